"""The offline check: every byte that a service left in its data directory, compared with every other that repeats it.

Nothing is changed and no service is needed; while one runs there is nothing to check, because it writes. Two kinds of
things are found. *Damage*: bytes that were committed and are not what was written. *Notes*: what a killed process may
leave, a torn tail or an append before its mark, and which the next start cuts off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec

from topics.core.fold import FoldError
from topics.core.location import ENTRY_WORDS
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.damage import used_bytes
from topics.storage.filesystem import FileSystem, boot_id, read_all
from topics.storage.folding import Folding, Known
from topics.storage.frame import scan
from topics.storage.lock import inspecting
from topics.storage.logfile import (
    NotALogFile,
    RefusedLog,
    WalEnd,
    WalIdentity,
    WalPosition,
    read_current,
    read_first_start,
)
from topics.storage.look_only import LookOnlyFileSystem
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.recovery import CorruptLog, RecoveredFile, Start, recover_group
from topics.storage.segment import ENTRY_LEN, SegmentReader
from topics.storage.sink_file import SinkDamagedError, decode_sink, is_sink_name
from topics.storage.snapshot import HEADER_LEN, BadSnapshot, UnknownSnapshotVersion, read_snapshot
from topics.storage.stage_file import StageDamagedError, decode_stage, stage_of_name
from topics.storage.state import ShardPart, decode_parts, present_log_ids


class Kind(StrEnum):
    """What is damaged."""

    LOG = "log"
    SEGMENT = "segment"
    POSTINGS = "postings"
    SNAPSHOT = "snapshot"
    STAGE = "stage"
    SINK = "sink"
    UNREADABLE = "unreadable"


class Finding(msgspec.Struct, frozen=True):
    """`offset` in bytes is where `path` stops being what it should be."""

    kind: Kind
    path: str
    offset: int
    reason: str


class Report(msgspec.Struct):
    """What was looked at, and what was found."""

    data_dir: str
    damage: list[Finding] = []
    notes: list[str] = []
    log_frames: int = 0
    segments: int = 0
    segment_records: int = 0
    postings: int = 0
    snapshots: int = 0


class NotADataDir(Exception):  # noqa: N818 — named for what it is
    """There is nothing in the directory that a service would have made."""


def verify(data_dir: str, progress: Callable[[float], None], cold_dir: str | None = None) -> Report:
    """Checks a data directory; `progress` hears of the share that is done, 0 to 1.

    `cold_dir` is where the data of cold segments are; without it they are not looked at, and a note says so.
    Raises DataDirLocked when a service runs, NotADataDir.
    """
    if not any(map(os.path.isdir, (layout.wal_dir(data_dir), layout.topics_dir(data_dir), layout.meta_dir(data_dir)))):
        raise NotADataDir(f"{data_dir} is not a data directory: it holds neither logs nor segments nor snapshots")
    with inspecting(data_dir):
        return _Check(data_dir, progress, cold_dir).run()


class _Check:
    def __init__(
        self,
        data_dir: str,
        progress: Callable[[float], None],
        cold_dir: str | None,
    ) -> None:
        self._fs: FileSystem = LookOnlyFileSystem()
        self._data_dir = data_dir
        self._progress = progress
        self._cold_dir = cold_dir
        self._report = Report(data_dir)
        self._parts: list[ShardPart] | None = None
        """Of the snapshot that counts; None: there are some, and none will do."""
        self._fallbacks: list[list[ShardPart]] = []
        """Older ones that go with these logs as well."""
        self._known: dict[int, Known] = {}
        """What the logs say of each topic."""
        self._deleted_ids: set[int] = set()
        self._total_bytes = max(1, sum(map(_size_of, _files(data_dir))))
        self._done_bytes = 0

    def run(self) -> Report:
        # In this order: snapshots say where logs begin, both say what is committed of a segment.
        for part in (self._snapshots, self._logs, self._topics, self._transactions):
            try:
                part()
            except OSError as error:
                self._unreadable(error, self._data_dir)
        self._progress(1.0)
        return self._report

    def _damage(self, kind: Kind, path: str, offset: int, reason: str) -> None:
        self._report.damage.append(Finding(kind, path, offset, reason))

    def _note(self, line: str) -> None:
        self._report.notes.append(line)

    def _unreadable(self, error: OSError, path: str) -> None:
        self._damage(Kind.UNREADABLE, error.filename or path, 0, error.strerror or str(error))

    def _done(self, path: str) -> None:
        self._done_bytes += _size_of(path)
        self._progress(min(1.0, self._done_bytes / self._total_bytes))

    # -- snapshots

    def _snapshots(self) -> None:
        found: list[list[ShardPart]] = []
        for number in layout.list_snapshots(self._fs, self._data_dir):
            path = layout.snapshot_path(self._data_dir, number)
            self._report.snapshots += 1
            try:
                parts = decode_parts(read_snapshot(self._fs, self._data_dir, number))
                for part in parts:
                    part.decoded()
                found.append(parts)
            except BadSnapshot as bad:
                self._damage(Kind.SNAPSHOT, path, bad.offset, bad.reason)
            except msgspec.DecodeError as error:
                self._damage(Kind.SNAPSHOT, path, HEADER_LEN, f"its body does not decode: {error}")
            except UnknownSnapshotVersion as unknown:
                self._damage(Kind.SNAPSHOT, path, 0, str(unknown))
            except OSError as error:
                self._unreadable(error, path)
            self._done(path)
        if not self._report.snapshots:
            self._parts = []
        elif found:
            log_ids = present_log_ids(self._fs, self._data_dir)
            # The newest one that goes with these logs counts (`reshard.py`).
            fitting = [parts for parts in found if {part.log_id for part in parts} <= log_ids]
            if fitting:
                *self._fallbacks, self._parts = fitting
            else:
                missing = ", ".join(sorted(f"{part.log_id:016x}" for part in found[-1] if part.log_id not in log_ids))
                root = layout.wal_dir(self._data_dir)
                self._damage(Kind.LOG, root, 0, f"the newest snapshot goes on in logs that are not there: {missing}")

    # -- logs

    def _logs(self) -> None:
        root = layout.wal_dir(self._data_dir)
        for name in (layout.NEW_WAL_NAME, layout.OLD_WAL_NAME):
            path = os.path.join(self._data_dir, name)
            if self._fs.exists(path):
                self._note(f"{path}: a change of the shard count was interrupted; the next start completes it")
        groups = layout.discover_groups(self._fs, root)
        missing: set[str] = set()
        for group in groups:
            try:
                shards = self._log(group)
            except CorruptLog as corrupt:
                self._damage(Kind.LOG, corrupt.path, corrupt.offset, f"{corrupt.reason}; behind it: {corrupt.lost}")
            except RefusedLog as refused:
                self._damage(Kind.LOG, refused.path, 0, str(refused))
            except NotALogFile as error:
                self._damage(Kind.LOG, group.path, 0, f"not a log: {error}")
            except FoldError as error:
                self._damage(Kind.LOG, group.path, 0, str(error))
            except OSError as error:
                self._unreadable(error, group.path)
            else:
                missing.update(layout.group_dir_in(root, shard, shards) for shard in range(shards))
            for path in _files(group.path):
                self._done(path)
        for path in sorted(missing.difference(group.path for group in groups)):
            self._damage(Kind.LOG, path, 0, "the log of this shard is missing")

    def _log(self, group: layout.Group) -> int:
        """Returns the number of shards it was written under."""
        first = read_first_start(self._fs, group.path)
        if first is None:
            return 0
        part = next((part for part in self._parts or () if part.log_id == first.log_id), None)
        # What the newest snapshot holds as well is still what the one before goes on in.
        start: Start = None if self._parts is not None and part is None else "lowest"
        folding = None if self._parts is None else Folding(part)
        recovery = recover_group(self._fs, group.path, WalIdentity(group.shard, first.shards, boot_id()), start=start)
        last: RecoveredFile | None = None
        for batch in recovery:
            if last is not None and last.file_no != batch.file_no:
                self._finished(last)
            last = batch
            self._report.log_frames += len(batch.frames)
            if folding is not None:
                folding.add(batch)
        if part is not None and not self._reaches(group, recovery.end, part.position):
            self._damage(
                Kind.LOG, group.path, 0, f"the snapshot goes on at {part.position}, where this log has nothing"
            )
        for parts in self._fallbacks:
            for older in parts:
                if older.log_id == first.log_id and not self._reaches(group, recovery.end, older.position):
                    self._note(f"{group.path}: begins behind {older.position}: an older snapshot has become useless")
        if folding is not None:
            self._known |= folding.known()
            self._deleted_ids |= folding.deleted_ids
        self._report.notes += recovery.report
        current = read_current(self._fs, group.path)
        if recovery.end is not None and current not in (None, recovery.end.file_no):
            self._note(f"{group.path}: CURRENT names file {current}, the log goes on in file {recovery.end.file_no}")
        return first.shards

    def _reaches(self, group: layout.Group, end: WalEnd | None, position: WalPosition) -> bool:
        first_no = min(layout.list_log_files(self._fs, group.path))
        return end is not None and first_no <= position.file_no and position <= WalPosition(end.file_no, end.offset)

    def _finished(self, last: RecoveredFile) -> None:
        """Nothing reads what is behind a file's last frame, but something must have put it there."""
        offset, total_len, *_ = last.frames[-1]
        end = scan(last.buffer, offset + total_len, len(last.buffer)).end
        if used := used_bytes(bytes(last.buffer), end):
            self._note(f"{last.path}: {used} bytes from offset {end} on that are no part of the log")

    # -- segments

    def _topics(self) -> None:
        found = layout.discover_topics(self._fs, self._data_dir)
        for topic_id in sorted({*found, *(topic_id for topic_id, known in self._known.items() if known.segments)}):
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                self._topic(topic_id, directory)
            except OSError as error:
                self._unreadable(error, directory)

    def _topic(self, topic_id: int, directory: str) -> None:
        known = self._known.get(topic_id)
        names = layout.discover_segments(self._fs, directory)
        if known is None and self._parts is None:
            self._topic_of_itself(topic_id, directory)
        elif known is None:
            why = "the topic is deleted" if topic_id in self._deleted_ids else "the log knows no such topic"
            for name in names:
                self._note(f"{layout.segment_data_path(directory, *name)}: {why}")
        else:
            listed = {(info.first_seq, info.version) for info in known.segments}
            last_seq = max((info.last_seq for info in known.segments), default=0)
            for name in names:
                if name not in listed:
                    begun = name.first_seq > last_seq
                    why = "begun, and no checkpoint counts it yet" if begun else "counts for nothing any more"
                    self._note(f"{layout.segment_data_path(directory, *name)}: {why}")
            for info in known.segments:
                self._listed(topic_id, directory, info, known.is_deleting)
        for name in names:
            for path_of in (layout.segment_data_path, layout.segment_idx_path, layout.segment_tags_path):
                self._done(path_of(directory, *name))

    def _listed(self, topic_id: int, directory: str, info: SegmentInfo, is_deleting: bool) -> None:
        """A segment that log or snapshot have."""
        self._report.segments += 1
        try:
            self._check_listed(topic_id, directory, info, is_deleting)
        except FileNotFoundError as error:
            self._damage(Kind.SEGMENT, error.filename, 0, "the file is missing")
        except OSError as error:
            self._unreadable(error, directory)

    def _check_listed(self, topic_id: int, directory: str, info: SegmentInfo, is_deleting: bool) -> None:
        name = (info.first_seq, info.version)
        is_sealed = bool(info.flags & SEALED)
        idx_path = layout.segment_idx_path(directory, *name)
        idx = self._committed(idx_path, info.records * ENTRY_LEN, f"up to seq {info.last_seq}", is_sealed)
        data_path = layout.segment_data_path(directory, *name)
        is_cold = bool(info.flags & COLD) and not self._fs.exists(data_path)
        if is_cold and self._cold_dir is not None:
            data_path = layout.segment_data_path(layout.topic_dir(self._cold_dir, topic_id), *name)
        data: bytes | None = None
        if is_cold and self._cold_dir is None:
            self._note(f"{data_path}: is in the cold directory, which was not looked at")
        else:
            data = self._committed(data_path, info.data_bytes, "of this segment", is_sealed)
        if idx is None or (data is None and not is_cold):
            return
        reader = SegmentReader(directory, info.first_seq, idx, data or b"", info.version)
        self._report.segment_records += reader.records
        whole = data is not None
        ts = reader.entries(info.first_seq, info.last_seq)[1::ENTRY_WORDS] if reader.records else None
        if ts is not None and (ts[0], ts[-1]) != (info.first_ts, info.last_ts):
            whole = False
            self._damage(
                Kind.SEGMENT, idx_path, 0, f"is of {ts[0]} to {ts[-1]}, the log says {info.first_ts} to {info.last_ts}"
            )
        if data is not None:
            for defect in reader.damage(is_deleting or bool(info.flags & COLD)):
                whole = False
                path = data_path if defect.path == reader.data_path else defect.path
                self._damage(Kind.SEGMENT, path, defect.offset, defect.reason)
        if is_sealed:
            self._postings(directory, reader, whole, info.version)

    def _committed(self, path: str, length: int, what: str, is_sealed: bool) -> bytes | None:
        """A file without what was being appended when the writer stopped; None when it is shorter than it should be."""
        content = read_all(self._fs, path)
        if len(content) < length:
            self._damage(Kind.SEGMENT, path, len(content), f"ends there; {length} bytes are committed, {what}")
            return None
        if len(content) > length:
            extra = f"{len(content) - length} bytes from offset {length} on"
            if is_sealed:
                self._damage(Kind.SEGMENT, path, length, f"{extra}, but the segment is sealed")
            else:
                self._note(f"{path}: {extra}, which no checkpoint counts yet")
        return content[:length]

    def _topic_of_itself(self, topic_id: int, directory: str) -> None:
        """Nothing says what is committed: a segment must be whole to its last byte."""
        for name, parts in layout.discover_segments(self._fs, directory).items():
            self._report.segments += 1
            try:
                idx = read_all(self._fs, layout.segment_idx_path(directory, *name))
                data = read_all(self._fs, layout.segment_data_path(directory, *name))
            except FileNotFoundError as error:
                self._damage(Kind.SEGMENT, error.filename, 0, "the file is missing")
                continue
            reader = SegmentReader(directory, name.first_seq, idx, data, name.version)
            self._report.segment_records += reader.records
            whole = True
            for defect in reader.damage(True):
                whole = False
                self._damage(Kind.SEGMENT, defect.path, defect.offset, defect.reason)
            if "tags" in parts:
                self._postings(directory, reader, whole, name.version)

    def _postings(self, directory: str, segment: SegmentReader, segment_is_whole: bool, version: int) -> None:
        self._report.postings += 1
        path = layout.segment_tags_path(directory, segment.first_seq, version)
        try:
            postings = Postings(path, read_all(self._fs, path))
        except CorruptPostings as defect:
            self._damage(Kind.POSTINGS, path, defect.offset, defect.reason)
            return
        if (postings.first_seq, postings.records) != (segment.first_seq, segment.records):
            self._damage(
                Kind.POSTINGS,
                path,
                0,
                f"is of {postings.records} records from seq {postings.first_seq}, "
                f"the segment has {segment.records} from {segment.first_seq}",
            )
        elif segment_is_whole:
            expected: dict[bytes, list[int]] = {}
            for seq, tag in segment.tagged():
                expected.setdefault(tag, []).append(seq)
            if list(postings.items()) != sorted(expected.items()):
                self._damage(Kind.POSTINGS, path, 0, "does not list the tags that the segment's records have")

    # -- transactions

    def _transactions(self) -> None:
        directory = layout.stages_dir(self._data_dir)
        for name in self._fs.listdir(directory) if self._fs.exists(directory) else ():
            path = os.path.join(directory, name)
            if stage_of_name(name) is not None:
                try:
                    decode_stage(read_all(self._fs, path))
                except StageDamagedError as damaged:
                    self._damage(Kind.STAGE, path, 0, str(damaged))
            self._done(path)
        directory = layout.sinks_dir(self._data_dir)
        for name in self._fs.listdir(directory) if self._fs.exists(directory) else ():
            path = os.path.join(directory, name)
            if is_sink_name(name):
                try:
                    sink = decode_sink(read_all(self._fs, path))
                except SinkDamagedError as damaged:
                    self._damage(Kind.SINK, path, 0, str(damaged))
                else:
                    if sink.pending:
                        self._note(
                            f"{path}: batch {sink.batch} of sink {sink.sink!r} is decided, the next start ends it"
                        )
            self._done(path)


def _files(root: str) -> Iterator[str]:
    for directory, _, names in os.walk(root):
        for name in names:
            yield os.path.join(directory, name)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # it only counts for the progress
