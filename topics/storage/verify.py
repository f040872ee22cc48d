"""The offline check: every byte that a service left in its data directory, compared with every other that repeats it.

Nothing is changed and no service is needed; while one runs there is nothing to check, because it writes. Two kinds of
things are found. *Damage*: bytes that were committed and are not what was written. *Notes*: what a killed process may
leave, a torn tail or an append before its mark, and which the next start cuts off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

import msgspec

from topics.storage import layout
from topics.storage.damage import used_bytes
from topics.storage.filesystem import FileSystem, boot_id, read_all
from topics.storage.frame import FrameType, scan
from topics.storage.lock import inspecting
from topics.storage.logfile import NotALogFile, RefusedLog, WalIdentity, WalPosition, read_current, read_first_start
from topics.storage.look_only import LookOnlyFileSystem
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.recovery import CorruptLog, RecoveredFile, Start, recover_group
from topics.storage.segment import ENTRY, ENTRY_LEN, SegmentReader
from topics.storage.sink_file import SinkDamagedError, decode_sink, is_sink_name
from topics.storage.snapshot import HEADER_LEN, BadSnapshot, UnknownSnapshotVersion, read_snapshot
from topics.storage.stage_file import StageDamagedError, decode_stage, stage_of_name


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


class SnapshotFacts(NamedTuple):
    """What a check needs of a snapshot's body, the format of which is not this module's.

    `positions`: log id → where reading that log begins; one that is not in it is read from its first byte.
    `checkpointed`: topic id → the last seq that is in a segment for good.
    """

    positions: Mapping[int, WalPosition]
    checkpointed: Mapping[int, int]


class NotADataDir(Exception):  # noqa: N818 — named for what it is
    """There is nothing in the directory that a service would have made."""


def verify(
    data_dir: str,
    progress: Callable[[float], None],
    facts_of: Callable[[bytes], SnapshotFacts] | None = None,
) -> Report:
    """Checks a data directory; `progress` hears of the share that is done, 0 to 1.

    `facts_of` reads a snapshot's body. Without it a log may begin with any file when there is a snapshot, what is
    checkpointed is known from the log's marks only, and segments of other topics must be whole to their last byte.
    Raises DataDirLocked when a service runs, NotADataDir.
    """
    if not any(map(os.path.isdir, (layout.wal_dir(data_dir), layout.topics_dir(data_dir), layout.meta_dir(data_dir)))):
        raise NotADataDir(f"{data_dir} is not a data directory: it holds neither logs nor segments nor snapshots")
    with inspecting(data_dir):
        return _Check(data_dir, progress, facts_of).run()


class _Check:
    def __init__(
        self,
        data_dir: str,
        progress: Callable[[float], None],
        facts_of: Callable[[bytes], SnapshotFacts] | None,
    ) -> None:
        self._fs: FileSystem = LookOnlyFileSystem()
        self._data_dir = data_dir
        self._progress = progress
        self._facts_of = facts_of
        self._report = Report(data_dir)
        self._facts: SnapshotFacts | None = None
        """None: there are snapshots, and what they say is not known."""
        self._marks: dict[int, int] = {}
        """Topic id → last seq that is in a segment for good."""
        self._deleting: set[int] = set()
        """Topics with deletions in the log, which may not be marked in their segments yet."""
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
        known: list[SnapshotFacts] = []
        for number in layout.list_snapshots(self._fs, self._data_dir):
            path = layout.snapshot_path(self._data_dir, number)
            self._report.snapshots += 1
            try:
                body = read_snapshot(self._fs, self._data_dir, number)
                if self._facts_of is not None:
                    known.append(self._facts_of(body))
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
            self._facts = SnapshotFacts({}, {})
        elif known:
            log_ids = self._log_ids()
            # The newest one that goes with these logs counts (`reshard.py`).
            fitting = [facts for facts in known if facts.positions.keys() <= log_ids]
            if not fitting:
                missing = ", ".join(f"{log_id:016x}" for log_id in sorted(known[-1].positions.keys() - log_ids))
                root = layout.wal_dir(self._data_dir)
                self._damage(Kind.LOG, root, 0, f"the newest snapshot goes on in logs that are not there: {missing}")
            self._facts = (fitting or known)[-1]
            self._marks.update(self._facts.checkpointed)

    def _log_ids(self) -> set[int]:
        found: set[int] = set()
        for group in layout.discover_groups(self._fs, layout.wal_dir(self._data_dir)):
            with suppress(NotALogFile, RefusedLog, OSError):  # the check of that log says so
                start = read_first_start(self._fs, group.path)
                if start is not None:
                    found.add(start.log_id)
        return found

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
        start: Start = "lowest" if self._facts is None else self._facts.positions.get(first.log_id)
        recovery = recover_group(self._fs, group.path, WalIdentity(group.shard, first.shards, boot_id()), start=start)
        last: RecoveredFile | None = None
        for batch in recovery:
            if last is not None and last.file_no != batch.file_no:
                self._finished(last)
            last = batch
            self._report.log_frames += len(batch.frames)
            for _, _, type_, _, topic_id, seq, *_ in batch.frames:
                if type_ == FrameType.CHECKPOINT_MARK:
                    self._marks[topic_id] = max(seq, self._marks.get(topic_id, 0))
                elif type_ == FrameType.DELETE:
                    self._deleting.add(topic_id)
        self._report.notes += recovery.report
        current = read_current(self._fs, group.path)
        if recovery.end is not None and current not in (None, recovery.end.file_no):
            self._note(f"{group.path}: CURRENT names file {current}, the log goes on in file {recovery.end.file_no}")
        return first.shards

    def _finished(self, last: RecoveredFile) -> None:
        """Nothing reads what is behind a file's last frame, but something must have put it there."""
        offset, total_len, *_ = last.frames[-1]
        end = scan(last.buffer, offset + total_len, len(last.buffer)).end
        if used := used_bytes(bytes(last.buffer), end):
            self._note(f"{last.path}: {used} bytes from offset {end} on that are no part of the log")

    # -- segments

    def _topics(self) -> None:
        for topic_id in layout.discover_topics(self._fs, self._data_dir):
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                self._topic(topic_id, directory)
            except OSError as error:
                self._unreadable(error, directory)

    def _topic(self, topic_id: int, directory: str) -> None:
        mark = self._marks.get(topic_id, None if self._facts is None else 0)
        end_seq = 0
        segments = layout.discover_segments(self._fs, directory)
        for first_seq, parts in segments.items():
            if mark is not None and first_seq > mark:
                self._note(f"{layout.segment_data_path(directory, first_seq)}: begun, and no checkpoint counts it yet")
                continue
            if first_seq < end_seq:
                path = layout.segment_idx_path(directory, first_seq)
                self._damage(Kind.SEGMENT, path, 0, f"begins before the end of the segment before it, {end_seq - 1}")
            try:
                end_seq = max(end_seq, self._segment(topic_id, directory, first_seq, "tags" in parts, mark))
            except FileNotFoundError as error:
                self._damage(Kind.SEGMENT, error.filename, 0, "the file is missing")
            except OSError as error:
                self._unreadable(error, directory)
            for path_of in (layout.segment_data_path, layout.segment_idx_path, layout.segment_tags_path):
                self._done(path_of(directory, first_seq))

    def _segment(self, topic_id: int, directory: str, first_seq: int, sealed: bool, mark: int | None) -> int:
        """Returns the seq behind its last."""
        self._report.segments += 1
        idx_path = layout.segment_idx_path(directory, first_seq)
        data_path = layout.segment_data_path(directory, first_seq)
        idx, data = read_all(self._fs, idx_path), read_all(self._fs, data_path)
        if mark is not None and not sealed:
            committed = mark - first_seq + 1
            if committed > len(idx) // ENTRY_LEN:
                self._damage(Kind.SEGMENT, idx_path, len(idx), f"ends there; it is committed up to seq {mark}")
            else:
                idx, data = self._committed(idx_path, idx, committed, data_path, data)
        reader = SegmentReader(directory, first_seq, idx, data)
        self._report.segment_records += reader.records
        whole = True
        for defect in reader.damage(topic_id in self._deleting):
            whole = False
            self._damage(Kind.SEGMENT, defect.path, defect.offset, defect.reason)
        if sealed:
            self._postings(directory, reader, whole)
        return reader.last_seq + 1

    def _committed(self, idx_path: str, idx: bytes, records: int, data_path: str, data: bytes) -> tuple[bytes, bytes]:
        """Both files without what was being appended when the writer stopped."""
        idx_end, data_end = records * ENTRY_LEN, 0
        for at in range(idx_end - ENTRY_LEN, -1, -ENTRY_LEN):
            offset, length, _, _ = ENTRY.unpack_from(idx, at)
            if length:
                data_end = offset + length
                break
        for path, content, end in ((idx_path, idx, idx_end), (data_path, data, data_end)):
            if len(content) > end:
                self._note(f"{path}: {len(content) - end} bytes from offset {end} on, which no checkpoint counts yet")
        return idx[:idx_end], data[:data_end]

    def _postings(self, directory: str, segment: SegmentReader, segment_is_whole: bool) -> None:
        self._report.postings += 1
        path = layout.segment_tags_path(directory, segment.first_seq)
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
