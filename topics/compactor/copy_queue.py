"""Which segments are to be copied next: each once, the oldest first. Pure.

A copy that failed is made again later, and later still if it fails again: a file that cannot be read, or a name that
cannot be written, holds up nothing behind it. Failures in a row, of whatever segments, are the cold directory's: then
nothing is begun for a while, and only one at a time until one succeeds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from topics.compactor.backoff import doubled_ms
from topics.core.segment_list import SegmentInfo

RETRY_MS: Final = 10_000
"""After the first failure of a segment; doubled with each further one."""
RETRY_MAX_MS: Final = 160_000
PAUSE_MS: Final = 250
"""After a failure, before anything else is copied; doubled with each further one in a row, up to RETRY_MS."""


class Copy(NamedTuple):
    """A segment as it was when it was found to be worth it."""

    shard: int
    topic_id: int
    info: SegmentInfo


class CopyQueue:
    """`now_ms` is of a monotonic clock."""

    def __init__(self) -> None:
        self._ready: deque[Copy] = deque()
        self._later: list[tuple[int, int, Copy]] = []
        """Heap of (due, a number that ascends, copy)."""
        self._known: set[Copy] = set()
        """Also those that were taken and are neither done nor failed."""
        self._failures: dict[Copy, int] = {}
        self._later_first = False
        self._failed = 0
        self._failed_in_a_row = 0
        self._not_before_ms = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the last copy failed."""
        return bool(self._failed_in_a_row)

    def add(self, copy: Copy) -> None:
        """Nothing happens if it is here already, or being copied."""
        if copy not in self._known:
            self._known.add(copy)
            self._ready.append(copy)

    def __len__(self) -> int:
        """Also those that were taken and are neither done nor failed."""
        return len(self._known)

    def keep_only(self, is_current: Callable[[Copy], bool]) -> None:
        """Of those that wait: who waits long may be gone by then, and must not take memory for ever."""
        gone = {copy for copy in self._ready if not is_current(copy)}
        gone.update(copy for _, _, copy in self._later if not is_current(copy))
        if gone:
            self._ready = deque(copy for copy in self._ready if copy not in gone)
            self._later = [row for row in self._later if row[2] not in gone]
            heapq.heapify(self._later)
            for copy in gone:
                self.dropped(copy)

    def take(self, now_ms: int) -> Copy | None:
        """The next one, which is to be `done` or `failed`; None if there is none yet."""
        if now_ms < self._not_before_ms:
            return None
        is_due = bool(self._later) and self._later[0][0] <= now_ms
        # In turn: however many fail again and again, others are copied between them, and success ends the waiting.
        if is_due and (self._later_first or not self._ready):
            self._later_first = False
            return heapq.heappop(self._later)[2]
        self._later_first = is_due
        return self._ready.popleft() if self._ready else None

    def done(self, copy: Copy) -> None:
        """It was copied."""
        self._failed_in_a_row = 0
        self.dropped(copy)

    def dropped(self, copy: Copy) -> None:
        """It need not be copied any more."""
        self._failures.pop(copy, None)
        self._known.discard(copy)

    def failed(self, copy: Copy, now_ms: int) -> None:
        """It comes again later."""
        times = self._failures.get(copy, 0)
        self._failures[copy] = times + 1
        self._failed += 1
        heapq.heappush(self._later, (now_ms + doubled_ms(RETRY_MS, times, RETRY_MAX_MS), self._failed, copy))
        self._not_before_ms = now_ms + doubled_ms(PAUSE_MS, self._failed_in_a_row, RETRY_MS)
        self._failed_in_a_row += 1
