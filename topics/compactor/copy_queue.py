"""Which segments are to be copied next: each once, the oldest first. Pure.

A copy that failed is made again later, and later still if it fails again: a file that cannot be read, or a name that
cannot be written, holds up nothing behind it. Failures in a row, of whatever segments, are the cold directory's: then
nothing is begun for a while, and only one at a time until one succeeds.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Final, NamedTuple

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

    def take(self, now_ms: int) -> Copy | None:
        """The next one, which is to be `done` or `failed`; None if there is none yet."""
        if now_ms < self._not_before_ms:
            return None
        if self._later and self._later[0][0] <= now_ms:
            return heapq.heappop(self._later)[2]
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
        heapq.heappush(self._later, (now_ms + _doubled(RETRY_MS, times, RETRY_MAX_MS), self._failed, copy))
        self._not_before_ms = now_ms + _doubled(PAUSE_MS, self._failed_in_a_row, RETRY_MS)
        self._failed_in_a_row += 1


def _doubled(first_ms: int, times: int, most_ms: int) -> int:
    return min(most_ms, first_ms << min(times, 16))
