"""Sealed segments with many deleted records are rewritten without them: same seqs, same frames, a new version of files.

`rewrite` writes the new version. `ColdFetch` gets the live frames of a cold segment for it: the helper thread that
alone talks to the cold directory fetches them, one segment at a time, while this process goes on with other things. The
bytes come into a file that loses its name once they are there: nobody can take it for a segment. A kill leaves at most
one file, under a name that is never looked at (`.tmp`) and is used again. `Rewriting` decides which segment is next, a
bounded number of bytes a second: all of this can wait.
"""

from __future__ import annotations

import heapq
import os
from array import array
from collections import deque
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from topics.compactor.checkpoints import Refused, tell
from topics.compactor.follower import Follower
from topics.core.clock import Clock, doubled_ms
from topics.core.location import LOCATION_DELETED
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.core.topic import Topic
from topics.log import get_logger
from topics.shm.topic_messages import TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import FileSystem, write_all
from topics.storage.frame import Bytes
from topics.storage.kill_points import reached
from topics.storage.postings import CorruptPostings, Postings, write_postings
from topics.storage.segment import ENTRY_LEN, CommittedFile, Content, CorruptSegment, check_frames, read_columns
from topics.storage.segment_store import SegmentStore

_ENTRY_U32 = ENTRY_LEN // 4
_COPY_MAX_BYTES = 4 * 2**20


class Dead(msgspec.Struct, frozen=True):
    """The deleted bytes of a segment, and all of them."""

    dead_bytes: int
    data_bytes: int

    def exceeds(self, ratio: float) -> bool:
        """True if more than `ratio` of all bytes are deleted."""
        return self.dead_bytes > ratio * self.data_bytes


def measure(directory: str, info: SegmentInfo) -> Dead:
    """Measures a segment by its index alone. Raises OSError, CorruptSegment."""
    halves = _columns(directory, info)
    lengths, flags = halves[1::_ENTRY_U32], halves[4::_ENTRY_U32]
    if not any(flag & LOCATION_DELETED for flag in set(flags)):
        return Dead(0, info.data_bytes)
    dead = sum([length for length, flag in zip(lengths, flags, strict=True) if flag & LOCATION_DELETED])
    return Dead(dead, info.data_bytes)


def live_pieces(directory: str, info: SegmentInfo) -> list[tuple[int, int]]:
    """Returns (start, end) in `.data` of everything that a new version will hold, ascending, neighbours as one. Raises
    OSError, CorruptSegment.
    """
    halves = _columns(directory, info)
    deleted = [bool(flag & LOCATION_DELETED) for flag in halves[4::_ENTRY_U32]]
    return _live_pieces(halves[0::_ENTRY_U32], halves[1::_ENTRY_U32], deleted)


def rewrite(fs: FileSystem, directory: str, info: SegmentInfo, old: Content | None = None) -> SegmentInfo:
    """Writes the new version, here and onto the disk; the old one stays as it was.

    `old` is its `.data` when that is not here, with all that `live_pieces` names at least. Raises OSError,
    CorruptSegment, CorruptPostings: then nothing of a new version is left here.
    """
    # First: without the postings all copying is for nothing.
    postings = list(Postings.load(directory, info.first_seq, info.version).items())
    halves = _columns(directory, info)
    if old is None:
        old = CommittedFile(layout.segment_data_path(directory, info.first_seq, info.version), info.data_bytes)
    offsets, lengths, flags = halves[0::_ENTRY_U32], halves[1::_ENTRY_U32], halves[4::_ENTRY_U32]
    deleted = [bool(flag & LOCATION_DELETED) for flag in flags]
    pieces = _live_pieces(offsets, lengths, deleted)
    new_lengths = array("I", [0 if dead else length for dead, length in zip(deleted, lengths, strict=True)])
    starts = array("I", accumulate(new_lengths, initial=0))
    data_bytes = starts.pop()
    # Without a frame the offset of a deleted record is 0, that of a lost one its reason.
    halves[0::_ENTRY_U32] = array(
        "I",
        [
            start if length else 0 if dead else offset
            for start, length, dead, offset in zip(starts, new_lengths, deleted, offsets, strict=True)
        ],
    )
    halves[1::_ENTRY_U32] = new_lengths
    halves[4::_ENTRY_U32] = array(
        "I", [LOCATION_DELETED if dead else flag for dead, flag in zip(deleted, flags, strict=True)]
    )
    tagged = [(seq, tag) for tag, seqs in postings for seq in seqs if not deleted[seq - info.first_seq]]
    tagged.sort()
    version = info.version + 1
    try:
        _write_pair(fs, directory, info.first_seq, version, old, pieces, halves)
        write_postings(fs, directory, info.first_seq, info.records, tagged, version)
        fs.fsync_dir(directory)
    except Exception:
        # On a full disk others need the room.
        for path_of in (layout.segment_data_path, layout.segment_idx_path, layout.segment_tags_path):
            with suppress(OSError):
                fs.unlink(path_of(directory, info.first_seq, version))
        raise
    reached("rewrite.synced")
    return msgspec.structs.replace(info, data_bytes=data_bytes, version=version, flags=SEALED)


def _write_pair(
    fs: FileSystem,
    directory: str,
    first_seq: int,
    version: int,
    old: Content,
    pieces: list[tuple[int, int]],
    idx: array[int],
) -> None:
    """Writes `.data` and `.idx` of the new version and syncs them, but not their names."""
    data_path = layout.segment_data_path(directory, first_seq, version)
    idx_path = layout.segment_idx_path(directory, first_seq, version)
    flags_new = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    data_fd = fs.open(data_path, flags_new)
    try:
        idx_fd = fs.open(idx_path, flags_new)
        try:
            _copy(fs, old, data_fd, pieces)
            write_all(fs, idx_fd, idx.tobytes(), 0)
            reached("rewrite.copied")
            fs.fdatasync(data_fd)
            fs.fdatasync(idx_fd)
        finally:
            fs.close(idx_fd)
    finally:
        fs.close(data_fd)


def _columns(directory: str, info: SegmentInfo) -> array[int]:
    """Reads the whole index as u32."""
    idx = CommittedFile(layout.segment_idx_path(directory, info.first_seq, info.version), info.records * ENTRY_LEN)
    halves = array("I")
    halves.frombytes(idx[:])
    return halves


def _live_pieces(offsets: array[int], lengths: array[int], deleted: list[bool]) -> list[tuple[int, int]]:
    """Returns (start, end) of the frames that stay, neighbours as one: frames lie back to back."""
    pieces: list[tuple[int, int]] = []
    start = end = 0
    for offset, length, dead in zip(offsets, lengths, deleted, strict=True):
        if not length or dead:
            continue
        if offset == end and end > start:
            end += length
            continue
        if end > start:
            pieces.append((start, end))
        start, end = offset, offset + length
    if end > start:
        pieces.append((start, end))
    return pieces


def _copy(fs: FileSystem, old: Content, fd: int, pieces: list[tuple[int, int]]) -> None:
    offset = 0
    gathered: list[Bytes] = []
    gathered_bytes = 0
    for start, end in pieces:
        for at in range(start, end, _COPY_MAX_BYTES):
            piece = old[at : min(end, at + _COPY_MAX_BYTES)]
            gathered.append(piece)
            gathered_bytes += len(piece)
            if gathered_bytes >= _COPY_MAX_BYTES:
                write_all(fs, fd, b"".join(gathered), offset)
                offset += gathered_bytes
                gathered, gathered_bytes = [], 0
    if gathered:
        write_all(fs, fd, b"".join(gathered), offset)


PIECE_BYTES: Final = 4 * 2**20

Data = Content


class ColdFetch:
    """Fetches the live frames of one cold segment at a time. `helper` has one thread, the only user of `store`."""

    def __init__(self, fs: FileSystem, data_dir: str, store: SegmentStore, helper: Executor) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._store = store
        self._helper = helper
        self._tmp_path = os.path.join(layout.topics_dir(data_dir), f"fetched{layout.TMP_SUFFIX}")
        self._future: Future[Data] | None = None
        helper.submit(self._remove_tmp)

    @property
    def busy(self) -> bool:
        """True if a fetch was begun and not taken."""
        return self._future is not None

    def begin(self, topic_id: int, info: SegmentInfo) -> None:
        """Begins to fetch the live frames of this segment."""
        assert self._future is None
        self._future = self._helper.submit(self._fetch, topic_id, info)

    def take(self) -> Future[Data] | None:
        """Returns the fetch that was begun, once it is done.

        Its result is the segment's `.data`: every live frame checked, and zeros for the rest. It fails with OSError,
        and with CorruptSegment or EOFError when the segment is not as it was.
        """
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        return future

    # -- on the helper's thread

    def _fetch(self, topic_id: int, info: SegmentInfo) -> Data:
        directory = layout.topic_dir(self._data_dir, topic_id)
        path = layout.segment_data_path(directory, info.first_seq, info.version)
        name = f"{os.path.basename(directory)}/{os.path.basename(path)}"
        pieces = live_pieces(directory, info)
        try:
            fd = self._fs.open(self._tmp_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                self._fs.ftruncate(fd, info.data_bytes)
                for start, end in pieces:
                    for at in range(start, end, PIECE_BYTES):
                        content = self._store.read_range(name, at, min(PIECE_BYTES, end - at))
                        write_all(self._fs, fd, content, at)
            finally:
                self._fs.close(fd)
            data = CommittedFile(self._tmp_path, info.data_bytes)
        finally:
            self._remove_tmp()
        idx = CommittedFile(layout.segment_idx_path(directory, info.first_seq, info.version), info.records * ENTRY_LEN)
        columns = read_columns(idx, 0, info.records)
        check_frames(path, data, 0, info.first_seq, columns, columns.offsets)
        return data

    def _remove_tmp(self) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self._tmp_path)


BYTES_PER_S: Final = 32 * 2**20
"""The rate of bytes read or written by rewriting: a fraction of what a disk gives to clients."""

AGAIN_MS: Final = 10_000
"""The pause after a segment could not be rewritten, or a cold directory failed; doubled each time."""
AGAIN_MAX_MS: Final = 160_000

log = get_logger()


class _Candidate(NamedTuple):
    shard: int
    topic_id: int
    first_seq: int


class Rewriting:
    """Looks at segments in which records were deleted, one a step, and rewrites those that are worth it.

    Cold segments come back here for that: `fetch` gets their live frames, one at a time, and nobody waits for it. As
    the oldest of their topics they are relocated again. Without `fetch` they stay as they are.
    """

    def __init__(
        self, fs: FileSystem, data_dir: str, dead_ratio: float, clock: Clock, fetch: ColdFetch | None = None
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._dead_ratio = dead_ratio
        self._clock = clock
        self._fetch = fetch
        self._queue: deque[_Candidate] = deque()
        self._queued: set[_Candidate] = set()
        self._next_ms = 0
        self._failures: dict[_Candidate, int] = {}
        self._later: list[tuple[int, _Candidate]] = []
        """Heap of (due, candidate) that failed."""
        self._cold: dict[_Candidate, None] = {}
        """Cold segments that are worth it and are to be fetched first, in that order."""
        self._fetching: tuple[_Candidate, SegmentInfo] | None = None
        self._fetch_next_ms = 0
        self._fetches_failed = 0
        """The number of failures in a row."""

    def consider(self, follower: Follower, topic_id: int, first_seq: int) -> None:
        """Records of this segment were deleted."""
        candidate = _Candidate(follower.shard, topic_id, first_seq)
        if self._dead_ratio and candidate not in self._queued:
            self._queued.add(candidate)
            self._queue.append(candidate)

    def consider_all(self, follower: Follower) -> None:
        """Considers all sealed segments: a former life may have known of deletions in some."""
        for topic in follower.fold.topics.values():
            for info in follower.index_of(topic).segments:
                if info.flags & SEALED:
                    self.consider(follower, topic.id, info.first_seq)

    def due_in_ms(self) -> int | None:
        """Returns in how many ms there is something to look at again; None: nothing is, but for a fetched segment."""
        if self._queue:
            due_ms = self._next_ms
        elif self._later:
            due_ms = max(self._next_ms, self._later[0][0])
        else:
            return None
        return max(0, due_ms - self._clock.monotonic_ms())

    def step(self, followers: list[Follower]) -> bool:
        """Looks at one segment, if it is time to; True when one was rewritten. Raises OSError, Refused: the segment
        comes again, later each time.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms:
            return False
        while self._later and self._later[0][0] <= now_ms:
            self._queue.append(heapq.heappop(self._later)[1])
        return self._look_at_next(followers) or self._go_on_with_cold(followers)

    def _look_at_next(self, followers: list[Follower]) -> bool:
        if not self._queue:
            return False
        candidate = self._queue.popleft()
        self._queued.discard(candidate)
        follower = followers[candidate.shard]
        times = self._failures.pop(candidate, 0)
        found = self._current(follower, candidate)
        if found is None:
            return False
        topic, info = found
        try:
            dead = measure(layout.topic_dir(self._data_dir, topic.id), info)
            if not dead.exceeds(self._dead_ratio):
                self._pause(info.records * ENTRY_LEN)
                return False
            if info.flags & COLD:
                if self._fetch is not None:
                    self._cold[candidate] = None
                return False
            self._rewrite(follower, topic, info, None)
        except (CorruptSegment, CorruptPostings, FileNotFoundError) as error:
            log.error("a damaged segment is not rewritten", reason=str(error))
            return False
        except (OSError, Refused):
            self._pause(info.data_bytes)
            self._failures[candidate] = times + 1
            self._queued.add(candidate)
            due_ms = self._clock.monotonic_ms() + doubled_ms(AGAIN_MS, times, AGAIN_MAX_MS)
            heapq.heappush(self._later, (due_ms, candidate))
            raise
        return True

    def _go_on_with_cold(self, followers: list[Follower]) -> bool:
        if self._fetch is None:
            return False
        if self._fetching is not None:
            future = self._fetch.take()
            if future is None:
                return False
            fetched, self._fetching = self._fetching, None
            return self._fetched(followers, *fetched, future)
        if self._cold and self._clock.monotonic_ms() >= self._fetch_next_ms:
            candidate = next(iter(self._cold))
            del self._cold[candidate]
            found = self._current(followers[candidate.shard], candidate)
            if found is not None and found[1].flags & COLD:
                self._fetching = candidate, found[1]
                self._fetch.begin(candidate.topic_id, found[1])
        return False

    def _fetched(
        self, followers: list[Follower], candidate: _Candidate, info: SegmentInfo, future: Future[Data]
    ) -> bool:
        follower = followers[candidate.shard]
        reached("rewrite.fetched")
        found = self._current(follower, candidate)
        if found is None or found[1] != info:
            if future.exception() is None:
                self._fetches_failed = 0
            return False  # the fetch may have failed for that: files go with their segment
        try:
            data = future.result()
            try:
                self._rewrite(follower, found[0], info, data)
            except FileNotFoundError as error:  # here a missing file is the cold directory's failure, and may come back
                raise CorruptSegment(error.filename or "", 0, "the file is missing") from error
        except (CorruptSegment, CorruptPostings, EOFError) as error:
            self._fetches_failed = 0  # the cold directory gave what it has
            log.error("a damaged segment is not rewritten", reason=str(error))
            return False
        except (OSError, Refused):
            pause_ms = doubled_ms(AGAIN_MS, self._fetches_failed, AGAIN_MAX_MS)
            self._fetches_failed += 1
            self._fetch_next_ms = self._clock.monotonic_ms() + pause_ms
            self._cold[candidate] = None
            raise
        self._fetches_failed = 0
        return True

    def _current(self, follower: Follower, candidate: _Candidate) -> tuple[Topic, SegmentInfo] | None:
        """Returns the segment as it is now, if it is sealed."""
        topic = follower.fold.topics.get(candidate.topic_id)
        if topic is None:
            return None
        info = follower.index_of(topic).segments.at(candidate.first_seq)
        if info is None or info.first_seq != candidate.first_seq or not info.flags & SEALED:
            return None
        return topic, info

    def _rewrite(self, follower: Follower, topic: Topic, info: SegmentInfo, data: Data | None) -> None:
        rewritten = rewrite(self._fs, layout.topic_dir(self._data_dir, topic.id), info, data)
        self._pause(info.data_bytes + rewritten.data_bytes)
        tell(follower, [TopicCheckpoint(topic.id, follower.index_of(topic).segments.last_seq, [rewritten])])
        reached("rewrite.marked")
        follower.shrunk.add(topic.id)

    def _pause(self, size_bytes: int) -> None:
        self._next_ms = self._clock.monotonic_ms() + size_bytes * 1000 // BYTES_PER_S
