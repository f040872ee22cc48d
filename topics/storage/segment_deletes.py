"""Marking records of a segment deleted: `del` in the frame, then the flag in the index. The format is `segment.py`'s.

The only bytes of committed records that ever change. The shard changes them, all others of a segment are the
compactor's. Of a segment in the cold tier only the index is here, and its flag alone counts: an object store could not
change a byte in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from topics.core.location import LOCATION_DELETED
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import write_fully
from topics.storage.segment import DELETED, ENTRY, ENTRY_LEN, HEADER_LEN, CorruptSegment, holds_frame
from topics.storage.segment_writer import pread_fully

_DELETED_BYTE: Final = bytes((DELETED,))


def mark_deleted(
    fs: FileSystem, directory: str, first_seq: int, seqs: Sequence[int], version: int = 0, *, cold: bool = False
) -> None:
    """Marks committed records of one segment deleted, in the frames first, then in the index; may be repeated.

    `seqs` ascend; those that are gone already are passed over. Raises CorruptSegment before it would write a byte to a
    place that is not the one, and OSError; `sync_segment` makes it durable.
    """
    if not seqs:
        return
    idx_path = layout.segment_idx_path(directory, first_seq, version)
    data_path = layout.segment_data_path(directory, first_seq, version)
    fds = _open(fs, directory, first_seq, version, cold)
    try:
        start = (seqs[0] - first_seq) * ENTRY_LEN
        idx = bytearray(pread_fully(fs, idx_path, fds[0], (seqs[-1] - seqs[0] + 1) * ENTRY_LEN, start))
        for seq in seqs:
            at = (seq - seqs[0]) * ENTRY_LEN
            offset, length, ts, flags = ENTRY.unpack_from(idx, at)
            if not length:
                continue
            if not cold:
                header = pread_fully(fs, data_path, fds[1], HEADER_LEN, offset)
                if not holds_frame(header, length, seq):
                    raise CorruptSegment(data_path, offset, f"not the frame of seq {seq} that {idx_path} says is there")
                write_fully(fs, fds[1], [_DELETED_BYTE], offset + length - 1)
            ENTRY.pack_into(idx, at, offset, length, ts, flags | LOCATION_DELETED)
        write_fully(fs, fds[0], [idx], start)
    finally:
        for fd in fds:
            fs.close(fd)


def sync_segment(fs: FileSystem, directory: str, first_seq: int, version: int = 0, *, cold: bool = False) -> None:
    """What `mark_deleted` wrote is on the disk afterwards. Raises OSError."""
    fds = _open(fs, directory, first_seq, version, cold)
    try:
        for fd in reversed(fds):
            fs.fdatasync(fd)
    finally:
        for fd in fds:
            fs.close(fd)


def _open(fs: FileSystem, directory: str, first_seq: int, version: int, cold: bool) -> list[int]:
    """The index, and the data if it is here."""
    paths = [layout.segment_idx_path(directory, first_seq, version)]
    if not cold:
        paths.append(layout.segment_data_path(directory, first_seq, version))
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(fs.open(path, os.O_RDWR))
    except BaseException:
        for fd in fds:
            fs.close(fd)
        raise
    return fds
