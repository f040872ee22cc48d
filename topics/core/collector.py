"""The looks of Python's garbage collector at all objects: a µs each, in which a process does nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

FEW: Final = 100
"""Connections or streams beside which a look takes 6 ms."""
WORTH: Final = 100
"""Looks at middle-aged objects that make a look at all worth it. Each means 7,000 objects more made than freed."""
GROWN_BLOCKS: Final = 2_000_000
"""Blocks of memory by which a process grows until all is looked at anyway. 10,000 streams are 1.3 million."""


def collect_only_young() -> None:
    """Have the collector look at no object any more that has survived two looks, but where `gc.collect` is called."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)


class FullLooks:
    """Says when a frontend has all of its objects looked at, beside `collect_only_young`.

    What a frontend does leaves no cycle that gets old (`python -m bench.cycles`), but for what libraries leave when
    something fails. So a look can wait until few are connected; by itself Python would look again and again while many
    connect, for 70 µs a connection. However many are connected, what an unknown cycle leaks is bounded by GROWN_BLOCKS.
    """

    def __init__(self, look: Callable[[], object], worth: Callable[[], int], blocks: Callable[[], int]) -> None:
        """`look` looks at all, `worth` counts looks at middle-aged objects since then, `blocks` those in use."""
        self._look = look
        self._worth = worth
        self._blocks = blocks
        self._blocks_before = blocks()
        self._next = WORTH

    def beat(self, connected: int) -> None:
        """Look if now is the time for it. Call it every now and then."""
        worth = self._worth()
        if worth < WORTH:
            return
        if connected > FEW:
            if worth < self._next:
                return
            self._next = worth + WORTH
            if self._blocks() - self._blocks_before < GROWN_BLOCKS:
                return
        self._look()
        self._blocks_before = self._blocks()
        self._next = WORTH
