"""When the next cut is due. Pure; `now_ms` is of a monotonic clock."""

from __future__ import annotations

from typing import Final

from topics.core.backoff import doubled_ms

RETRY_MS: Final = 2_000
"""After a cut that was not complete; doubled each time, up to the interval, and:"""
RETRY_MAX_MS: Final = 60_000
"""However long the interval: a full disk is to get its room back, and so are files that could not be removed."""


class CutTimes:
    """`interval_ms` after the last one, or at once when a shard has written `wal_bytes` since. What failed is tried
    again before that, but less and less often.
    """

    def __init__(self, interval_ms: int, wal_bytes: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._wal_bytes = wal_bytes
        self._retry_max_ms = min(interval_ms, RETRY_MAX_MS)
        self._begun_ms = self._last_ms = self._tidied_ms = now_ms
        self._has_tried = False
        self._failed = 0

    def is_due(self, new_bytes: int, now_ms: int) -> bool:
        """Whether to begin one now."""
        since_ms = now_ms - self._last_ms
        if self._failed:
            wait_ms = doubled_ms(RETRY_MS, self._failed - 1, max(RETRY_MS, self._retry_max_ms))
        else:
            wait_ms = self._interval_ms
        return since_ms >= wait_ms or new_bytes >= self._wal_bytes

    def done(self, complete: bool, now_ms: int, was_made: bool = True) -> None:
        """One was tried, or (not `was_made`) there was nothing to do; `complete`: of all shards."""
        self._last_ms = now_ms
        self._has_tried = True
        self._failed = 0 if complete else self._failed + 1
        if complete and was_made:
            self._tidied_ms = now_ms

    def is_tidying_due(self, now_ms: int) -> bool:
        """Whether to try again to remove what a cut could not, which needs none."""
        return now_ms - self._tidied_ms >= self._retry_max_ms

    def tidied(self, now_ms: int) -> None:
        """That was tried."""
        self._tidied_ms = now_ms

    def may_keep_up(self, now_ms: int) -> bool:
        """Whether what can wait may be done: behind the first cut, which is not to wait for what ends the process in
        it, in each of its lives; but for a long interval it does not wait either, and `wal_bytes` bounds the log then.
        """
        return self._has_tried or now_ms - self._begun_ms >= RETRY_MAX_MS
