"""The offline check: it reads everything in a data directory and compares all bytes that repeat each other.

The check changes nothing, and runs only while no service does, because a service writes. It reports *damage*: committed
bytes that differ from what was written. It makes *notes* of harmless leftovers of a killed process, which the next
start cuts off: a torn tail, or appended records without a mark. `segment_check.py` checks segments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from topics.core.fold import FoldError
from topics.storage import layout
from topics.storage.borrowed import ColdSource, open_cold
from topics.storage.filesystem import FileSystem, ReadOnlyFileSystem, boot_id, names_in, read_all
from topics.storage.follow_note import read_note
from topics.storage.frame import scan
from topics.storage.lock import inspecting
from topics.storage.log_fold import LoggedTopic, OfflineFold
from topics.storage.logfile import (
    NotALogFile,
    RefusedLog,
    WalEnd,
    WalIdentity,
    WalPosition,
    is_at_work,
    read_current,
    read_first_start,
)
from topics.storage.recovery import CorruptLog, RecoveredFile, Recovery, Start, used_bytes
from topics.storage.segment_check import FileKind, Report, SegmentCheck
from topics.storage.service_id import archive_note, epoch_masks, known_id
from topics.storage.snapshot import (
    HEADER_LEN,
    BadSnapshot,
    ShardPart,
    UnknownSnapshotVersion,
    decode_parts,
    present_log_ids,
    read_snapshot,
)
from topics.storage.txn_files import TxnFileDamagedError, decode_sink, decode_stage, is_sink_name, stage_of_name
from topics.storage.upgrade import RoutedCopies, has_mark


class NotADataDir(Exception):  # noqa: N818 — named for what it is
    """The directory has nothing that a service would have made."""


def verify(data_dir: str, progress: Callable[[int, int], None], cold_place: str | None = None) -> Report:
    """Check a data directory. `progress` gets (bytes done, bytes in all). `cold_place` is the directory or the URL of
    the data of cold segments; without it they are not checked, and a note says so. Data borrowed from an archive are
    read there. Raise DataDirLocked if a service runs, NotADataDir.
    """
    if not any(map(os.path.isdir, (layout.wal_dir(data_dir), layout.topics_dir(data_dir), layout.meta_dir(data_dir)))):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(data_dir)  # raises PermissionError if this user cannot tell
        raise NotADataDir(f"{data_dir} is not a data directory: it holds neither logs nor segments nor snapshots")
    with inspecting(data_dir):
        return _Check(data_dir, progress, cold_place).run()


class _Check:
    def __init__(self, data_dir: str, progress: Callable[[int, int], None], cold_place: str | None) -> None:
        self._fs: FileSystem = ReadOnlyFileSystem()
        self._data_dir = data_dir
        self._root = layout.wal_dir(data_dir)
        if self._fs.exists(old_root := os.path.join(data_dir, layout.OLD_WAL_NAME)) and not self._fs.exists(self._root):
            self._root = old_root  # half swapped: the next start renames it back (`reshard.py`)
        self._progress = progress
        self._report = Report(data_dir)
        self._segments = SegmentCheck(self._fs, self._cold(cold_place), self._report)
        self._parts: list[ShardPart] | None = None
        """Parts of the snapshot that counts; None if there are snapshots and none can be used."""
        self._fallbacks: list[list[ShardPart]] = []
        """Parts of older snapshots that go with these logs as well."""
        self._logged: dict[int, LoggedTopic] = {}
        self._deleted_ids: set[int] = set()
        self._copies = RoutedCopies()
        self._total_bytes = max(1, sum(map(_size_of, _files(data_dir))))
        self._done_bytes = 0

    def _cold(self, cold_place: str | None) -> ColdSource | None:
        try:
            return open_cold(self._fs, self._data_dir, cold_place)
        except OSError as error:
            self._report.unreadable(error, self._data_dir)
        return None

    def run(self) -> Report:
        # The order matters: snapshots say where logs begin, and both say how much of a segment is committed.
        for step in (self._snapshots, self._logs, self._format, self._topics, self._transactions):
            try:
                step()
            except OSError as error:
                self._report.unreadable(error, self._data_dir)
        self._progress(self._total_bytes, self._total_bytes)
        return self._report

    def _done(self, path: str) -> None:
        self._done_bytes += _size_of(path)
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)

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
                self._report.damaged(FileKind.SNAPSHOT, path, bad.reason, bad.offset)
            except msgspec.DecodeError as error:
                self._report.damaged(FileKind.SNAPSHOT, path, f"its body does not decode: {error}", HEADER_LEN)
            except UnknownSnapshotVersion as unknown:
                self._report.damaged(FileKind.SNAPSHOT, path, str(unknown))
            except OSError as error:
                self._report.unreadable(error, path)
            self._done(path)
        if not self._report.snapshots:
            self._parts = []
        elif found:
            log_ids = present_log_ids(self._fs, self._root)
            # The newest one that goes with these logs counts (`reshard.py`).
            fitting = [parts for parts in found if {part.log_id for part in parts} <= log_ids]
            if fitting:
                *self._fallbacks, self._parts = fitting
            else:
                missing = ", ".join(sorted(f"{part.log_id:016x}" for part in found[-1] if part.log_id not in log_ids))
                reason = f"the newest snapshot goes on in logs that are not there: {missing}"
                self._report.damaged(FileKind.LOG, self._root, reason)

    # -- logs

    def _logs(self) -> None:
        for name in (layout.NEW_WAL_NAME, layout.OLD_WAL_NAME):
            path = os.path.join(self._data_dir, name)
            if self._fs.exists(path):
                self._report.note(f"{path}: a change of the shard count was interrupted; the next start completes it")
        groups = layout.discover_groups(self._fs, self._root)
        missing: set[str] = set()
        for group in groups:
            try:
                shards = self._log(group)
            except CorruptLog as corrupt:
                self._corrupt(corrupt)
            except RefusedLog as refused:
                self._report.damaged(FileKind.LOG, refused.path, str(refused))
            except NotALogFile as error:
                path = layout.log_path(group.path, layout.list_log_files(self._fs, group.path)[0])
                self._report.damaged(FileKind.LOG, path, f"not a log file: {error}")
            except (FoldError, msgspec.DecodeError) as error:
                self._report.damaged(FileKind.LOG, group.path, str(error))
            except OSError as error:
                self._report.unreadable(error, group.path)
            else:
                missing.update(layout.group_dir_in(self._root, shard, shards) for shard in range(shards))
            for path in _files(group.path):
                self._done(path)
        for path in sorted(missing.difference(group.path for group in groups)):
            self._report.damaged(FileKind.LOG, path, "the log of this shard is missing")

    def _corrupt(self, log: CorruptLog) -> None:
        self._report.damaged(FileKind.LOG, log.path, f"{log.reason}; behind it: {log.lost}", log.offset)

    def _log(self, group: layout.Group, from_snapshot: bool = False) -> int:
        """Check the log of one shard; return the number of shards it was written under."""
        first = read_first_start(self._fs, group.path)
        if first is None:
            list(Recovery(self._fs, group.path, WalIdentity(group.shard, 1, boot_id()), start="lowest"))  # raises
            return 0
        part = next((part for part in self._parts or () if part.log_id == first.log_id), None)
        # The fallback snapshot needs log files that the newest snapshot already covers.
        start: Start = None if self._parts is not None and part is None else "lowest"
        if from_snapshot and part is not None:
            start = part.position
        fold = None if self._parts is None else OfflineFold(part)
        recovery = Recovery(self._fs, group.path, WalIdentity(group.shard, first.shards, boot_id()), start=start)
        last: RecoveredFile | None = None
        try:
            for batch in recovery:
                if last is not None and last.file_no != batch.file_no:
                    self._finished(last)
                last = batch
                self._report.log_frames += len(batch.frames)
                if fold is not None:
                    fold.add(batch)
        except CorruptLog as corrupt:
            if part is None or from_snapshot:
                raise
            # Perhaps only the older snapshot needs the damaged place: check also what a start reads behind it.
            shards = self._log(group, from_snapshot=True)
            self._corrupt(corrupt)
            return shards
        if part is not None and not self._reaches(group, recovery.end, part.position):
            reason = f"the snapshot goes on at {part.position}, where this log has nothing"
            self._report.damaged(FileKind.LOG, group.path, reason)
        for older in (older for parts in self._fallbacks for older in parts if older.log_id == first.log_id):
            if not self._reaches(group, recovery.end, older.position):
                self._report.note(f"{group.path}: begins behind {older.position}: an older snapshot has become useless")
        if fold is not None:
            self._logged |= fold.topics(recovery.has_end)
            self._deleted_ids |= fold.deleted_ids
            self._copies.add(fold.state())
        self._report.notes += recovery.report
        current = read_current(self._fs, group.path)
        if recovery.end is not None and current not in (None, recovery.end.file_no):
            self._report.note(
                f"{group.path}: CURRENT names file {current}, the log goes on in file {recovery.end.file_no}"
            )
        noted = self._fs.exists(os.path.join(group.path, layout.COMMITTED_NAME)) and not is_at_work(
            self._fs, group.path
        )
        if noted and not recovery.has_end:
            self._report.note(
                f"{group.path}: the log does not reach the end that COMMITTED names: a start takes the last records of "
                f"topics for lost"
            )
        return first.shards

    def _reaches(self, group: layout.Group, end: WalEnd | None, position: WalPosition) -> bool:
        first_no = min(layout.list_log_files(self._fs, group.path))
        return end is not None and first_no <= position.file_no and position <= WalPosition(end.file_no, end.offset)

    def _finished(self, last: RecoveredFile) -> None:
        """Note bytes behind a file's last frame: nobody reads them, but they should be zeros."""
        offset, total_len, *_ = last.frames[-1]
        end = scan(last.buffer, offset + total_len, len(last.buffer)).end
        if used := used_bytes(bytes(last.buffer), end):
            self._report.note(f"{last.path}: {used} bytes from offset {end} on that are no part of the log")

    def _format(self) -> None:
        try:
            if not has_mark(self._fs, self._data_dir) and (problem := self._copies.problem()):
                self._report.note(f"{self._data_dir}: {problem}")
        except RefusedLog as refused:
            self._report.damaged(FileKind.FORMAT, refused.path, str(refused))
        for read in (known_id, epoch_masks, archive_note, read_note):
            try:
                read(self._fs, self._data_dir)
            except OSError as error:
                self._report.unreadable(error, self._data_dir)

    # -- segments

    def _topics(self) -> None:
        found = layout.discover_topics(self._fs, self._data_dir)
        for topic_id in sorted({*found, *(topic_id for topic_id, topic in self._logged.items() if topic.segments)}):
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                self._topic(topic_id, directory)
            except OSError as error:
                self._report.unreadable(error, directory)

    def _topic(self, topic_id: int, directory: str) -> None:
        logged = self._logged.get(topic_id)
        names = layout.discover_segments(self._fs, directory)
        if logged is None and self._parts is None:
            self._segments.unlisted(directory)
        elif logged is None:
            why = "the topic is deleted" if topic_id in self._deleted_ids else "the log knows no such topic"
            for name in names:
                self._report.note(f"{layout.segment_data_path(directory, *name)}: {why}")
        else:
            listed = {(info.first_seq, info.version) for info in logged.segments}
            last_seq = max((info.last_seq for info in logged.segments), default=0)
            for name in names:
                if name not in listed:
                    begun = name.first_seq > last_seq
                    why = "begun, and no checkpoint counts it yet" if begun else "no checkpoint counts it any more"
                    self._report.note(f"{layout.segment_data_path(directory, *name)}: {why}")
            self._listed(topic_id, directory, logged)
        for name in names:
            for path in layout.segment_paths(directory, *name).values():
                self._done(path)

    def _listed(self, topic_id: int, directory: str, logged: LoggedTopic) -> None:
        findings = len(self._report.damage)
        live = logged.live_behind
        for info in logged.segments:
            live += self._segments.listed(topic_id, directory, info, logged.earliest_seq, logged.deleted)
        # Only the counts show an index from before a deletion: nothing else repeats the deletions of a cold segment.
        may_differ = logged.live is None or (live < logged.live and not logged.has_end)
        if live != logged.live and not may_differ and len(self._report.damage) == findings:
            reason = (
                f"{live} records live by its indexes and the log behind them, {logged.live} by what the log counts: an"
                " index is older or newer than a deletion"
            )
            self._report.damaged(FileKind.SEGMENT, directory, reason)

    # -- transactions

    def _transactions(self) -> None:
        for kind, directory in (
            (FileKind.STAGE, layout.stages_dir(self._data_dir)),
            (FileKind.SINK, layout.sinks_dir(self._data_dir)),
        ):
            for name in names_in(self._fs, directory):
                path = os.path.join(directory, name)
                try:
                    self._transaction(kind, name, path)
                except TxnFileDamagedError as damaged:
                    self._report.damaged(kind, path, str(damaged))
                except OSError as error:
                    self._report.unreadable(error, path)
                self._done(path)

    def _transaction(self, kind: FileKind, name: str, path: str) -> None:
        if kind == FileKind.STAGE and stage_of_name(name) is not None:
            decode_stage(read_all(self._fs, path))
        if kind == FileKind.SINK and is_sink_name(name):
            sink = decode_sink(read_all(self._fs, path), name)
            if sink.pending:
                self._report.note(
                    f"{path}: batch {sink.batch} of sink {sink.sink!r} is decided, the next start ends it"
                )


def _files(root: str) -> Iterator[str]:
    for directory, _, names in os.walk(root):
        for name in names:
            yield os.path.join(directory, name)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # the size is used for progress only
