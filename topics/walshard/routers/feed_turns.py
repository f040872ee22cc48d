"""The order in which the dests of one shard's routers copy."""

from __future__ import annotations

import heapq
from collections import OrderedDict


class FeedTurns:
    """The queue of dests (topic ids) that have a turn, first come, first served, and the dests that wait. A waiting
    dest gets a turn at its time (monotonic ms), or when it is woken before.
    """

    def __init__(self) -> None:
        self._ready: OrderedDict[int, None] = OrderedDict()  # the front of a plain dict is slow to find after removals
        self._waiting: dict[int, int] = {}
        self._times: list[tuple[int, int]] = []
        """Heap of (time, dest). Entries that are not in `_waiting` any more do not count."""

    def __bool__(self) -> bool:
        """True if a dest has its turn."""
        return bool(self._ready)

    @property
    def some_wait(self) -> bool:
        """Return whether a dest waits for its time."""
        return bool(self._waiting)

    def line_up(self, dest_id: int) -> None:
        """Give a dest a turn: it may have something to copy."""
        self._waiting.pop(dest_id, None)
        self._ready[dest_id] = None

    def wake(self, dest_id: int) -> None:
        """Give a dest a turn if it waits: what it waits for may have happened."""
        if dest_id in self._waiting:
            self.line_up(dest_id)

    def defer(self, dest_id: int, until_ms: int) -> None:
        """Take a dest's turn away until then."""
        self._ready.pop(dest_id, None)
        self._waiting[dest_id] = until_ms
        heapq.heappush(self._times, (until_ms, dest_id))

    def wake_due(self, now_ms: int) -> None:
        """Give a turn to the dests whose time has come."""
        while self._times and self._times[0][0] <= now_ms:
            until_ms, dest_id = heapq.heappop(self._times)
            if self._waiting.get(dest_id) == until_ms:
                self.line_up(dest_id)

    def take(self) -> int:
        """Take the dest whose turn it is. There must be one."""
        return self._ready.popitem(last=False)[0]

    def give_back(self, dest_ids: list[int]) -> None:
        """Put dests in front again that were taken but have not copied."""
        for dest_id in reversed(dest_ids):
            self.line_up(dest_id)
            self._ready.move_to_end(dest_id, last=False)
