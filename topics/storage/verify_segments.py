"""The offline check of segments: their files against each other, and against what log and snapshot say of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, LOCATION_GONE
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.filesystem import FileSystem, read_all
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.segment import ENTRY_FLAGS_AT, ENTRY_LEN
from topics.storage.segment_reader import SegmentReader
from topics.storage.verify_report import Kind, Report

_LIVE_TABLE: Final = bytes(0 if flags & LOCATION_GONE else 1 for flags in range(256))


class SegmentCheck:
    """`cold_dir` is where the data of cold segments are; None: they are not looked at."""

    def __init__(self, fs: FileSystem, cold_dir: str | None, report: Report) -> None:
        self._fs = fs
        self._cold_dir = cold_dir
        self._report = report

    def listed(
        self, topic_id: int, directory: str, info: SegmentInfo, earliest_seq: int, deleted: Sequence[int]
    ) -> int:
        """A segment that log or snapshot have; `deleted`: what of its topic the log has deleted (ascending) and
        it may not have marked yet.

        Returns how many of its records live from `earliest_seq` on; 0 when its index cannot be read.
        """
        self._report.segments += 1
        try:
            idx = self._check_listed(topic_id, directory, info, bool(deleted))
        except FileNotFoundError as error:
            self._report.damaged(Kind.SEGMENT, error.filename, 0, "the file is missing")
        except OSError as error:
            self._report.unreadable(error, directory)
        else:
            if idx is not None:
                return _live(idx, info.first_seq, earliest_seq, deleted)
        return 0

    def _check_listed(self, topic_id: int, directory: str, info: SegmentInfo, is_deleting: bool) -> bytes | None:
        """Its index, as far as it is committed."""
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
                Kind.SEGMENT, idx_path, 0, f"is of {ts[0]} to {ts[-1]}, the log says {info.first_ts} to {info.last_ts}"
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
        """Where its data have to be right: for a while after a segment has become cold, in both directories."""
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
        """The segment with the data at that place, None when not all of it is right; `said` is what was said of its
        index already.
        """
        try:
            data = self._committed(path, info.data_bytes, "of this segment", bool(info.flags & SEALED))
        except FileNotFoundError:
            self._report.damaged(Kind.SEGMENT, path, 0, "the file is missing")
            return None
        if data is None:
            return None
        reader = SegmentReader(directory, info.first_seq, idx, data, info.version)
        whole = True
        for defect in reader.damage(is_deleting or bool(info.flags & COLD)):
            whole = False
            found = (path if defect.path == reader.data_path else defect.path, defect.offset)
            if found not in said:
                self._report.damaged(Kind.SEGMENT, *found, defect.reason)
            if found[0] != path:
                said.add(found)
        return reader if whole else None

    def _copies(self, cold: str, directory: str, name: tuple[int, int], idx: bytes) -> None:
        """What lies beside cold data is what it was copied from, but for deletions: those are marked here alone."""
        for kind, path_of in ((Kind.SEGMENT, layout.segment_idx_path), (Kind.POSTINGS, layout.segment_tags_path)):
            path = path_of(cold, *name)
            try:
                copy = read_all(self._fs, path)
                original = idx if kind == Kind.SEGMENT else read_all(self._fs, path_of(directory, *name))
            except FileNotFoundError as error:
                if error.filename == path:
                    self._report.damaged(kind, path, 0, "the file is missing")
                continue
            at = _first_difference(copy, original, kind == Kind.SEGMENT)
            if at is not None:
                self._report.damaged(kind, path, at, f"is no copy of {path_of(directory, *name)}")

    def _committed(self, path: str, length: int, what: str, is_sealed: bool) -> bytes | None:
        """A file without what was being appended when the writer stopped; None when it is shorter than it should be."""
        content = read_all(self._fs, path)
        if len(content) < length:
            self._report.damaged(Kind.SEGMENT, path, len(content), f"ends there; {length} bytes are committed, {what}")
            return None
        if len(content) > length:
            extra = f"{len(content) - length} bytes from offset {length} on"
            if is_sealed:
                self._report.damaged(Kind.SEGMENT, path, length, f"{extra}, but the segment is sealed")
            else:
                self._report.note(f"{path}: {extra}, which no checkpoint counts yet")
        return content[:length]

    def of_themselves(self, directory: str) -> None:
        """Nothing says what is committed: a segment must be whole to its last byte."""
        for name, parts in layout.discover_segments(self._fs, directory).items():
            self._report.segments += 1
            try:
                idx = read_all(self._fs, layout.segment_idx_path(directory, *name))
                data = read_all(self._fs, layout.segment_data_path(directory, *name))
            except FileNotFoundError as error:
                self._report.damaged(Kind.SEGMENT, error.filename, 0, "the file is missing")
                continue
            reader = SegmentReader(directory, name.first_seq, idx, data, name.version)
            self._report.segment_records += reader.records
            whole = True
            for defect in reader.damage(True):
                whole = False
                self._report.damaged(Kind.SEGMENT, defect.path, defect.offset, defect.reason)
            if "tags" in parts:
                self._postings(directory, reader, whole, name.version)

    def _postings(self, directory: str, segment: SegmentReader, segment_is_whole: bool, version: int) -> None:
        self._report.postings += 1
        path = layout.segment_tags_path(directory, segment.first_seq, version)
        try:
            postings = Postings(path, read_all(self._fs, path))
        except CorruptPostings as defect:
            self._report.damaged(Kind.POSTINGS, path, defect.offset, defect.reason)
            return
        if (postings.first_seq, postings.records) != (segment.first_seq, segment.records):
            self._report.damaged(
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
                self._report.damaged(Kind.POSTINGS, path, 0, "does not list the tags that the segment's records have")


def _live(idx: bytes, first_seq: int, earliest_seq: int, deleted: Sequence[int]) -> int:
    """How many entries of an index are of records that live, from `earliest_seq` on."""
    is_live = idx[ENTRY_FLAGS_AT::ENTRY_LEN].translate(_LIVE_TABLE)
    start = max(0, earliest_seq - first_seq)
    live = is_live.count(1, start)
    here = deleted[bisect_left(deleted, first_seq + start) : bisect_left(deleted, first_seq + len(is_live))]
    return live - sum([is_live[seq - first_seq] for seq in here])


def _first_difference(copy: bytes, original: bytes, is_idx: bool) -> int | None:
    """Where a copy is not what it was made of. In an index, records that were deleted since are none."""
    if copy == original:
        return None
    for at, (copied, there) in enumerate(zip(copy, original, strict=False)):
        was_deleted = is_idx and at % ENTRY_LEN == ENTRY_FLAGS_AT and copied | LOCATION_DELETED == there
        if copied != there and not was_deleted:
            return at
    return None if len(copy) == len(original) else min(len(copy), len(original))
