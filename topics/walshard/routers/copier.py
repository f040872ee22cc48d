"""The next write into a router's dest: a page of copies with its cursor, or a gap, or a reason to wait.

Copies and cursor are one atomic write to the log of the dest. So after a crash the dest has a copy and the cursor
behind it, or neither. No copy is made twice, and every seq keeps the record that readers have seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from topics.core.clock import Clock, doubled_ms
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.location import (
    FLAGS_SHIFT,
    LOCATION_DELETED,
    LOCATION_GONE,
    LOCATION_IN_RAM_LOG,
    LOCATION_LOST,
    LOW_WORD,
    file_flags_of,
)
from topics.log import LASTING_EVERY_S, SparseLines
from topics.shm.arena import TopicView
from topics.shm.arena_heap import ArenaFullError
from topics.shm.control import ProcessCell
from topics.storage.copies import each_copy
from topics.walshard.commit.draft import LogWrite, ceiling_writes, head_write
from topics.walshard.routers.cold_reads import UnknownError
from topics.walshard.routers.feeds import Feed, Hindrance
from topics.walshard.routers.originals import Originals, SourceLocations
from topics.walshard.routers.page import PAGE_BYTES, PAGE_RECORDS, CopyPage, copy_page, pass_unchanged

_SOURCE_LOST: Final = "a router's source lost records before they were copied"

WAIT_FIRST_MS: Final = 10
WAIT_LONGEST_MS: Final = 1_000
LOG_CURSOR_SEQS: Final = 16_384
"""Seqs by which a cursor may be ahead of its last logged value while no router lets a record pass."""


class CopyWrite(NamedTuple):
    """The next write into a dest, for the durable log and the RAM log. `moves_head` says whether the dest's head moves.
    `records` of the source were looked at for it, and `size_bytes` copied.
    """

    feed: Feed
    durable: list[LogWrite]
    ram: list[LogWrite]
    moves_head: bool = False
    records: int = 0
    size_bytes: int = 0


@dataclass(eq=False)
class Copier:
    """Makes the writes of one shard's feeds. A write changes its feed once it is logged. If it is refused, the feed
    waits.
    """

    _originals: Originals
    _claim_bytes: Callable[[int, Callable[[], int]], int]
    _cell: ProcessCell
    _clock: Clock

    def __post_init__(self) -> None:
        self._lines = SparseLines(LASTING_EVERY_S, lambda: self._clock.monotonic_ms() / 1000)

    def next_write(self, feed: Feed, sight: TopicView) -> CopyWrite | None:
        """Return the next write into the dest. None when the feed is at the head of its source, or must wait:
        `feed.retry_ms` says until when, `feed.hindrance` why. `sight` is the source.
        """
        feed.source_head_seq = sight.head_seq
        feed.repeats_to_seq = min(feed.repeats_to_seq, sight.head_seq)
        if feed.source_seq > sight.head_seq:
            self._lines.warning("the source of a router has lost records that were copied", **_where(feed))
            return self._cursor(feed, sight.head_seq)
        if feed.source_seq == sight.head_seq:
            feed.failures = 0
            if feed.full or _must_be_logged(feed, sight, feed.source_seq):
                return self._cursor(feed, feed.source_seq, full=False)
            return None
        first_seq = feed.source_seq + 1
        floor = sight.earliest_seq if feed.full else sight.base_seq
        if first_seq < min(floor, sight.evict_floor):
            last_seq = min(floor - 1, sight.evict_floor - 1, sight.head_seq)
            return self._lost(feed, last_seq, EvictReason(sight.evict_reason))
        if first_seq < floor:
            # These records were deleted before they were copied: the dest gets no gap for them (api §5).
            return self._cursor(feed, min(floor - 1, sight.head_seq))
        return self._copies(feed, sight, first_seq)

    def source_ended(self, feed: Feed) -> CopyWrite | None:
        """Return a gap for records that waited when the source was deleted or replaced; None when none did."""
        # How many waited before the service started is unknown; a full dest missed at least one.
        waiting = max(feed.uncopied, int(feed.full))
        if not waiting:
            return None
        self._lines.warning("a router's source ended before it was copied", **_where(feed), records=waiting)
        last_seq = max(feed.source_seq, feed.source_head_seq)
        return self._gap(feed, last_seq, waiting, EvictReason.SOURCE_TRIM, full=False)

    def wait(self, feed: Feed, hindrance: Hindrance = Hindrance.LASTING) -> None:
        """Have a feed wait, each time in a row twice as long as before, up to WAIT_LONGEST_MS."""
        feed.hindrance = hindrance
        feed.retry_ms = self._clock.monotonic_ms() + doubled_ms(WAIT_FIRST_MS, feed.failures, WAIT_LONGEST_MS)
        feed.failures += 1

    # -- copies

    def _copies(self, feed: Feed, sight: TopicView, first_seq: int) -> CopyWrite | None:
        try:
            last_seq = min(sight.head_seq, feed.source_seq + PAGE_RECORDS)
            locations = self._originals.locations(feed.source, sight.topic_id, first_seq, last_seq)
            gone_flags = LOCATION_GONE if feed.full else LOCATION_LOST
            gone, were_deleted = _leading_gone(locations, gone_flags, first_seq, sight.evict_floor)
            if gone and were_deleted:
                return self._cursor(feed, feed.source_seq + gone)
            if gone:
                return self._lost(feed, feed.source_seq + gone, EvictReason(locations.offset_len[0] & LOW_WORD))
            if feed.has_no_room():
                return self._wait_for_room(feed)
            page = self._page(feed, sight, first_seq, _within_bytes(locations, gone_flags))
        except UnknownError:
            self.wait(feed, _unless_full(feed, Hindrance.SOURCE))
            return None
        except (OSError, ValueError) as error:
            self._lines.error("a router cannot read its source", **_where(feed), reason=str(error))
            self.wait(feed, _unless_full(feed, Hindrance.LASTING))
            return None
        feed.no_room_for = page.source_seq, *page.no_room_for
        if not len(page):
            return self._nothing_passed(feed, sight, page)
        try:
            self._claim_bytes(page.size_bytes, partial(feed.topic.growth, len(page), page.size_bytes))
            feed.hosted.ring.reserve(len(page))
        except (TopicsError, ArenaFullError) as error:
            if isinstance(error, TopicsError) and error.code == "throttled":
                return self._wait_for_room(feed, Hindrance.LASTING)
            self.wait(feed, Hindrance.LASTING)
            return None
        return self._write(feed, page)

    def _page(self, feed: Feed, sight: TopicView, first_seq: int, locations: SourceLocations) -> CopyPage:
        wanted = feed.source, sight.topic_id, first_seq, locations
        originals = self._originals.read(*wanted)
        if feed.topic.config.discard != "reject":  # a `reject` dest may have room for a few only, read one by one
            with suppress(OSError, ValueError):  # a record is damaged: read those before it, below
                copies = self._originals.copies(*wanted)
                if pass_unchanged(feed.routers, feed.source_seq, feed.repeats_to_seq):
                    return CopyPage.unchanged(feed.source_seq, copies, feed.routers[0].router)
                originals = each_copy(copies.frames, copies.rows)
        source = feed.source, sight.topic_id, feed.source_seq
        return copy_page(originals, feed.routers, *source, feed.topic, feed.repeats_to_seq)

    def _nothing_passed(self, feed: Feed, sight: TopicView, page: CopyPage) -> CopyWrite | None:
        if page.source_seq == feed.source_seq:
            return self._left_out(feed, page.oversize) if page.oversize else self._wait_for_room(feed)
        # No router lets these records pass.
        if _must_be_logged(feed, sight, page.source_seq):
            return self._cursor(feed, page.source_seq)._replace(records=page.source_seq - feed.source_seq)
        records, feed.source_seq = page.source_seq - feed.source_seq, page.source_seq
        return CopyWrite(feed, [], [], records=records)

    def _write(self, feed: Feed, page: CopyPage) -> CopyWrite:
        topic, in_ram = feed.topic, feed.is_ephemeral
        ts = topic.commit_ts(self._clock.now_ms())
        body = feed.body(page.source_seq, feed.full or page.full)
        for one in body.routers:
            one.forwarded_total += page.copies_by_router.get(one.router.id, 0)
        frames = page.stamped(topic.id, topic.head_seq + 1, ts)
        head_seq = topic.head_seq + len(page)
        cursor = feed.cursor_frame(body, head_seq, ts)
        location_flags = LOCATION_IN_RAM_LOG if in_ram else 0

        def place(file_no: int, offset: int) -> None:
            absolute = array("Q", [offset + entry for entry in page.offset_len])
            topic.appended(ts, absolute, file_flags_of(file_no, page.record_flags, location_flags), page.size_bytes)
            feed.logged(body, in_ram)
            self._cell.add("router_copies", len(page))
            if page.full:
                self.wait(feed, Hindrance.NONE)
            else:
                feed.failures = 0

        undo = partial(self.wait, feed)
        write = LogWrite([frames, cursor], place=place, more_frames=len(page) - 1, undo=undo, takes_room=True)
        ceilings = ceiling_writes(topic, len(page), ts)
        durable, ram = (ceilings, [write]) if in_ram else ([*ceilings, write], [])
        return CopyWrite(feed, durable, ram, True, page.source_seq - feed.source_seq, page.size_bytes)

    # -- what is not copied

    def _cursor(self, feed: Feed, source_seq: int, full: bool | None = None) -> CopyWrite:
        """Return a write that moves only the cursor."""
        write = feed.cursor_write(feed.body(source_seq, full), self._clock.now_ms())
        write.undo = partial(self.wait, feed)
        return CopyWrite(feed, [write], [])

    def _lost(self, feed: Feed, last_source_seq: int, reason: EvictReason) -> CopyWrite | None:
        """Return a gap for records that the source lost before they were copied, with a seq for each. The gap has one
        seq for all of them if a restart or a lost end of the log took them: their number is unknown.
        """
        if reason == EvictReason.SOURCE_TRIM and any(one.router.counts_hops for one in feed.routers):
            # A gap has no count of hops, so it would go around a cycle for ever: write none here.
            return self._cursor(feed, last_source_seq)
        is_unknown = reason in (EvictReason.RESTART, EvictReason.LOST_TAIL, EvictReason.RESTORED)
        if is_unknown:
            is_said, feed.lost_to_seq = feed.lost_to_seq == feed.source_seq, last_source_seq
            if is_said:
                return self._cursor(feed, last_source_seq)  # the last gap stands for this page of the loss, too
        if min(feed.topic.room()) <= 0:
            self.wait(feed, Hindrance.NONE)  # the gap may grow until there is room for it
            return None
        count = 1 if is_unknown else last_source_seq - feed.source_seq
        records = "unknown" if is_unknown else count
        self._lines.warning(_SOURCE_LOST, **_where(feed), records=records)
        return self._gap(feed, last_source_seq, count, EvictReason.SOURCE_TRIM)

    def _left_out(self, feed: Feed, copies: int) -> CopyWrite | None:
        """Return a gap for the next record, whose copies are more than the dest can ever hold: the router would wait
        for room for ever. Readers see the same as if the copies had been appended and evicted at once.
        """
        write = self._gap(feed, feed.source_seq + 1, copies, EvictReason.CAP)
        if write is None:
            return None
        self._cell.add("router_oversize", copies)
        self._lines.warning(
            "a record is larger than the dest of its router may ever hold, and left out",
            **_where(feed),
            source_seq=feed.source_seq + 1,
            cap_records=feed.topic.config.cap_records,
            cap_bytes=feed.topic.config.cap_bytes,
        )
        return write

    def _gap(
        self, feed: Feed, last_source_seq: int, count: int, reason: EvictReason, full: bool | None = None
    ) -> CopyWrite | None:
        """Return a write that makes the next `count` seqs of the dest a gap, for the source up to `last_source_seq`."""
        try:
            feed.hosted.ring.reserve(count)
        except ArenaFullError:
            self.wait(feed, Hindrance.LASTING)
            return None
        topic, now_ms = feed.topic, self._clock.now_ms()
        body = feed.body(last_source_seq, full)
        body.trimmed, body.trim_reason = count, 0 if reason == EvictReason.SOURCE_TRIM else int(reason)
        write = feed.cursor_write(body, now_ms)

        def apply() -> None:
            feed.logged(body)
            topic.skipped(topic.head_seq + count, reason)

        write.apply, write.undo = apply, partial(self.wait, feed)
        if feed.is_ephemeral:  # no record in the RAM log shows that these seqs are used
            heads = [head_write(topic, topic.head_seq + count, now_ms)]
        else:
            heads = ceiling_writes(topic, count, now_ms)
        return CopyWrite(feed, [*heads, write], [], True)

    # -- waiting

    def _wait_for_room(self, feed: Feed, hindrance: Hindrance = Hindrance.NONE) -> CopyWrite | None:
        self.wait(feed, hindrance)
        return None if feed.full else self._cursor(feed, feed.source_seq, full=True)


def _unless_full(feed: Feed, hindrance: Hindrance) -> Hindrance:
    """Return NONE for a full dest, which could take nothing anyway, else `hindrance`. A queue never counts as full: it
    may drop acknowledged jobs.
    """
    is_full = feed.topic.queue is None and (feed.has_no_room() or min(feed.topic.room()) <= 0)
    return Hindrance.NONE if is_full else hindrance


def _must_be_logged(feed: Feed, sight: TopicView, source_seq: int) -> bool:
    """Return whether a cursor that moved without a copy must be logged. A restart goes on from the last logged cursor.
    It must not read too much again, nor report evicted records as lost that no router let pass.
    """
    behind = source_seq - feed.logged_source_seq
    return behind >= LOG_CURSOR_SEQS or (behind > 0 and sight.evict_floor > feed.logged_source_seq + 1)


def _where(feed: Feed) -> dict[str, str]:
    return {"topic": feed.topic.name, "source": feed.source}


def _leading_gone(locations: SourceLocations, gone_flags: int, first_seq: int, evict_floor: int) -> tuple[int, bool]:
    """Return (how many of the first records cannot be copied, whether they were deleted rather than lost)."""
    count, were_deleted = 0, False
    for offset_len, word in zip(locations.offset_len, locations.file_flags, strict=True):
        flags = word >> FLAGS_SHIFT
        if not flags & gone_flags:
            break
        # A record that was deleted before its segment was sealed has no frame and no reason there.
        unexplained = not offset_len & LOW_WORD and first_seq + count >= evict_floor
        deleted = bool(flags & LOCATION_DELETED) or unexplained
        if count and deleted != were_deleted:
            break
        count, were_deleted = count + 1, deleted
    return count, were_deleted


def _within_bytes(locations: SourceLocations, gone_flags: int) -> SourceLocations:
    """Return the first locations: up to a record that cannot be copied, and at most PAGE_BYTES, but at least one."""
    size_bytes = 0
    for at, (offset_len, word) in enumerate(zip(locations.offset_len, locations.file_flags, strict=True)):
        size_bytes += offset_len >> 32
        if word >> FLAGS_SHIFT & gone_flags or (at and size_bytes > PAGE_BYTES):
            return SourceLocations(locations.offset_len[:at], locations.file_flags[:at], locations.segment)
    return locations
