"""A shard that writes faster than the compactor takes in is slowed, so that a start never has much log to read. Pure.

    log behind the last snapshot    0 ──────── 4/5 of the limit ───────── the limit ────── 6/5 of the limit ──────▶
    pause for each ms of work       none       │ 0 ms … 4 ms ─────────────────── … 8 ms ─│ 8 ms ──────────────────▶

The pause comes behind the answers of a group: who writes now and then does not notice it, who writes without a break
gets the pace of the compactor, which has the processor meanwhile.
"""

from __future__ import annotations

from typing import Final

FROM_SHARE: Final = 0.8
"""The share of the limit from which on there are pauses."""
PAUSE_PER_WORK: Final = 8.0
"""The pause for each unit of work under full braking: a ninth of the time is work then."""
FULL_SHARE: Final = 1.2
"""The share of the limit from which on the brake is full."""
PAUSE_MAX_NS: Final = 200_000_000


class Brake:
    """The pauses of one shard. `share` is the part of full braking that is in force, 0 to 1."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` of log may lie behind the last snapshot; 0: any number."""
        self._limit_bytes = limit_bytes
        self.share = 0.0

    def update(self, lag_bytes: int) -> None:
        """Adapt to the bytes that lie behind the last snapshot now."""
        if self._limit_bytes:
            above = lag_bytes / self._limit_bytes - FROM_SHARE
            self.share = min(1.0, max(0.0, above / (FULL_SHARE - FROM_SHARE)))

    def pause_ns(self, worked_ns: int) -> int:
        """Return the pause after so much work."""
        return min(PAUSE_MAX_NS, round(worked_ns * PAUSE_PER_WORK * self.share))
