"""Rewriting makes a new version of a sealed segment without its many deleted records: same seqs, same live frames.

`rewrite` writes the new version. `ColdFetch` first fetches the live frames of a cold segment, one segment at a time, on
the helper thread that alone uses the cold directory. It puts them into a file that it unlinks once the file is
complete, so nobody can take it for a segment. A kill leaves at most one `.tmp` file, and the next fetch uses its name
again. `Rewriting` decides which segment is next and bounds the bytes per second, because all of this can wait.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from topics.compactor.checkpoints import Refused, mark
from topics.compactor.loan import Loan
from topics.compactor.shard_copy import ShardCopy
from topics.compactor.work_queue import RETRY_MAX_MS, RETRY_MS, WorkQueue
from topics.core.clock import Clock, doubled_ms
from topics.core.location import LOCATION_DELETED
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.core.topic import Topic
from topics.log import LASTING_EVERY_S, SparseLines
from topics.shm.topic_messages import TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import FileSystem, opened, write_all
from topics.storage.frame import Bytes
from topics.storage.kill_points import reached
from topics.storage.postings import CorruptPostings, Postings, write_postings
from topics.storage.segment import ENTRY_LEN, ENTRY_U32, CommittedFile, Content, CorruptSegment, check_whole
from topics.storage.segment_store import SegmentSource

PIECE_BYTES: Final = 4 * 2**20
BYTES_PER_S: Final = 32 * 2**20
"""The rate of bytes read or written by rewriting: a fraction of what a disk does for clients."""
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_TRUNC


def dead_bytes(directory: str, info: SegmentInfo) -> int:
    """Return the bytes of a segment's deleted records, by its index alone. Raise OSError, CorruptSegment."""
    _, _, lengths, flags = _columns(directory, info)
    if not any(flag & LOCATION_DELETED for flag in set(flags)):
        return 0
    return sum([length for length, flag in zip(lengths, flags, strict=True) if flag & LOCATION_DELETED])


def rewrite(fs: FileSystem, directory: str, info: SegmentInfo, old: Content | None = None) -> SegmentInfo:
    """Write the new version and sync it; the old one stays as it was.

    `old` is the `.data` of a cold segment, with at least all live frames. Raise OSError, CorruptSegment,
    CorruptPostings, leaving nothing of a new version.
    """
    # Read the postings first: without them a new version is useless.
    postings = list(Postings.open(directory, info.first_seq, info.records, info.version, in_memory=True).items())
    words, offsets, lengths, flags = _columns(directory, info)
    if old is None:
        # Check the old version first: it will be removed, and then no restored index could bring back a record that
        # a wrong index calls deleted.
        old = CommittedFile(layout.segment_data_path(directory, info.first_seq, info.version), info.data_bytes)
        check_whole(_idx(directory, info), old, old.path, info.first_seq, marked=True)
    deleted = [bool(flag & LOCATION_DELETED) for flag in flags]
    pieces = _live_pieces(offsets, lengths, flags)
    new_lengths = array("I", [0 if dead else length for dead, length in zip(deleted, lengths, strict=True)])
    starts = array("I", accumulate(new_lengths, initial=0))
    data_bytes = starts.pop()
    # For a record without a frame, the offset is 0 if it was deleted, or else the reason of its loss.
    words[0::ENTRY_U32] = array(
        "I",
        [
            start if length else 0 if dead else offset
            for start, length, dead, offset in zip(starts, new_lengths, deleted, offsets, strict=True)
        ],
    )
    words[1::ENTRY_U32] = new_lengths
    words[4::ENTRY_U32] = array(
        "I", [LOCATION_DELETED if dead else flag for dead, flag in zip(deleted, flags, strict=True)]
    )
    tagged = [(seq, tag) for tag, seqs in postings for seq in seqs if not deleted[seq - info.first_seq]]
    tagged.sort()
    version = info.version + 1
    try:
        with (
            opened(fs, layout.segment_data_path(directory, info.first_seq, version), _NEW) as data_fd,
            opened(fs, layout.segment_idx_path(directory, info.first_seq, version), _NEW) as idx_fd,
        ):
            _copy(fs, old, data_fd, pieces)
            write_all(fs, idx_fd, words.tobytes(), 0)
            reached("rewrite.copied")
            fs.fdatasync(data_fd)
            fs.fdatasync(idx_fd)
        write_postings(fs, directory, info.first_seq, info.records, tagged, version)
        fs.fsync_dir(directory)
    except Exception:
        # On a full disk other files need the room.
        for path in layout.segment_paths(directory, info.first_seq, version).values():
            with suppress(OSError):
                fs.unlink(path)
        raise
    reached("rewrite.synced")
    return msgspec.structs.replace(info, data_bytes=data_bytes, version=version, flags=SEALED)


def _idx(directory: str, info: SegmentInfo) -> CommittedFile:
    return CommittedFile(layout.segment_idx_path(directory, info.first_seq, info.version), info.records * ENTRY_LEN)


def _columns(directory: str, info: SegmentInfo) -> tuple[array[int], array[int], array[int], array[int]]:
    """Read an index. Return it as u32 words, and its columns offsets, lengths and flags."""
    words = array("I", _idx(directory, info)[:])
    return words, words[0::ENTRY_U32], words[1::ENTRY_U32], words[4::ENTRY_U32]


def _live_pieces(offsets: array[int], lengths: array[int], flags: array[int]) -> list[tuple[int, int]]:
    """Return (start, end) of the frames that stay, neighbours as one."""
    pieces: list[tuple[int, int]] = []
    for offset, length, flag in zip(offsets, lengths, flags, strict=True):
        if not length or flag & LOCATION_DELETED:
            continue
        if pieces and pieces[-1][1] == offset:
            pieces[-1] = pieces[-1][0], offset + length
        else:
            pieces.append((offset, offset + length))
    return pieces


def _copy(fs: FileSystem, old: Content, fd: int, pieces: list[tuple[int, int]]) -> None:
    offset = 0
    gathered: list[Bytes] = []
    gathered_bytes = 0
    for start, end in pieces:
        for at in range(start, end, PIECE_BYTES):
            piece = old[at : min(end, at + PIECE_BYTES)]
            gathered.append(piece)
            gathered_bytes += len(piece)
            if gathered_bytes >= PIECE_BYTES:
                write_all(fs, fd, b"".join(gathered), offset)
                offset += gathered_bytes
                gathered, gathered_bytes = [], 0
    if gathered:
        write_all(fs, fd, b"".join(gathered), offset)


@dataclass(eq=False)
class ColdFetch:
    """Fetches the live frames of one cold segment at a time. The one thread of `helper` alone uses the cold tier; it
    calls `wake` when it has fetched a segment.
    """

    _fs: FileSystem
    _data_dir: str
    _source: SegmentSource
    _helper: Executor
    _wake: Callable[[], None]
    _future: Future[Content] | None = None

    def __post_init__(self) -> None:
        self._tmp_path = os.path.join(layout.topics_dir(self._data_dir), f"fetched{layout.TMP_SUFFIX}")
        self._helper.submit(self._remove_tmp)

    def begin(self, topic_id: int, info: SegmentInfo) -> None:
        """Begin to fetch the live frames of this segment."""
        assert self._future is None
        self._future = self._helper.submit(self._fetch, topic_id, info)
        self._future.add_done_callback(lambda _: self._wake())

    def take(self) -> Future[Content] | None:
        """Return the fetch that was begun, once it is done.

        Its result is the segment's `.data`, with every live frame (checked) and zeros elsewhere. The future fails with
        OSError, or with CorruptSegment or EOFError if the segment is damaged.
        """
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        return future

    # -- on the helper's thread

    def _fetch(self, topic_id: int, info: SegmentInfo) -> Content:
        directory = layout.topic_dir(self._data_dir, topic_id)
        name = layout.object_name(*info.key_in(topic_id))
        _, offsets, lengths, flags = _columns(directory, info)
        try:
            with opened(self._fs, self._tmp_path, _NEW) as fd:
                self._fs.ftruncate(fd, info.data_bytes)
                for start, end in _live_pieces(offsets, lengths, flags):
                    for at in range(start, end, PIECE_BYTES):
                        content = self._source.read_range(name, at, min(PIECE_BYTES, end - at))
                        write_all(self._fs, fd, content, at)
            data = CommittedFile(self._tmp_path, info.data_bytes)
        finally:
            self._remove_tmp()
        check_whole(_idx(directory, info), data, self._source.place(name), info.first_seq)
        return data

    def _remove_tmp(self) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self._tmp_path)


class _Candidate(NamedTuple):
    """A segment in which records were deleted."""

    shard: int
    topic_id: int
    first_seq: int


@dataclass(eq=False)
class Rewriting:
    """Measures segments in which records were deleted, one in each step, and rewrites those above `dead_ratio`.

    A cold segment comes back into the data directory for that, and is relocated again later: `fetch` gets its live
    frames in the background, one segment at a time. Without `fetch` cold segments stay as they are. Segments of a
    `loan` come home even if no record was deleted in them.
    """

    _fs: FileSystem
    _data_dir: str
    _dead_ratio: float
    _clock: Clock
    _fetch: ColdFetch | None
    loan: Loan | None
    _queue: WorkQueue[_Candidate] = field(default_factory=WorkQueue)
    _next_ms: int = 0
    _cold: dict[_Candidate, None] = field(default_factory=dict)
    """Cold segments that are to be fetched and rewritten, in this order."""
    _fetching: tuple[_Candidate, SegmentInfo] | None = None
    _fetch_next_ms: int = 0
    _fetches_failed: int = 0
    """The number of failed fetches in a row."""

    def __post_init__(self) -> None:
        self._lines = SparseLines(LASTING_EVERY_S, lambda: self._clock.monotonic_ms() / 1000)

    def consider(self, shard_copy: ShardCopy, topic_id: int, first_seq: int) -> None:
        """Queue a segment in which records were deleted."""
        if self._dead_ratio or self.loan is not None:
            self._queue.add(_Candidate(shard_copy.shard, topic_id, first_seq))

    def consider_all(self, shard_copy: ShardCopy) -> None:
        """Queue all sealed segments: a former life may have queued some before it ended."""
        for topic in shard_copy.fold.topics.values():
            for info in shard_copy.index_of(topic).segments:
                if info.flags & SEALED:
                    self.consider(shard_copy, topic.id, info.first_seq)

    def due_in_ms(self) -> int | None:
        """Return the ms until the next segment can be measured or fetched; None without one. A fetch that is under way
        does not count.
        """
        due_ms = self._queue.due_ms()
        if due_ms is None and self._cold and self._fetching is None:
            due_ms = self._fetch_next_ms
        return None if due_ms is None else max(0, max(due_ms, self._next_ms) - self._clock.monotonic_ms())

    def step(self, shard_copies: list[ShardCopy]) -> bool:
        """Do the next step, if it is time to. True when a segment was rewritten.

        Raise OSError, Refused: the segment comes again, later each time.
        """
        if self.loan is not None:
            self.loan.step()
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms:
            return False
        candidate = self._queue.take(now_ms)
        if candidate is not None:
            try:
                is_rewritten = self._examine(shard_copies[candidate.shard], candidate)
            except (OSError, Refused):
                self._queue.failed(candidate, self._clock.monotonic_ms())
                raise
            self._queue.drop(candidate)
            if is_rewritten:
                return True
        return self._step_cold(shard_copies)

    def _examine(self, shard_copy: ShardCopy, candidate: _Candidate) -> bool:
        """Measure a segment, and rewrite it or note it for a fetch. True when it was rewritten."""
        found = self._current(shard_copy, candidate)
        if found is None:
            return False
        topic, info = found
        if self.loan is not None and self.loan.has(topic.id, info):
            self._cold[candidate] = None
            return False
        if not self._dead_ratio:
            return False
        try:
            if dead_bytes(layout.topic_dir(self._data_dir, topic.id), info) <= self._dead_ratio * info.data_bytes:
                self._pause(info.records * ENTRY_LEN)
                return False
            if info.flags & COLD:
                if self._fetch is not None:
                    self._cold[candidate] = None
                return False
            self._rewrite(shard_copy, topic, info, None)
        except (CorruptSegment, CorruptPostings, FileNotFoundError) as error:
            self._lines.error("a damaged segment is not rewritten", topic=topic.name, reason=str(error))
            self._pause(info.data_bytes)
            return False
        except (OSError, Refused):
            self._pause(info.data_bytes)
            raise
        return True

    def _step_cold(self, shard_copies: list[ShardCopy]) -> bool:
        """Rewrite the fetched segment, or begin the next fetch. True when one was rewritten."""
        if self._fetch is None:
            return False
        if self._fetching is not None:
            future = self._fetch.take()
            if future is None:
                return False
            fetching, self._fetching = self._fetching, None
            return self._rewrite_fetched(shard_copies, *fetching, future)
        if self._cold and self._clock.monotonic_ms() >= self._fetch_next_ms:
            candidate = next(iter(self._cold))
            del self._cold[candidate]
            found = self._current(shard_copies[candidate.shard], candidate)
            if found is not None and found[1].flags & COLD:
                self._fetching = candidate, found[1]
                self._fetch.begin(candidate.topic_id, found[1])
        return False

    def _rewrite_fetched(
        self, shard_copies: list[ShardCopy], candidate: _Candidate, info: SegmentInfo, future: Future[Content]
    ) -> bool:
        shard_copy = shard_copies[candidate.shard]
        reached("rewrite.fetched")
        found = self._current(shard_copy, candidate)
        if found is None or found[1] != info:
            if future.exception() is None:
                self._fetches_failed = 0
            return False  # the segment was removed or replaced, perhaps while it was fetched
        try:
            data = future.result()
            try:
                self._rewrite(shard_copy, found[0], info, data)
            except FileNotFoundError as error:  # a hot file is missing for good; a missing cold file may come back
                raise CorruptSegment(error.filename or "", 0, "the file is missing") from error
            if self.loan is not None and self.loan.has(candidate.topic_id, info):
                self.loan.came_home(info)
        except (CorruptSegment, CorruptPostings, EOFError) as error:
            self._fetches_failed = 0  # the cold directory works
            self._lines.error("a damaged segment is not rewritten", topic=found[0].name, reason=str(error))
            return False
        except (OSError, Refused):
            pause_ms = doubled_ms(RETRY_MS, self._fetches_failed, RETRY_MAX_MS)
            self._fetches_failed += 1
            self._fetch_next_ms = self._clock.monotonic_ms() + pause_ms
            self._cold[candidate] = None
            raise
        self._fetches_failed = 0
        return True

    def _current(self, shard_copy: ShardCopy, candidate: _Candidate) -> tuple[Topic, SegmentInfo] | None:
        """Return the segment as it is now, if it is sealed."""
        topic = shard_copy.fold.topics.get(candidate.topic_id)
        if topic is None:
            return None
        info = shard_copy.index_of(topic).segments.at(candidate.first_seq)
        if info is None or info.first_seq != candidate.first_seq or not info.flags & SEALED:
            return None
        return topic, info

    def _rewrite(self, shard_copy: ShardCopy, topic: Topic, info: SegmentInfo, data: Content | None) -> None:
        rewritten = rewrite(self._fs, layout.topic_dir(self._data_dir, topic.id), info, data)
        self._pause(info.data_bytes + rewritten.data_bytes)
        mark(shard_copy, [TopicCheckpoint(topic.id, shard_copy.index_of(topic).segments.last_seq, [rewritten])])
        reached("rewrite.marked")
        shard_copy.shrunk.add(topic.id)

    def _pause(self, size_bytes: int) -> None:
        self._next_ms = self._clock.monotonic_ms() + size_bytes * 1000 // BYTES_PER_S
