"""A data directory that is made of an archive's objects: files of segments, a snapshot, and logs byte for byte.

Its logs differ from the originals in two things. One frame that says nothing stands for all that the snapshot covers.
The CHECKPOINT_MARKs behind it list no segments: the directory has the snapshot's segments, and its logs have the rest.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from topics.core.ceilings import RAM_STEP, TAIL_STEP
from topics.core.control_bodies import HeadFrameBody, MarkFrameBody, decode_mark, encode_body
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_DELETED
from topics.core.segment_list import COLD, SegmentInfo
from topics.core.shard_state import FoldedTopic, ShardState
from topics.storage import layout
from topics.storage.archive_objects import ArchiveDamagedError, LogStart, Piece, joined, new_bytes, split_payload
from topics.storage.filesystem import (
    FileSystem,
    boot_id,
    make_dirs,
    opened,
    read_all,
    read_up_to,
    replace_file,
    write_all,
)
from topics.storage.frame import CHECKSUM, CHECKSUM_LEN, HEADER_LEN, OVERHEAD_LEN, TYPE_AT, Bytes, FrameType, encode
from topics.storage.frame_columns import scan_columns
from topics.storage.log_fold import OfflineFold
from topics.storage.logfile import WalIdentity, WalPosition, note_committed, read_first_start, write_current
from topics.storage.recovery import Recovery
from topics.storage.segment import DELETED, ENTRY_FLAGS_AT, ENTRY_LEN, read_columns
from topics.storage.snapshot import decode_parts, encode_part, encode_parts, load_snapshot, save_snapshot
from topics.storage.upgrade import write_mark

LOST_SEQS_MAX: Final = 1 << 17
"""The most lost seqs that a topic passes over, unless its log allowed it to give out more."""
LOST_SEQS_TOTAL: Final = 1 << 20
"""The same for all topics together; each gets TAIL_STEP at least. Each lost seq takes an entry in the index."""
_PAD_KEY: Final = b"\xa3pad"
FETCHED_AHEAD: Final = 8
_Wanted = TypeVar("_Wanted")
_Got = TypeVar("_Got")


class MissingBytesError(ArchiveDamagedError):
    """A piece of the archive does not go on where the one before it ends."""


class DirectoryCopy:
    """Writes the files of one such directory. Owns them until a service uses it; `place` is the archive, for errors."""

    def __init__(self, fs: FileSystem, data_dir: str, shards: int, place: str) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._shards = shards
        self._place = place

    def log_directory(self, shard: int) -> str:
        return layout.group_dir(self._data_dir, shard, self._shards)

    # -- files

    def write(self, path: str, content: Bytes) -> None:
        """Write a file of a directory that nobody reads yet, an index before its data."""
        content = content if path.endswith(".idx") else self.merged(path, content)
        with opened(self._fs, self._full(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(self._fs, fd, content, 0)

    def replace(self, path: str, content: Bytes) -> None:
        """Write a file durably, an index before its data. A process that has the former file open keeps that one."""
        content = self.merged(path, content)
        replace_file(self._fs, self._full(path), content)

    def merged(self, path: str, content: Bytes) -> Bytes:
        """Return a file of an archive with the deletions that the index here has. Data are shipped once, so they lack
        later deletions. An index may be older than the state shown here, and shards mark each deletion only once.
        """
        stem, kind = os.path.splitext(os.path.join(self._data_dir, path))
        if kind == ".data":
            return _marked(content, read_all(self._fs, f"{stem}.idx"))
        if kind == ".idx" and self._fs.exists(f"{stem}.idx"):
            return _with_marks(content, read_all(self._fs, f"{stem}.idx"))
        return content

    def mark_deleted(self, path: str, idx: Bytes) -> None:
        """Write the deletions of an index into the data of its segment, durably."""
        with opened(self._fs, os.path.join(self._data_dir, path), os.O_RDWR) as fd:
            for end in _deleted_ends(idx):
                write_all(self._fs, fd, bytes((DELETED,)), end - 1)
            self._fs.fdatasync(fd)

    def _full(self, path: str) -> str:
        path = os.path.join(self._data_dir, path)
        make_dirs(self._fs, os.path.dirname(path))
        return path

    def save_snapshot(self, body: bytes, borrowed: Collection[str] = ()) -> None:
        """Write a snapshot. In it only segments whose data paths are `borrowed` are cold; all others are here."""
        parts = []
        for part in decode_parts(body):
            state = part.decoded()
            for topic in state.topics:
                directory = layout.topic_dir("", topic.id)
                topic.segments = [
                    _tiered(info, layout.segment_data_path(directory, info.first_seq, info.version) in borrowed)
                    for info in topic.segments
                    if info.last_seq >= topic.floors.earliest_seq
                ]
            parts.append(encode_part(part.shard, part.shards, part.log_id, part.position, state))
        save_snapshot(self._fs, self._data_dir, encode_parts(parts))

    def save_snapshot_again(self, borrowed: Collection[str]) -> None:
        """Write the newest snapshot once more, with these data borrowed."""
        snapshot = load_snapshot(self._fs, self._data_dir)
        if snapshot is not None:
            self.save_snapshot(snapshot.body, borrowed)

    # -- logs

    def begin_log(self, start: LogStart) -> None:
        """Lay out the beginning of a log's first file. One frame that says nothing fills the place of those that the
        snapshot covers.
        """
        file_no, offset = start.position.file_no, start.position.offset
        start_len = len(start.file_start)
        content = start.file_start
        if offset > start_len:
            room = bytes(offset - start_len - OVERHEAD_LEN)
            content += encode(FrameType.SYNC_MARK, 0, file_no, start_len, 0, b"", b"", room)
        self.write(os.path.relpath(layout.log_path(self.log_directory(start.shard), file_no), self._data_dir), content)

    def lay_out(self, piece: Piece, payload: memoryview, ends: list[WalPosition]) -> None:
        """Write the next bytes of the logs. `ends` has the end of each log, by shard, and is changed to the new one.
        Raise MissingBytesError if bytes are missing in between.
        """
        for part, content in split_payload(piece, payload):
            end = ends[part.shard]
            behind = joined(end, part)
            if behind is None:
                raise MissingBytesError(
                    f"{self._place}: in piece {piece.number}, log {part.shard} goes on at {part.offset} of file"
                    f" {part.file_no}; the pieces before end at {end}"
                )
            if lacked := new_bytes(end, part, content):
                path = layout.log_path(self.log_directory(part.shard), part.file_no)
                with opened(self._fs, path, os.O_RDWR | os.O_CREAT) as fd:
                    write_all(self._fs, fd, lacked, behind.offset - len(lacked))
            ends[part.shard] = behind
        for one in piece.ends:
            if ends[one.shard] < one.position:
                raise MissingBytesError(f"{self._place}: up to piece {piece.number}, log {one.shard} lacks its end")

    def read_log(self, shard: int, start: WalPosition, length: int) -> bytes:
        """Return `length` bytes of a log file from `start` on, fewer at its end, none if it is not there."""
        path = layout.log_path(self.log_directory(shard), start.file_no)
        with suppress(FileNotFoundError), opened(self._fs, path, os.O_RDONLY) as fd:
            return read_up_to(self._fs, fd, length, start.offset)
        return b""

    def has_frames(self, shard: int, start: WalPosition, frames: bytes) -> bool:
        """Return whether a log has these frames at `start`. Lists of segments in marks may be emptied already."""
        own, wanted = bytearray(self.read_log(shard, start, len(frames))), bytearray(frames)
        _empty_marks(own)
        _empty_marks(wanted)
        return own == wanted

    def forget_segments(self, shard: int, start: WalPosition, end: WalPosition) -> None:
        """Empty the lists of segments in the CHECKPOINT_MARKs of a log from `start` to `end`, both behind a frame."""
        for file_no in range(start.file_no, end.file_no + 1):
            first = start.offset if file_no == start.file_no else 0
            with opened(self._fs, layout.log_path(self.log_directory(shard), file_no), os.O_RDWR) as fd:
                last = end.offset if file_no == end.file_no else self._fs.size_bytes(fd)
                content = bytearray(read_up_to(self._fs, fd, last - first, first))
                for at, behind in _empty_marks(content):
                    write_all(self._fs, fd, content[at:behind], first + at)

    def sync_log(self, shard: int, start: WalPosition, end: WalPosition) -> None:
        """Bring the bytes of a log from `start` to `end` to the disk."""
        directory = self.log_directory(shard)
        for file_no in range(start.file_no, end.file_no + 1):
            with opened(self._fs, layout.log_path(directory, file_no), os.O_RDONLY) as fd:
                self._fs.fdatasync(fd)
        if start.file_no != end.file_no or not start.offset:
            self._fs.fsync_dir(directory)

    def cut_behind(self, shard: int, end: WalPosition) -> None:
        """Remove what a log has behind `end`."""
        directory = self.log_directory(shard)
        for file_no in layout.list_log_files(self._fs, directory):
            path = layout.log_path(directory, file_no)
            if file_no > end.file_no:
                self._fs.unlink(path)
            elif file_no == end.file_no:
                with opened(self._fs, path, os.O_RDWR) as fd:
                    self._fs.ftruncate(fd, end.offset)
        self._fs.fsync_dir(directory)

    def remove_logs_before(self, starts: Iterable[LogStart]) -> None:
        """Remove log files before these places."""
        for start in starts:
            directory = self.log_directory(start.shard)
            for file_no in layout.list_log_files(self._fs, directory):
                if file_no < start.position.file_no:
                    with suppress(FileNotFoundError):
                        self._fs.unlink(layout.log_path(directory, file_no))

    # -- the end of the copied history

    def end_history(self, has_end: bool, now_ms: int) -> int:
        """Prepare the logs for a service that goes on with them: add a gap behind the last record of each topic, for
        the seqs that the original may have given out later. Return the number of topics. May be repeated.
        """
        snapshot = load_snapshot(self._fs, self._data_dir)
        logs: list[tuple[ShardState, WalPosition]] = []
        for shard in range(self._shards):
            directory = self.log_directory(shard)
            numbers = layout.list_log_files(self._fs, directory)
            write_current(self._fs, directory, numbers[-1])
            first_start = read_first_start(self._fs, directory)
            assert first_start is not None
            part = None if snapshot is None else snapshot.part_of(first_start.log_id)
            fold = OfflineFold(part)
            identity = WalIdentity(shard, first_start.shards, boot_id())
            recovery = Recovery(self._fs, directory, identity, start=None if part is None else part.position)
            for batch in recovery:
                fold.add(batch)
            assert recovery.end is not None
            logs.append((fold.state(), WalPosition(recovery.end.file_no, recovery.end.offset)))
        topics = sum(len(state.topics) for state, _ in logs)
        for shard, (state, end) in enumerate(logs):
            self._pass_over(shard, state.topics, end, topics, has_end, now_ms)
        write_mark(self._fs, self._data_dir)
        return topics

    def _pass_over(
        self, shard: int, topics: list[FoldedTopic], end: WalPosition, all_topics: int, has_end: bool, now_ms: int
    ) -> None:
        """Append the loss of each topic to the log: the seqs behind its head that the service may have given out."""
        lost_seqs = max(TAIL_STEP, min(LOST_SEQS_MAX, LOST_SEQS_TOTAL // all_topics)) if all_topics else 0
        frames = b"".join([_lost_tail_frame(topic, lost_seqs, now_ms) for topic in topics])
        directory = self.log_directory(shard)
        with opened(self._fs, layout.log_path(directory, end.file_no), os.O_RDWR) as fd:
            write_all(self._fs, fd, frames, end.offset)
        if has_end:
            note_committed(self._fs, directory, WalPosition(end.file_no, end.offset + len(frames)))


def fetched_ahead(fetch: Callable[[_Wanted], _Got], wanted: Iterable[_Wanted]) -> Iterator[tuple[_Wanted, _Got]]:
    """Yield (wanted, fetched) in order, FETCHED_AHEAD at a time: most of the time of a bucket is waiting."""
    underway: deque[tuple[_Wanted, Future[_Got]]] = deque()
    with ThreadPoolExecutor(FETCHED_AHEAD, "fetch") as pool:
        try:
            for one in wanted:
                underway.append((one, pool.submit(fetch, one)))
                if len(underway) == FETCHED_AHEAD:
                    first, work = underway.popleft()
                    yield first, work.result()
            for first, work in underway:
                yield first, work.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tiered(info: SegmentInfo, is_cold: bool) -> SegmentInfo:
    return msgspec.structs.replace(info, flags=info.flags | COLD if is_cold else info.flags & ~COLD)


def _marked(data: Bytes, idx: bytes) -> Bytes:
    """Return the data of a segment with the deletions that an index has."""
    ends = _deleted_ends(idx)
    if not ends:
        return data
    content = bytearray(data)
    for end in ends:
        content[end - 1] = DELETED
    return content


def _with_marks(idx: Bytes, own: bytes) -> Bytes:
    """Return an index with its own deletions and those of `own`, another state of it."""
    content = bytearray(idx)
    for at in range(ENTRY_FLAGS_AT, min(len(idx), len(own)), ENTRY_LEN):
        content[at] |= own[at] & LOCATION_DELETED
    return content


def _deleted_ends(idx: Bytes) -> list[int]:
    _, offsets, lengths, flags = read_columns(idx, 0, len(idx) // ENTRY_LEN)
    return [
        offset + length
        for offset, length, flag in zip(offsets, lengths, flags, strict=True)
        if flag & LOCATION_DELETED and length
    ]


def _lost_tail_frame(topic: FoldedTopic, lost_seqs: int, now_ms: int) -> bytes:
    if topic.config.durability == "ephemeral":
        # Its records were in RAM, in no archive: a start counts all seqs up to this one as lost.
        body = HeadFrameBody(False)
        seq = max(topic.head_seq, topic.ephemeral_head_seq or 0) + max(RAM_STEP, lost_seqs)
    else:
        body = HeadFrameBody(True, EvictReason.RESTORED)
        seq = max(topic.head_seq + lost_seqs, topic.head_ceiling)
    return encode(FrameType.HEAD_WATERMARK, 0, topic.id, seq, now_ms, b"", b"", encode_body(body))


def _empty_marks(content: bytearray) -> list[tuple[int, int]]:
    """Empty the lists of segments in CHECKPOINT_MARKs; return where bytes may have changed."""
    changed = []
    frames = scan_columns(content, 0, len(content), len(content), trusts_records=True).frames
    at = -1
    while (at := frames.types.find(FrameType.CHECKPOINT_MARK, at + 1)) >= 0:
        frame_at, total_len, *_ = frames[at]
        body_at, checksum_at = frame_at + HEADER_LEN, frame_at + total_len - CHECKSUM_LEN
        content[body_at:checksum_at] = _without_segments(bytes(content[body_at:checksum_at]))
        CHECKSUM.pack_into(content, checksum_at, xxh3_64_intdigest(content[frame_at + TYPE_AT : checksum_at]))
        changed.append((body_at, frame_at + total_len))
    return changed


def _without_segments(body: bytes) -> bytes:
    """Return the body of a CHECKPOINT_MARK without segments, of the same length: a member that nobody reads fills it
    up.
    """
    mark = decode_mark(body)
    if not mark.segments:
        return body
    emptied = encode_body(MarkFrameBody([], mark.floors))
    assert emptied[0] == 0x82, "a map of two members"
    room = len(body) - len(emptied) - len(_PAD_KEY)
    pad = b"\xc6" + (room - 5).to_bytes(4, "big") if room >= 5 else b"\xc4" + (room - 2).to_bytes(1, "big")
    return b"\x83" + emptied[1:] + _PAD_KEY + pad + bytes(room - len(pad))
