"""The floors of a topic as its log has them, and why what is below them is gone (api §3.2)."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class EvictReason(IntEnum):
    """Why records below evict_floor are gone; the names are the tombstone's `reason`."""

    NONE = 0
    CAP = 1
    TTL = 2
    MIXED = 3
    RESTART = 4
    """Records of an `ephemeral` topic, after the service was restarted."""
    SOURCE_TRIM = 5
    """Records that a router's source lost before they were copied."""


def run_after(reason: EvictReason, last_reason: int, evict_floor: int, evict_run_seq: int) -> int:
    """The `evict_run_seq` of a topic when more is evicted for `reason`: a run is of evictions with one reason."""
    if last_reason == reason:
        return evict_run_seq
    return 1 if last_reason == EvictReason.NONE else evict_floor


class Floors(msgspec.Struct, array_like=True, frozen=True):
    """What a topic is after a control frame that changed it (`core/topic.py` has the meanings).

    `revision` counts such frames of a topic: one that is not above the topic's changes nothing.
    """

    revision: int = 0
    earliest_seq: int = 1
    evict_floor: int = 1
    evict_reason: int = 0
    evict_run_seq: int = 1
    records: int = 0
    live_bytes: int = 0

    def evicted(self, seq: int, reason: EvictReason) -> Floors:
        """With evict_floor at `seq`, if it is not yet."""
        if seq <= self.evict_floor:
            return self
        run_seq = run_after(reason, self.evict_reason, self.evict_floor, self.evict_run_seq)
        return msgspec.structs.replace(self, evict_floor=seq, evict_reason=int(reason), evict_run_seq=run_seq)
