"""The offline check: every byte that a service left in its data directory, compared with every other that repeats it.

The check changes nothing and needs no service; while one runs there is nothing to check, because it writes. It finds
two kinds of things. *Damage*: committed bytes are not what was written. *Notes*: a torn tail, or an append before its
mark, which a killed process may leave and the next start cuts off. Segments are checked file against file, and against
what log and snapshot say of them.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from topics.core.fold import FoldError
from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, LOCATION_GONE
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.filesystem import FileSystem, LookOnlyFileSystem, boot_id, read_all
from topics.storage.format_mark import has_mark
from topics.storage.frame import scan
from topics.storage.lock import inspecting
from topics.storage.log_fold import Folding, Known
from topics.storage.logfile import (
    NotALogFile,
    RefusedLog,
    WalEnd,
    WalIdentity,
    WalPosition,
    read_current,
    read_first_start,
)
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.recovery import CorruptLog, RecoveredFile, Start, recover_group, used_bytes
from topics.storage.segment import ENTRY_FLAGS_AT, ENTRY_LEN
from topics.storage.segment_reader import SegmentReader
from topics.storage.snapshot import (
    HEADER_LEN,
    BadSnapshot,
    ShardPart,
    UnknownSnapshotVersion,
    decode_parts,
    present_log_ids,
    read_snapshot,
)
from topics.storage.txn_files import (
    SinkDamagedError,
    StageDamagedError,
    decode_sink,
    decode_stage,
    is_sink_name,
    stage_of_name,
)
from topics.storage.upgrade import RoutedCopies


class FileKind(StrEnum):
    """The kind of file that is damaged."""

    FORMAT = "format"
    LOG = "log"
    SEGMENT = "segment"
    POSTINGS = "postings"
    SNAPSHOT = "snapshot"
    STAGE = "stage"
    SINK = "sink"
    UNREADABLE = "unreadable"


class DamageFinding(msgspec.Struct, frozen=True):
    """`offset` in bytes is where `path` stops being what it should be."""

    kind: FileKind
    path: str
    offset: int
    reason: str


class Report(msgspec.Struct):
    """The number of things the check looked at, and everything it found."""

    data_dir: str
    damage: list[DamageFinding] = []
    notes: list[str] = []
    log_frames: int = 0
    segments: int = 0
    segment_records: int = 0
    postings: int = 0
    snapshots: int = 0

    def damaged(self, kind: FileKind, path: str, offset: int, reason: str) -> None:
        """Reports committed bytes that are not as they were written."""
        self.damage.append(DamageFinding(kind, path, offset, reason))

    def unreadable(self, error: OSError, path: str) -> None:
        """Reports a file, or something below `path`, that cannot be read."""
        self.damaged(FileKind.UNREADABLE, error.filename or path, 0, error.strerror or str(error))

    def note(self, line: str) -> None:
        """Notes something that the next start cuts off, or that nobody needs."""
        self.notes.append(line)


_LIVE_TABLE: Final = bytes(0 if flags & LOCATION_GONE else 1 for flags in range(256))


class SegmentCheck:
    """Checks segments. `cold_dir` is where the data of cold segments are; None: they are not looked at."""

    def __init__(self, fs: FileSystem, cold_dir: str | None, report: Report) -> None:
        self._fs = fs
        self._cold_dir = cold_dir
        self._report = report

    def listed(
        self, topic_id: int, directory: str, info: SegmentInfo, earliest_seq: int, deleted: Sequence[int]
    ) -> int:
        """Checks a segment that log or snapshot have. `deleted` are seqs (ascending) that the log has deleted and the
        segment may not have marked yet.

        Returns how many of its records live from `earliest_seq` on; 0 when its index cannot be read.
        """
        self._report.segments += 1
        try:
            idx = self._check_listed(topic_id, directory, info, bool(deleted))
        except FileNotFoundError as error:
            self._report.damaged(FileKind.SEGMENT, error.filename, 0, "the file is missing")
        except OSError as error:
            self._report.unreadable(error, directory)
        else:
            if idx is not None:
                return _live(idx, info.first_seq, earliest_seq, deleted)
        return 0

    def _check_listed(self, topic_id: int, directory: str, info: SegmentInfo, is_deleting: bool) -> bytes | None:
        """Reads its index, as far as it is committed."""
        name = (info.first_seq, info.version)
        is_sealed = bool(info.flags & SEALED)
        idx_path = layout.segment_idx_path(directory, *name)
        idx = self._committed(idx_path, info.records * ENTRY_LEN, f"up to seq {info.last_seq}", is_sealed)
        if idx is None:
            return None
        self._report.segment_records += info.records
        bare = SegmentReader(directory, info.first_seq, idx, b"", info.version)
        ts = bare.entries(info.first_seq, info.last_seq)[1::ENTRY_WORDS] if info.records else None
        is_in_time = ts is None or (ts[0], ts[-1]) == (info.first_ts, info.last_ts)
        if ts is not None and not is_in_time:
            self._report.damaged(
                FileKind.SEGMENT,
                idx_path,
                0,
                f"is of {ts[0]} to {ts[-1]}, the log says {info.first_ts} to {info.last_ts}",
            )
        whole: SegmentReader | None = None
        said: set[tuple[str, int]] = set()
        for path in self._places(topic_id, directory, info):
            reader = self._data(directory, info, idx, path, is_deleting, said)
            whole = whole or reader
        if is_sealed:
            self._postings(directory, whole or bare, whole is not None and is_in_time, info.version)
        if info.flags & COLD and self._cold_dir is not None:
            self._copies(layout.topic_dir(self._cold_dir, topic_id), directory, name, idx)
        return idx

    def _places(self, topic_id: int, directory: str, info: SegmentInfo) -> list[str]:
        """Returns the places where its data have to be right: for a while after a segment has become cold, both
        directories.
        """
        name = (info.first_seq, info.version)
        hot_path = layout.segment_data_path(directory, *name)
        if not info.flags & COLD:
            return [hot_path]
        places = [hot_path] if self._fs.exists(hot_path) else []
        if self._cold_dir is None:
            self._report.note(f"{hot_path}: is in the cold directory, which was not looked at")
        else:
            places.append(layout.segment_data_path(layout.topic_dir(self._cold_dir, topic_id), *name))
        return places

    def _data(
        self,
        directory: str,
        info: SegmentInfo,
        idx: bytes,
        path: str,
        is_deleting: bool,
        said: set[tuple[str, int]],
    ) -> SegmentReader | None:
        """Returns the segment with the data at that place, None when not all of it is right. `said` has the damage of
        its index that is reported already.
        """
        try:
            data = self._committed(path, info.data_bytes, "of this segment", bool(info.flags & SEALED))
        except FileNotFoundError:
            self._report.damaged(FileKind.SEGMENT, path, 0, "the file is missing")
            return None
        if data is None:
            return None
        reader = SegmentReader(directory, info.first_seq, idx, data, info.version)
        whole = True
        for defect in reader.damage(is_deleting or bool(info.flags & COLD)):
            whole = False
            found = (path if defect.path == reader.data_path else defect.path, defect.offset)
            if found not in said:
                self._report.damaged(FileKind.SEGMENT, *found, defect.reason)
            if found[0] != path:
                said.add(found)
        return reader if whole else None

    def _copies(self, cold: str, directory: str, name: tuple[int, int], idx: bytes) -> None:
        """Compares the copies beside cold data with the files they were made of. Deletions are marked in these files
        alone.
        """
        for kind, path_of in (
            (FileKind.SEGMENT, layout.segment_idx_path),
            (FileKind.POSTINGS, layout.segment_tags_path),
        ):
            path = path_of(cold, *name)
            try:
                copy = read_all(self._fs, path)
                original = idx if kind == FileKind.SEGMENT else read_all(self._fs, path_of(directory, *name))
            except FileNotFoundError as error:
                if error.filename == path:
                    self._report.damaged(kind, path, 0, "the file is missing")
                continue
            at = _first_difference(copy, original, kind == FileKind.SEGMENT)
            if at is not None:
                self._report.damaged(kind, path, at, f"is no copy of {path_of(directory, *name)}")

    def _committed(self, path: str, length: int, what: str, is_sealed: bool) -> bytes | None:
        """Reads a file without the bytes that were being appended when the writer stopped; None when it is too
        short.
        """
        content = read_all(self._fs, path)
        if len(content) < length:
            self._report.damaged(
                FileKind.SEGMENT, path, len(content), f"ends there; {length} bytes are committed, {what}"
            )
            return None
        if len(content) > length:
            extra = f"{len(content) - length} bytes from offset {length} on"
            if is_sealed:
                self._report.damaged(FileKind.SEGMENT, path, length, f"{extra}, but the segment is sealed")
            else:
                self._report.note(f"{path}: {extra}, which no checkpoint counts yet")
        return content[:length]

    def of_themselves(self, directory: str) -> None:
        """Checks a segment of which nothing says how much is committed: it must be whole to its last byte."""
        for name, parts in layout.discover_segments(self._fs, directory).items():
            self._report.segments += 1
            try:
                idx = read_all(self._fs, layout.segment_idx_path(directory, *name))
                data = read_all(self._fs, layout.segment_data_path(directory, *name))
            except FileNotFoundError as error:
                self._report.damaged(FileKind.SEGMENT, error.filename, 0, "the file is missing")
                continue
            reader = SegmentReader(directory, name.first_seq, idx, data, name.version)
            self._report.segment_records += reader.records
            whole = True
            for defect in reader.damage(True):
                whole = False
                self._report.damaged(FileKind.SEGMENT, defect.path, defect.offset, defect.reason)
            if "tags" in parts:
                self._postings(directory, reader, whole, name.version)

    def _postings(self, directory: str, segment: SegmentReader, segment_is_whole: bool, version: int) -> None:
        self._report.postings += 1
        path = layout.segment_tags_path(directory, segment.first_seq, version)
        try:
            postings = Postings(path, read_all(self._fs, path))
        except CorruptPostings as defect:
            self._report.damaged(FileKind.POSTINGS, path, defect.offset, defect.reason)
            return
        if (postings.first_seq, postings.records) != (segment.first_seq, segment.records):
            self._report.damaged(
                FileKind.POSTINGS,
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
                self._report.damaged(
                    FileKind.POSTINGS, path, 0, "does not list the tags that the segment's records have"
                )


def _live(idx: bytes, first_seq: int, earliest_seq: int, deleted: Sequence[int]) -> int:
    """Counts the entries of an index that are of live records, from `earliest_seq` on."""
    is_live = idx[ENTRY_FLAGS_AT::ENTRY_LEN].translate(_LIVE_TABLE)
    start = max(0, earliest_seq - first_seq)
    live = is_live.count(1, start)
    here = deleted[bisect_left(deleted, first_seq + start) : bisect_left(deleted, first_seq + len(is_live))]
    return live - sum([is_live[seq - first_seq] for seq in here])


def _first_difference(copy: bytes, original: bytes, is_idx: bool) -> int | None:
    """Returns where a copy differs from its original. A record that was deleted since is no difference in an index."""
    if copy == original:
        return None
    for at, (copied, there) in enumerate(zip(copy, original, strict=False)):
        was_deleted = is_idx and at % ENTRY_LEN == ENTRY_FLAGS_AT and copied | LOCATION_DELETED == there
        if copied != there and not was_deleted:
            return at
    return None if len(copy) == len(original) else min(len(copy), len(original))


class NotADataDir(Exception):  # noqa: N818 — named for what it is
    """The directory has nothing that a service would have made."""


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
        self._report = Report(data_dir)
        self._segments = SegmentCheck(self._fs, cold_dir, self._report)
        self._parts: list[ShardPart] | None = None
        """The parts of the snapshot that counts; None: there are snapshots, and none will do."""
        self._fallbacks: list[list[ShardPart]] = []
        """The parts of older snapshots that go with these logs as well."""
        self._known: dict[int, Known] = {}
        """What the logs say of each topic."""
        self._deleted_ids: set[int] = set()
        self._copies = RoutedCopies()
        self._total_bytes = max(1, sum(map(_size_of, _files(data_dir))))
        self._done_bytes = 0

    def run(self) -> Report:
        # In this order: snapshots say where logs begin, both say what is committed of a segment.
        for part in (self._snapshots, self._logs, self._format, self._topics, self._transactions):
            try:
                part()
            except OSError as error:
                self._report.unreadable(error, self._data_dir)
        self._progress(1.0)
        return self._report

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
                self._report.damaged(FileKind.SNAPSHOT, path, bad.offset, bad.reason)
            except msgspec.DecodeError as error:
                self._report.damaged(FileKind.SNAPSHOT, path, HEADER_LEN, f"its body does not decode: {error}")
            except UnknownSnapshotVersion as unknown:
                self._report.damaged(FileKind.SNAPSHOT, path, 0, str(unknown))
            except OSError as error:
                self._report.unreadable(error, path)
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
                self._report.damaged(
                    FileKind.LOG, root, 0, f"the newest snapshot goes on in logs that are not there: {missing}"
                )

    # -- logs

    def _logs(self) -> None:
        root = layout.wal_dir(self._data_dir)
        for name in (layout.NEW_WAL_NAME, layout.OLD_WAL_NAME):
            path = os.path.join(self._data_dir, name)
            if self._fs.exists(path):
                self._report.note(f"{path}: a change of the shard count was interrupted; the next start completes it")
        groups = layout.discover_groups(self._fs, root)
        missing: set[str] = set()
        for group in groups:
            try:
                shards = self._log(group)
            except CorruptLog as corrupt:
                self._report.damaged(
                    FileKind.LOG, corrupt.path, corrupt.offset, f"{corrupt.reason}; behind it: {corrupt.lost}"
                )
            except RefusedLog as refused:
                self._report.damaged(FileKind.LOG, refused.path, 0, str(refused))
            except NotALogFile as error:
                self._report.damaged(FileKind.LOG, group.path, 0, f"not a log: {error}")
            except FoldError as error:
                self._report.damaged(FileKind.LOG, group.path, 0, str(error))
            except OSError as error:
                self._report.unreadable(error, group.path)
            else:
                missing.update(layout.group_dir_in(root, shard, shards) for shard in range(shards))
            for path in _files(group.path):
                self._done(path)
        for path in sorted(missing.difference(group.path for group in groups)):
            self._report.damaged(FileKind.LOG, path, 0, "the log of this shard is missing")

    def _log(self, group: layout.Group) -> int:
        """Checks the log of one shard. Returns the number of shards it was written under."""
        first = read_first_start(self._fs, group.path)
        if first is None:
            return 0
        part = next((part for part in self._parts or () if part.log_id == first.log_id), None)
        # The snapshot before the newest one goes on in files that the newest one covers.
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
            self._report.damaged(
                FileKind.LOG, group.path, 0, f"the snapshot goes on at {part.position}, where this log has nothing"
            )
        for parts in self._fallbacks:
            for older in parts:
                if older.log_id == first.log_id and not self._reaches(group, recovery.end, older.position):
                    self._report.note(
                        f"{group.path}: begins behind {older.position}: an older snapshot has become useless"
                    )
        if folding is not None:
            self._known |= folding.known()
            self._deleted_ids |= folding.deleted_ids
            self._copies.add(folding.state())
        self._report.notes += recovery.report
        current = read_current(self._fs, group.path)
        if recovery.end is not None and current not in (None, recovery.end.file_no):
            self._report.note(
                f"{group.path}: CURRENT names file {current}, the log goes on in file {recovery.end.file_no}"
            )
        return first.shards

    def _reaches(self, group: layout.Group, end: WalEnd | None, position: WalPosition) -> bool:
        first_no = min(layout.list_log_files(self._fs, group.path))
        return end is not None and first_no <= position.file_no and position <= WalPosition(end.file_no, end.offset)

    def _finished(self, last: RecoveredFile) -> None:
        """Reports bytes behind a file's last frame: nothing reads them, but something must have put them there."""
        offset, total_len, *_ = last.frames[-1]
        end = scan(last.buffer, offset + total_len, len(last.buffer)).end
        if used := used_bytes(bytes(last.buffer), end):
            self._report.note(f"{last.path}: {used} bytes from offset {end} on that are no part of the log")

    def _format(self) -> None:
        try:
            if not has_mark(self._fs, self._data_dir) and (problem := self._copies.problem(self._data_dir)):
                self._report.note(problem)
        except RefusedLog as refused:
            self._report.damaged(FileKind.FORMAT, refused.path, 0, str(refused))

    # -- segments

    def _topics(self) -> None:
        found = layout.discover_topics(self._fs, self._data_dir)
        for topic_id in sorted({*found, *(topic_id for topic_id, known in self._known.items() if known.segments)}):
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                self._topic(topic_id, directory)
            except OSError as error:
                self._report.unreadable(error, directory)

    def _topic(self, topic_id: int, directory: str) -> None:
        known = self._known.get(topic_id)
        names = layout.discover_segments(self._fs, directory)
        if known is None and self._parts is None:
            self._segments.of_themselves(directory)
        elif known is None:
            why = "the topic is deleted" if topic_id in self._deleted_ids else "the log knows no such topic"
            for name in names:
                self._report.note(f"{layout.segment_data_path(directory, *name)}: {why}")
        else:
            listed = {(info.first_seq, info.version) for info in known.segments}
            last_seq = max((info.last_seq for info in known.segments), default=0)
            for name in names:
                if name not in listed:
                    begun = name.first_seq > last_seq
                    why = "begun, and no checkpoint counts it yet" if begun else "counts for nothing any more"
                    self._report.note(f"{layout.segment_data_path(directory, *name)}: {why}")
            self._listed(topic_id, directory, known)
        for name in names:
            for path in layout.segment_paths(directory, *name).values():
                self._done(path)

    def _listed(self, topic_id: int, directory: str, known: Known) -> None:
        findings = len(self._report.damage)
        live = known.live_behind
        for info in known.segments:
            live += self._segments.listed(topic_id, directory, info, known.earliest_seq, known.deleted)
        # An index from before a deletion is whole in itself; nothing else repeats the deletions of a cold segment.
        if known.live is not None and live != known.live and len(self._report.damage) == findings:
            self._report.damaged(
                FileKind.SEGMENT,
                directory,
                0,
                f"{live} records live by its indexes and the log behind them, {known.live} by what the log counts: an"
                " index is of before, or behind, a deletion",
            )

    # -- transactions

    def _transactions(self) -> None:
        directory = layout.stages_dir(self._data_dir)
        for name in self._fs.listdir(directory) if self._fs.exists(directory) else ():
            path = os.path.join(directory, name)
            if stage_of_name(name) is not None:
                try:
                    decode_stage(read_all(self._fs, path))
                except StageDamagedError as damaged:
                    self._report.damaged(FileKind.STAGE, path, 0, str(damaged))
            self._done(path)
        directory = layout.sinks_dir(self._data_dir)
        for name in self._fs.listdir(directory) if self._fs.exists(directory) else ():
            path = os.path.join(directory, name)
            if is_sink_name(name):
                try:
                    sink = decode_sink(read_all(self._fs, path))
                except SinkDamagedError as damaged:
                    self._report.damaged(FileKind.SINK, path, 0, str(damaged))
                else:
                    if sink.pending:
                        self._report.note(
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
