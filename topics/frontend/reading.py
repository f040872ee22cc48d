"""Reading a topic: the page that follows a cursor (api §3). Diff and watch streams both read through here.

No await, no message: what is read is the arena's view of the topic and the log files it points into. So reads of what
is committed go on while the shard is dead, and a page is one consistent state.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from topics.core.clock import Clock
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError, topic_not_found
from topics.core.names import owner_shard
from topics.core.topic import LOCATION_LOST, EvictReason
from topics.frontend.arenas import Arenas
from topics.frontend.log_files import LogFiles
from topics.frontend.records import MismatchError, PageOptions, Source, render
from topics.log import get_logger
from topics.shm.arena import ArenaReader, SlotState, TopicView

SCAN_MAX: Final = 8192
"""Records examined for one page, about: filtering a long log must not hold the event loop."""
_STEP_MAX: Final = 1024
_STEP_MIN: Final = 16
_TRIES: Final = 8

_log = get_logger()


class TopicRef(NamedTuple):
    """A live topic as it was found. To be used at once: after an `await`, find it again."""

    name: str
    shard: int
    arena: ArenaReader
    slot: int
    view: TopicView
    config: TopicConfig


class Tombstone(msgspec.Struct, frozen=True):
    """What is gone and was not asked to go (api §3.3)."""

    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class Page(msgspec.Struct, frozen=True):
    """`body` is `count` record objects joined by commas; everything up to `next_from_seq` has been examined."""

    body: bytes
    count: int
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    durable_seq: int
    tombstone: Tombstone | None
    scanned: int
    topic_id: int

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq


class _MovedError(Exception):
    """The view was overtaken by the shard: take a new one."""


class TopicReader:
    """Finds and reads topics of all shards."""

    def __init__(self, arenas: Arenas, files: LogFiles, shards: int, clock: Clock) -> None:
        self._arenas = arenas
        self._files = files
        self._shards = shards
        self._clock = clock
        self._now_ms = 0

    def now_ms(self) -> int:
        """Wall clock that never goes back: what has expired stays expired."""
        self._now_ms = max(self._now_ms, self._clock.now_ms())
        return self._now_ms

    def owner(self, name: str) -> int:
        """The shard of a topic, whether it exists or not."""
        return owner_shard(name, self._shards)

    def find(self, name: str) -> TopicRef | None:
        """The topic as it is now; raises `not_ready` until its shard has recovered."""
        shard = owner_shard(name, self._shards)
        arena = self._arenas.require(shard)
        found = arena.look_up(name)
        if found is None:
            return None
        slot, view = found
        return TopicRef(name, shard, arena, slot, view, arena.config(slot, view))

    def get(self, name: str) -> TopicRef:
        """As `find`; `404 topic_not_found` where there is none."""
        ref = self.find(name)
        if ref is None:
            raise topic_not_found(name)
        return ref

    def refresh(self, ref: TopicRef) -> TopicRef:
        """The same topic now; `404 topic_not_found` when it is gone, though its name may be in use again."""
        view = ref.arena.view(ref.slot)
        if view.topic_id != ref.view.topic_id or view.state != SlotState.LIVE:
            raise topic_not_found(ref.name)
        return ref._replace(view=view, config=ref.arena.config(ref.slot, view))

    def seq_before(self, ref: TopicRef, ts: int) -> int:
        """The cursor whose next record is the first with `$ts >= ts` (api §3 from_ts)."""
        for _ in range(_TRIES):
            seq = ref.arena.first_seq_at(ref.view, ts)
            if seq is not None:
                return max(seq, ref.view.earliest_seq) - 1
            ref = self.refresh(ref)
        raise _unreadable(ref, "its index does not hold still")

    def read_page(
        self, ref: TopicRef, from_seq: int, options: PageOptions, now_ms: int, up_to_seq: int | None = None
    ) -> Page:
        """The records that follow `from_seq`, not beyond `up_to_seq`.

        Raises `topic_not_found` when the topic went away, `storage_unavailable` when a frame cannot be read.
        """
        reason = ""
        for _ in range(_TRIES):
            try:
                return self._read(ref, from_seq, options, now_ms, up_to_seq)
            except _MovedError:
                reason = "its index does not hold still"
            except (MismatchError, FileNotFoundError, EOFError) as error:
                reason = str(error)
            ref = self.refresh(ref)
        raise _unreadable(ref, reason)

    def _read(self, ref: TopicRef, from_seq: int, options: PageOptions, now_ms: int, up_to_seq: int | None) -> Page:
        arena = ref.arena
        view = logical_view(ref, now_ms)
        tombstone = floor_tombstone(view, from_seq)
        if from_seq > view.head_seq:
            from_seq = 0 if view.recreated else view.head_seq
        if not ref.config.dedupe_node:
            options = options._replace(nodes=None)
        start = cursor = max(from_seq, view.earliest_seq - 1)
        last_seq = view.head_seq if up_to_seq is None else min(up_to_seq, view.head_seq)
        source = Source(self._files, ref.shard, view.topic_id)
        bodies: list[bytes] = []
        count = size_bytes = 0
        while cursor < last_seq and count < options.limit and cursor - start < SCAN_MAX:
            step = max(_STEP_MIN, min(_STEP_MAX, options.limit - count))
            end = min(last_seq, cursor + step)
            locations = arena.locations(view, cursor + 1, end)
            if locations is None:
                raise _MovedError
            part = render(source, cursor + 1, locations, options, count, size_bytes)
            cursor += part.examined
            size_bytes = part.size_bytes
            if part.count:
                bodies.append(part.body)
                count += part.count
            if part.lost:
                if count or tombstone is not None:
                    break
                tombstone = _lost_run(arena, view, cursor + 1, last_seq)
                cursor = tombstone.gap_to
            if part.full:
                break
        return Page(
            bodies[0] if len(bodies) == 1 else b",".join(bodies),
            count,
            cursor,
            view.head_seq,
            view.earliest_seq,
            view.durable_seq,
            tombstone,
            cursor - start,
            view.topic_id,
        )


def logical_view(ref: TopicRef, now_ms: int) -> TopicView:
    """`ref.view` with its floors over what has expired since the shard last looked: floors are exact at every answer,
    only disk space is lazy. `records` and `live_bytes` are not recounted.
    """
    view, ttl_ms = ref.view, ref.config.ttl_ms
    if not ttl_ms or view.earliest_seq > view.head_seq:
        return view
    oldest_ts = ref.arena.ts_at(view, view.earliest_seq)
    if oldest_ts is None:
        raise _MovedError
    if now_ms - oldest_ts <= ttl_ms:
        return view
    floor = ref.arena.first_seq_at(view, now_ms - ttl_ms)
    if floor is None:
        raise _MovedError
    run_seq = view.evict_run_seq
    if view.evict_reason != EvictReason.TTL:
        run_seq = view.evict_floor if view.evict_reason != EvictReason.NONE else 1
    return view._replace(
        earliest_seq=floor, evict_floor=floor, evict_reason=int(EvictReason.TTL), evict_run_seq=run_seq
    )


def has_expired(ref: TopicRef, now_ms: int) -> bool:
    """Whether records have expired that the shard still counts."""
    ttl_ms, view = ref.config.ttl_ms, ref.view
    if not ttl_ms or view.earliest_seq > view.head_seq:
        return False
    oldest_ts = ref.arena.ts_at(view, view.earliest_seq)
    # None: the shard has moved on since `view`; it may be for this very reason.
    return oldest_ts is None or now_ms - oldest_ts > ttl_ms


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


def _lost_run(arena: ArenaReader, view: TopicView, first_seq: int, last_seq: int) -> Tombstone:
    """The records from `first_seq` on that are gone though older ones live (core/topic.py LOCATION_LOST)."""
    seq = first_seq
    reason = EvictReason.NONE
    while seq <= last_seq:
        locations = arena.locations(view, seq, min(last_seq, seq + _STEP_MAX - 1))
        if locations is None:
            raise _MovedError
        if reason == EvictReason.NONE:
            reason = EvictReason(locations.offset_len[0] & 0xFFFF_FFFF)
        for file_flags in locations.file_flags:
            if not file_flags >> 32 & LOCATION_LOST:
                last_seq = seq - 1
                break
            seq += 1
    return Tombstone(
        first_seq, last_seq, reason.name.lower(), last_seq - first_seq + 1, view.earliest_seq, view.head_seq
    )


def _unreadable(ref: TopicRef, reason: str) -> TopicsError:
    _log.error("a topic cannot be read", topic=ref.name, shard=ref.shard, reason=reason)
    return TopicsError(
        "storage_unavailable", f"topic {ref.name!r} cannot be read: {reason}", {"topic": ref.name, "reason": reason}
    )
