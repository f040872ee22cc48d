"""The deletion marks of a segment's records: `del` in the frame, then the flag in the index (`segment.py`).

These are the only bytes of committed records that ever change. The shard writes them; the compactor writes everything
else of a segment. A record is deleted if either mark says so, but readers use only the flag. A cold segment has only
the flag, because an object store cannot change a byte in place. So has a segment whose `.data` are damaged or missing.
`del` is there for the case that the index is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

from topics.core.location import LOCATION_DELETED
from topics.storage import layout
from topics.storage.filesystem import FileSystem, opened
from topics.storage.frame import LENGTH_FIELD_LEN
from topics.storage.logfile import write_fully
from topics.storage.segment import (
    DELETED,
    ENTRY_FLAGS_AT,
    ENTRY_LEN,
    ENTRY_U32,
    HEADER_LEN,
    CorruptSegment,
    pread_fully,
)

_DELETED_BYTE: Final = bytes((DELETED,))
_IDENTITY: Final = Struct("<IxQ")
"""Length and seq in a frame's first 13 bytes."""
_WINDOW_BYTES: Final = 1 << 18
_GAP_BYTES_MAX: Final = 8 << 10
"""The widest gap between frames that are read together: reading the gap costs less than another call."""
_PAGE_BYTES: Final = 4096


class _Frame(NamedTuple):
    """The place of a frame, as the index has it."""

    seq: int
    offset: int
    length: int


def mark_deleted(
    fs: FileSystem, directory: str, first_seq: int, seqs: Sequence[int], version: int = 0, *, cold: bool = False
) -> OSError | CorruptSegment | None:
    """Mark committed records of one segment deleted, first in the frames, then in the index. It may be repeated.

    `seqs` ascend; deleted and lost ones are skipped. If it cannot mark all frames, it marks all of `seqs` in the index
    and returns the reason. Raise CorruptSegment and OSError if the index cannot be marked. It writes nothing into a
    frame that is not the expected one. `sync_segment` makes the marks durable.
    """
    if not seqs:
        return None
    idx_path = layout.segment_idx_path(directory, first_seq, version)
    with opened(fs, idx_path, os.O_RDWR) as idx_fd:
        start = (seqs[0] - first_seq) * ENTRY_LEN
        idx = bytearray(pread_fully(fs, idx_path, idx_fd, (seqs[-1] - seqs[0] + 1) * ENTRY_LEN, start))
        with memoryview(idx) as view, view.cast("I") as words:
            numbers = [seq - seqs[0] for seq in seqs]
            frames = [
                _Frame(seqs[0] + number, words[number * ENTRY_U32], length)
                for number in numbers
                if (length := words[number * ENTRY_U32 + 1])
            ]
        for frame in frames:
            idx[(frame.seq - seqs[0]) * ENTRY_LEN + ENTRY_FLAGS_AT] |= LOCATION_DELETED
        defect = None if cold else _mark_frames(fs, layout.segment_data_path(directory, first_seq, version), frames)
        write_fully(fs, idx_fd, [idx], start)
    return defect


def _mark_frames(fs: FileSystem, path: str, frames: list[_Frame]) -> OSError | CorruptSegment | None:
    """Mark as many frames as possible; return the first reason why one could not be marked."""
    defect: OSError | CorruptSegment | None = None
    try:
        with opened(fs, path, os.O_RDWR) as fd:
            for window in _windows(frames):
                if len(window) > 1:
                    with suppress(OSError, CorruptSegment):  # a defect of one frame must not leave out the others
                        _mark_together(fs, path, fd, window)
                        continue
                found = _mark_each(fs, path, fd, window)
                defect = defect or found
    except OSError as error:
        return defect or error
    return defect


def _windows(frames: list[_Frame]) -> Iterator[list[_Frame]]:
    """Yield neighbours in the file that are read with one call."""
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


def _mark_together(fs: FileSystem, path: str, fd: int, frames: list[_Frame]) -> None:
    """Mark all frames. If this raises OSError or CorruptSegment, some of them may be marked.

    It writes marks in one page together with the bytes between them. Nobody else changes these committed bytes, and no
    additional page is written.
    """
    base = frames[0].offset
    if min(frame.length for frame in frames) < HEADER_LEN:
        raise CorruptSegment(path, base, "the index has frames that are shorter than their header")
    content = bytearray(pread_fully(fs, path, fd, frames[-1].offset + frames[-1].length - base, base))
    identities = [_IDENTITY.unpack_from(content, frame.offset - base) for frame in frames]
    if identities != [(frame.length - LENGTH_FIELD_LEN, frame.seq) for frame in frames]:
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
    """Mark each frame by itself; return the first reason why one could not be marked."""
    defect: OSError | CorruptSegment | None = None
    for seq, offset, length in frames:
        try:
            header = pread_fully(fs, path, fd, HEADER_LEN, offset)
            if _IDENTITY.unpack_from(header) != (length - LENGTH_FIELD_LEN, seq):
                raise CorruptSegment(path, offset, f"not the frame of seq {seq} that the index says is there")
            pread_fully(fs, path, fd, 1, offset + length - 1)
            write_fully(fs, fd, [_DELETED_BYTE], offset + length - 1)
        except (OSError, CorruptSegment) as error:
            defect = defect or error
    return defect


def sync_segment(fs: FileSystem, directory: str, first_seq: int, version: int = 0, *, cold: bool = False) -> None:
    """Sync the marks of `mark_deleted` to the disk. Skip a missing file: it has no marks. Raise OSError."""
    paths = [layout.segment_idx_path(directory, first_seq, version)]
    if not cold:
        paths.insert(0, layout.segment_data_path(directory, first_seq, version))
    for path in paths:
        with suppress(FileNotFoundError), opened(fs, path, os.O_RDWR) as fd:
            fs.fdatasync(fd)
