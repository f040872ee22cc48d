"""The offline check of segments. It compares their files with each other, and with log and snapshot (`verify.py`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from enum import StrEnum

import msgspec

from topics.core.location import ENTRY_WORDS, LOCATION_DELETED
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.borrowed import ColdSource
from topics.storage.filesystem import FileSystem, read_all
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.segment import ENTRY_FLAGS_AT, ENTRY_LEN, IS_LIVE
from topics.storage.segment_reader import SegmentReader


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
    """One damage: the file `path` is wrong from `offset` (bytes) on."""

    kind: FileKind
    path: str
    offset: int
    reason: str


class Report(msgspec.Struct):
    """All findings of the check, and counts of what it read."""

    data_dir: str
    damage: list[DamageFinding] = []
    notes: list[str] = []
    log_frames: int = 0
    segments: int = 0
    segment_records: int = 0
    postings: int = 0
    snapshots: int = 0

    def damaged(self, kind: FileKind, path: str, reason: str, offset: int = 0) -> None:
        """Report committed bytes that differ from what was written."""
        self.damage.append(DamageFinding(kind, path, offset, reason))

    def unreadable(self, error: OSError, path: str) -> None:
        """Report a file, or something below `path`, that cannot be read."""
        self.damaged(FileKind.UNREADABLE, error.filename or path, error.strerror or str(error))

    def missing(self, kind: FileKind, path: str) -> None:
        """Report a file that does not exist."""
        self.damaged(kind, path, "the file is missing")

    def note(self, line: str) -> None:
        """Note something harmless: the next start cuts it off, or nobody needs it."""
        self.notes.append(line)


class SegmentCheck:
    """Checks segments. `cold` has the data of cold segments; data that it lacks are not checked."""

    def __init__(self, fs: FileSystem, cold: ColdSource | None, report: Report) -> None:
        self._fs = fs
        self._cold = cold
        self._report = report

    def listed(
        self, topic_id: int, directory: str, info: SegmentInfo, earliest_seq: int, deleted: Sequence[int]
    ) -> int:
        """Check a segment that log or snapshot list. `deleted` are deleted seqs (ascending) that the segment may not
        have marked yet. Return the number of its live records from `earliest_seq` on, 0 if its index cannot be read.
        """
        self._report.segments += 1
        try:
            idx = self._check_listed(topic_id, directory, info, deleted)
            return 0 if idx is None else _live(idx, info.first_seq, earliest_seq, deleted)
        except FileNotFoundError as error:
            self._report.missing(FileKind.SEGMENT, error.filename)
        except OSError as error:
            self._report.unreadable(error, directory)
        return 0

    def _check_listed(self, topic_id: int, directory: str, info: SegmentInfo, deleted: Sequence[int]) -> bytes | None:
        """Check the segment and return the committed bytes of its index; None if the index is too short."""
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
            reason = f"is of {ts[0]} to {ts[-1]}, the log says {info.first_ts} to {info.last_ts}"
            self._report.damaged(FileKind.SEGMENT, idx_path, reason)
        whole: SegmentReader | None = None
        here = deleted[bisect_left(deleted, info.first_seq) : bisect_left(deleted, info.last_seq + 1)]
        unmarked = None if info.flags & COLD else frozenset(here)
        reported: set[tuple[str, int]] = set()
        places = self._data_places(topic_id, directory, info)
        for defect in () if places else bare.damage(None, has_data=False):
            self._report.damaged(FileKind.SEGMENT, defect.path, defect.reason, defect.offset)
        for path, name_in_cold in places:
            reader = self._data(directory, info, idx, path, name_in_cold, unmarked, reported)
            whole = whole or reader
        if is_sealed:
            self._postings(directory, whole or bare, whole is not None and is_in_time, info.version)
        if info.flags & COLD and self._cold is not None and self._cold.has(layout.object_name(topic_id, *name)):
            self._copies(self._cold, topic_id, directory, name, idx)
        return idx

    def _data_places(self, topic_id: int, directory: str, info: SegmentInfo) -> list[tuple[str, str | None]]:
        """Return (path, name in the cold tier or None) of each place that must have the segment's data. Just after the
        segment became cold there are two such places.
        """
        name = (info.first_seq, info.version)
        hot_path = layout.segment_data_path(directory, *name)
        if not info.flags & COLD:
            return [(hot_path, None)]
        places: list[tuple[str, str | None]] = [(hot_path, None)] if self._fs.exists(hot_path) else []
        in_cold = layout.object_name(topic_id, *name)
        if self._cold is None or not self._cold.has(in_cold):
            self._report.note(f"{hot_path}: is in the cold directory, which was not looked at")
        else:
            places.append((self._cold.place(in_cold), in_cold))
        return places

    def _data(
        self,
        directory: str,
        info: SegmentInfo,
        idx: bytes,
        path: str,
        name_in_cold: str | None,
        unmarked: Container[int] | None,
        reported: set[tuple[str, int]],
    ) -> SegmentReader | None:
        """Check the data at one place. Return a reader of the segment with these data, None if they are damaged.
        `reported` has the damage of the index that is reported already.
        """
        try:
            data = self._committed(path, info.data_bytes, "of this segment", bool(info.flags & SEALED), name_in_cold)
        except FileNotFoundError:
            self._report.missing(FileKind.SEGMENT, path)
            return None
        except OSError as error:
            self._report.unreadable(error, path)
            return None
        if data is None:
            return None
        reader = SegmentReader(directory, info.first_seq, idx, data, info.version)
        whole = True
        for defect in reader.damage(unmarked):
            whole = False
            found = (path if defect.path == reader.data_path else defect.path, defect.offset)
            if found not in reported:
                self._report.damaged(FileKind.SEGMENT, found[0], defect.reason, defect.offset)
            if found[0] != path:
                reported.add(found)
        return reader if whole else None

    def _copies(self, cold: ColdSource, topic_id: int, directory: str, name: tuple[int, int], idx: bytes) -> None:
        """Compare index and tags in the cold tier with the originals here; only these have deletion marks."""
        tags_name, idx_name, _ = layout.object_names(topic_id, *name)
        for kind, in_cold, original_path in (
            (FileKind.SEGMENT, idx_name, layout.segment_idx_path(directory, *name)),
            (FileKind.POSTINGS, tags_name, layout.segment_tags_path(directory, *name)),
        ):
            path = cold.place(in_cold)
            try:
                copy = cold.read_range(in_cold, 0, cold.len(in_cold))
                original = idx if kind == FileKind.SEGMENT else read_all(self._fs, original_path)
            except FileNotFoundError as error:
                if error.filename == path:
                    self._report.missing(kind, path)
                continue
            except OSError as error:
                self._report.unreadable(error, path)
                continue
            at = _first_difference(copy, original, kind == FileKind.SEGMENT)
            if at is not None:
                self._report.damaged(kind, path, f"is no copy of {original_path}", at)

    def _committed(
        self, path: str, length: int, what: str, is_sealed: bool, name_in_cold: str | None = None
    ) -> bytes | None:
        """Read the committed bytes of a file, None if it is too short. An active segment may have more behind them."""
        if name_in_cold is None or self._cold is None:
            content = read_all(self._fs, path)
        else:
            content = self._cold.read_range(name_in_cold, 0, self._cold.len(name_in_cold))
        if len(content) < length:
            reason = f"ends there; {length} bytes are committed, {what}"
            self._report.damaged(FileKind.SEGMENT, path, reason, len(content))
            return None
        if len(content) > length:
            extra = f"{len(content) - length} bytes from offset {length} on"
            if is_sealed:
                self._report.damaged(FileKind.SEGMENT, path, f"{extra}, but the segment is sealed", length)
            else:
                self._report.note(f"{path}: {extra}, which no checkpoint counts yet")
        return content[:length]

    def unlisted(self, directory: str) -> None:
        """Check all segments of a topic when neither log nor snapshot gives committed lengths: each must be whole."""
        for name, parts in layout.discover_segments(self._fs, directory).items():
            self._report.segments += 1
            try:
                idx = read_all(self._fs, layout.segment_idx_path(directory, *name))
                data = read_all(self._fs, layout.segment_data_path(directory, *name))
            except FileNotFoundError as error:
                self._report.missing(FileKind.SEGMENT, error.filename)
                continue
            except OSError as error:
                self._report.unreadable(error, directory)
                continue
            reader = SegmentReader(directory, name.first_seq, idx, data, name.version)
            self._report.segment_records += reader.records
            defects = list(reader.damage(None))
            for defect in defects:
                self._report.damaged(FileKind.SEGMENT, defect.path, defect.reason, defect.offset)
            if "tags" in parts:
                self._postings(directory, reader, not defects, name.version)

    def _postings(self, directory: str, segment: SegmentReader, segment_is_whole: bool, version: int) -> None:
        self._report.postings += 1
        path = layout.segment_tags_path(directory, segment.first_seq, version)
        try:
            postings = Postings(path, read_all(self._fs, path))
        except CorruptPostings as defect:
            self._report.damaged(FileKind.POSTINGS, path, defect.reason, defect.offset)
            return
        if reason := postings.misplaced(directory, segment.first_seq, segment.records):
            self._report.damaged(FileKind.POSTINGS, path, reason)
        elif segment_is_whole:
            expected: dict[bytes, list[int]] = {}
            for seq, tag in segment.tagged():
                expected.setdefault(tag, []).append(seq)
            if list(postings.items()) != sorted(expected.items()):
                reason = "does not list the tags that the segment's records have"
                self._report.damaged(FileKind.POSTINGS, path, reason)


def _live(idx: bytes, first_seq: int, earliest_seq: int, deleted: Sequence[int]) -> int:
    """Count the live records of an index, from `earliest_seq` on and without `deleted` ones."""
    is_live = idx[ENTRY_FLAGS_AT::ENTRY_LEN].translate(IS_LIVE)
    start = max(0, earliest_seq - first_seq)
    live = is_live.count(1, start)
    here = deleted[bisect_left(deleted, first_seq + start) : bisect_left(deleted, first_seq + len(is_live))]
    return live - sum([is_live[seq - first_seq] for seq in here])


def _first_difference(copy: bytes, original: bytes, is_idx: bool) -> int | None:
    """Return the first offset at which a copy differs from its original; marks of later deletions do not count."""
    if copy == original:
        return None
    for at, (copied, there) in enumerate(zip(copy, original, strict=False)):
        was_deleted = is_idx and at % ENTRY_LEN == ENTRY_FLAGS_AT and copied | LOCATION_DELETED == there
        if copied != there and not was_deleted:
            return at
    return None if len(copy) == len(original) else min(len(copy), len(original))
