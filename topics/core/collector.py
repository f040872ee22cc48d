"""The looks of Python's garbage collector at all objects: a µs each, in which a process does nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

FEW: Final = 100
"""Connections or streams beside which a look takes 6 ms."""
WORTH: Final = 100
"""Looks at middle-aged objects that make a look at all worth it. Each means 7,000 objects more made than freed."""
GROWN_BYTES: Final = 256 << 20
"""Memory by which a process may grow until all is looked at however many wait: 10,000 idle event streams are 160 MB."""


def collect_only_young() -> None:
    """Have the collector look at no object any more that has survived two looks, but where `gc.collect` is called."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)


class FullLooks:
    """Says when a frontend has all of its objects looked at, beside `collect_only_young`.

    Ordinary work of a frontend leaves no cycle that gets old (`python -m bench.cycles`), some failures do. So a look
    can wait until few are connected; by itself Python would look again and again while many connect, for 70 µs a
    connection. However many are connected, what cycles may keep is bounded by GROWN_BYTES.
    """

    def __init__(self, look: Callable[[], object], worth: Callable[[], int], own_bytes: Callable[[], int]) -> None:
        """`look` looks at all, `worth` counts looks at middle-aged objects since then, `own_bytes` is the memory that
        the process shares with nobody.
        """
        self._look = look
        self._worth = worth
        self._own_bytes = own_bytes
        self._bytes_before = own_bytes()

    def beat(self, connected: int) -> None:
        """Look if now is the time for it. Call it every now and then."""
        is_cheap = connected <= FEW and self._worth() >= WORTH
        if is_cheap or self._own_bytes() - self._bytes_before >= GROWN_BYTES:
            self._look()
            self._bytes_before = self._own_bytes()
