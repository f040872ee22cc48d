"""Reads a topic: the page that follows a cursor (api §3). Diffs, watch streams and claims all read through here.

A read asks no shard, so it works while the shard is dead. It takes the arena's view of the topic, and the files that
the view points into: one consistent state. It waits only for records in the cold tier (`TopicReader.fetch_page`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from topics.api.answers import TombstoneAnswer as Tombstone
from topics.core.clock import STEP_MAX_MS, Clock
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError, storage_unavailable, topic_not_found
from topics.core.floors import EvictReason, run_after
from topics.core.location import LOCATION_LOST
from topics.core.names import owner_shard
from topics.core.record_index import front_from, last_undeleted, last_without
from topics.core.segment_list import SegmentInfo
from topics.frontend.entry.responses import encode_json
from topics.frontend.reads.cold import ColdMissError, ColdTier
from topics.frontend.reads.files import LogFiles, SegmentCache
from topics.frontend.reads.located_records import LocatedRecords, MismatchError, MovedError, RecordStores, unmoved
from topics.frontend.reads.records import PageOptions, render
from topics.frontend.shards.arenas import Arenas
from topics.log import SparseLines, get_logger
from topics.shm.arena import ArenaReader, SlotState, TopicView
from topics.storage.segment import CorruptSegment
from topics.storage.service_id import NO_MASKS, EpochMasks


def logical_view(view: TopicView, ttl_ms: int, records: LocatedRecords, now_ms: int) -> TopicView:
    """Return `view` with its floors moved behind records that have expired since the shard last looked. The shard will
    move them, too (`core.topic.Topic.plan_eviction`), but answers need exact floors now. The `records` and `live_bytes`
    of the view are not recounted.
    """
    if not ttl_ms or view.earliest_seq > view.head_seq:
        return view
    if now_ms - records.ts_at(view.earliest_seq) <= ttl_ms:
        return view
    seq = records.first_seq_at(now_ms - ttl_ms)
    # Only undeleted records count as lost: the last of them ends the loss.
    lost_seq = last_undeleted(records, view.earliest_seq, seq - 1)
    front = front_from(records, seq, view.head_seq)
    view = _evicted(view._replace(earliest_seq=front.earliest_seq), lost_seq + 1, EvictReason.TTL)
    return _evicted(view, front.lost_below_seq, front.lost_reason)


def cursor_at(view: TopicView, records: LocatedRecords, ts: int, now_ms: int) -> int:
    """Return the cursor of a reader who begins at a time (api §3.3), in a view with exact floors: before the first
    record with `$ts >= ts`, and before a loss in front of that record if the loss may be as late.

    Nothing keeps the times of lost records. What tells a loss to be earlier is a record before `ts` that is still
    there, behind the loss.
    """
    seq, latest_ts = records.first_seq_at(ts), max(now_ms, view.last_write_ts)
    if seq > view.head_seq and ts > latest_ts:
        return view.head_seq
    if seq > view.earliest_seq:
        return last_without(LOCATION_LOST, records, view.earliest_seq, seq - 1)
    if view.earliest_seq > view.head_seq:
        # What expired had been written here, and so had what was deleted behind a loss. A lost end is of any time.
        has_lost_end = view.evict_floor > view.head_seq and view.evict_reason != EvictReason.TTL
        if ts > (latest_ts if has_lost_end else view.last_write_ts):
            return view.head_seq
    return 0 if view.evict_floor > 1 else view.earliest_seq - 1


def floor_tombstone(view: TopicView, from_seq: int) -> Tombstone | None:
    """Return the records that a reader at `from_seq` has lost to the floors (api §3.3)."""
    if from_seq > view.head_seq:
        # The cursor is from a deleted topic of this name, if there was one; otherwise it never came from here.
        if not view.recreated or not view.head_seq:
            return None
        return _gap(view, 1, view.head_seq, "recreated")
    gap_from = from_seq + 1
    if gap_from >= view.evict_floor:
        return None
    reason = EvictReason.MIXED if gap_from < view.evict_run_seq else EvictReason(view.evict_reason)
    return _gap(view, gap_from, view.earliest_seq - 1, reason.name.lower())


def _gap(view: TopicView, gap_from: int, gap_to: int, reason: str) -> Tombstone:
    return Tombstone(gap_from, gap_to, reason, gap_to - gap_from + 1, view.earliest_seq, view.head_seq)


def _evicted(view: TopicView, seq: int, reason: EvictReason) -> TopicView:
    """Move the evict floor as `core.floors.Floors.evicted` does."""
    if seq <= view.evict_floor:
        return view
    run_seq = run_after(reason, view.evict_reason, view.evict_floor, view.evict_run_seq)
    return view._replace(evict_floor=seq, evict_reason=int(reason), evict_run_seq=run_seq)


SCAN_MAX: Final = 1024
"""Records examined for one page at most, roughly, unless it may have more: filtering a long log must not block the
event loop. Each takes up to 4 µs.
"""
_STEP_MAX: Final = 1024
_STEP_MIN: Final = 16
_BEYOND_BYTES: Final = 64 * 1024
"""Bytes that one step may read if it covers more records than are wanted, as some may be filtered out."""
_TRIES: Final = 8
_CHANGES: Final = "its index changes faster than it can be read"
_COLD_TRIES: Final = 16
LOG_EVERY_S: Final = 1.0
_T = TypeVar("_T")

log = get_logger()


class TopicRef(NamedTuple):
    """A live topic as it was found. It is valid until the next `await`: then find it again."""

    name: str
    shard: int
    arena: ArenaReader
    slot: int
    view: TopicView
    config: TopicConfig

    @property
    def strong_seq(self) -> int:
        """The last seq that `strong` readers get: what is on the disk, or in the archive where the class says so."""
        return self.view.archived_seq if self.config.durability == "archived" else self.view.durable_seq


class RecordPage(msgspec.Struct, frozen=True):
    """Records behind a cursor: `count` JSON objects joined by commas. Those up to `next_from_seq` were examined."""

    body: bytes
    count: int
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    durable_seq: int
    tombstone: Tombstone | None
    scanned: int
    epoch: int
    cold_segments: int = 0
    """Number of segments in the cold tier that records were taken from."""

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq >= self.head_seq  # above it: a copy that is behind its reader

    @property
    def is_news(self) -> bool:
        """True if there is anything to deliver."""
        return self.count > 0 or self.tombstone is not None


class TopicReader:
    """Finds and reads the topics of all shards."""

    def __init__(
        self,
        arenas: Arenas,
        files: LogFiles,
        shards: int,
        clock: Clock,
        cold: ColdTier | None = None,
        epoch_masks: EpochMasks = NO_MASKS,
        not_leader: Callable[[], TopicsError | None] | None = None,
    ) -> None:
        """Records expire by `clock`. `cold` has the segments outside the data directory; None if none ever left it.
        `epoch_masks` are those of `service_id.py`. In a service that follows another one `not_leader` returns the error
        for what only that one has.
        """
        self._arenas = arenas
        self.stores = RecordStores(files, SegmentCache(files.data_dir), cold)
        self._shards = shards
        self._clock = clock
        self._epoch_masks = epoch_masks
        self._not_leader = not_leader
        self._now_ms = 0
        self._failures = SparseLines(LOG_EVERY_S, lambda: clock.monotonic_ms() / 1000)

    def epoch_of(self, topic_id: int) -> int:
        """Return the `epoch` that names this instance of a topic to clients. A restore from an archive changes it."""
        return topic_id ^ self._epoch_masks.own

    def former_epoch_of(self, view: TopicView) -> int | None:
        """Return the epoch that the topic had before this service was restored or took over. It holds for cursors up to
        `view.restored_seq`. None if the topic was made since.
        """
        former = self._epoch_masks.former
        return None if former is None or not view.restored_seq else view.topic_id ^ former

    def is_beyond(self, view: TopicView, from_seq: int) -> bool:
        """True if this topic cannot have given out a cursor. A copy cannot know that: its leader may be ahead."""
        return from_seq > view.head_seq and (self._not_leader is None or bool(view.recreated))

    def sweep(self) -> None:
        """Close files that were removed. Call this now and then."""
        self.stores.logs.sweep()
        self.stores.segments.sweep()

    def now_ms(self) -> int:
        """Return the ms since the epoch by which records expire. It does not go back when the clock is corrected,
        unless the clock was far ahead: then records come back that the shard has not evicted meanwhile.
        """
        now_ms = self._clock.now_ms()
        if not now_ms < self._now_ms <= now_ms + STEP_MAX_MS:
            self._now_ms = now_ms
        return self._now_ms

    def find(self, name: str) -> TopicRef | None:
        """Return the topic as it is now, if it exists. Raise `not_ready` until its shard has recovered."""
        shard = owner_shard(name, self._shards)
        arena = self._arenas.require(shard)
        if (found := arena.look_up(name)) is None:
            return None
        return TopicRef(name, shard, arena, *found, arena.config(*found))

    def get(self, name: str) -> TopicRef:
        if (ref := self.find(name)) is None:
            raise topic_not_found(name)
        return ref

    def refresh(self, ref: TopicRef) -> TopicRef:
        """Return the same topic as it is now. `404 topic_not_found` if it was deleted, also if its name is reused."""
        view = ref.arena.view(ref.slot)
        if view.topic_id != ref.view.topic_id or view.state != SlotState.LIVE:
            raise topic_not_found(ref.name)
        return ref._replace(view=view, config=ref.arena.config(ref.slot, view))

    def seq_before(self, ref: TopicRef, ts: int) -> int:
        """Return the cursor of a reader who begins at `ts` (`cursor_at`)."""

        def look(ref: TopicRef) -> int:
            records, now_ms = self._records(ref), self.now_ms()
            return cursor_at(logical_view(ref.view, ref.config.ttl_ms, records, now_ms), records, ts, now_ms)

        return self._retrying(ref, look)

    def with_segments(self, ref: TopicRef) -> tuple[TopicRef, tuple[SegmentInfo, ...]]:
        """Return the topic with exact floors, and its segments at the same moment. Raise as `read_page` does."""

        def look(ref: TopicRef) -> tuple[TopicRef, tuple[SegmentInfo, ...]]:
            view = logical_view(ref.view, ref.config.ttl_ms, self._records(ref), self.now_ms())
            return ref._replace(view=view), unmoved(ref.arena.segments(ref.slot, ref.view))

        return self._retrying(ref, look)

    def has_expired(self, ref: TopicRef) -> bool:
        """Tell whether records have expired that the shard still counts."""
        ttl_ms, view = ref.config.ttl_ms, ref.view
        if not ttl_ms or view.earliest_seq > view.head_seq:
            return False
        try:
            return self.now_ms() - self._records(ref).ts_at(view.earliest_seq) > ttl_ms
        except (MovedError, FileNotFoundError):
            # The shard has changed the topic since `view`, maybe because records expired.
            return True
        except (CorruptSegment, OSError):
            # The shard cannot mend damage. Readers of these records will get the error.
            return False

    def read_page(
        self, ref: TopicRef, from_seq: int, options: PageOptions, to_seq: int | None = None, from_ts: int | None = None
    ) -> RecordPage:
        """Return the records after `from_seq`, up to `to_seq`, and none before those of `from_ts` (`cursor_at`).

        Raise `topic_not_found` if the topic was deleted, `storage_unavailable` if a frame cannot be read, and
        ColdMissError if the first record has to be fetched from the cold tier (`fetch_page` does that).
        """
        return self._retrying(ref, lambda ref: self._read(ref, from_seq, options, to_seq, from_ts))

    async def fetch_page(
        self, ref: TopicRef, from_seq: int, options: PageOptions, to_seq: int | None = None, from_ts: int | None = None
    ) -> RecordPage:
        """Read as `read_page` does, and fetch records from the cold tier. Find the topic again after this."""
        reason, was_gone = _CHANGES, False
        for _ in range(_COLD_TRIES):
            try:
                return self.read_page(ref, from_seq, options, to_seq, from_ts)
            except ColdMissError as miss:
                try:
                    await self.fetch(miss)
                except FileNotFoundError as error:
                    # The segment was dropped or rewritten in the meantime. Then a new view no longer names it.
                    reason = str(error)
                    if was_gone:
                        raise self._unreadable(ref, reason) from error
                    was_gone = True
            ref = self.refresh(ref)
        raise self._unreadable(ref, reason)

    async def fetch(self, miss: ColdMissError) -> None:
        """Fetch the bytes that a page lacked (`ColdTier.fetch`)."""
        assert self.stores.cold is not None
        await self.stores.cold.fetch(miss)

    def _retrying(self, ref: TopicRef, look: Callable[[TopicRef], _T]) -> _T:
        """Return what `look` returns, which is called with a new view of the topic while its view is outdated."""
        reason = _CHANGES  # a text, not the error, which would keep its frame and with it the page
        for _ in range(_TRIES):
            try:
                return look(ref)
            except MovedError:
                reason = _CHANGES
            except (MismatchError, FileNotFoundError, EOFError) as error:
                reason = str(error)
            except CorruptSegment as damage:
                self.stores.segments.forget(damage.path)
                if self.stores.cold is None or not self.stores.cold.forget(_in_topics_dir(damage.path)):
                    raise self._corrupt(ref, damage) from damage
                reason = str(damage)
            except OSError as error:
                raise self._unreadable(ref, str(error)) from error
            ref = self.refresh(ref)
        raise self._unreadable(ref, reason)

    def _records(self, ref: TopicRef) -> LocatedRecords:
        return LocatedRecords(self.stores, ref.shard, ref.arena, ref.slot, ref.view)

    def _read(
        self, ref: TopicRef, from_seq: int, options: PageOptions, to_seq: int | None, from_ts: int | None
    ) -> RecordPage:
        if ref.config.durability == "ephemeral" and self._not_leader is not None and (error := self._not_leader()):
            raise error  # no log that is followed has its records, so a cursor means nothing here
        records, now_ms = self._records(ref), self.now_ms()
        view = logical_view(ref.view, ref.config.ttl_ms, records, now_ms)
        if from_ts is not None:
            # Find the start in this view: a record that was written since an earlier look may be too early.
            from_seq = max(from_seq, cursor_at(view, records, from_ts, now_ms))
        tombstone = floor_tombstone(view, from_seq)
        if self.is_beyond(view, from_seq):
            from_seq = 0 if view.recreated else view.head_seq
        if not ref.config.dedupe_node:
            options = options._replace(nodes=None)
        start = cursor = max(from_seq, view.earliest_seq - 1)
        last_seq = view.head_seq if to_seq is None else min(to_seq, view.head_seq)
        if (options.limit == 1 or last_seq - cursor == 1) and cursor < last_seq and options.is_plain:
            body = records.plain_record(cursor + 1)
            if body is not None:
                return self._page(view, body, 1, cursor + 1, tombstone, 1, 0)
        bodies: list[bytes] = []
        count = size_bytes = 0
        step_max, scan_max = _STEP_MAX, max(SCAN_MAX, options.limit)
        ended = False
        while not ended and cursor < last_seq and count < options.limit and cursor - start < scan_max:
            # Records that are filtered out are few, or many: the first step takes what is wanted, later ones more.
            step = min(step_max, max(_STEP_MIN if cursor > start else 1, options.limit - count), last_seq - cursor)
            try:
                room_bytes = options.max_batch_bytes - size_bytes
                if step > options.limit - count:
                    room_bytes = min(room_bytes, _BEYOND_BYTES)
                runs = records.runs(cursor + 1, cursor + step, room_bytes, options.verify)
            except (ColdMissError, CorruptSegment) as error:
                if isinstance(error, CorruptSegment) and step > 1:
                    # The records before the damage are served.
                    step_max = step // 2
                    continue
                if count or (cursor > start and isinstance(error, ColdMissError)):
                    # Return what there is, even if it is only a new cursor. A page made again from `start` could need
                    # more blocks of the cold tier at once than are kept, and would never succeed.
                    break
                raise
            for run in runs:
                part = render(run, options, count, size_bytes)
                cursor += part.examined
                size_bytes = part.size_bytes
                if part.count:
                    bodies.append(part.body)
                    count += part.count
                if part.lost:
                    if count or tombstone is not None:
                        ended = True
                        break
                    tombstone = _lost_run(records, view, cursor + 1, last_seq)
                    cursor = tombstone.gap_to
                    break  # the cursor is behind the rest of these runs
                if part.full:
                    ended = True
                    break
        whole = bodies[0] if len(bodies) == 1 else b",".join(bodies)
        return self._page(view, whole, count, cursor, tombstone, cursor - start, len(records.cold_segments))

    def _unreadable(self, ref: TopicRef, reason: str) -> TopicsError:
        self._failures.error("a topic cannot be read", topic=ref.name, shard=ref.shard, reason=reason)
        return storage_unavailable(f"topic {ref.name!r} cannot be read: {reason}", topic=ref.name, reason=reason)

    def _corrupt(self, ref: TopicRef, damage: CorruptSegment) -> TopicsError:
        """Return the error for damage, which never counts as absence. The reader stays before it, and learns where."""
        segment, where = _in_topics_dir(damage.path), {"offset": damage.offset, "reason": damage.reason}
        self._failures.error("a segment is corrupt", topic=ref.name, path=damage.path, **where)
        return storage_unavailable(
            f"topic {ref.name!r} cannot be read on: segment {segment} is corrupt at offset {damage.offset}:"
            f" {damage.reason}; restore the file from a copy (put that beside it, then rename it to this name), or give"
            " up its records by a delete with before_seq",
            topic=ref.name,
            segment=segment,
            **where,
        )

    def _page(
        self,
        view: TopicView,
        body: bytes,
        count: int,
        next_from_seq: int,
        tombstone: Tombstone | None,
        scanned: int,
        cold_segments: int,
    ) -> RecordPage:
        return RecordPage(
            body,
            count,
            next_from_seq,
            view.head_seq,
            view.earliest_seq,
            view.durable_seq,
            tombstone,
            scanned,
            self.epoch_of(view.topic_id),
            cold_segments,
        )


def _lost_run(records: LocatedRecords, view: TopicView, first_seq: int, last_seq: int) -> Tombstone:
    """Return the records from `first_seq` on that are lost though older ones live (LOCATION_LOST)."""
    seq = first_seq
    reason = EvictReason.NONE
    while seq <= last_seq:
        flags, offsets = records.flags_and_offsets(seq, min(last_seq, seq + _STEP_MAX - 1))
        if reason == EvictReason.NONE:
            reason = EvictReason(offsets[0])
        for flag in flags:
            if not flag & LOCATION_LOST:
                last_seq = seq - 1
                break
            seq += 1
    return _gap(view, first_seq, last_seq, reason.name.lower())


def _in_topics_dir(path: str) -> str:
    """Return the path of a segment's file below `topics/`, which is also its name in the cold tier."""
    return os.path.join(os.path.basename(os.path.dirname(path)), os.path.basename(path))


PAGE_MEMBERS: Final = (
    b'"records":[%b],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"durable_seq":%d,"epoch":"%016x",'
    b'"caught_up":%b,"tombstone":%b,"lag":%d'
)
"""Template for `page_values`. An answer is filled in as a whole, so that the records are copied once."""


def page_values(page: RecordPage) -> tuple[bytes | int, ...]:
    return (
        page.body,
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        page.durable_seq,
        page.epoch,
        b"true" if page.caught_up else b"false",
        b"null" if page.tombstone is None else encode_json(page.tombstone),
        max(0, page.head_seq - page.next_from_seq),
    )
