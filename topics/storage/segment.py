"""A segment is a run of one topic's records that the compactor moved out of the log. This module owns its format.

A segment has two files, named by the first seq. Other modules take the offsets from here. All integers are
little-endian.

`seg-<20 digits>.data`: frames back to back from offset 0, ascending by seq. A frame is the record's Append frame of the
log (`frame.py`) without type and topic_id, and with a byte behind it:

  0           4       5     13    21         23        25         29
  ┌───────────┬───────┬─────┬─────┬──────────┬─────────┬──────────┬──────┬──────┬─────────┬──────────┬─────┐
  │ frame_len │ flags │ seq │ ts  │ node_len │ tag_len │ data_len │ node │ tag  │ payload │ checksum │ del │
  │ u32       │ u8    │ u64 │ u64 │ u16      │ u16     │ u32      │ utf8 │ utf8 │ bytes   │ u64      │ u8  │
  └───────────┴───────┴─────┴─────┴──────────┴─────────┴──────────┴──────┴──────┴─────────┴──────────┴─────┘
    frame_len  = every byte after this field = 25 + node_len + tag_len + data_len + 9
    flags      = those of the log frame; FLAG_MORE and FLAG_DURABLE mean nothing here
    checksum   = XXH3-64 of bytes [4, checksum)
    del        = 0xD5 for a deleted record; anything else is live (a writer puts 0)

`seg-<20 digits>.idx`: entry i is of seq first_seq + i.

  0        4     8    16      17    20
  ┌────────┬─────┬────┬───────┬─────┐
  │ offset │ len │ ts │ flags │ pad │
  │ u32    │ u32 │ u64│ u8    │ 3×0 │
  └────────┴─────┴────┴───────┴─────┘
    offset, len = the whole frame in `.data`
    flags       = 2 deleted, 4 has tag, 8 has node, 16 has meta, 32 lost

    A record that was deleted or lost before it was moved has no frame: len 0, flags exactly 2 (offset 0) or 32 (offset
    is the reason, `core.floors.EvictReason`).

Neither file has a header. The version of the format is in the log's CHECKPOINT_MARK and in the snapshot. These alone
say that a segment exists and how many of its entries are committed; bytes behind the committed entries are left over
from a writer that was stopped. The only committed bytes that change are `del` and the deleted flag. `del` changes
first, so a crash between the two leaves the index behind the data, never ahead of it.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, compress
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from topics.core.floors import EvictReason
from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_DELETED, LOCATION_GONE, LOCATION_LOST
from topics.storage.filesystem import FileSystem
from topics.storage.frame import (
    LENGTH_FIELD_LEN,
    LOCATION_FLAGS,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    Bytes,
)

HEADER: Final = Struct("<IBQQHHI")
HEADER_LEN: Final = HEADER.size
NODE_LEN_AT: Final = Struct("<IBQQ").size
TAIL: Final = Struct("<QB")
TAIL_LEN: Final = TAIL.size
ENTRY: Final = Struct("<IIQB3x")
ENTRY_LEN: Final = ENTRY.size
ENTRY_U32: Final = ENTRY_LEN // 4
ENTRY_FLAGS_AT: Final = 16
DELETED: Final = 0xD5
LOG_FRAME_EXTRA_LEN: Final = 8
"""Bytes by which a record's frame in the log is longer than its frame here."""
DATA_MAX_BYTES: Final = 0xFFFF_FFFF
CHECKED_RECORDS: Final = 1024
CHECKED_BYTES: Final = 4 * 2**20
"""Bytes, and records, that `check_whole` reads at once: a segment may have 2 GiB."""

_REASONS: Final = frozenset(map(int, EvictReason)) - {EvictReason.NONE}
IS_LIVE: Final = bytes(not flags & LOCATION_GONE for flags in range(256))
"""A byte for each value of an entry's flags: 1 if the record lives."""
KEPT_FLAGS: Final = LOCATION_GONE | LOCATION_HAS_TAG | LOCATION_HAS_NODE | LOCATION_HAS_META


class CorruptFile(Exception):  # noqa: N818 — named for what it is
    """A file does not have the bytes that were written. `.path` and `.offset` (bytes) say where."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(
            f"{path}: corrupt at offset {offset}: {reason}; restore the file from a copy: put that beside it, then"
            " rename it to this name"
        )
        self.path = path
        self.offset = offset
        self.reason = reason


class CorruptSegment(CorruptFile):
    """Committed bytes of a segment's `.data` or `.idx` are not what was written."""


def entries_of_idx(part: Bytes, first_seq: int) -> array[int]:
    """Return the entries (`core/location.py`) in a piece of an index whose first entry is of `first_seq`."""
    halves = array("I")
    halves.frombytes(part)
    count = len(halves) * 4 // ENTRY_LEN
    words = array("I", bytes(count * ENTRY_WORDS * 8))
    words[2::8] = halves[2::5]
    words[3::8] = halves[3::5]
    words[4::8] = halves[0::5]
    words[5::8] = halves[1::5]
    words[7::8] = halves[4::5]
    entries = array("Q")
    entries.frombytes(words.tobytes())
    entries[0::ENTRY_WORDS] = array("Q", range(first_seq, first_seq + count))
    return entries


def is_gone(file_flags: int) -> bool:
    """True if the record of an index entry is deleted or lost, and gets no frame in a segment."""
    return bool(file_flags >> FLAGS_SHIFT & LOCATION_GONE)


def pread_fully(fs: FileSystem, path: str, fd: int, length: int, offset: int) -> bytes:
    """Read exactly `length` bytes. Raise CorruptSegment if the file is shorter, OSError."""
    found = fs.pread(fd, length, offset)
    if len(found) != length:
        raise CorruptSegment(path, offset + len(found), f"the file ends there, {length} bytes from {offset} on are due")
    return found


class CommittedFile:
    """The committed bytes of one of a segment's files; slices of it are `bytes`.

    Each slice reads the file, which is not mapped. If somebody cut the file, or the disk has a bad sector, a read
    raises an error that can be reported. A map would kill the process (SIGBUS), again at every start that reads there.
    A read costs half a microsecond more than a slice of a map (docs/decisions/0008).

    It keeps the file open as long as it lives, so the file may be unlinked meanwhile. Bytes behind the committed ones
    may change.
    """

    __slots__ = ("_fd", "_identity", "_len_bytes", "path")

    def __init__(self, path: str, len_bytes: int) -> None:
        """Open the file. Raise OSError, and CorruptSegment if the file is shorter."""
        self._fd = -1
        self.path = path
        self._len_bytes = len_bytes
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if found.st_size < len_bytes:
            raise self._too_short(found.st_size)
        self._identity = (found.st_dev, found.st_ino)

    @classmethod
    def whole(cls, path: str) -> CommittedFile:
        """Open a file that was written once, with all of its bytes."""
        return cls(path, os.stat(path).st_size)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __len__(self) -> int:
        return self._len_bytes

    def __getitem__(self, part: slice) -> bytes:
        """Read a slice. Raise CorruptSegment if the file is shorter by now, or the disk fails."""
        start, end, _ = part.indices(self._len_bytes)
        found = self._pread(end - start, start) if start < end else b""
        while start + len(found) < end:  # one call gives 2 GiB at most
            more = self._pread(end - start - len(found), start + len(found))
            if not more:
                raise self._too_short(os.fstat(self._fd).st_size)
            found += more
        return found

    @property
    def has_its_name(self) -> bool:
        """True while the file still has its name: it was neither removed nor replaced."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _pread(self, len_bytes: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, len_bytes, offset)
        except OSError as error:
            raise CorruptSegment(self.path, offset, f"{len_bytes} bytes cannot be read: {error}") from error

    def _too_short(self, size_bytes: int) -> CorruptSegment:
        return CorruptSegment(self.path, size_bytes, f"the file ends there, {self._len_bytes} bytes are committed")


Content: TypeAlias = Bytes | CommittedFile
"""A segment's file, in memory or to be read by slices."""


_TS_AT: Final = 8


class Columns(NamedTuple):
    """Index entries of consecutive seqs as columns, for readers that serve pages. Handling one record at a time costs
    more than the disk does, so a few calls check a whole run of frames. A record without a frame has length 0. The
    offset of a lost record is the reason of the loss (`core.floors.EvictReason`).
    """

    ts: list[int]
    offsets: list[int]
    lengths: list[int]
    flags: list[int]

    def part(self, start: int, stop: int) -> Columns:
        """Return the entries from `start` up to `stop`."""
        if start == 0 and stop == len(self.ts):
            return self
        return Columns(self.ts[start:stop], self.offsets[start:stop], self.lengths[start:stop], self.flags[start:stop])

    @property
    def has_gone(self) -> bool:
        """True if any record is deleted or lost."""
        return any(flags & LOCATION_GONE for flags in set(self.flags))


def read_columns(idx: Content, first: int, count: int) -> Columns:
    """Read `count` entries of an index, from number `first` on."""
    halves = array("I")
    halves.frombytes(idx[first * ENTRY_LEN : (first + count) * ENTRY_LEN])
    ts = array("I", bytes(8 * count))
    ts[0::2] = halves[2::ENTRY_U32]
    ts[1::2] = halves[3::ENTRY_U32]
    return Columns(
        memoryview(ts).cast("B").cast("Q").tolist(),
        halves[0::ENTRY_U32].tolist(),
        halves[1::ENTRY_U32].tolist(),
        # This word is flags and padding. Padding other than zeros makes flags that differ from the frame's.
        halves[4::ENTRY_U32].tolist(),
    )


def index_digest(idx: Content) -> int:
    """Return XXH3-64 over offset, len and ts of all entries in order: the bytes that deletions never change."""
    halves = array("I")
    halves.frombytes(idx[:])
    del halves[4::ENTRY_U32]
    return xxh3_64_intdigest(halves.tobytes())


def ts_of(idx: Content, number: int) -> int:
    """Return the commit time of one entry."""
    at = number * ENTRY_LEN + _TS_AT
    return int.from_bytes(idx[at : at + 8], "little")


def first_at(idx: Content, count: int, ts: int) -> int:
    """Return the number of the first of `count` entries with a commit time >= ts; `count` if there is none."""
    return bisect_left(range(count), ts, key=lambda number: ts_of(idx, number))


def extent(columns: Columns, data_bytes: int, idx_path: str, first_entry_at: int) -> tuple[list[int], int]:
    """Return (the offset of each frame, the end of the last one). Raise CorruptSegment if the frames do not lie back
    to back within `data_bytes`. `first_entry_at` is the offset of the first entry in the index.
    """
    framed = next((number for number, length in enumerate(columns.lengths) if length), None)
    if framed is None:
        return [0] * len(columns.lengths), 0
    starts = list(accumulate(columns.lengths, initial=columns.offsets[framed]))
    end = starts.pop()
    if starts != columns.offsets:
        for number, (start, offset, length) in enumerate(zip(starts, columns.offsets, columns.lengths, strict=True)):
            if length and start != offset:
                at = first_entry_at + number * ENTRY_LEN
                raise CorruptSegment(idx_path, at, f"a frame should begin at {start}, not at {offset}")
    if end > data_bytes:
        at = first_entry_at + (len(starts) - 1) * ENTRY_LEN
        raise CorruptSegment(idx_path, at, f"a frame ends at {end}, behind the {data_bytes} bytes there are")
    return starts, end


def check_whole(idx: CommittedFile, data: CommittedFile, data_path: str, first_seq: int, marked: bool = False) -> None:
    """Check an index and every live frame in `data`. If `marked` (deletions are marked in frames), check deleted frames
    too. Raise CorruptSegment, with `data_path` for a frame.
    """
    count = len(idx) // ENTRY_LEN
    columns = read_columns(idx, 0, count)
    for number, defect in enumerate(map(entry_defect, columns.offsets, columns.lengths, columns.flags)):
        if defect is not None:
            raise CorruptSegment(idx.path, number * ENTRY_LEN, defect)
    starts, end = extent(columns, len(data), idx.path, 0)
    starts.append(end)
    at = 0
    while at < count:
        base, most = starts[at], min(at + CHECKED_RECORDS, count)
        behind = max(at + 1, bisect_right(starts, base + CHECKED_BYTES, at, most + 1) - 1)
        places = [start - base for start in starts[at:behind]]
        buffer, part = data[base : starts[behind]], columns.part(at, behind)
        check_frames(data_path, buffer, base, first_seq + at, part, places)
        if marked and (seq := _unmarked(buffer, first_seq + at, part, places)) is not None:
            reason = f"seq {seq} is deleted here, its frame lives: restore this file from a backup"
            raise CorruptSegment(idx.path, (seq - first_seq) * ENTRY_LEN, reason)
        at = behind


def _unmarked(buffer: bytes, first_seq: int, columns: Columns, starts: list[int]) -> int | None:
    """Return the first record that only the index has as deleted, though its frame is whole and could be marked."""
    for number, (flags, length) in enumerate(zip(columns.flags, columns.lengths, strict=True)):
        if flags & LOCATION_DELETED and length and not buffer[starts[number] + length - 1]:
            alive = columns.part(number, number + 1)._replace(flags=[flags & ~LOCATION_DELETED])
            with suppress(CorruptSegment):
                check_frames("", buffer, 0, first_seq + number, alive, starts[number : number + 1])
                return first_seq + number
    return None


def entry_defect(offset: int, length: int, flags: int) -> str | None:
    """Return why an entry of the index is not valid; None if it is."""
    if flags & ~KEPT_FLAGS:
        return f"unknown flags {flags:#x}"
    if length:
        return "a lost record with a frame" if flags & LOCATION_LOST else None
    if flags == LOCATION_DELETED:
        return None if offset == 0 else f"a record without a frame at offset {offset}"
    if flags == LOCATION_LOST:
        return None if offset in _REASONS else f"unknown reason {offset} for a lost record"
    return f"no frame, but flags {flags:#x}"


def check_frames(
    path: str, buffer: Content, base: int, first_seq: int, columns: Columns, starts: Sequence[int]
) -> list[int]:
    """Check that each live record has the frame that the index gives, whole and unchanged. Raise CorruptSegment for
    `path`. `starts` are the frames' places in `buffer`, which begins at `base` in the file.

    Return the seqs whose frames are marked deleted but whose entries are not: the index is behind, or an older copy. It
    does not check frame_len: the checksum vouches for the length in the index.
    """
    ts, _, lengths, flags = columns
    seqs: Sequence[int] = range(first_seq, first_seq + len(ts))
    if columns.has_gone:
        live = [number for number, flag in enumerate(flags) if not flag & LOCATION_GONE]
        seqs, ts, flags = [seqs[n] for n in live], [ts[n] for n in live], [flags[n] for n in live]
        starts, lengths = [starts[n] for n in live], [lengths[n] for n in live]
    if not seqs:
        return []
    if min(lengths) < HEADER_LEN + TAIL_LEN:
        shortest = lengths.index(min(lengths))
        raise CorruptSegment(path, base + starts[shortest], f"seq {seqs[shortest]} has a frame of {min(lengths)} bytes")
    checksums_at = [start + length - TAIL_LEN for start, length in zip(starts, lengths, strict=True)]
    bodies = [
        buffer[start + LENGTH_FIELD_LEN : checksum_at] for start, checksum_at in zip(starts, checksums_at, strict=True)
    ]
    digests = array("Q", map(xxh3_64_intdigest, bodies)).tobytes()
    stored = bytearray().join([buffer[at : at + TAIL_LEN] for at in checksums_at])
    marks = stored[8::TAIL_LEN]
    del stored[8::TAIL_LEN]
    identities = b"".join([body[1:17] for body in bodies])
    wanted = array("Q", bytes(16 * len(bodies)))
    wanted[0::2] = array("Q", seqs)
    wanted[1::2] = array("Q", ts)
    if digests == stored and identities == wanted.tobytes() and [LOCATION_FLAGS[body[0]] for body in bodies] == flags:
        return list(compress(seqs, [mark == DELETED for mark in marks])) if DELETED in marks else []
    for number, (seq, body) in enumerate(zip(seqs, bodies, strict=True)):
        reason = ""
        if digests[number * 8 : number * 8 + 8] != stored[number * 8 : number * 8 + 8]:
            reason = f"checksum of seq {seq} does not match"
        elif identities[number * 16 : number * 16 + 16] != wanted[number * 2 : number * 2 + 2].tobytes():
            found = array("Q", identities[number * 16 : number * 16 + 16])
            reason = f"holds seq {found[0]} of {found[1]}, the index says seq {seq} of {ts[number]}"
        elif LOCATION_FLAGS[body[0]] != flags[number]:
            reason = f"flags {body[0]:#x} of seq {seq}, the index says {flags[number]:#x}"
        if reason:
            raise CorruptSegment(path, base + starts[number], reason)
    raise AssertionError("one of them differs")
