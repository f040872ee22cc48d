"""A topic's floors as its log has them, the reasons of evictions (api §3.2), and the plan of a delete (api §5)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec


class EvictReason(IntEnum):
    """The reason for which records below evict_floor were lost; the names are the tombstone's `reason`."""

    NONE = 0
    CAP = 1
    TTL = 2
    MIXED = 3
    RESTART = 4
    """The service was restarted, and the records were of an `ephemeral` topic."""
    SOURCE_TRIM = 5
    """A router's source lost the records before they were copied."""
    LOST_TAIL = 6
    """The log may have lost its end (a power loss): seqs up to the ceiling may have been given out."""
    RESTORED = 7
    """The data were restored from an archive: seqs behind its last moment may have been given out."""


def run_after(reason: EvictReason, last_reason: int, evict_floor: int, evict_run_seq: int) -> int:
    """Return the `evict_run_seq` of a topic after an eviction for `reason`. A run has evictions for one reason only."""
    if last_reason == reason:
        return evict_run_seq
    return 1 if last_reason == EvictReason.NONE else evict_floor


class Floors(msgspec.Struct, array_like=True, frozen=True):
    """The state of a topic after a control frame that changed it; `core/topic.py` explains the fields. `revision`
    counts such frames of a topic: a frame whose revision is not above the topic's changes nothing.
    """

    revision: int = 0
    earliest_seq: int = 1
    evict_floor: int = 1
    evict_reason: int = 0
    evict_run_seq: int = 1
    records: int = 0
    live_bytes: int = 0

    def evicted(self, seq: int, reason: EvictReason) -> Floors:
        """Return these floors after an eviction below `seq`."""
        if seq <= self.evict_floor:
            return self
        run_seq = run_after(reason, self.evict_reason, self.evict_floor, self.evict_run_seq)
        return msgspec.structs.replace(self, evict_floor=seq, evict_reason=int(reason), evict_run_seq=run_seq)


class Front(NamedTuple):
    """The seq of the first live record, and the loss just before it: all below `lost_below_seq` (0: nothing)."""

    earliest_seq: int
    lost_below_seq: int = 0
    lost_reason: EvictReason = EvictReason.NONE


class Deletion(NamedTuple):
    """The effect of one delete: it removes everything below `below_seq`, and `seqs`. `records` and `size_bytes` of that
    were live (negative: they correct a count that was too low). `front` is where live records begin afterwards.
    """

    below_seq: int
    seqs: tuple[int, ...]
    records: int
    size_bytes: int
    front: Front

    @property
    def earliest_seq(self) -> int:
        return self.front.earliest_seq
