"""The dests of routers on one shard: making copies, and getting them into the log before anything else is.

Copies are *derived*: written to the RAM log, where readers find them as any record, and not to the durable one. The log
has a cursor (ROUTER_CURSOR), and whatever is behind it is made again from the source, the same bytes with the same
seqs. They become Appends of the durable log (`log_copies`) when something else is to be logged for their topic, when
they take too much memory, or at once when the source could not say them again: it is `ephemeral`, or does not yet hold
them for us (`followers.py`). An `ephemeral` dest has copies and cursor in the RAM log, as all its records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Final

from topics.core.config import U64_MAX
from topics.core.errors import TopicsError
from topics.core.router_state import FeedBody, FeedRouter, RouterState
from topics.core.routers import Router
from topics.core.topic import LOCATION_IN_RAM_LOG, LOCATION_LOST, EvictReason, Topic
from topics.log import get_logger
from topics.shm.arena import ArenaFullError
from topics.shm.router_board import RouterBoardWriter, RouterProgress
from topics.storage import layout
from topics.storage.copies import as_appends
from topics.storage.filesystem import FileSystem
from topics.storage.frame import Bytes, FrameType
from topics.walshard.appends import CEILING_STEP
from topics.walshard.feed import PAGE_BYTES, PAGE_RECORDS, Feed, Page, room
from topics.walshard.head_marks import ceiling_operation, head_operation
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation
from topics.walshard.originals import Locations, Originals, SourceSight, UnknownError

log = get_logger()

UNLOGGED_BYTES_MAX: Final = 16 * 1024 * 1024
"""What copies that are not in the log may take; beyond it the oldest get there."""
LOG_CURSOR_SEQS: Final = 16_384
"""So far may a cursor be ahead of the log when nothing was copied."""
BACKOFF_MS: Final = (10, 1_000)

Commit = Callable[[list[Operation], list[Operation]], bool]


class Feeds:
    """One shard's feeds, by dest. `commit(durable, ram)` gets a group into the logs, or returns False; `show` makes
    what a topic is now known to all; `claim_bytes` as `Holdings.claim_bytes`.
    """

    def __init__(
        self,
        originals: Originals,
        board: RouterBoardWriter,
        fs: FileSystem,
        ram_directory: str,
        commit: Commit,
        show: Callable[[Hosted], None],
        logged: Callable[[Hosted], None],
        claim_bytes: Callable[[int, Callable[[], int]], int],
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._originals = originals
        self._board = board
        self._fs = fs
        self._ram_directory = ram_directory
        self._commit = commit
        self._show = show
        self._logged = logged
        self._claim_bytes = claim_bytes
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        self.by_dest: dict[int, Feed] = {}
        self.by_source: dict[str, dict[int, Feed]] = {}
        self._unlogged: dict[int, Feed] = {}
        """Those with copies that are not in the log, the oldest first."""
        self.unlogged_bytes = 0
        self.forwarded = 0
        """Copies made in this life."""
        self.oversize = 0
        """Those that were not, because their dest could never hold them."""

    # -- which feeds there are

    def recovered(self, state: RouterState, hosted: dict[int, Hosted]) -> None:
        """The feeds that the logs speak of, before anything is copied."""
        for topic_id in state.feeds.keys() | state.ram_feeds.keys():
            dest = hosted.get(topic_id)
            body = state.feeds.get(topic_id)
            in_ram = state.ram_feeds.get(topic_id)
            if dest is None or body is None:
                continue
            ephemeral = dest.topic.config.durability == "ephemeral"
            if ephemeral and in_ram is not None and in_ram.revision > body.revision:
                body = in_ram
            if body.routers:
                self._add(Feed(dest, body))

    def start(self, hosted: Hosted, source: str, sight: SourceSight | None, routers: list[Router]) -> bool:
        """A dest that nothing was copied into so far. Logged, so that it begins there and nowhere else."""
        head_seq = 0 if sight is None else sight.head_seq
        body = FeedBody(
            source, 0 if sight is None else sight.topic_id, head_seq, [FeedRouter(one, head_seq) for one in routers]
        )
        feed = Feed(hosted, body)
        if not self._log_cursor(feed, sync=True):
            return False
        self._add(feed)
        self.show_progress(feed)
        return True

    def reroute(self, feed: Feed, sight: SourceSight | None, routers: list[Router]) -> bool:
        """Other routers, or changed ones, into the same dest from the same source. New ones begin at its head."""
        if not self.log_copies(feed):
            return False
        head_seq = 0 if sight is None else sight.head_seq
        known = {one.router.id: one for one in feed.routers}
        former = feed.routers
        feed.routers = [
            FeedRouter(router, known[router.id].from_seq, known[router.id].forwarded_total)
            if router.id in known
            else FeedRouter(router, head_seq)
            for router in routers
        ]
        if not self._log_cursor(feed, sync=True):
            feed.routers = former
            return False
        for router_id in known.keys() - {router.id for router in routers}:
            self._board.remove(router_id)
        feed.forget_matches()
        self.show_progress(feed)
        return True

    def stop(self, feed: Feed) -> bool:
        """Nothing is copied into the dest any more; what was stays."""
        if not self.log_copies(feed):
            return False
        former, feed.routers = feed.routers, []
        if not self._log_cursor(feed, sync=True):
            feed.routers = former
            return False
        self.forget(feed, former)
        return True

    def forget(self, feed: Feed, routers: list[FeedRouter] | None = None) -> None:
        """The dest is gone, or nothing is copied into it any more."""
        for one in feed.routers if routers is None else routers:
            self._board.remove(one.router.id)
        self._note_logged(feed)
        del self.by_dest[feed.topic.id]
        siblings = self.by_source[feed.source]
        del siblings[feed.topic.id]
        if not siblings:
            del self.by_source[feed.source]

    def _add(self, feed: Feed) -> None:
        self.by_dest[feed.topic.id] = feed
        self.by_source.setdefault(feed.source, {})[feed.topic.id] = feed

    def show_progress(self, feed: Feed) -> None:
        """The board says how far its routers are; after the copies can be read."""
        for one in feed.routers:
            router = one.router
            try:
                self._board.show(
                    RouterProgress(
                        router.id, router.version, feed.source_topic_id, feed.source_seq, one.forwarded_total
                    )
                )
            except OSError as error:
                log.error("a router cannot be shown", router=router.name, error=str(error))

    # -- copying

    def bind(self, feed: Feed, sight: SourceSight) -> bool:
        """The source exists now: it is copied from its first record on."""
        if feed.source_topic_id:
            return True
        feed.source_topic_id = sight.topic_id
        if not self._log_cursor(feed, sync=True):
            feed.source_topic_id = 0
            return False
        return True

    def advance(self, feed: Feed, sight: SourceSight, rederiving: bool = False) -> bool:
        """Copies a page. True when there may be more to copy at once; False when it is at the head, or must wait
        (`feed.retry_ms` says until when). `rederiving`: this shard crashed, and readers have seen copies that its log
        does not have.
        """
        feed.source_head_seq, feed.source_evict_floor = sight.head_seq, sight.evict_floor
        if feed.source_seq > sight.head_seq:
            # After a power loss the source may have lost records that were copied: it goes on with those it has now.
            log.warning("the source of a router has lost records that were copied", topic=feed.topic.name)
            if not self.log_copies(feed):
                return self._wait(feed)
            feed.source_seq = sight.head_seq
            feed.held, feed.told = False, None
            if not self._log_cursor(feed):
                return self._wait(feed)
            self.show_progress(feed)
            return False
        if feed.source_seq == sight.head_seq:
            feed.backoff_ms, feed.full = 0, False
            self.note_durable(feed, sight)
            return False
        first_seq = feed.source_seq + 1
        floor = max(sight.base_seq, sight.evict_floor) if feed.full else sight.base_seq
        if first_seq < floor:
            return self._trim(feed, min(floor - 1, sight.head_seq), EvictReason(sight.evict_reason))
        try:
            last_seq = min(sight.head_seq, feed.source_seq + PAGE_RECORDS)
            locations = self._originals.locations(feed.source, sight.topic_id, first_seq, last_seq)
            lost = _leading_lost(locations)
            if lost:
                return self._trim(feed, feed.source_seq + lost, EvictReason(locations.offset_len[0] & 0xFFFF_FFFF))
            locations = _within_bytes(locations)
            originals = self._originals.read(feed.source, sight.topic_id, first_seq, locations)
            topic = feed.topic
            # What is in a segment, or was released, is held for nobody: it may not be there to be copied again.
            is_held = feed.held and feed.told is not None and first_seq >= feed.told[1]
            derived = topic.config.durability != "ephemeral" and not sight.ephemeral
            derived = derived and locations.segment is None and (is_held or rederiving)
            page = feed.copy(originals, FrameType.ROUTER_COPY if derived else FrameType.APPEND)
        except UnknownError:
            return self._wait(feed)
        except (OSError, ValueError) as error:
            log.error("a router cannot read its source", topic=feed.topic.name, source=feed.source, error=str(error))
            return self._wait(feed)
        feed.full |= page.full
        if not len(page):
            if page.source_seq > feed.source_seq:
                return self._passed_over(feed, page.source_seq, sight)
            return self._leave_out(feed, page.oversize) if page.oversize else self._wait(feed)
        try:
            self._claim_bytes(page.size_bytes, partial(topic.growth, len(page), page.size_bytes))
            feed.hosted.ring.reserve(len(page))
        except (TopicsError, ArenaFullError):
            return self._wait(feed)
        if not (self._commit_derived(feed, page) if derived else self._commit_logged(feed, page)):
            return self._wait(feed)
        self._show(feed.hosted)
        self.show_progress(feed)
        self.note_durable(feed, sight)
        if page.full:
            return self._wait(feed)
        feed.backoff_ms = 0
        return feed.source_seq < sight.head_seq

    def note_durable(self, feed: Feed, sight: SourceSight) -> None:
        """Copies of what is on the disk can be made again whatever happens, so they are as durable."""
        topic, moved = feed.topic, False
        while feed.marks and feed.marks[0][0] <= sight.durable_seq and topic.durable_seq >= self._logged_head(feed):
            topic.durable_seq = max(topic.durable_seq, feed.marks.popleft()[1])
            moved = True
        if moved:
            self._show(feed.hosted)

    def _logged_head(self, feed: Feed) -> int:
        return min(feed.topic.head_seq, feed.unlogged_seq - 1)

    def _wait(self, feed: Feed) -> bool:
        feed.backoff_ms = min(BACKOFF_MS[1], max(BACKOFF_MS[0], 2 * feed.backoff_ms))
        feed.retry_ms = self._monotonic_ms() + feed.backoff_ms
        return False

    def _passed_over(self, feed: Feed, source_seq: int, sight: SourceSight) -> bool:
        """No router lets them pass: the cursor moves, and the log hears of it now and then."""
        feed.source_seq = source_seq
        if (
            feed.topic.config.durability != "ephemeral"
            and feed.unlogged_seq == U64_MAX
            and source_seq - feed.logged_source_seq >= LOG_CURSOR_SEQS
        ):
            self._log_cursor(feed)
        self.show_progress(feed)
        return source_seq < sight.head_seq

    def _commit_derived(self, feed: Feed, page: Page) -> bool:
        hosted = feed.hosted
        first_seq = feed.topic.head_seq + 1

        def apply(file_no: int, offset: int) -> None:
            hosted.ring.unlogged_seq = min(hosted.ring.unlogged_seq, first_seq)
            self._applied(feed, page, file_no, offset, LOCATION_IN_RAM_LOG)
            feed.marks.append((feed.source_seq, feed.topic.head_seq))
            feed.unlogged_bytes += page.size_bytes
            self.unlogged_bytes += page.size_bytes
            self._unlogged.setdefault(feed.topic.id, feed)

        return self._commit([], [Operation(page.frames, apply)])

    def _commit_logged(self, feed: Feed, page: Page) -> bool:
        """Copies and cursor in one write, of whichever log the dest has its records in."""
        topic = feed.topic
        ephemeral = topic.config.durability == "ephemeral"
        if not self.log_copies(feed):
            return False
        body = feed.body()
        body.source_seq = page.source_seq
        body.revision += 1
        for one in body.routers:
            one.forwarded_total += page.copies_by_router.get(one.router.id, 0)
        head_seq = topic.head_seq + len(page)
        cursor = feed.cursor_frame(body, head_seq, page.entries[-3])

        def apply(file_no: int, offset: int) -> None:
            self._applied(feed, page, file_no, offset, LOCATION_IN_RAM_LOG if ephemeral else 0)
            feed.revision = body.revision
            if not ephemeral:
                feed.logged_source_seq = feed.source_seq

        operation = Operation([*page.frames, cursor], apply)
        if not ephemeral:
            if not self._commit([operation], []):
                return False
            self._logged(feed.hosted)
            return True
        durable = []
        if head_seq > topic.head_ceiling:
            ceiling = max(head_seq, topic.head_seq + CEILING_STEP)
            durable.append(ceiling_operation(feed.hosted, ceiling, page.entries[-3]))
        return self._commit(durable, [operation])

    def _applied(self, feed: Feed, page: Page, file_no: int, offset: int, location_flags: int) -> None:
        topic = feed.topic
        topic.restored(page.placed(file_no, offset, location_flags))
        topic.evict_over_cap()
        feed.leaving_out = False
        feed.source_seq = page.source_seq
        for one in feed.routers:
            one.forwarded_total += page.copies_by_router.get(one.router.id, 0)
        self.forwarded += len(page)

    def _trim(self, feed: Feed, last_source_seq: int, reason: EvictReason) -> bool:
        """Records that the source has lost before they were copied: a gap in the dest, a seq for each; but one for all
        when an `ephemeral` source was lost, since nobody knows how many there were.
        """
        count = 1 if reason == EvictReason.RESTART else last_source_seq - feed.source_seq
        if min(room(feed.topic)) <= 0:
            return self._wait(feed)  # until then more may follow it
        if not self._skip(feed, last_source_seq, count, EvictReason.SOURCE_TRIM):
            return self._wait(feed)
        log.warning("a router's source lost records before they were copied", topic=feed.topic.name, records=count)
        return True

    def _leave_out(self, feed: Feed, copies: int) -> bool:
        """The next record is more than the dest may ever hold: waiting for room would end the router. Its copies are a
        gap, as if they had been appended and evicted at once, which is what a dest that discards old ones does.
        """
        if not self._skip(feed, feed.source_seq + 1, copies, EvictReason.CAP):
            return self._wait(feed)
        self.oversize += copies
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
        topic = feed.topic
        try:
            feed.hosted.ring.reserve(count)
        except ArenaFullError:
            return False
        if not self.log_copies(feed):
            return False
        former_seq, feed.source_seq = feed.source_seq, last_source_seq
        last_seq = topic.head_seq + count
        # No record in RAM tells of these seqs.
        heads = [head_operation(feed.hosted, last_seq, self._now_ms())] if _in_ram(topic) else []
        if heads and not self._commit(heads, []):
            feed.source_seq = former_seq
            return False
        if not self._log_cursor(feed, trimmed=count, trim_reason=reason, head_seq=last_seq):
            feed.source_seq = former_seq
            return False
        topic.skipped(last_seq, reason)
        self._show(feed.hosted)
        self.show_progress(feed)
        return True

    # -- the log

    def log_copies(self, feed: Feed, *, sync: bool = False) -> bool:
        """Gets the copies that are not in the log there, with their cursor. False when that failed. `sync`: and onto
        the disk.
        """
        first_seq, topic, ring = feed.unlogged_seq, feed.topic, feed.hosted.ring
        if first_seq == U64_MAX:
            return True
        entries = ring.entries(first_seq, topic.head_seq)
        try:
            buffers = self._read_copies(entries, topic.id)
        except (OSError, ValueError) as error:
            log.error("copies cannot be read back", topic=topic.name, error=str(error))
            return False
        body = feed.body()
        body.revision += 1
        lengths = [word >> 32 for word in entries[2::4]]

        def apply(file_no: int, offset: int) -> None:
            flags = [word & ~0xFFFF_FFFF & ~(LOCATION_IN_RAM_LOG << 32) for word in entries[3::4]]
            for at, length in enumerate(lengths):
                entries[4 * at + 2] = offset | length << 32
                entries[4 * at + 3] = flags[at] | file_no
                offset += length
            ring.replace_entries(first_seq, entries)
            feed.revision = body.revision
            feed.logged_source_seq = feed.source_seq
            self._note_logged(feed)
            ring.drop_before(topic.earliest_seq)

        cursor = feed.cursor_frame(body, topic.head_seq, topic.last_write_ts)
        operation = Operation([*buffers, cursor], apply, sync=sync, more_frames=len(lengths) - len(buffers))
        if not self._commit([operation], []):
            return False
        feed.hosted.publish()
        self._logged(feed.hosted)
        return True

    def prepare(self, feed: Feed) -> bool:
        """Something else will be logged for the dest: the log must be as far as the dest is. False if it cannot."""
        if feed.topic.config.durability == "ephemeral":
            return feed.logged_source_seq == feed.source_seq or self._log_cursor(feed)
        return self.log_copies(feed)

    def settle(self, feed: Feed) -> bool:
        """The log says on the disk what was copied so far, so that the source need not keep it. False if it cannot."""
        topic = feed.topic
        if topic.config.durability == "ephemeral":
            return self.prepare(feed)
        if feed.unlogged_seq != U64_MAX:
            return self.log_copies(feed, sync=True)
        is_settled = feed.logged_source_seq == feed.source_seq and topic.durable_seq >= topic.head_seq
        return is_settled or self._log_cursor(feed, sync=True)

    def keep_within_bounds(self) -> None:
        """Logs copies when all together take too much memory."""
        while self.unlogged_bytes > UNLOGGED_BYTES_MAX and self._unlogged:
            if not self.log_copies(next(iter(self._unlogged.values()))):
                return

    def sweep(self) -> None:
        """Now and then: no log is too far behind. Those of `ephemeral` dests would copy again what was lost since."""
        for feed in self.by_dest.values():
            if feed.topic.config.durability == "ephemeral":
                self.prepare(feed)
            elif feed.unlogged_seq != U64_MAX and feed.source_head_seq - feed.logged_source_seq >= LOG_CURSOR_SEQS:
                self.log_copies(feed)

    def unlogged_runs(self) -> list[tuple[Hosted, int, int]]:
        """(topic, first seq, last seq) of copies that are in the RAM log alone."""
        return [(feed.hosted, feed.unlogged_seq, feed.topic.head_seq) for feed in self._unlogged.values()]

    def ram_frames(self, now_ms: int) -> list[Bytes]:
        """Cursors of `ephemeral` dests, to be repeated where older files of the RAM log go."""
        feeds = [feed for feed in self.by_dest.values() if feed.topic.config.durability == "ephemeral"]
        return [feed.cursor_frame(feed.body(), feed.topic.head_seq, now_ms) for feed in feeds]

    def cursor_at_head(self, dest_topic_id: int) -> FeedBody | None:
        """The cursor that belongs to a dest's head as it is now, for who puts its copies on the disk another way; None
        when nothing is copied into that topic.
        """
        feed = self.by_dest.get(dest_topic_id)
        return None if feed is None else feed.body()

    def _log_cursor(
        self,
        feed: Feed,
        *,
        sync: bool = False,
        trimmed: int = 0,
        trim_reason: EvictReason = EvictReason.NONE,
        head_seq: int | None = None,
    ) -> bool:
        """A cursor alone, in the durable log; there must be no copies behind the last one."""
        assert feed.unlogged_seq == U64_MAX
        topic = feed.topic
        body = feed.body(trimmed, trim_reason)
        body.revision += 1
        cursor = feed.cursor_frame(body, topic.head_seq if head_seq is None else head_seq, self._now_ms())

        def apply(_file_no: int, _offset: int) -> None:
            feed.revision = body.revision
            feed.logged_source_seq = feed.source_seq

        return self._commit([Operation([cursor], apply, sync=sync)], [])

    def _note_logged(self, feed: Feed) -> None:
        feed.hosted.ring.unlogged_seq = U64_MAX
        self.unlogged_bytes -= feed.unlogged_bytes
        feed.unlogged_bytes = 0
        feed.marks.clear()
        self._unlogged.pop(feed.topic.id, None)

    def _read_copies(self, entries: array[int], topic_id: int) -> list[Bytes]:
        """The frames of these copies as Appends, neighbours together."""
        buffers: list[Bytes] = []
        offset_lens, words = entries[2::4], entries[3::4]
        at, count = 0, len(words)
        while at < count:
            start = end = offset_lens[at] & 0xFFFF_FFFF
            rows = array("Q")
            first_seq = entries[4 * at]
            file_no = words[at] & 0xFFFF_FFFF
            while at < count and words[at] & 0xFFFF_FFFF == file_no and offset_lens[at] & 0xFFFF_FFFF == end:
                rows.append(offset_lens[at] - start)
                end += offset_lens[at] >> 32
                at += 1
            path = layout.log_path(self._ram_directory, file_no)
            fd = self._fs.open(path, 0)
            try:
                buffer = bytearray(self._fs.pread(fd, end - start, start))
            finally:
                self._fs.close(fd)
            if len(buffer) != end - start:
                raise ValueError(f"{path} ends before byte {end}")
            as_appends(buffer, rows, topic_id, first_seq)
            buffers.append(buffer)
        return buffers


def _in_ram(topic: Topic) -> bool:
    return topic.config.durability == "ephemeral"


def _leading_lost(locations: Locations) -> int:
    lost = 0
    for word in locations.file_flags:
        if not word >> 32 & LOCATION_LOST:
            break
        lost += 1
    return lost


def _within_bytes(locations: Locations) -> Locations:
    """Up to the first lost record, and to PAGE_BYTES: at least one."""
    size_bytes = 0
    for at, (offset_len, word) in enumerate(zip(locations.offset_len, locations.file_flags, strict=True)):
        size_bytes += offset_len >> 32
        if word >> 32 & LOCATION_LOST or (at and size_bytes > PAGE_BYTES):
            return Locations(locations.offset_len[:at], locations.file_flags[:at], locations.segment)
    return locations
