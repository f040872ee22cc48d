"""Restoring: a data directory from an archive, as the service was at one of its moments.

The restored directory is a service of its own: it has a new id and new epochs. Every topic has a gap behind its last
record (reason `restored`), because the service may have given out seqs after the moment. The directory is made under
another name and gets its own once it is whole and on the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from topics.archive.objects import (
    Archive,
    ArchiveDamagedError,
    Base,
    Generation,
    LogPart,
    LogStart,
    Piece,
    joined,
    piece_name,
    read_whole,
)
from topics.core.ceilings import RAM_STEP, TAIL_STEP
from topics.core.clock import Clock
from topics.core.control_bodies import HeadFrameBody, MarkFrameBody, decode_mark, encode_body
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_DELETED
from topics.core.segment_list import COLD
from topics.core.shard_state import FoldedTopic, ShardState
from topics.storage import layout, service_id
from topics.storage.filesystem import FileSystem, boot_id, make_dirs, opened, read_all, write_all
from topics.storage.frame import (
    CHECKSUM,
    CHECKSUM_LEN,
    HEADER_LEN,
    OVERHEAD_LEN,
    TYPE_AT,
    Bytes,
    FrameType,
    encode,
    scan,
)
from topics.storage.log_fold import OfflineFold
from topics.storage.logfile import WalIdentity, WalPosition, note_committed, read_first_start, write_current
from topics.storage.recovery import Recovery
from topics.storage.segment import DELETED, ENTRY_LEN, read_columns
from topics.storage.snapshot import ShardPart, decode_parts, encode_part, encode_parts, save_snapshot
from topics.storage.upgrade import write_mark

LOST_SEQS_MAX: Final = 1 << 17
"""The most seqs that a topic passes over, unless its log lets it give out more."""
LOST_SEQS_TOTAL: Final = 1 << 20
"""The same for all topics together, but for TAIL_STEP each: each lost seq takes an entry in the index."""
FETCHED_AHEAD: Final = 8
_PAD_KEY: Final = b"\xa3pad"


_Wanted = TypeVar("_Wanted")
_Got = TypeVar("_Got")


class WantedMoment(NamedTuple):
    """The moment to restore: the last one, the last one at or before `ts_ms`, or the first one with a record."""

    ts_ms: int | None = None
    topic: str | None = None
    seq: int = 0


class NotThereError(Exception):
    """The archive has no such moment; the message says what it has."""


class Plan(NamedTuple):
    """A moment, and the way to it: the base and the pieces `base.first_piece`..`moment.number`."""

    generation: Generation
    base: Base
    snapshot: bytes
    moment: Piece

    @property
    def pieces(self) -> range:
        return range(self.base.first_piece, self.moment.number + 1)


class Restored(NamedTuple):
    """The result of a restore: the time of the moment, topics, and bytes that were fetched."""

    taken_ms: int
    topics: int
    size_bytes: int


def plan(archive: Archive, wanted: WantedMoment) -> Plan:
    """Find the way to a moment. Raise NotThereError, ArchiveDamagedError, OSError."""
    numbers = archive.generations()
    if not numbers:
        raise NotThereError(f"{archive.store.place('')}: there is no archive here")
    earliest_ms = None
    for number in reversed(numbers):
        generation = archive.generation(number)
        for base_no in reversed(archive.bases(number)):
            base, snapshot = archive.base(number, base_no)
            earliest_ms = base.taken_ms
            if wanted.ts_ms is not None and base.taken_ms > wanted.ts_ms:
                continue
            if wanted.topic is not None and not _is_behind(archive, generation, base, snapshot, wanted):
                continue
            moment = _moment(archive, generation, base, wanted)
            if moment is not None:
                return Plan(generation, base, bytes(snapshot), moment)
            if wanted.topic is not None:
                raise NotThereError(f"{archive.store.place('')}: topic {wanted.topic!r} has no record {wanted.seq}")
    if earliest_ms is None:
        raise NotThereError(f"{archive.store.place('')}: the archive was begun, but its first base is not complete")
    what = f"record {wanted.seq} of topic {wanted.topic!r}" if wanted.topic else f"{wanted.ts_ms}"
    raise NotThereError(f"{archive.store.place('')}: {what} is before the first moment, which is of {earliest_ms}")


def _moment(archive: Archive, generation: Generation, base: Base, wanted: WantedMoment) -> Piece | None:
    """Return the last moment from this base on that is wanted, None without one."""
    last = archive.last_piece(generation.number, base.number)
    if wanted.topic is not None:
        found = _piece_with(archive, generation, base, wanted, last)
        numbers: Iterator[int] = iter(() if found is None else range(found, last + 1))
    elif wanted.ts_ms is not None:
        low, high = base.number, last + 1  # the piece `low` is early enough, `high` is not, or is none
        while high - low > 1:
            middle = (low + high) // 2
            if archive.piece(generation.number, middle)[0].taken_ms <= wanted.ts_ms:
                low = middle
            else:
                high = middle
        numbers = iter(range(low, base.number - 1, -1))
    else:
        numbers = iter(range(last, base.number - 1, -1))
    for number in numbers:
        piece, _ = archive.piece(generation.number, number)
        if piece.is_moment:
            return piece
    return None


def _is_behind(
    archive: Archive, generation: Generation, base: Base, snapshot: memoryview, wanted: WantedMoment
) -> bool:
    """True if the topic had not got the wanted record at the moment of the base, or if there is no earlier base."""
    if base.number == archive.bases(generation.number)[0]:
        return True
    topic = next((topic for topic in _topics_of(bytes(snapshot)) if topic.name == wanted.topic), None)
    if topic is not None and topic.head_seq >= wanted.seq:
        return False
    return _piece_with(archive, generation, base, wanted, base.number - 1) is None


def _piece_with(archive: Archive, generation: Generation, base: Base, wanted: WantedMoment, last: int) -> int | None:
    """Return the first piece, from the base's on, that has the wanted record, None if none up to `last` has."""
    _, snapshot = archive.base(generation.number, base.number)
    ids = {topic.id: topic.head_seq for topic in _topics_of(bytes(snapshot)) if topic.name == wanted.topic}
    if any(head_seq >= wanted.seq for head_seq in ids.values()):
        return base.number
    left: dict[int, bytes] = {}
    for number in range(base.first_piece, last + 1):
        piece, payload = archive.piece(generation.number, number)
        at = 0
        for part in piece.parts:
            content = left.get(part.shard, b"") if part.offset else b""
            content += payload[at : at + part.size_bytes]
            at += part.size_bytes
            found = scan(content, 0, len(content))
            left[part.shard] = content[found.end :]  # a frame may go on in the next piece
            for frame_at, _, type_, _, topic_id, seq, _, node_len, tag_len, data_len in found.frames:
                if type_ == FrameType.TOPIC_CREATE:
                    body_at = frame_at + HEADER_LEN + node_len + tag_len
                    if _created_name(content[body_at : body_at + data_len]) == wanted.topic:
                        ids[topic_id] = 0
                elif type_ == FrameType.APPEND and seq >= wanted.seq and topic_id in ids:
                    return max(number, base.number)
    return None


def _created_name(body: bytes) -> str:
    name: str = msgspec.msgpack.decode(body)["name"]
    return name


def _topics_of(snapshot: bytes) -> list[FoldedTopic]:
    return [topic for part in (decode_parts(snapshot) if snapshot else ()) for topic in part.decoded().topics]


def _ahead(fetch: Callable[[_Wanted], _Got], wanted: Iterable[_Wanted]) -> Iterator[tuple[_Wanted, _Got]]:
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


class Restore:
    """One restore. Owns the directory that it makes, `<data dir>.restoring`, until that gets its name."""

    def __init__(
        self, archive: Archive, plan: Plan, fs: FileSystem, data_dir: str, told: Callable[[int, int], None]
    ) -> None:
        """`told` hears how many objects of how many were fetched."""
        self._archive = archive
        self._plan = plan
        self._fs = fs
        self._data_dir = os.path.abspath(data_dir)
        self._making = f"{self._data_dir}.restoring"
        self._told = told
        self._objects = self._bytes = 0

    def run(self, clock: Clock) -> Restored:
        """Make the directory. Raise ArchiveDamagedError, OSError (FileExistsError if there is something in it)."""
        if os.path.isdir(self._data_dir) and os.listdir(self._data_dir):
            raise FileExistsError(errno.EEXIST, "is not empty: name a directory that does not exist", self._data_dir)
        shutil.rmtree(self._making, ignore_errors=True)  # of a restore that was killed
        try:
            topics = self._make(clock.now_ms())
            if os.path.isdir(self._data_dir):
                os.rmdir(self._data_dir)
            self._fs.rename(self._making, self._data_dir)
        except BaseException:
            shutil.rmtree(self._making, ignore_errors=True)
            raise
        self._fs.fsync_dir(os.path.dirname(self._data_dir))
        return Restored(self._plan.moment.taken_ms, topics, self._bytes)

    def _make(self, now_ms: int) -> int:
        make_dirs(self._fs, self._making)
        self._fetch_segments()
        self._fetch_pieces()
        parts = self._snapshot()
        states = [self._log(shard, parts.get(log_id)) for shard, log_id in enumerate(self._plan.generation.log_ids)]
        topics = [topic for state, _ in states for topic in state.topics]
        for shard, (state, end) in enumerate(states):
            self._pass_over(shard, state.topics, end, len(topics), now_ms)
        write_mark(self._fs, self._making)
        service_id.make_restored(self._fs, self._making, now_ms)
        self._fs.sync_all(self._making)
        return len(topics)

    # -- objects

    def _fetch_segments(self) -> None:
        archive, idx = self._archive, b""
        for ref, content in _ahead(lambda ref: read_whole(archive.store, ref.name), self._plan.base.files):
            archive.check_file(ref, content)
            if ref.path.endswith(".idx"):
                idx = content
            self._write(ref.path, _marked(content, idx) if ref.path.endswith(".data") else content)
            self._fetched(len(content))

    def _fetch_pieces(self) -> None:
        """Lay the logs out again, and the files of transactions."""
        plan, wanted = self._plan, {(file.piece, file.path): file for file in self._plan.moment.txn}
        ends = {start.shard: start.position for start in plan.base.logs}
        for start in plan.base.logs:
            self._begin_log(start)
        for number, (piece, payload) in _ahead(lambda no: self._archive.piece(plan.generation.number, no), plan.pieces):
            at = 0
            for part in piece.parts:
                content = payload[at : at + part.size_bytes]
                at += part.size_bytes
                ends[part.shard] = self._lay_out(number, part, content, ends[part.shard])
            for file in piece.txn:
                if (number, file.path) in wanted:
                    self._write(file.path, payload[file.offset : file.offset + file.size_bytes])
            self._fetched(at)
        for end in plan.moment.ends:
            if ends[end.shard] != end.position:
                raise ArchiveDamagedError(
                    f"{self._archive.store.place('')}: pieces {plan.pieces.start} to {plan.pieces.stop - 1} have log"
                    f" {end.shard} up to {ends[end.shard]}, it should go to {end.position}"
                )

    def _begin_log(self, start: LogStart) -> None:
        """Lay out the beginning of a log's first file. One frame that says nothing fills the place of those that the
        snapshot covers.
        """
        file_no, offset = start.position.file_no, start.position.offset
        start_len = len(start.file_start)
        content = start.file_start
        if offset > start_len:
            room = bytes(offset - start_len - OVERHEAD_LEN)
            content += encode(FrameType.SYNC_MARK, 0, file_no, start_len, 0, b"", b"", room)
        self._write(os.path.relpath(layout.log_path(self._group(start.shard), file_no), self._making), content)

    def _lay_out(self, number: int, part: LogPart, content: memoryview, end: WalPosition) -> WalPosition:
        """Write the next bytes of a log; return where it ends now."""
        behind = joined(end, part)
        if behind is None:
            raise ArchiveDamagedError(
                f"{self._archive.store.place(piece_name(self._plan.generation.number, number))}: log {part.shard} goes"
                f" on at {part.offset} of file {part.file_no}, the pieces before end at {end}"
            )
        known = end.offset - part.offset if part.file_no == end.file_no else 0 if behind > end else len(content)
        path = layout.log_path(self._group(part.shard), part.file_no)
        if known < len(content):
            with opened(self._fs, path, os.O_RDWR | os.O_CREAT) as fd:
                write_all(self._fs, fd, content[known:], part.offset + known)
        return behind

    def _write(self, path: str, content: Bytes) -> None:
        path = os.path.join(self._making, path)
        make_dirs(self._fs, os.path.dirname(path))
        with opened(self._fs, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(self._fs, fd, content, 0)

    def _fetched(self, size_bytes: int) -> None:
        self._objects += 1
        self._bytes += size_bytes
        self._told(self._objects, len(self._plan.base.files) + len(self._plan.pieces))

    # -- the directory

    def _snapshot(self) -> dict[int, ShardPart]:
        """Write the snapshot without the cold tier: all data are here. Return its parts by log id."""
        if not self._plan.snapshot:
            return {}
        parts = []
        for part in decode_parts(self._plan.snapshot):
            state = part.decoded()
            for topic in state.topics:
                topic.segments = [
                    msgspec.structs.replace(info, flags=info.flags & ~COLD)
                    for info in topic.segments
                    if info.last_seq >= topic.floors.earliest_seq
                ]
            parts.append(encode_part(part.shard, part.shards, part.log_id, part.position, state))
        save_snapshot(self._fs, self._making, encode_parts(parts))
        return {part.log_id: part for part in parts}

    def _log(self, shard: int, part: ShardPart | None) -> tuple[ShardState, WalPosition]:
        """Make a log one that a start can read. Return what it says, and its end."""
        directory = self._group(shard)
        numbers = layout.list_log_files(self._fs, directory)
        for number in numbers:
            first = part.position.offset if part is not None and part.position.file_no == number else 0
            _forget_segments(self._fs, layout.log_path(directory, number), first)
        write_current(self._fs, directory, numbers[-1])
        first_start = read_first_start(self._fs, directory)
        assert first_start is not None
        fold = OfflineFold(part)
        start = None if part is None else part.position
        identity = WalIdentity(shard, first_start.shards, boot_id())
        recovery = Recovery(self._fs, directory, identity, start=start)
        for batch in recovery:
            fold.add(batch)
        assert recovery.end is not None
        return fold.state(), WalPosition(recovery.end.file_no, recovery.end.offset)

    def _pass_over(self, shard: int, topics: list[FoldedTopic], end: WalPosition, all_topics: int, now_ms: int) -> None:
        """Have the log say which seqs were lost: those behind each head that the service may have given out."""
        lost_seqs = max(TAIL_STEP, min(LOST_SEQS_MAX, LOST_SEQS_TOTAL // all_topics)) if all_topics else 0
        frames = b"".join([_lost_tail_frame(topic, lost_seqs, now_ms) for topic in topics])
        directory = self._group(shard)
        with opened(self._fs, layout.log_path(directory, end.file_no), os.O_RDWR) as fd:
            write_all(self._fs, fd, frames, end.offset)
        if self._plan.moment.has_end:
            note_committed(self._fs, directory, WalPosition(end.file_no, end.offset + len(frames)))

    def _group(self, shard: int) -> str:
        return layout.group_dir(self._making, shard, self._plan.generation.shards)


def _lost_tail_frame(topic: FoldedTopic, lost_seqs: int, now_ms: int) -> bytes:
    if topic.config.durability == "ephemeral":
        # Its records were in RAM, in no archive: a start takes all up to here for lost.
        body = HeadFrameBody(False)
        seq = max(topic.head_seq, topic.ephemeral_head_seq or 0) + max(RAM_STEP, lost_seqs)
    else:
        body = HeadFrameBody(True, EvictReason.RESTORED)
        seq = max(topic.head_seq + lost_seqs, topic.head_ceiling)
    return encode(FrameType.HEAD_WATERMARK, 0, topic.id, seq, now_ms, b"", b"", encode_body(body))


def _marked(data: bytes, idx: bytes) -> bytes:
    """Return the data of a segment with the deletions that its index has: data are shipped once, an index with each
    base.
    """
    _, offsets, lengths, flags = read_columns(idx, 0, len(idx) // ENTRY_LEN)
    ends = [
        offset + length
        for offset, length, flag in zip(offsets, lengths, flags, strict=True)
        if flag & LOCATION_DELETED and length
    ]
    if not ends:
        return data
    marked = bytearray(data)
    for end in ends:
        marked[end - 1] = DELETED
    return bytes(marked)


def _forget_segments(fs: FileSystem, path: str, start: int) -> None:
    """Empty the lists of segments in the CHECKPOINT_MARKs of a log file from `start` on, in place. The segments are
    those of the snapshot: what later ones hold is in the log.
    """
    content = bytearray(read_all(fs, path))
    found = scan(content, start, len(content))
    with opened(fs, path, os.O_RDWR) as fd:
        for frame_at, total_len, type_, *_ in found.frames:
            if type_ != FrameType.CHECKPOINT_MARK:
                continue
            body_at, checksum_at = frame_at + HEADER_LEN, frame_at + total_len - CHECKSUM_LEN
            content[body_at:checksum_at] = _without_segments(bytes(content[body_at:checksum_at]))
            checksum = xxh3_64_intdigest(content[frame_at + TYPE_AT : checksum_at])
            CHECKSUM.pack_into(content, checksum_at, checksum)
            write_all(fs, fd, content[body_at : frame_at + total_len], body_at)


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
