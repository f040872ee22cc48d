"""A topic's floors as they are at this very moment, and what a reader has lost to them (api §3.2, §3.3).

The shard moves them when it comes to it, within a second; no answer waits for that.
"""

from __future__ import annotations

import msgspec

from topics.core.floors import EvictReason, run_after
from topics.core.live_scan import front_from, last_undeleted
from topics.frontend.reads.sources import Source
from topics.shm.arena import TopicView


class Tombstone(msgspec.Struct, frozen=True):
    """What is gone and was not asked to go (api §3.3)."""

    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int
    earliest_seq: int
    head_seq: int


def logical_view(view: TopicView, ttl_ms: int, source: Source, now_ms: int) -> TopicView:
    """`view` with its floors over what has expired since the shard last looked, as the shard will move them
    (`core.topic.Topic.plan_eviction`): floors are exact at every answer, only disk space is lazy. `records` and
    `live_bytes` are not recounted.
    """
    if not ttl_ms or view.earliest_seq > view.head_seq:
        return view
    if now_ms - source.ts_at(view.earliest_seq) <= ttl_ms:
        return view
    seq = source.first_seq_at(now_ms - ttl_ms)
    # What was deleted behind the last that expired was not lost.
    lost_seq = last_undeleted(source, view.earliest_seq, seq - 1)
    front = front_from(source, seq, view.head_seq)
    view = _evicted(view._replace(earliest_seq=front.earliest_seq), lost_seq + 1, EvictReason.TTL)
    return _evicted(view, front.lost_below_seq, front.lost_reason)


def floor_tombstone(view: TopicView, from_seq: int) -> Tombstone | None:
    """What a reader at `from_seq` has lost to the floors (api §3.3)."""
    if from_seq > view.head_seq:
        # Another topic's cursor, if this name had one before; otherwise nobody ever had it from us.
        if not view.recreated or not view.head_seq:
            return None
        return Tombstone(1, view.head_seq, "recreated", view.head_seq, view.earliest_seq, view.head_seq)
    gap_from = from_seq + 1
    if gap_from >= view.evict_floor:
        return None
    reason = EvictReason.MIXED if gap_from < view.evict_run_seq else EvictReason(view.evict_reason)
    gap_to = view.earliest_seq - 1
    return Tombstone(gap_from, gap_to, reason.name.lower(), gap_to - gap_from + 1, view.earliest_seq, view.head_seq)


def _evicted(view: TopicView, seq: int, reason: EvictReason) -> TopicView:
    """As `core.floors.Floors.evicted`."""
    if seq <= view.evict_floor:
        return view
    run_seq = run_after(reason, view.evict_reason, view.evict_floor, view.evict_run_seq)
    return view._replace(evict_floor=seq, evict_reason=int(reason), evict_run_seq=run_seq)
