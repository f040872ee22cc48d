"""The offline check: every byte that a service left in its data directory, compared with every other that repeats it.

Nothing is changed and no service is needed; while one runs there is nothing to check, because it writes. Two kinds of
things are found. *Damage*: bytes that were committed and are not what was written. *Notes*: what a killed process may
leave, a torn tail or an append before its mark, and which the next start cuts off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec

from topics.core.fold import FoldError
from topics.storage import layout
from topics.storage.damage import used_bytes
from topics.storage.filesystem import FileSystem, boot_id, read_all
from topics.storage.folding import Folding, Known
from topics.storage.format_mark import has_mark
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
from topics.storage.recovery import CorruptLog, RecoveredFile, Start, recover_group
from topics.storage.sink_file import SinkDamagedError, decode_sink, is_sink_name
from topics.storage.snapshot import HEADER_LEN, BadSnapshot, UnknownSnapshotVersion, read_snapshot
from topics.storage.stage_file import StageDamagedError, decode_stage, stage_of_name
from topics.storage.state import ShardPart, decode_parts, present_log_ids
from topics.storage.upgrade import RoutedCopies
from topics.storage.verify_report import Kind, Report
from topics.storage.verify_segments import SegmentCheck


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
        self._report = Report(data_dir)
        self._segments = SegmentCheck(self._fs, cold_dir, self._report)
        self._parts: list[ShardPart] | None = None
        """Of the snapshot that counts; None: there are some, and none will do."""
        self._fallbacks: list[list[ShardPart]] = []
        """Older ones that go with these logs as well."""
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
                self._report.damaged(Kind.SNAPSHOT, path, bad.offset, bad.reason)
            except msgspec.DecodeError as error:
                self._report.damaged(Kind.SNAPSHOT, path, HEADER_LEN, f"its body does not decode: {error}")
            except UnknownSnapshotVersion as unknown:
                self._report.damaged(Kind.SNAPSHOT, path, 0, str(unknown))
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
                    Kind.LOG, root, 0, f"the newest snapshot goes on in logs that are not there: {missing}"
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
                    Kind.LOG, corrupt.path, corrupt.offset, f"{corrupt.reason}; behind it: {corrupt.lost}"
                )
            except RefusedLog as refused:
                self._report.damaged(Kind.LOG, refused.path, 0, str(refused))
            except NotALogFile as error:
                self._report.damaged(Kind.LOG, group.path, 0, f"not a log: {error}")
            except FoldError as error:
                self._report.damaged(Kind.LOG, group.path, 0, str(error))
            except OSError as error:
                self._report.unreadable(error, group.path)
            else:
                missing.update(layout.group_dir_in(root, shard, shards) for shard in range(shards))
            for path in _files(group.path):
                self._done(path)
        for path in sorted(missing.difference(group.path for group in groups)):
            self._report.damaged(Kind.LOG, path, 0, "the log of this shard is missing")

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
            self._report.damaged(
                Kind.LOG, group.path, 0, f"the snapshot goes on at {part.position}, where this log has nothing"
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
        """Nothing reads what is behind a file's last frame, but something must have put it there."""
        offset, total_len, *_ = last.frames[-1]
        end = scan(last.buffer, offset + total_len, len(last.buffer)).end
        if used := used_bytes(bytes(last.buffer), end):
            self._report.note(f"{last.path}: {used} bytes from offset {end} on that are no part of the log")

    def _format(self) -> None:
        try:
            if not has_mark(self._fs, self._data_dir) and (problem := self._copies.problem(self._data_dir)):
                self._report.note(problem)
        except RefusedLog as refused:
            self._report.damaged(Kind.FORMAT, refused.path, 0, str(refused))

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
            for path_of in (layout.segment_data_path, layout.segment_idx_path, layout.segment_tags_path):
                self._done(path_of(directory, *name))

    def _listed(self, topic_id: int, directory: str, known: Known) -> None:
        findings = len(self._report.damage)
        live = known.live_behind
        for info in known.segments:
            live += self._segments.listed(topic_id, directory, info, known.earliest_seq, known.deleted)
        # An index of before a deletion is whole in itself; of a cold segment nothing else repeats what it says.
        if known.live is not None and live != known.live and len(self._report.damage) == findings:
            self._report.damaged(
                Kind.SEGMENT,
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
                    self._report.damaged(Kind.STAGE, path, 0, str(damaged))
            self._done(path)
        directory = layout.sinks_dir(self._data_dir)
        for name in self._fs.listdir(directory) if self._fs.exists(directory) else ():
            path = os.path.join(directory, name)
            if is_sink_name(name):
                try:
                    sink = decode_sink(read_all(self._fs, path))
                except SinkDamagedError as damaged:
                    self._report.damaged(Kind.SINK, path, 0, str(damaged))
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
