"""Marking records of a segment deleted: `del` in the frame, then the flag in the index. The format is `segment.py`'s.

The only bytes of committed records that ever change. The shard changes them, all others of a segment are the
compactor's. A record is deleted if either of the two says so, and the flag alone is what readers go by: of a segment in
the cold tier only the index is here, for an object store could not change a byte in place, and of one whose `.data` is
damaged or missing it is what can be said. `del` has a use when an index is not what was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from topics.core.location import LOCATION_DELETED
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import write_fully
from topics.storage.segment import DELETED, ENTRY_FLAGS_AT, ENTRY_LEN, HEADER_LEN, CorruptSegment, holds_frame
from topics.storage.segment_writer import pread_fully

_DELETED_BYTE: Final = bytes((DELETED,))
_ENTRY_U32: Final = ENTRY_LEN // 4
_LENGTH_FIELD_LEN: Final = 4
_IDENTITY: Final = Struct("<IxQ")
"""A frame's first 13 bytes: its length and seq."""
_WINDOW_BYTES: Final = 1 << 18
_GAP_BYTES_MAX: Final = 8 << 10
"""Frames are read together as long as what lies between two costs less to read than another call."""
_PAGE_BYTES: Final = 4096


class _Frame(NamedTuple):
    """Where the index says that it is."""

    seq: int
    offset: int
    length: int


def mark_deleted(
    fs: FileSystem, directory: str, first_seq: int, seqs: Sequence[int], version: int = 0, *, cold: bool = False
) -> OSError | CorruptSegment | None:
    """Marks committed records of one segment deleted, in the frames first, then in the index; may be repeated.

    `seqs` ascend; those that are gone already are passed over. Returns why not all frames could be marked, where they
    could not: the index has all of `seqs` then, too. Raises CorruptSegment and OSError when the index cannot be marked.
    Writes no byte to a place that is not the one; `sync_segment` makes it durable.
    """
    if not seqs:
        return None
    idx_path = layout.segment_idx_path(directory, first_seq, version)
    idx_fd = fs.open(idx_path, os.O_RDWR)
    try:
        start = (seqs[0] - first_seq) * ENTRY_LEN
        idx = bytearray(pread_fully(fs, idx_path, idx_fd, (seqs[-1] - seqs[0] + 1) * ENTRY_LEN, start))
        with memoryview(idx) as view, view.cast("I") as words:
            numbers = [seq - seqs[0] for seq in seqs]
            frames = [
                _Frame(seqs[0] + number, words[number * _ENTRY_U32], length)
                for number in numbers
                if (length := words[number * _ENTRY_U32 + 1])
            ]
        for frame in frames:
            idx[(frame.seq - seqs[0]) * ENTRY_LEN + ENTRY_FLAGS_AT] |= LOCATION_DELETED
        defect = None if cold else _mark_frames(fs, layout.segment_data_path(directory, first_seq, version), frames)
        write_fully(fs, idx_fd, [idx], start)
    finally:
        fs.close(idx_fd)
    return defect


def _mark_frames(fs: FileSystem, path: str, frames: list[_Frame]) -> OSError | CorruptSegment | None:
    """As many as can be; the first reason why one could not."""
    defect: OSError | CorruptSegment | None = None
    try:
        fd = fs.open(path, os.O_RDWR)
    except OSError as error:
        return error
    try:
        for window in _windows(frames):
            found = _mark_window(fs, path, fd, window)
            defect = defect or found
    finally:
        fs.close(fd)
    return defect


def _windows(frames: list[_Frame]) -> Iterator[list[_Frame]]:
    """Neighbours in the file, so many as are read with one call."""
    start = 0
    for at in range(1, len(frames)):
        before, frame = frames[at - 1], frames[at]
        if not (
            0 <= frame.offset - before.offset - before.length <= _GAP_BYTES_MAX
            and frame.offset + frame.length - frames[start].offset <= _WINDOW_BYTES
        ):
            yield frames[start:at]
            start = at
    if frames:
        yield frames[start:]


def _mark_window(fs: FileSystem, path: str, fd: int, frames: list[_Frame]) -> OSError | CorruptSegment | None:
    """As many as can be; the first reason why one could not."""
    if len(frames) > 1:
        try:
            _mark_together(fs, path, fd, frames)
        except (OSError, CorruptSegment):
            pass  # what is wrong with one of them is no reason to leave out the others
        else:
            return None
    return _mark_each(fs, path, fd, frames)


def _mark_together(fs: FileSystem, path: str, fd: int, frames: list[_Frame]) -> None:
    """All of them, or an error, behind which any may be marked.

    Marks that lie within a page of each other are written with what is between them: committed bytes, which nobody
    changes, so they are written as they were read, and no page is written for it that would not be anyway.
    """
    base = frames[0].offset
    if min(frame.length for frame in frames) < HEADER_LEN:
        raise CorruptSegment(path, base, "the index has frames that are shorter than their header")
    content = bytearray(pread_fully(fs, path, fd, frames[-1].offset + frames[-1].length - base, base))
    identities = [_IDENTITY.unpack_from(content, frame.offset - base) for frame in frames]
    if identities != [(frame.length - _LENGTH_FIELD_LEN, frame.seq) for frame in frames]:
        raise CorruptSegment(path, base, "not the frames that the index says are there")
    marks = [frame.offset + frame.length - 1 - base for frame in frames]
    for mark in marks:
        content[mark] = DELETED
    first = last = marks[0]
    for mark in marks:
        if mark - last >= _PAGE_BYTES:
            write_fully(fs, fd, [content[first : last + 1]], base + first)
            first = mark
        last = mark
    write_fully(fs, fd, [content[first : last + 1]], base + first)


def _mark_each(fs: FileSystem, path: str, fd: int, frames: list[_Frame]) -> OSError | CorruptSegment | None:
    """Each by itself; the first reason why one could not be."""
    defect: OSError | CorruptSegment | None = None
    for seq, offset, length in frames:
        try:
            header = pread_fully(fs, path, fd, HEADER_LEN, offset)
            if not holds_frame(header, length, seq):
                raise CorruptSegment(path, offset, f"not the frame of seq {seq} that the index says is there")
            pread_fully(fs, path, fd, 1, offset + length - 1)
            write_fully(fs, fd, [_DELETED_BYTE], offset + length - 1)
        except (OSError, CorruptSegment) as error:
            defect = defect or error
    return defect


def sync_segment(fs: FileSystem, directory: str, first_seq: int, version: int = 0, *, cold: bool = False) -> None:
    """What `mark_deleted` wrote is on the disk afterwards; a file that is missing has nothing. Raises OSError."""
    paths = [layout.segment_idx_path(directory, first_seq, version)]
    if not cold:
        paths.insert(0, layout.segment_data_path(directory, first_seq, version))
    for path in paths:
        try:
            fd = fs.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fs.fdatasync(fd)
        finally:
            fs.close(fd)
