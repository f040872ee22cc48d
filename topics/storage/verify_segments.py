"""The offline check of segments: their files against each other, and against what log and snapshot say of them."""

from __future__ import annotations

from topics.core.location import ENTRY_WORDS
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.filesystem import FileSystem, read_all
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.segment import ENTRY_LEN, SegmentReader
from topics.storage.verify_report import Kind, Report


class SegmentCheck:
    """`cold_dir` is where the data of cold segments are; None: they are not looked at."""

    def __init__(self, fs: FileSystem, cold_dir: str | None, report: Report) -> None:
        self._fs = fs
        self._cold_dir = cold_dir
        self._report = report

    def listed(self, topic_id: int, directory: str, info: SegmentInfo, is_deleting: bool) -> None:
        """A segment that log or snapshot have; `is_deleting`: the log has deletions that it may not have yet."""
        self._report.segments += 1
        try:
            self._check_listed(topic_id, directory, info, is_deleting)
        except FileNotFoundError as error:
            self._report.damaged(Kind.SEGMENT, error.filename, 0, "the file is missing")
        except OSError as error:
            self._report.unreadable(error, directory)

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
            self._report.note(f"{data_path}: is in the cold directory, which was not looked at")
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
            self._report.damaged(
                Kind.SEGMENT, idx_path, 0, f"is of {ts[0]} to {ts[-1]}, the log says {info.first_ts} to {info.last_ts}"
            )
        if data is not None:
            for defect in reader.damage(is_deleting or bool(info.flags & COLD)):
                whole = False
                path = data_path if defect.path == reader.data_path else defect.path
                self._report.damaged(Kind.SEGMENT, path, defect.offset, defect.reason)
        if is_sealed:
            self._postings(directory, reader, whole, info.version)

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
