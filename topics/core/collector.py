"""Full collections ("looks") of Python's garbage collector. One takes a µs for each object, and stops the process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

FEW: Final = 100
"""The most connections or streams that count as few: with them a full look takes 6 ms."""
WORTH: Final = 100
"""Looks at middle-aged objects after which a full look is worth it. Each means 7,000 more objects made than freed."""
GROWN_BYTES: Final = 256 << 20
"""Growth of the process at which a full look is due, however many are connected. 10,000 idle streams take 160 MB."""


def collect_only_young() -> None:
    """Stop automatic full looks: the collector looks at objects that survived two looks only by `gc.collect`."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)


class FullLooks:
    """Decides when a frontend makes a full look, once `collect_only_young` has stopped the automatic ones.

    Ordinary work of a frontend leaves no old cycles (`python -m bench.cycles`), but some failures do. So a full look
    can wait until few clients are connected. Python itself would look again and again while many connect, which costs
    70 µs for each connection. GROWN_BYTES bounds the memory that cycles may keep meanwhile.
    """

    def __init__(self, look: Callable[[], object], worth: Callable[[], int], own_bytes: Callable[[], int]) -> None:
        """`look` makes a full look. `worth` returns the looks at middle-aged objects since then, `own_bytes` the memory
        that the process shares with nobody.
        """
        self._look = look
        self._worth = worth
        self._own_bytes = own_bytes
        self._bytes_before = own_bytes()

    def beat(self, connected: int) -> None:
        """Make a full look if it is due. Call it regularly."""
        is_cheap = connected <= FEW and self._worth() >= WORTH
        if is_cheap or self._own_bytes() - self._bytes_before >= GROWN_BYTES:
            self._look()
            self._bytes_before = self._own_bytes()
