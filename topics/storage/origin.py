"""The data directory that is being archived, read only: how far its logs go, and the files that a snapshot needs.

Meanwhile the service goes on writing, cutting and removing files. That is safe, because committed bytes of a log or a
segment never change, except for deletion marks. No newer snapshot needs a file that the service has removed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.segment_list import COLD, SEALED
from topics.storage import layout
from topics.storage.archive_objects import LogEnd, LogStart, Piece, PieceDraft, TxnFile, encode
from topics.storage.borrowed import open_cold
from topics.storage.filesystem import FileSystem, ReadOnlyFileSystem, boot_id, names_in, opened, read_all, read_up_to
from topics.storage.frame import CHECKSUM_LEN
from topics.storage.logfile import (
    FileStart,
    NotALogFile,
    WalIdentity,
    WalPosition,
    find_file_end,
    read_file_start,
    read_first_start,
)
from topics.storage.recovery import Recovery
from topics.storage.segment import ENTRY_LEN
from topics.storage.snapshot import Snapshot, load_snapshot
from topics.storage.txn_files import SINK_HEAD_LEN, is_sink_name, stage_of_name

TRIES_MAX: Final = 200
TAIL_BYTES: Final = 4 << 20
"""The most bytes of logs in one answer."""
TxnState = dict[str, tuple[TxnFile, bytes]]
"""Files of transactions at one moment, by path. The bytes of a stage that the caller knew are left out."""


class OriginGoneError(Exception):
    """Bytes of a log or a segment are gone: the service removed them, or the directory has another history. The caller
    must begin again.
    """


class LogPlace(NamedTuple):
    """One log: its directory and its end. Bytes before `end` never change."""

    shard: int
    log_id: int
    directory: str
    end: WalPosition


class RunningEnds:
    """The ends of a running service's logs: each is the end of a write. `moment_ends` is the method of its control
    page (`shm/control.py`).
    """

    has_end = True

    def __init__(self, moment_ends: Callable[[], list[int] | None]) -> None:
        self._moment_ends = moment_ends

    def read(self) -> list[WalPosition] | None:
        """Return the ends of the logs, by shard, as they all were at one time; None if that cannot be told now."""
        words = self._moment_ends()
        return None if words is None else list(map(WalPosition.of_word, words))


class RestingEnds:
    """The ends of the logs of a directory that no service uses; recovery finds them, like at a start. The caller holds
    the lock. Raise RefusedLog, UnknownSnapshotVersion, OSError. `has_end` is False if a log may lack its last writes.
    """

    def __init__(self, data_dir: str) -> None:
        fs = ReadOnlyFileSystem()
        self.has_end = True
        self._ends: list[WalPosition] = []
        snapshot = load_snapshot(fs, data_dir)
        for group in layout.discover_groups(fs, layout.wal_dir(data_dir)):
            first = read_first_start(fs, group.path)
            if first is None:
                continue
            part = None if snapshot is None else snapshot.part_of(first.log_id)
            identity = WalIdentity(group.shard, first.shards, boot_id())
            recovery = Recovery(fs, group.path, identity, start="lowest" if part is None else part.position)
            for _ in recovery:
                pass
            if recovery.end is not None:
                self.has_end &= recovery.has_end
                self._ends.append(WalPosition(recovery.end.file_no, recovery.end.offset))

    def read(self) -> list[WalPosition] | None:
        return self._ends


LogEnds = RunningEnds | RestingEnds


class Origin:
    """A data directory as an archive sees it. Owns no file. `cold_place` is the cold tier, None if it has none."""

    def __init__(self, fs: FileSystem, data_dir: str, ends: LogEnds, cold_place: str | None = None) -> None:
        self.fs = fs
        self.data_dir = data_dir
        self.ends = ends
        self._cold_place = cold_place
        self.told: dict[str, TxnFile] = {}
        """Files of transactions in the last answer to followers, by path."""

    def logs(self, ends: list[WalPosition]) -> list[LogPlace]:
        """Return the logs with these ends, by shard. Raise OriginGoneError while another shard count is being made."""
        groups = layout.discover_groups(self.fs, layout.wal_dir(self.data_dir))
        if [group.shard for group in groups] != list(range(len(ends))):
            raise OriginGoneError(f"{self.data_dir}: the logs are being made anew for another count of shards")
        found = []
        for group, end in zip(groups, ends, strict=True):
            try:
                start = read_first_start(self.fs, group.path)
            except (NotALogFile, FileNotFoundError) as error:
                raise OriginGoneError(f"{group.path}: {error}") from error
            if start is None:
                raise OriginGoneError(f"{group.path}: has no file")
            found.append(LogPlace(group.shard, start.log_id, group.path, end))
        return found

    def moment(self, known: Mapping[str, TxnFile] | None) -> tuple[list[LogPlace], TxnState] | None:
        """Return (logs, files of transactions by path) as they all were at one time; None if nobody can tell now. A
        stage never changes and may be large, so stages in `known` are not read. With `known` None no file is read.

        The file of a sink decides a batch, and the logs publish it. If no such file changed while this read the ends,
        the logs have no part of a batch that the files do not know.
        """
        for _ in range(TRIES_MAX):
            before = self._txn_heads()
            ends = self.ends.read()
            if ends is None:
                return None
            try:
                files = {} if known is None else {path: self._txn_bytes(path, known) for path in before}
            except FileNotFoundError:
                continue
            if self._txn_heads() == before:
                return self.logs(ends), files
        return None

    def _txn_bytes(self, path: str, known: Mapping[str, TxnFile]) -> tuple[TxnFile, bytes]:
        if path in known and stage_of_name(os.path.basename(path)) is not None:
            return known[path], b""
        content = read_all(self.fs, os.path.join(self.data_dir, path))
        return TxnFile(path, 0, 0, len(content), xxh3_64_intdigest(content)), content

    def read_segment_file(self, file: SegmentFile) -> bytes:
        """Read the committed bytes of a file, from the cold tier if it went there. Raise OriginGoneError if the
        compactor has removed it: then a newer snapshot does not list it. Raise OSError, EOFError.
        """
        path = os.path.join(self.data_dir, file.path)
        try:
            if file.size_bytes is None:
                return read_all(self.fs, path)
            with opened(self.fs, path, os.O_RDONLY) as fd:
                found = read_up_to(self.fs, fd, file.size_bytes, 0)
        except FileNotFoundError as error:
            if not file.is_cold or file.size_bytes is None:
                raise OriginGoneError(f"{path}: was replaced or removed") from error
            cold = open_cold(self.fs, self.data_dir, self._cold_place)
            if cold is None:
                reason = "has segments in its cold tier: name it (--cold-dir, --cold-url)"
                raise OSError(errno.EINVAL, reason, self.data_dir) from error
            try:
                return cold.read_range(file.path.partition("/")[2], 0, file.size_bytes)
            except FileNotFoundError as missing:
                raise OriginGoneError(f"{missing.filename}: was replaced or removed") from missing
        if len(found) != file.size_bytes:
            raise EOFError(f"{path} has {len(found)} bytes, {file.size_bytes} are committed")
        return found

    def _txn_heads(self) -> dict[str, bytes]:
        """Return the path of each stage and sink with bytes that change when the file does: b"" for a stage."""
        heads: dict[str, bytes] = {}
        for directory, is_file in (
            (layout.stages_dir(self.data_dir), lambda name: stage_of_name(name) is not None),
            (layout.sinks_dir(self.data_dir), is_sink_name),
        ):
            below = os.path.relpath(directory, self.data_dir)
            for name in names_in(self.fs, directory):
                if is_file(name):
                    heads[f"{below}/{name}"] = self._head(os.path.join(directory, name)) if is_sink_name(name) else b""
        return heads

    def _head(self, path: str) -> bytes:
        try:
            with opened(self.fs, path, os.O_RDONLY) as fd:
                return read_up_to(self.fs, fd, SINK_HEAD_LEN, 0)
        except FileNotFoundError:
            return b""

    # -- logs

    def start(self, log: LogPlace, snapshot: Snapshot | None) -> LogStart:
        """Return where a start of the service begins to read this log. Raise OriginGoneError if that file is gone."""
        part = None if snapshot is None else snapshot.part_of(log.log_id)
        numbers = layout.list_log_files(self.fs, log.directory)
        if part is None and not numbers:
            raise OriginGoneError(f"{log.directory}: has no file")
        file_no = numbers[0] if part is None else part.position.file_no
        path = layout.log_path(log.directory, file_no)
        try:
            start_len = self._file_start(path)[1]
            with opened(self.fs, path, os.O_RDONLY) as fd:
                file_start = read_up_to(self.fs, fd, start_len, 0)
        except FileNotFoundError as error:
            raise OriginGoneError(f"{path}: was removed") from error
        offset = max(start_len, 0 if part is None else part.position.offset)
        return LogStart(log.shard, WalPosition(file_no, offset), file_start)

    def log_bytes(self, log: LogPlace, start: WalPosition, most: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (file number, offset, bytes) from `start` to the end of the log, at most `most` bytes at a time.

        Raise OriginGoneError if the service has removed a file.
        """
        file_no, offset = start.file_no, start.offset
        try:
            while file_no < log.end.file_no:
                yield from self._bytes(log, file_no, offset, self._end_of_file(log, file_no), most)
                file_no, offset = file_no + 1, 0
            yield from self._bytes(log, file_no, offset, log.end.offset, most)
        except FileNotFoundError as error:
            raise OriginGoneError(f"{error.filename}: was removed") from error

    def bytes_before(self, log: LogPlace, position: WalPosition) -> bytes | None:
        """Return the last bytes before a position, None if the file is gone."""
        try:
            with opened(self.fs, layout.log_path(log.directory, position.file_no), os.O_RDONLY) as fd:
                return read_up_to(self.fs, fd, CHECKSUM_LEN, max(0, position.offset - CHECKSUM_LEN))
        except FileNotFoundError:
            return None

    def _end_of_file(self, log: LogPlace, file_no: int) -> int:
        """Return where the frames of a finished file end: behind its FILE_END, or where the next file goes on."""
        following, _ = self._file_start(layout.log_path(log.directory, file_no + 1))
        if following.previous_end is not None:
            return following.previous_end
        path = layout.log_path(log.directory, file_no)
        with opened(self.fs, path, os.O_RDONLY) as fd:
            end = find_file_end(self.fs, fd, file_no)
        if end is None:
            raise OSError(errno.EIO, f"has no FILE_END, and the log goes on in file {file_no + 1}", path)
        return end

    def _file_start(self, path: str) -> tuple[FileStart, int]:
        try:
            return read_file_start(self.fs, path)
        except NotALogFile as error:
            raise OSError(errno.EIO, f"is not a log file: {error}; restore it from a copy", path) from error

    def _bytes(self, log: LogPlace, file_no: int, offset: int, end: int, most: int) -> Iterator[tuple[int, int, bytes]]:
        path = layout.log_path(log.directory, file_no)
        with opened(self.fs, path, os.O_RDONLY) as fd:
            while offset < end:
                found = read_up_to(self.fs, fd, min(most, end - offset), offset)
                if not found:
                    raise OriginGoneError(f"{path}: ends at {offset}, {end} bytes of it were committed")
                yield file_no, offset, found
                offset += len(found)


class SegmentFile(NamedTuple):
    """A file of a segment: its `path` below the data directory and its committed length, None for the whole file."""

    path: str
    size_bytes: int | None
    is_cold: bool


class ListedSegment(NamedTuple):
    """A segment that a snapshot lists; `tags` is None unless it is sealed."""

    data: SegmentFile
    idx: SegmentFile
    tags: SegmentFile | None


def listed_segments(snapshot: Snapshot) -> Iterator[ListedSegment]:
    """Yield the segments of a snapshot that have records."""
    for part in snapshot.parts:
        for topic in part.decoded().topics:
            for info in topic.segments:
                if info.last_seq < topic.floors.earliest_seq:
                    continue
                paths = layout.segment_paths(layout.topic_dir("", topic.id), info.first_seq, info.version)
                yield ListedSegment(
                    SegmentFile(paths["data"], info.data_bytes, bool(info.flags & COLD)),
                    SegmentFile(paths["idx"], info.records * ENTRY_LEN, False),
                    SegmentFile(paths["tags"], None, False) if info.flags & SEALED else None,
                )


def read_tail(origin: Origin, ends: Sequence[LogEnd], now_ms: int, leader_url: str) -> bytes | None:
    """Return the bytes of the logs behind these ends for a follower, as an encoded piece without number; None if nobody
    can tell a moment now. Without any ends, return a piece that only says where the logs end.

    The piece `is_moment` if it has all bytes up to the moment. Its `txn` lists the files of transactions at that
    moment, without their bytes. Raise OriginGoneError if the logs do not go on from these ends (the follower then needs
    the archive), and OSError.
    """
    found = origin.moment(origin.told)
    if found is None:
        return None
    logs, txn = found
    origin.told = {path: file for path, (file, _) in sorted(txn.items())}  # also if these ends are refused below
    ends = ends or [LogEnd(log.shard, log.log_id, log.end, origin.bytes_before(log, log.end) or b"") for log in logs]
    _check_ends(origin, logs, ends)
    draft, is_whole = PieceDraft(ends), True
    for log in logs:
        is_whole &= _add_tail(origin, log, draft)
    files = list(origin.told.values())
    piece = Piece(0, now_ms, "", draft.parts, draft.ends, is_whole, True, files, leader_url=leader_url)
    return encode(piece, draft.payload)


def _check_ends(origin: Origin, logs: Sequence[LogPlace], ends: Sequence[LogEnd]) -> None:
    if [(end.shard, end.log_id) for end in ends] != [(log.shard, log.log_id) for log in logs]:
        raise OriginGoneError("these are other logs: their ids differ")
    for log, end in zip(logs, ends, strict=True):
        last_bytes = origin.bytes_before(log, end.position)
        if log.end < end.position or last_bytes is None or not last_bytes.endswith(end.last_bytes):
            raise OriginGoneError(f"log {log.shard} has no end {end.position}, or had another record before it")


def _add_tail(origin: Origin, log: LogPlace, draft: PieceDraft) -> bool:
    """Add the next bytes of a log; return False if there are more than fit."""
    for file_no, offset, content in origin.log_bytes(log, draft.ends[log.shard].position, TAIL_BYTES):
        if draft.size_bytes + len(content) > TAIL_BYTES:
            return False
        draft.add(log.shard, log.log_id, file_no, offset, content)
    return True
