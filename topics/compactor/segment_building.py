"""The builder of segments: it appends records of a log that are in no segment yet, and seals full or old segments.

The appender knows only what the last mark says. It opens a segment at its committed length, cuts off bytes that a
killed life left behind that, and keeps no file open. `LogBuffers` maps a log file when its first record is needed and
keeps it mapped until the cut ends.
"""

from __future__ import annotations

import errno
import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from topics.core.location import ENTRY_WORDS, LOCATION_GONE, LOW_WORD, any_flagged
from topics.core.segment_list import SEALED, SegmentInfo
from topics.log import get_logger
from topics.storage import layout
from topics.storage.filesystem import NO_ROOM, FileSystem
from topics.storage.frame import Bytes
from topics.storage.kill_points import reached
from topics.storage.logfile import map_file
from topics.storage.postings import write_postings
from topics.storage.segment import CorruptSegment, is_gone
from topics.storage.segment_reader import SegmentReader
from topics.storage.segment_writer import SegmentWriter

_TEMPORARY: Final = NO_ROOM | {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of the disk or the process, not of a file."""

log = get_logger()

BufferOf = Callable[[int, int], Bytes | mmap.mmap]
"""(number of a log file, end) → the file, mapped at least up to byte `end`."""


class LogBuffers:
    """The log files of one shard, mapped whole and read-only for a cut. Only bytes at published locations are valid."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._maps: dict[int, mmap.mmap] = {}

    def get(self, file_no: int, end: int) -> mmap.mmap:
        """Return the file, mapped at least up to byte `end`. FileNotFoundError if missing, EOFError if shorter."""
        mapped = self._maps.get(file_no)
        if mapped is not None and end <= len(mapped):
            return mapped
        path = layout.log_path(self._directory, file_no)
        mapped = map_file(path)
        if end > len(mapped):
            raise EOFError(f"{path} ends before byte {end}")
        self._maps[file_no] = mapped
        return mapped

    def close(self) -> None:
        """Unmap all files."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()


class SealAt(NamedTuple):
    """The bounds at which a segment is sealed; an age of 0 ms is no bound."""

    records: int
    data_bytes: int
    age_ms: int

    def is_old(self, info: SegmentInfo, now_ms: int) -> bool:
        """True if it is time to seal this segment, however few records it has."""
        return bool(self.age_ms) and now_ms - info.first_ts >= self.age_ms


class SegmentAppender:
    """Appends to segments of all topics. Its methods raise OSError. Segments that they return are synced, unless `fs`
    defers syncs.

    `suspects` are `.data` paths of segments that could not be reopened last time. The set outlives this object: a
    segment that fails twice in a row counts as damaged.
    """

    def __init__(self, fs: FileSystem, data_dir: str, seal_at: SealAt, suspects: set[str]) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._seal_at = seal_at
        self._suspects = suspects

    def append(
        self, topic_id: int, last: SegmentInfo | None, entries: array[int], buffer_of: BufferOf, now_ms: int
    ) -> list[SegmentInfo]:
        """Append entries; return the new or changed segments, ascending. `last` is the topic's last marked segment.

        `entries` are index entries (`core/location.py`) of consecutive seqs in log files. They continue `last` if it is
        not sealed and they follow it. If the disk fails after some segments, it returns only these. Raise ValueError if
        the logs do not have the records that the entries describe.
        """
        changed: list[SegmentInfo] = []
        count = len(entries) // ENTRY_WORDS
        at = 0
        active = last if last is not None and not last.flags & SEALED and last.last_seq + 1 == entries[0] else None
        while at < count or active is not None:
            try:
                # One entry more than a segment takes: if some are left over, the segment is full.
                part = entries[at * ENTRY_WORDS : (at + self._seal_at.records + 1) * ENTRY_WORDS]
                info, appended = self._append_to_one(topic_id, active, part, buffer_of, now_ms)
            except OSError:
                if active is None:
                    self._remove_new(topic_id, entries[at * ENTRY_WORDS])
                if at:
                    break
                raise  # also if a segment was only sealed: sealing can be repeated, and a retry must get further
            active = None
            at += appended
            if info is not None:
                changed.append(info)
        return changed

    def seal(self, topic_id: int, info: SegmentInfo) -> SegmentInfo | None:
        """Seal an active segment. None when it stays as it is: it is damaged, or its tags cannot be written."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        writer = self._reopen(directory, info)
        if writer is None:
            return None
        try:
            writer.sync()
        finally:
            writer.close()
        try:
            return self._sealed(directory, info)
        except OSError as error:
            log.error("a segment cannot be sealed now", directory=directory, reason=str(error))
            return None

    def _append_to_one(
        self, topic_id: int, active: SegmentInfo | None, entries: array[int], buffer_of: BufferOf, now_ms: int
    ) -> tuple[SegmentInfo | None, int]:
        """Append as many entries as fit into one segment. Return (segment, None if damaged; number of entries)."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        if active is None:
            writer = SegmentWriter.create(self._fs, directory, entries[0])
            first_ts = entries[1]
        else:
            reopened = self._reopen(directory, active)
            if reopened is None:
                return None, 0
            writer, first_ts = reopened, active.first_ts
        begins = writer.records, writer.data_bytes
        try:
            bounds = self._seal_at
            room = max(0, bounds.records - writer.records)
            fitting = writer.room(entries[: room * ENTRY_WORDS], bounds.records, bounds.data_bytes)
            taken = entries[: fitting * ENTRY_WORDS]
            for file_no, run in _runs(taken):
                buffer = b"" if file_no is None else buffer_of(file_no, _end(run))
                writer.append(buffer, topic_id, run)
            last_ts = taken[-3] if taken else active.last_ts if active is not None else first_ts
            info = SegmentInfo(
                writer.first_seq, writer.next_seq - 1, first_ts, last_ts, writer.data_bytes, writer.version, 0
            )
            reached("checkpoint.copied")
            writer.sync()
            is_full = fitting * ENTRY_WORDS < len(entries) or info.records >= bounds.records
            if is_full or info.data_bytes >= bounds.data_bytes or bounds.is_old(info, now_ms):
                info = self._sealed(directory, info) or info
            return info, fitting
        except OSError:
            # No mark counts these bytes, and on a full disk other files need the room.
            with suppress(OSError):
                writer.cut_back(*begins)
            raise
        finally:
            writer.close()

    def _remove_new(self, topic_id: int, first_seq: int) -> None:
        """Remove the files of a new segment after a failure: even empty files take room."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        for path in layout.segment_paths(directory, first_seq).values():
            with suppress(OSError):
                self._fs.unlink(path)

    def _reopen(self, directory: str, info: SegmentInfo) -> SegmentWriter | None:
        path = layout.segment_data_path(directory, info.first_seq, info.version)
        try:
            writer = SegmentWriter.reopen(
                self._fs, directory, info.first_seq, info.records, info.data_bytes, info.version
            )
        except (CorruptSegment, OSError) as error:
            if isinstance(error, OSError) and self._may_be_temporary(error, path):
                raise
            # Its readable part stays readable; later records go into the next segment.
            self._suspects.discard(path)
            log.error("a segment is damaged, so later records go into a new one", path=path, reason=str(error))
            return None
        self._suspects.discard(path)
        return writer

    def _may_be_temporary(self, error: OSError, path: str) -> bool:
        """True if reopening this segment may succeed next time."""
        if error.errno in _TEMPORARY:
            return True
        if isinstance(error, FileNotFoundError) or path in self._suspects:
            return False
        self._suspects.add(path)
        return True

    def _sealed(self, directory: str, info: SegmentInfo) -> SegmentInfo | None:
        name = (info.first_seq, info.records, info.data_bytes, info.version)
        try:
            tagged = list(SegmentReader.open(directory, *name).tagged())
        except (CorruptSegment, OSError) as error:
            if isinstance(error, OSError) and error.errno in _TEMPORARY:
                raise
            log.error("a segment is damaged, so it is not sealed", reason=str(error))
            return None
        write_postings(self._fs, directory, info.first_seq, info.records, tagged, info.version)
        reached("checkpoint.sealed")
        return msgspec.structs.replace(info, flags=info.flags | SEALED)


def _runs(entries: array[int]) -> Iterator[tuple[int | None, array[int]]]:
    """Yield (file number, entries) for runs of entries in one log file. Records that are gone fit any file."""
    file_words: Sequence[int] = entries[3::ENTRY_WORDS]
    if not file_words:
        return
    if not any_flagged(entries, LOCATION_GONE) and file_words == entries[3:ENTRY_WORDS] * len(file_words):
        yield file_words[0] & LOW_WORD, entries
        return
    words = set(file_words)
    gone = {word for word in words if is_gone(word)}
    files = {word & LOW_WORD for word in words - gone}
    if len(files) <= 1:
        yield next(iter(files), None), entries
        return
    file_nos: list[int] = []
    file_no = next(word & LOW_WORD for word in file_words if word not in gone)
    for word in file_words:
        if word not in gone:
            file_no = word & LOW_WORD
        file_nos.append(file_no)
    at = 0
    for file_no, run in groupby(file_nos):
        end = at + sum(1 for _ in run)
        yield file_no, entries[at * ENTRY_WORDS : end * ENTRY_WORDS]
        at = end


def _end(entries: array[int]) -> int:
    """Return the end of the last frame of these entries, which are in log order; 0 if none has a frame."""
    for at in range(len(entries) - ENTRY_WORDS, -1, -ENTRY_WORDS):
        if not is_gone(entries[at + 3]):
            return (entries[at + 2] & LOW_WORD) + (entries[at + 2] >> 32)
    return 0
