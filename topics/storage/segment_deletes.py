"""Marking records of a segment deleted: `del` in the frame, then the flag in the index. The format is `segment.py`'s.

The only bytes of committed records that ever change. The shard changes them, all others of a segment are the
compactor's. A record is deleted if either of the two says so, and the flag alone is what readers go by: of a segment in
the cold tier only the index is here, for an object store could not change a byte in place, and of one whose `.data` is
damaged or missing it is what can be said. `del` has a use when an index is not what was written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from topics.core.location import LOCATION_DELETED
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import write_fully
from topics.storage.segment import DELETED, ENTRY, ENTRY_LEN, HEADER_LEN, CorruptSegment, holds_frame
from topics.storage.segment_writer import pread_fully

_DELETED_BYTE: Final = bytes((DELETED,))


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
        frames: list[_Frame] = []
        for seq in seqs:
            at = (seq - seqs[0]) * ENTRY_LEN
            offset, length, ts, flags = ENTRY.unpack_from(idx, at)
            if length:
                frames.append(_Frame(seq, offset, length))
                ENTRY.pack_into(idx, at, offset, length, ts, flags | LOCATION_DELETED)
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
        for seq, offset, length in frames:
            try:
                header = pread_fully(fs, path, fd, HEADER_LEN, offset)
                if not holds_frame(header, length, seq):
                    raise CorruptSegment(path, offset, f"not the frame of seq {seq} that the index says is there")
                pread_fully(fs, path, fd, 1, offset + length - 1)
                write_fully(fs, fd, [_DELETED_BYTE], offset + length - 1)
            except (OSError, CorruptSegment) as error:
                defect = defect or error
    finally:
        fs.close(fd)
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
