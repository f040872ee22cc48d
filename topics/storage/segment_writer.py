"""The writer of a segment: it converts records of a log file and appends them (`segment_convert.py`)."""

from __future__ import annotations

import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from topics.core.location import ENTRY_WORDS, LOCATION_GONE, flags_of, lengths_of
from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, write_all
from topics.storage.frame import Bytes
from topics.storage.segment import DATA_MAX_BYTES, ENTRY, ENTRY_LEN, LOG_FRAME_EXTRA_LEN, CorruptSegment, pread_fully
from topics.storage.segment_convert import convert

_CHUNK_RECORDS: Final = 2048  # few enough to stay in the cache while they are hashed and joined
CHUNK_BYTES: Final = 64 * 1024 * 1024
"""The most bytes to write at once: Linux takes less than 2 GiB, and joined pieces take memory."""


@dataclass(eq=False)
class SegmentWriter:
    """The only writer of one segment. Methods raise OSError.

    A failed `append` has appended nothing and may be repeated. After a failed `sync` do not trust anything appended
    since the last mark: close the writer and reopen the segment at the mark.
    """

    _fs: FileSystem
    _directory: str
    first_seq: int
    version: int
    records: int
    data_bytes: int
    """Length of `.data` up to its last frame."""
    _data_fd: int
    _idx_fd: int
    _is_new: bool = False
    _has_leftovers: bool = False

    @classmethod
    def create(cls, fs: FileSystem, directory: str, first_seq: int, version: int = 0) -> SegmentWriter:
        """Make a new segment. Replace files of the same name: a crash left them before they got a mark."""
        make_dirs(fs, directory)
        _unseal(fs, directory, first_seq, version)
        fds = _open_pair(fs, directory, first_seq, version, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        writer = cls(fs, directory, first_seq, version, 0, 0, *fds)
        writer._is_new = True
        return writer

    @classmethod
    def reopen(
        cls, fs: FileSystem, directory: str, first_seq: int, records: int, data_bytes: int, version: int = 0
    ) -> SegmentWriter:
        """Open the segment at its last mark and cut off bytes behind it. Raise CorruptSegment if it is shorter."""
        was_sealed = _unseal(fs, directory, first_seq, version)
        fds = _open_pair(fs, directory, first_seq, version, os.O_RDWR)
        try:
            paths = layout.segment_paths(directory, first_seq, version)
            for kind, fd, length in (("data", fds[0], data_bytes), ("idx", fds[1], records * ENTRY_LEN)):
                size_bytes = fs.size_bytes(fd)
                if size_bytes < length:
                    raise CorruptSegment(paths[kind], size_bytes, f"the file ends there, {length} bytes are committed")
            _check_end(fs, paths["idx"], fds[1], records, data_bytes)
            writer = cls(fs, directory, first_seq, version, records, data_bytes, *fds)
            writer._is_new = was_sealed or records == 0
            writer._has_leftovers = True
            writer._cut_leftovers()
        except BaseException:
            for fd in fds:
                fs.close(fd)
            raise
        return writer

    @property
    def next_seq(self) -> int:
        return self.first_seq + self.records

    def room(self, entries: array[int], max_records: int, max_bytes: int) -> int:
        """Count the entries (see `append`) that fit within these bounds; an empty segment takes one in any case."""
        max_bytes = min(max_bytes, DATA_MAX_BYTES)
        lengths = lengths_of(entries)
        fitting = len(lengths)
        if self.data_bytes + sum(lengths) > max_bytes:  # an estimate: segment frames are a few bytes shorter
            is_gone = [flags & LOCATION_GONE for flags in flags_of(entries)]
            taken = [0 if gone else length - LOG_FRAME_EXTRA_LEN for length, gone in zip(lengths, is_gone, strict=True)]
            fitting = bisect_right(list(accumulate(taken, initial=self.data_bytes)), max_bytes) - 1
        fitting = min(fitting, max_records - self.records)
        if fitting <= 0 and self.records == 0 and lengths:
            return 1
        return max(fitting, 0)

    def append(self, buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int]) -> None:
        """Append records of consecutive seqs, from `next_seq` on. `entries` are index entries (`core/location.py`) with
        offsets in `buffer`, a log file with valid frames. Deleted and lost records get an entry and no frame.
        """
        count = len(entries) // ENTRY_WORDS
        ends = (entries[0], entries[-ENTRY_WORDS]) if count else ()
        if count and ends != (self.next_seq, self.next_seq + count - 1):
            raise ValueError(f"segment {self.first_seq} goes on with {count} from seq {self.next_seq}, not with {ends}")
        self._cut_leftovers()
        self._has_leftovers = True
        idx = bytearray()
        data_bytes = self.data_bytes
        for chunk in _chunks(entries):
            data, idx_part = convert(buffer, topic_id, chunk, data_bytes)
            assert data_bytes + len(data) <= DATA_MAX_BYTES, "see `room`"
            if data:
                write_all(self._fs, self._data_fd, data, data_bytes)
            data_bytes += len(data)
            idx += idx_part
        write_all(self._fs, self._idx_fd, idx, self.records * ENTRY_LEN)
        self._has_leftovers = False
        self.records += count
        self.data_bytes = data_bytes

    def sync(self) -> None:
        """Put everything that was appended, and the files' names, onto the disk."""
        self._cut_leftovers()
        self._fs.fdatasync(self._data_fd)
        self._fs.fdatasync(self._idx_fd)
        if self._is_new:
            # Sync all names, not only those that this writer made: another writer may have been killed before its sync.
            topics_dir = os.path.dirname(self._directory)
            for directory in (self._directory, topics_dir, os.path.dirname(topics_dir)):
                self._fs.fsync_dir(directory)
            self._is_new = False

    def cut_back(self, records: int, data_bytes: int) -> None:
        """Cut the segment back to this length."""
        self.records, self.data_bytes = records, data_bytes
        self._has_leftovers = True
        self._cut_leftovers()

    def close(self) -> None:
        self._fs.close(self._data_fd)
        self._fs.close(self._idx_fd)

    def _cut_leftovers(self) -> None:
        """Cut off the bytes of a failed append, or of another writer that was killed."""
        if not self._has_leftovers:
            return
        for fd, length in ((self._data_fd, self.data_bytes), (self._idx_fd, self.records * ENTRY_LEN)):
            if self._fs.size_bytes(fd) > length:
                self._fs.ftruncate(fd, length)
        self._has_leftovers = False


def _chunks(entries: array[int]) -> Iterator[array[int]]:
    """Yield entries to be written at once: at most CHUNK_BYTES, or one record."""
    at = 0
    while at < len(entries):
        chunk = entries[at : at + _CHUNK_RECORDS * ENTRY_WORDS]
        lengths = lengths_of(chunk)
        if sum(lengths) > CHUNK_BYTES:
            chunk = chunk[: max(1, bisect_right(list(accumulate(lengths)), CHUNK_BYTES)) * ENTRY_WORDS]
        yield chunk
        at += len(chunk)


def _unseal(fs: FileSystem, directory: str, first_seq: int, version: int) -> bool:
    """Remove the postings of a segment whose writer was killed between sealing and the mark. True if there were any."""
    path = layout.segment_tags_path(directory, first_seq, version)
    if not fs.exists(path):
        return False
    fs.unlink(path)
    return True


def _check_end(fs: FileSystem, idx_path: str, idx_fd: int, records: int, data_bytes: int) -> None:
    """Check that the last committed frame in the index ends where the mark says. Raise CorruptSegment."""
    end_of_idx = records * ENTRY_LEN
    while end_of_idx:
        start = max(0, end_of_idx - _CHUNK_RECORDS * ENTRY_LEN)
        part = pread_fully(fs, idx_path, idx_fd, end_of_idx - start, start)
        for at in range(len(part) - ENTRY_LEN, -1, -ENTRY_LEN):
            offset, length, _, _ = ENTRY.unpack_from(part, at)
            if length:
                if offset + length != data_bytes:
                    raise CorruptSegment(
                        idx_path, start + at, f"the last frame ends at {offset + length}, committed are {data_bytes}"
                    )
                return
        end_of_idx = start
    if data_bytes:
        raise CorruptSegment(idx_path, 0, f"no record has a frame, but {data_bytes} bytes are committed")


def _open_pair(fs: FileSystem, directory: str, first_seq: int, version: int, flags: int) -> tuple[int, int]:
    data_fd = fs.open(layout.segment_data_path(directory, first_seq, version), flags)
    try:
        return data_fd, fs.open(layout.segment_idx_path(directory, first_seq, version), flags)
    except BaseException:
        fs.close(data_fd)
        raise
