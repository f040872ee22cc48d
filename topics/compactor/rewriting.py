"""Rewriting a sealed segment without its deleted records: same seqs, same frames, a new version of its files."""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from itertools import accumulate

import msgspec

from topics.core.location import LOCATION_DELETED
from topics.core.segment_list import SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.committed_file import CommittedFile, Content
from topics.storage.filesystem import FileSystem, write_all
from topics.storage.frame import Bytes
from topics.storage.kill_points import reached
from topics.storage.postings import Postings, write_postings
from topics.storage.segment import ENTRY_LEN

_ENTRY_U32 = ENTRY_LEN // 4
_COPY_MAX_BYTES = 4 * 2**20


class Dead(msgspec.Struct, frozen=True):
    """How much of a segment is deleted, of how much."""

    dead_bytes: int
    data_bytes: int

    def exceeds(self, ratio: float) -> bool:
        """Whether it is more than `ratio` of all."""
        return self.dead_bytes > ratio * self.data_bytes


def measure(directory: str, info: SegmentInfo) -> Dead:
    """From the index alone. Raises OSError, CorruptSegment."""
    halves = _columns(directory, info)
    lengths, flags = halves[1::_ENTRY_U32], halves[4::_ENTRY_U32]
    if not any(flag & LOCATION_DELETED for flag in set(flags)):
        return Dead(0, info.data_bytes)
    dead = sum([length for length, flag in zip(lengths, flags, strict=True) if flag & LOCATION_DELETED])
    return Dead(dead, info.data_bytes)


def live_pieces(directory: str, info: SegmentInfo) -> list[tuple[int, int]]:
    """(start, end) in `.data` of what a new version will hold, ascending, neighbours as one. Raises OSError,
    CorruptSegment.
    """
    halves = _columns(directory, info)
    deleted = [bool(flag & LOCATION_DELETED) for flag in halves[4::_ENTRY_U32]]
    return _live_pieces(halves[0::_ENTRY_U32], halves[1::_ENTRY_U32], deleted)


def rewrite(fs: FileSystem, directory: str, info: SegmentInfo, old: Content | None = None) -> SegmentInfo:
    """The new version, here and on the disk; the old one is as it was. `old` is its `.data` when that is not here, with
    what `live_pieces` says of it at least. Raises OSError, CorruptSegment, CorruptPostings: then nothing of a new
    version is left here.
    """
    # First: without these all copying is for nothing.
    postings = list(Postings.load(directory, info.first_seq, info.version).items())
    halves = _columns(directory, info)
    if old is None:
        old = CommittedFile(layout.segment_data_path(directory, info.first_seq, info.version), info.data_bytes)
    offsets, lengths, flags = halves[0::_ENTRY_U32], halves[1::_ENTRY_U32], halves[4::_ENTRY_U32]
    deleted = [bool(flag & LOCATION_DELETED) for flag in flags]
    pieces = _live_pieces(offsets, lengths, deleted)
    new_lengths = array("I", [0 if dead else length for dead, length in zip(deleted, lengths, strict=True)])
    starts = array("I", accumulate(new_lengths, initial=0))
    data_bytes = starts.pop()
    # Without a frame the offset of a deleted record is 0, that of a lost one its reason.
    halves[0::_ENTRY_U32] = array(
        "I",
        [
            start if length else 0 if dead else offset
            for start, length, dead, offset in zip(starts, new_lengths, deleted, offsets, strict=True)
        ],
    )
    halves[1::_ENTRY_U32] = new_lengths
    halves[4::_ENTRY_U32] = array(
        "I", [LOCATION_DELETED if dead else flag for dead, flag in zip(deleted, flags, strict=True)]
    )
    tagged = [(seq, tag) for tag, seqs in postings for seq in seqs if not deleted[seq - info.first_seq]]
    tagged.sort()
    version = info.version + 1
    try:
        _write_pair(fs, directory, info.first_seq, version, old, pieces, halves)
        write_postings(fs, directory, info.first_seq, info.records, tagged, version)
        fs.fsync_dir(directory)
    except Exception:
        # On a full disk it is the room that others need.
        for path_of in (layout.segment_data_path, layout.segment_idx_path, layout.segment_tags_path):
            with suppress(OSError):
                fs.unlink(path_of(directory, info.first_seq, version))
        raise
    reached("rewrite.synced")
    return msgspec.structs.replace(info, data_bytes=data_bytes, version=version, flags=SEALED)


def _write_pair(
    fs: FileSystem,
    directory: str,
    first_seq: int,
    version: int,
    old: Content,
    pieces: list[tuple[int, int]],
    idx: array[int],
) -> None:
    """`.data` and `.idx` of the new version, synced; their names are not."""
    data_path = layout.segment_data_path(directory, first_seq, version)
    idx_path = layout.segment_idx_path(directory, first_seq, version)
    flags_new = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    data_fd = fs.open(data_path, flags_new)
    try:
        idx_fd = fs.open(idx_path, flags_new)
        try:
            _copy(fs, old, data_fd, pieces)
            write_all(fs, idx_fd, idx.tobytes(), 0)
            reached("rewrite.copied")
            fs.fdatasync(data_fd)
            fs.fdatasync(idx_fd)
        finally:
            fs.close(idx_fd)
    finally:
        fs.close(data_fd)


def _columns(directory: str, info: SegmentInfo) -> array[int]:
    """The whole index as u32."""
    idx = CommittedFile(layout.segment_idx_path(directory, info.first_seq, info.version), info.records * ENTRY_LEN)
    halves = array("I")
    halves.frombytes(idx[:])
    return halves


def _live_pieces(offsets: array[int], lengths: array[int], deleted: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of what stays, neighbours as one: frames lie back to back."""
    pieces: list[tuple[int, int]] = []
    start = end = 0
    for offset, length, dead in zip(offsets, lengths, deleted, strict=True):
        if not length or dead:
            continue
        if offset == end and end > start:
            end += length
            continue
        if end > start:
            pieces.append((start, end))
        start, end = offset, offset + length
    if end > start:
        pieces.append((start, end))
    return pieces


def _copy(fs: FileSystem, old: Content, fd: int, pieces: list[tuple[int, int]]) -> None:
    offset = 0
    gathered: list[Bytes] = []
    gathered_bytes = 0
    for start, end in pieces:
        for at in range(start, end, _COPY_MAX_BYTES):
            piece = old[at : min(end, at + _COPY_MAX_BYTES)]
            gathered.append(piece)
            gathered_bytes += len(piece)
            if gathered_bytes >= _COPY_MAX_BYTES:
                write_all(fs, fd, b"".join(gathered), offset)
                offset += gathered_bytes
                gathered, gathered_bytes = [], 0
    if gathered:
        write_all(fs, fd, b"".join(gathered), offset)
