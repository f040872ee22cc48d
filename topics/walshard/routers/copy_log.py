"""How copies get into the logs: derived first, and as records of their own before anything else is.

Copies are *derived*: written to the RAM log, where readers find them as any record, and not to the durable one. The log
has a cursor (ROUTER_CURSOR), and whatever is behind it is made again from the source, the same bytes with the same
seqs. They become Appends of the durable log (`log_copies`) when something else is to be logged for their topic, when
they take too much memory, or at once when the source could not say them again: it is `ephemeral`, or does not yet hold
them for us (`followers.py`). An `ephemeral` dest has copies and cursor in the RAM log, as all its records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Final

from topics.core.config import U64_MAX
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_IN_RAM_LOG
from topics.log import get_logger
from topics.storage import layout
from topics.storage.copies import as_appends
from topics.storage.filesystem import FileSystem
from topics.storage.frame import Bytes
from topics.walshard.appends import CEILING_STEP
from topics.walshard.head_marks import ceiling_operation, head_operation
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation
from topics.walshard.routers.feed import Feed, Page

log = get_logger()

UNLOGGED_BYTES_MAX: Final = 16 * 1024 * 1024
"""What copies that are not in the log may take; beyond it the oldest get there."""
LOG_CURSOR_SEQS: Final = 16_384
"""So far may a cursor be ahead of the log when nothing was copied."""

Commit = Callable[[list[Operation], list[Operation]], bool]


class CopyLog:
    """One shard's. `commit(durable, ram)` gets a group into the logs, or returns False; `logged` is told of topics
    whose copies came into the durable log. What returns a bool returns False when it could not be written: the cursor
    and the dest are as before.
    """

    def __init__(
        self,
        fs: FileSystem,
        ram_directory: str,
        commit: Commit,
        logged: Callable[[Hosted], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._fs = fs
        self._ram_directory = ram_directory
        self._commit = commit
        self.logged = logged
        self._now_ms = now_ms
        self._unlogged: dict[int, Feed] = {}
        """By dest: feeds with copies that are not in the log, the oldest first."""
        self.unlogged_bytes = 0
        self.written = 0
        """Copies written in this life."""

    # -- new copies

    def write_derived(self, feed: Feed, page: Page) -> bool:
        """Copies that can be made again: to the RAM log alone."""
        hosted = feed.hosted
        first_seq = feed.topic.head_seq + 1

        def apply(file_no: int, offset: int) -> None:
            hosted.ring.unlogged_seq = min(hosted.ring.unlogged_seq, first_seq)
            feed.copied(page, file_no, offset, LOCATION_IN_RAM_LOG)
            self.written += len(page)
            feed.marks.append((feed.source_seq, feed.topic.head_seq))
            feed.unlogged_bytes += page.size_bytes
            self.unlogged_bytes += page.size_bytes
            self._unlogged.setdefault(feed.topic.id, feed)

        return self._commit([], [Operation(page.frames, apply)])

    def write_logged(self, feed: Feed, page: Page) -> bool:
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
            feed.copied(page, file_no, offset, LOCATION_IN_RAM_LOG if ephemeral else 0)
            self.written += len(page)
            feed.revision = body.revision
            if not ephemeral:
                feed.logged_source_seq = feed.source_seq

        operation = Operation([*page.frames, cursor], apply)
        if not ephemeral:
            if not self._commit([operation], []):
                return False
            self.logged(feed.hosted)
            return True
        durable = []
        if head_seq > topic.head_ceiling:
            ceiling = max(head_seq, topic.head_seq + CEILING_STEP)
            durable.append(ceiling_operation(feed.hosted, ceiling, page.entries[-3]))
        return self._commit(durable, [operation])

    def log_gap(self, feed: Feed, last_source_seq: int, count: int, reason: EvictReason) -> bool:
        """The source's records up to there are not copied: the next `count` seqs of the dest are nobody's. The cursor
        has passed them then, the dest's head is the caller's to move.
        """
        if not self.log_copies(feed):
            return False
        former_seq, feed.source_seq = feed.source_seq, last_source_seq
        last_seq = feed.topic.head_seq + count
        # No record in RAM tells of these seqs.
        ephemeral = feed.topic.config.durability == "ephemeral"
        heads = [head_operation(feed.hosted, last_seq, self._now_ms())] if ephemeral else []
        if heads and not self._commit(heads, []):
            feed.source_seq = former_seq
            return False
        if not self.log_cursor(feed, trimmed=count, trim_reason=reason, head_seq=last_seq):
            feed.source_seq = former_seq
            return False
        return True

    def log_given_up(self, feed: Feed, last_source_seq: int) -> bool:
        """The source's records up to there were deleted before they were copied: nothing stands for them. Logged with
        the copies before them, or who reads the log again would not know which of what is deleted now was copied.
        """
        if not self.log_copies(feed):
            return False
        former_seq, feed.source_seq = feed.source_seq, last_source_seq
        if not self.log_cursor(feed):
            feed.source_seq = former_seq
            return False
        return True

    def log_full(self, feed: Feed, full: bool) -> bool:
        """`feed.full` is that from now on."""
        feed.full = full
        if not (self.log_cursor(feed) if feed.unlogged_seq == U64_MAX else self.log_copies(feed)):
            feed.full = not full
            return False
        return True

    # -- copies and cursors that are only in RAM

    def log_copies(self, feed: Feed, *, sync: bool = False) -> bool:
        """Gets the copies that are not in the log there, with their cursor. `sync`: and onto the disk."""
        first_seq, topic, ring = feed.unlogged_seq, feed.topic, feed.hosted.ring
        if first_seq == U64_MAX:
            return True
        entries = ring.entries(first_seq, topic.head_seq)
        try:
            buffers = self._read_back(entries, topic.id)
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
            self.forget(feed)
            ring.drop_before(topic.earliest_seq)

        cursor = feed.cursor_frame(body, topic.head_seq, topic.last_write_ts)
        operation = Operation([*buffers, cursor], apply, sync=sync, more_frames=len(lengths) - len(buffers))
        if not self._commit([operation], []):
            return False
        feed.hosted.publish()
        self.logged(feed.hosted)
        return True

    def log_cursor(
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

    def prepare(self, feed: Feed) -> bool:
        """Something else will be logged for the dest: the log must be as far as the dest is."""
        if feed.topic.config.durability == "ephemeral":
            return feed.logged_source_seq == feed.source_seq or self.log_cursor(feed)
        return self.log_copies(feed)

    def settle(self, feed: Feed) -> bool:
        """The log says on the disk what was copied so far, so that the source need not keep it."""
        topic = feed.topic
        if topic.config.durability == "ephemeral":
            return self.prepare(feed)
        if feed.unlogged_seq != U64_MAX:
            return self.log_copies(feed, sync=True)
        is_settled = feed.logged_source_seq == feed.source_seq and topic.durable_seq >= topic.head_seq
        return is_settled or self.log_cursor(feed, sync=True)

    # -- bounds

    def passed_over(self, feed: Feed) -> None:
        """The cursor moved, and nothing was copied: the log hears of that now and then."""
        if (
            feed.topic.config.durability != "ephemeral"
            and feed.unlogged_seq == U64_MAX
            and feed.source_seq - feed.logged_source_seq >= LOG_CURSOR_SEQS
        ):
            self.log_cursor(feed)

    def keep_within_bounds(self) -> None:
        """Logs copies when all together take too much memory."""
        while self.unlogged_bytes > UNLOGGED_BYTES_MAX and self._unlogged:
            if not self.log_copies(next(iter(self._unlogged.values()))):
                return

    def sweep(self, feeds: Iterable[Feed]) -> None:
        """Now and then: no log is too far behind. Those of `ephemeral` dests would copy again what was lost since."""
        for feed in feeds:
            if feed.topic.config.durability == "ephemeral":
                self.prepare(feed)
            elif feed.unlogged_seq != U64_MAX and feed.source_head_seq - feed.logged_source_seq >= LOG_CURSOR_SEQS:
                self.log_copies(feed)

    def forget(self, feed: Feed) -> None:
        """Its copies are in the log, or it is over."""
        feed.hosted.ring.unlogged_seq = U64_MAX
        self.unlogged_bytes -= feed.unlogged_bytes
        feed.unlogged_bytes = 0
        feed.marks.clear()
        self._unlogged.pop(feed.topic.id, None)

    def unlogged_runs(self) -> list[tuple[Hosted, int, int]]:
        """(topic, first seq, last seq) of copies that are in the RAM log alone."""
        return [(feed.hosted, feed.unlogged_seq, feed.topic.head_seq) for feed in self._unlogged.values()]

    def _read_back(self, entries: array[int], topic_id: int) -> list[Bytes]:
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
