"""Copying a page of a source into a dest of this shard: reading the originals, making the copies, waiting for room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.location import (
    FLAGS_SHIFT,
    LOCATION_DELETED,
    LOCATION_GONE,
    LOCATION_IN_RAM_LOG,
    LOCATION_LOST,
    LOW_WORD,
)
from topics.log import get_logger
from topics.shm.arena_heap import ArenaFullError
from topics.storage.copies import Original
from topics.storage.frame import FrameType
from topics.walshard.hosted import Hosted
from topics.walshard.routers.copy_log import CopyLog
from topics.walshard.routers.feed import PAGE_BYTES, PAGE_RECORDS, Feed, Hindrance, room
from topics.walshard.routers.originals import Locations, Originals, SourceSight, UnknownError

log = get_logger()

BACKOFF_MS: Final = (10, 1_000)


class Copier:
    """One shard's. `show` makes what a topic is now known to all, `show_progress` how far its routers are, after that;
    `claim_bytes` as `Holdings.claim_bytes`.
    """

    def __init__(
        self,
        originals: Originals,
        copy_log: CopyLog,
        show: Callable[[Hosted], None],
        show_progress: Callable[[Feed], None],
        claim_bytes: Callable[[int, Callable[[], int]], int],
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._originals = originals
        self._copy_log = copy_log
        self._show = show
        self._show_progress = show_progress
        self._claim_bytes = claim_bytes
        self._monotonic_ms = monotonic_ms
        self.expire_for: Callable[[Hosted, int, int], bool] | None = None
        self.give_way: Callable[[Hosted, int, int], bool] | None = None
        """As `Appends` has them; None before the shard is at work: what is made again is what was there."""
        self.left_out = 0
        """Copies that were not made in this life, because their dest could never hold them."""

    def advance(self, feed: Feed, sight: SourceSight, rederiving: bool = False) -> bool:
        """Copies a page. True when there may be more to copy at once; False when it is at the head, or must wait
        (`feed.retry_ms` says until when, `feed.hindrance` why). `rederiving`: this shard crashed, and readers have seen
        copies that its log does not have.
        """
        feed.source_head_seq, feed.source_evict_floor = sight.head_seq, sight.evict_floor
        if feed.source_seq > sight.head_seq:
            return self._step_back(feed, sight)
        self._note_durable(feed, sight)
        if feed.source_seq == sight.head_seq:
            feed.backoff_ms = 0
            if feed.full and not self._copy_log.log_full(feed, False):
                return self._wait(feed, Hindrance.NONE)
            return False
        if self.expire_for is not None:
            try:
                self.expire_for(feed.hosted, PAGE_RECORDS, PAGE_BYTES)
            except TopicsError:
                return self._wait(feed)
        first_seq = feed.source_seq + 1
        floor = sight.earliest_seq if feed.full else sight.base_seq
        if first_seq < min(floor, sight.evict_floor):
            last_seq = min(floor - 1, sight.evict_floor - 1, sight.head_seq)
            return self._trim(feed, last_seq, EvictReason(sight.evict_reason))
        if first_seq < floor:
            return self._give_up(feed, min(floor - 1, sight.head_seq))
        try:
            last_seq = min(sight.head_seq, feed.source_seq + PAGE_RECORDS)
            locations = self._originals.locations(feed.source, sight.topic_id, first_seq, last_seq)
            gone_flags = LOCATION_GONE if feed.full else LOCATION_LOST
            gone, were_deleted = _leading_gone(locations, gone_flags, first_seq, sight.evict_floor)
            if gone and were_deleted:
                return self._give_up(feed, feed.source_seq + gone)
            if gone:
                return self._trim(feed, feed.source_seq + gone, EvictReason(locations.offset_len[0] & LOW_WORD))
            if feed.has_no_room():
                return self._acked_give_way(feed) or self._wait_for_room(feed)
            locations = _within_bytes(locations, gone_flags)
            originals: Iterable[Original] = self._originals.read(feed.source, sight.topic_id, first_seq, locations)
            topic = feed.topic
            # What is in a segment, or was released, is held for nobody: it may not be there to be copied again.
            is_held = feed.held and feed.told is not None and first_seq >= feed.told[1]
            derived = topic.config.durability != "ephemeral" and not sight.ephemeral and not feed.full
            derived = derived and locations.segment is None and (is_held or rederiving)
            if derived:
                originals = list(originals)
                derived = not _any_in_ram_alone(locations, originals)
            page = feed.copy(originals, FrameType.ROUTER_COPY if derived else FrameType.APPEND)
        except UnknownError:
            return self._wait(feed, _unless_full(feed, Hindrance.SOURCE))
        except (OSError, ValueError) as error:
            if feed.unreadable != str(error):  # said once, however many ask
                feed.unreadable = str(error)
                log.error(
                    "a router cannot read its source", topic=feed.topic.name, source=feed.source, error=str(error)
                )
            if isinstance(error, ValueError):
                feed.rederive_seq = feed.source_seq  # damaged: nobody makes a copy of it again
            return self._wait(feed, _unless_full(feed, Hindrance.UNREADABLE))
        feed.unreadable = ""
        feed.no_room_for = page.source_seq, *page.no_room_for
        if not len(page):
            if page.source_seq == feed.source_seq:
                if page.oversize:
                    return self._leave_out(feed, page.oversize)
                return self._acked_give_way(feed) or self._wait_for_room(feed)
            # No router lets them pass.
            feed.source_seq = page.source_seq
            self._copy_log.passed_over(feed)
            self._show_progress(feed)
            return feed.source_seq < sight.head_seq
        try:
            # What is made again the service held before, and a shard that starts has yet to say what it holds. But
            # nobody has seen what waited for room.
            if feed.full or not (rederiving or feed.hosted.rederiving):
                self._claim_bytes(page.size_bytes, partial(topic.growth, len(page), page.size_bytes))
            feed.hosted.ring.reserve(len(page))
        except TopicsError as error:
            if error.code == "throttled":
                return self._wait_for_room(feed, Hindrance.LASTING)
            return self._wait(feed)
        except ArenaFullError:
            return self._wait(feed)
        write = self._copy_log.write_derived if derived else self._copy_log.write_logged
        if not write(feed, page):
            return self._wait(feed)
        self._show(feed.hosted)
        self._show_progress(feed)
        self._note_durable(feed, sight)
        if page.full:
            return self._wait_for_room(feed)
        feed.backoff_ms = 0
        return feed.source_seq < sight.head_seq

    def made_again(self, feed: Feed) -> None:
        """All copies that readers of the dest may have seen are here."""
        if feed.hosted.rederiving:
            feed.hosted.rederiving = False
            self._show(feed.hosted)

    def _acked_give_way(self, feed: Feed) -> bool:
        """Whether there is room now for the next record, which had none."""
        _, records, size_bytes = feed.no_room_for
        try:
            return self.give_way is not None and self.give_way(feed.hosted, records, size_bytes)
        except TopicsError:
            return False

    def _step_back(self, feed: Feed, sight: SourceSight) -> bool:
        """After a power loss the source may have lost records that were copied: it goes on with those it has now."""
        log.warning("the source of a router has lost records that were copied", topic=feed.topic.name)
        if not self._copy_log.log_copies(feed):
            return self._wait(feed)
        feed.source_seq = sight.head_seq
        feed.held, feed.told = False, None
        feed.no_room_for = 0, 0, 0
        if not self._copy_log.log_cursor(feed):
            return self._wait(feed)
        self._show_progress(feed)
        return False

    def _trim(self, feed: Feed, last_source_seq: int, reason: EvictReason) -> bool:
        """Records that the source has lost before they were copied: a gap in the dest, a seq for each; but one for all
        when an `ephemeral` source was lost, since nobody knows how many there were.
        """
        count = 1 if reason == EvictReason.RESTART else last_source_seq - feed.source_seq
        if min(room(feed.topic)) <= 0:
            return self._wait(feed, Hindrance.NONE)  # until then more may follow it
        if not self._skip(feed, last_source_seq, count, EvictReason.SOURCE_TRIM):
            return self._wait(feed)
        log.warning("a router's source lost records before they were copied", topic=feed.topic.name, records=count)
        return True

    def _give_up(self, feed: Feed, last_source_seq: int) -> bool:
        """Records that were deleted before they were copied: nobody misses them (api §5)."""
        if not self._copy_log.log_given_up(feed, last_source_seq):
            return self._wait(feed)
        self._show_progress(feed)
        return True

    def source_ended(self, feed: Feed) -> bool:
        """The source was deleted, or another one has its name: what waited to be copied is lost, as if evicted, and
        what was copied cannot be copied again. False if that could not be logged.
        """
        if not self._copy_log.log_copies(feed, sync=True):
            return False
        # Of what waited before the service started nobody knows how many there were.
        waiting = max(feed.uncopied(), int(feed.full))
        if not waiting:
            return True
        was_full, feed.full = feed.full, False
        last_seq = max(feed.source_seq, feed.seen_source_seq, feed.source_head_seq)
        if not self._skip(feed, last_seq, waiting, EvictReason.SOURCE_TRIM):
            feed.full = was_full
            return False
        feed.source_head_seq = feed.source_seq
        log.warning("a router's source ended before it was copied", topic=feed.topic.name, records=waiting)
        return True

    def _leave_out(self, feed: Feed, copies: int) -> bool:
        """The next record is more than the dest may ever hold: waiting for room would end the router. Its copies are a
        gap, as if they had been appended and evicted at once, which is what a dest that discards old ones does.
        """
        if not self._skip(feed, feed.source_seq + 1, copies, EvictReason.CAP):
            return self._wait(feed)
        self.left_out += copies
        if not feed.leaving_out:
            feed.leaving_out = True
            log.warning(
                "a record is larger than the dest of its router may ever hold, and left out",
                topic=feed.topic.name,
                source=feed.source,
                source_seq=feed.source_seq,
                cap_records=feed.topic.config.cap_records,
                cap_bytes=feed.topic.config.cap_bytes,
            )
        return True

    def _skip(self, feed: Feed, last_source_seq: int, count: int, reason: EvictReason) -> bool:
        """The dest gets a gap of `count` seqs for the source's records up to `last_source_seq`; False if it cannot."""
        try:
            feed.hosted.ring.reserve(count)
        except ArenaFullError:
            return False
        if not self._copy_log.log_gap(feed, last_source_seq, count, reason):
            return False
        feed.topic.skipped(feed.topic.head_seq + count, reason)
        if feed.topic.config.durability != "ephemeral":
            self._copy_log.logged(feed.hosted)
        self._show(feed.hosted)
        self._show_progress(feed)
        return True

    def _note_durable(self, feed: Feed, sight: SourceSight) -> None:
        """Copies of what is on the disk can be made again whatever happens, so they are as durable."""
        topic, moved = feed.topic, False
        logged_head_seq = min(topic.head_seq, feed.unlogged_seq - 1)
        while feed.marks and feed.marks[0][0] <= sight.durable_seq and topic.durable_seq >= logged_head_seq:
            topic.durable_seq = max(topic.durable_seq, feed.marks.popleft()[1])
            moved = True
        if moved:
            self._show(feed.hosted)

    def _wait_for_room(self, feed: Feed, hindrance: Hindrance = Hindrance.NONE) -> bool:
        if not feed.full:
            self._copy_log.log_full(feed, True)
        return self._wait(feed, hindrance)

    def _wait(self, feed: Feed, hindrance: Hindrance = Hindrance.LASTING) -> bool:
        feed.hindrance = hindrance
        feed.backoff_ms = min(BACKOFF_MS[1], max(BACKOFF_MS[0], 2 * feed.backoff_ms))
        feed.retry_ms = self._monotonic_ms() + feed.backoff_ms
        return False


def _unless_full(feed: Feed, hindrance: Hindrance) -> Hindrance:
    """Whatever keeps a source from being read keeps nothing from a dest that could not take it. A queue may have jobs
    that would give way: of that one nobody knows.
    """
    is_full = feed.topic.queue is None and (feed.has_no_room() or min(room(feed.topic)) <= 0)
    return Hindrance.NONE if is_full else hindrance


def _leading_gone(locations: Locations, gone_flags: int, first_seq: int, evict_floor: int) -> tuple[int, bool]:
    """(how many of the first records are not there to be copied, whether those were deleted: else they were lost)."""
    count, were_deleted = 0, False
    for offset_len, word in zip(locations.offset_len, locations.file_flags, strict=True):
        flags = word >> FLAGS_SHIFT
        if not flags & gone_flags:
            break
        # A segment has no frame of what was deleted before it came there, and no reason why.
        unexplained = not offset_len & LOW_WORD and first_seq + count >= evict_floor
        deleted = bool(flags & LOCATION_DELETED) or unexplained
        if count and deleted != were_deleted:
            break
        count, were_deleted = count + 1, deleted
    return count, were_deleted


def _any_in_ram_alone(locations: Locations, originals: list[Original]) -> bool:
    """Whether a restart of the service loses one of these: it came while its topic was `ephemeral`. What is a copy
    itself can be made again.
    """
    return any(
        word >> FLAGS_SHIFT & LOCATION_IN_RAM_LOG and original.type == FrameType.APPEND
        for word, original in zip(locations.file_flags, originals, strict=True)
    )


def _within_bytes(locations: Locations, gone_flags: int) -> Locations:
    """Up to the first record that is not to be copied, and to PAGE_BYTES: at least one."""
    size_bytes = 0
    for at, (offset_len, word) in enumerate(zip(locations.offset_len, locations.file_flags, strict=True)):
        size_bytes += offset_len >> 32
        if word >> FLAGS_SHIFT & gone_flags or (at and size_bytes > PAGE_BYTES):
            return Locations(locations.offset_len[:at], locations.file_flags[:at], locations.segment)
    return locations
