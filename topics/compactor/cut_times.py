"""When the next cut is due. Pure; `now_ms` is of a monotonic clock."""

from __future__ import annotations

from typing import Final

from topics.compactor.backoff import doubled_ms

RETRY_MS: Final = 2_000
"""After a cut that was not complete; doubled each time, up to the interval."""


class CutTimes:
    """`interval_ms` after the last one, or at once when a shard has written `wal_bytes` since. What failed is tried
    again before that, but less and less often.
    """

    def __init__(self, interval_ms: int, wal_bytes: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._wal_bytes = wal_bytes
        self._last_ms = now_ms
        self._failed = 0

    def is_due(self, new_bytes: int, now_ms: int) -> bool:
        """Whether to begin one now."""
        since_ms = now_ms - self._last_ms
        if self._failed:
            wait_ms = doubled_ms(RETRY_MS, self._failed - 1, max(RETRY_MS, self._interval_ms))
        else:
            wait_ms = self._interval_ms
        return since_ms >= wait_ms or new_bytes >= self._wal_bytes

    def done(self, complete: bool, now_ms: int) -> None:
        """One was made, or there was nothing to do; `complete`: of all shards."""
        self._last_ms = now_ms
        self._failed = 0 if complete else self._failed + 1
