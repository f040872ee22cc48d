"""A queue of work that can wait: each item once, the oldest first; an item that failed comes again later."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from topics.core.clock import doubled_ms

RETRY_MS: Final = 10_000
"""The pause after a failure, of an item or of the cold directory; doubled with each further one."""
RETRY_MAX_MS: Final = 160_000

ItemT = TypeVar("ItemT", bound=Hashable)


class WorkQueue(Generic[ItemT]):
    """Items of work. One that fails comes again after RETRY_MS, doubled with each failure up to RETRY_MAX_MS.

    Pure; `now_ms` is monotonic. An item that was taken stays known until it is dropped or has failed.
    """

    def __init__(self) -> None:
        self._ready: deque[ItemT] = deque()
        self._later: list[tuple[int, int, ItemT]] = []
        """Heap of (due, a number that ascends, item)."""
        self._later_first = False
        self._known: set[ItemT] = set()
        self._failures: dict[ItemT, int] = {}
        self._failed = 0

    def __len__(self) -> int:
        """Return the number of known items, also of those that were taken."""
        return len(self._known)

    def add(self, item: ItemT) -> None:
        """Add an item, unless it is known."""
        if item not in self._known:
            self._known.add(item)
            self._ready.append(item)

    def due_ms(self) -> int | None:
        """Return the monotonic ms at which the next item can be taken, 0 for now; None without one."""
        if self._ready:
            return 0
        return self._later[0][0] if self._later else None

    def take(self, now_ms: int) -> ItemT | None:
        """Take the next item; None if none is due. Failed items and others take turns, so neither wait for ever."""
        is_due = bool(self._later) and self._later[0][0] <= now_ms
        if is_due and (self._later_first or not self._ready):
            self._later_first = False
            return heapq.heappop(self._later)[2]
        self._later_first = is_due
        return self._ready.popleft() if self._ready else None

    def drop(self, item: ItemT) -> None:
        """Forget an item that was taken: it is done, or not needed any more."""
        self._failures.pop(item, None)
        self._known.discard(item)

    def failed(self, item: ItemT, now_ms: int) -> None:
        """Put an item that was taken back, for later."""
        times = self._failures.get(item, 0)
        self._failures[item] = times + 1
        self._failed += 1
        heapq.heappush(self._later, (now_ms + doubled_ms(RETRY_MS, times, RETRY_MAX_MS), self._failed, item))

    def keep_only(self, is_current: Callable[[ItemT], bool]) -> None:
        """Drop waiting items that are not current any more, so that they do not take memory for ever."""
        waiting = {*self._ready, *(item for _, _, item in self._later)}
        gone = {item for item in waiting if not is_current(item)}
        self._ready = deque(item for item in self._ready if item not in gone)
        self._later = [row for row in self._later if row[2] not in gone]
        heapq.heapify(self._later)
        for item in gone:
            self.drop(item)
