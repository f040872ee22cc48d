"""The segment: a run of one topic's records taken out of the log. Two files, named by the first seq; nothing else knows
an offset in them. All integers are little-endian.

`seg-<20 digits>.data`: frames back to back from offset 0, ascending by seq. A frame is the record's Append frame of the
log (`frame.py`) without type and topic_id, and with a byte behind it:

  0           4       5     13    21         23        25         29
  ┌───────────┬───────┬─────┬─────┬──────────┬─────────┬──────────┬──────┬──────┬─────────┬──────────┬─────┐
  │ frame_len │ flags │ seq │ ts  │ node_len │ tag_len │ data_len │ node │ tag  │ payload │ checksum │ del │
  │ u32       │ u8    │ u64 │ u64 │ u16      │ u16     │ u32      │ utf8 │ utf8 │ bytes   │ u64      │ u8  │
  └───────────┴───────┴─────┴─────┴──────────┴─────────┴──────────┴──────┴──────┴─────────┴──────────┴─────┘
    frame_len  = every byte after this field = 25 + node_len + tag_len + data_len + 9
    flags      = the log frame's, as they were; FLAG_MORE and FLAG_DURABLE mean nothing here
    checksum   = XXH3-64 of bytes [4, checksum)
    del        = 0xD5: the record is deleted; anything else: it lives (a writer puts 0)

`seg-<20 digits>.idx`: entry i is of seq first_seq + i.

  0        4     8    16      17    20
  ┌────────┬─────┬────┬───────┬─────┐
  │ offset │ len │ ts │ flags │ pad │
  │ u32    │ u32 │ u64│ u8    │ 3×0 │
  └────────┴─────┴────┴───────┴─────┘
    offset, len = the whole frame in `.data`
    flags       = 2 deleted, 4 has tag, 8 has node, 16 has meta, 32 lost
    A record that was gone before it came here has no frame: len 0, flags exactly 2 (offset 0) or 32 (offset is the
    reason, `core.topic.EvictReason`).

Neither file has a header: their version is that of the log's CHECKPOINT_MARK and of the snapshot, which alone say
that a segment exists and how many of its entries are committed. What lies behind those was being written when the
writer stopped. Committed bytes never change but for `del` and the deleted flag: `del` first, so that between the two
the index is behind the data, never before it.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections.abc import Iterator
from itertools import accumulate, repeat
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.floors import EvictReason
from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_DELETED, LOCATION_GONE, LOCATION_LOST
from topics.storage import layout
from topics.storage.frame import CHECKSUM_LEN as WAL_CHECKSUM_LEN
from topics.storage.frame import (
    LOCATION_FLAGS,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    Bytes,
)

assert sys.byteorder == "little", "columns are read and written without a conversion"

HEADER: Final = Struct("<IBQQHHI")
HEADER_LEN: Final = HEADER.size
TAIL: Final = Struct("<QB")
TAIL_LEN: Final = TAIL.size
ENTRY: Final = Struct("<IIQB3x")
ENTRY_LEN: Final = ENTRY.size
ENTRY_FLAGS_AT: Final = 16
DELETED: Final = 0xD5
LOG_FRAME_EXTRA_LEN: Final = 8
"""A record's frame in the log is so much longer than its frame here."""
DATA_MAX_BYTES: Final = 0xFFFF_FFFF

_LENGTH_FIELD_LEN: Final = 4
_FLAGS_AT: Final = 4
_WAL_FLAGS_AT: Final = 5
_WAL_IDENTITY_AT: Final = 6  # topic_id, seq
_WAL_IDENTITY_LEN: Final = 16
_WAL_SEQ_AT: Final = 14
_GONE_FLAGS: Final = frozenset(flags for flags in range(256) if flags & LOCATION_GONE)
_KEPT_FLAGS: Final = LOCATION_GONE | LOCATION_HAS_TAG | LOCATION_HAS_NODE | LOCATION_HAS_META
_REASONS: Final = frozenset(map(int, EvictReason)) - {EvictReason.NONE}
_FLAG_BYTES: Final = [bytes((flags,)) for flags in range(256)]
# The end of a frame and the length of the one behind it: one pack and one join entry less a record.
_TAIL_AND_NEXT: Final = Struct("<QBI")
_FRAME_LEN: Final = Struct("<I")


class CorruptSegment(Exception):  # noqa: N818 — named for what it is
    """Committed bytes of a segment are not what was written. `.path` and `.offset` (bytes) say where."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: corrupt at offset {offset}: {reason}; restore the segment's files from a copy")
        self.path = path
        self.offset = offset
        self.reason = reason


class SegmentFrame(NamedTuple):
    """A valid frame, its parts copied out of the file."""

    seq: int
    ts: int
    flags: int
    node: bytes
    tag: bytes
    data: bytes
    deleted: bool


class SegmentReader:
    """The committed part of a segment: `idx` and `data` are the bytes of both files, mapped or read.

    Immutable but for the two marks of a deletion, so it may be used while the segment is appended to.
    """

    def __init__(
        self, directory: str, first_seq: int, idx: Bytes | mmap.mmap, data: Bytes | mmap.mmap, version: int = 0
    ) -> None:
        self.first_seq = first_seq
        self.records = len(idx) // ENTRY_LEN
        self.data = data
        self.data_path = layout.segment_data_path(directory, first_seq, version)
        self.idx_path = layout.segment_idx_path(directory, first_seq, version)
        self._idx = idx

    @classmethod
    def map(cls, directory: str, first_seq: int, records: int, data_bytes: int, version: int = 0) -> SegmentReader:
        """Maps so many committed records, read-only. The files may be unlinked meanwhile, never made shorter.

        Raises FileNotFoundError, CorruptSegment when the files are shorter, OSError.
        """
        idx = map_file(layout.segment_idx_path(directory, first_seq, version), records * ENTRY_LEN)
        data = map_file(layout.segment_data_path(directory, first_seq, version), data_bytes)
        return cls(directory, first_seq, idx, data, version)

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.records - 1

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        """Index entries as in `core.topic`: seq, ts, offset | len << 32, flags << 32. `len` is that of the frame here:
        0 without one, else LOG_FRAME_EXTRA_LEN less than it was in the log.
        """
        assert self.first_seq <= first_seq
        assert last_seq <= self.last_seq
        start = (first_seq - self.first_seq) * ENTRY_LEN
        count = max(0, last_seq - first_seq + 1)
        return entries_of_idx(self._idx[start : start + count * ENTRY_LEN], first_seq)

    def frame(self, seq: int) -> SegmentFrame | None:
        """The record, fully checked; None when it has no frame (any more). Raises CorruptSegment."""
        entry = self._entry(seq)
        return self._read(seq, *entry) if entry[1] else None

    def tagged(self, first_seq: int = 0, last_seq: int = 2**64) -> Iterator[tuple[int, bytes]]:
        """(seq, tag) of every record of first_seq..last_seq that has both a tag and a frame, deleted or not.

        Of a frame no more is checked than that it is the record's. Raises CorruptSegment when it is not.
        """
        first_seq = max(first_seq, self.first_seq)
        entries = self.entries(first_seq, min(last_seq, self.last_seq))
        data, unpack = self.data, HEADER.unpack_from
        for seq, offset_len, file_flags in zip(
            entries[0::ENTRY_WORDS], entries[2::ENTRY_WORDS], entries[3::ENTRY_WORDS], strict=True
        ):
            offset, length = offset_len & 0xFFFF_FFFF, offset_len >> 32
            if not length or not file_flags >> FLAGS_SHIFT & LOCATION_HAS_TAG:
                continue
            if offset + length > len(data) or length < HEADER_LEN + TAIL_LEN:
                self.frame(seq)  # says what is wrong
            frame_len, _, frame_seq, _, node_len, tag_len, data_len = unpack(data, offset)
            lengths_agree = frame_len == length - _LENGTH_FIELD_LEN
            if frame_seq != seq or not lengths_agree or HEADER_LEN + node_len + tag_len + data_len + TAIL_LEN != length:
                self.frame(seq)
            start = offset + HEADER_LEN + node_len
            yield seq, bytes(data[start : start + tag_len])

    def damage(self, deletions_under_way: bool) -> Iterator[CorruptSegment]:
        """Everything that is wrong with it: every entry, every frame, and nothing else in the files.

        `deletions_under_way`: the log has deletions of this topic that may not all be marked here yet.
        """
        if len(self._idx) % ENTRY_LEN:
            yield CorruptSegment(self.idx_path, self.records * ENTRY_LEN, "the file ends inside an entry")
        end = ts_before = 0
        for seq in range(self.first_seq, self.first_seq + self.records):
            entry_at = (seq - self.first_seq) * ENTRY_LEN
            offset, length, ts, flags = self._entry(seq)
            reason = _entry_defect(offset, length, flags, bytes(self._idx[entry_at + 17 : entry_at + ENTRY_LEN]))
            if reason is None and ts < ts_before:
                reason = f"ts {ts} is before that of the record before, {ts_before}"
            if reason is None and length and offset != end:
                reason = f"the frame of seq {seq} should begin at {end}, not at {offset}"
            if reason is not None:
                yield CorruptSegment(self.idx_path, entry_at, reason)
            ts_before = max(ts, ts_before)
            if not length:
                continue
            end = offset + length
            try:
                frame = self._read(seq, offset, length, ts, flags)
            except CorruptSegment as defect:
                yield defect
                continue
            deleted_byte = self.data[end - 1]
            if deleted_byte not in (0, DELETED):
                yield CorruptSegment(self.data_path, end - 1, f"del is {deleted_byte:#x}, neither 0 nor {DELETED:#x}")
            elif frame.deleted != bool(flags & LOCATION_DELETED) and not deletions_under_way:
                in_data, in_idx = ("deleted", "live") if frame.deleted else ("live", "deleted")
                yield CorruptSegment(
                    self.data_path, end - 1, f"seq {seq} is {in_data} here and {in_idx} in the index, at {entry_at}"
                )
        if end != len(self.data):
            yield CorruptSegment(self.data_path, end, f"the last frame ends there, the file at {len(self.data)}")

    def _entry(self, seq: int) -> tuple[int, int, int, int]:
        """offset, len, ts, flags"""
        assert self.first_seq <= seq <= self.last_seq
        return ENTRY.unpack_from(self._idx, (seq - self.first_seq) * ENTRY_LEN)

    def _read(self, seq: int, offset: int, length: int, ts: int, location_flags: int) -> SegmentFrame:
        data = self.data
        checksum_at = offset + length - TAIL_LEN
        if offset + length > len(data) or length < HEADER_LEN + TAIL_LEN:
            raise CorruptSegment(
                self.idx_path,
                (seq - self.first_seq) * ENTRY_LEN,
                f"seq {seq} is said to lie at {offset}, {length} bytes of the {len(data)} there are",
            )
        frame_len, flags, frame_seq, frame_ts, node_len, tag_len, data_len = HEADER.unpack_from(data, offset)
        checksum, deleted = TAIL.unpack_from(data, checksum_at)
        body = data[offset + _FLAGS_AT : checksum_at]
        if checksum != xxh3_64_intdigest(body):
            reason = "checksum does not match"
        elif frame_len != length - _LENGTH_FIELD_LEN or HEADER_LEN + node_len + tag_len + data_len + TAIL_LEN != length:
            reason = "inconsistent lengths"
        elif (frame_seq, frame_ts) != (seq, ts):
            reason = f"holds seq {frame_seq} of {frame_ts}, the index says seq {seq} of {ts}"
        elif LOCATION_FLAGS[flags] != location_flags & ~LOCATION_DELETED:
            reason = f"flags {flags:#x}, the index says {location_flags:#x}"
        else:
            node_at = HEADER_LEN - _FLAGS_AT
            tag_at = node_at + node_len
            data_at = tag_at + tag_len
            return SegmentFrame(
                seq,
                ts,
                flags,
                bytes(body[node_at:tag_at]),
                bytes(body[tag_at:data_at]),
                bytes(body[data_at:]),
                deleted == DELETED,
            )
        raise CorruptSegment(self.data_path, offset, reason)


def entries_of_idx(part: Bytes, first_seq: int) -> array[int]:
    """What `SegmentReader.entries` gives, from a piece of an index that begins with the entry of `first_seq`."""
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
    """Whether the record of an index entry gets no frame in a segment."""
    return bool(file_flags >> FLAGS_SHIFT & LOCATION_GONE)


def holds_frame(header: bytes, length: int, seq: int) -> bool:
    """Whether a frame's first HEADER_LEN bytes are those of `seq`, `length` bytes long."""
    frame_len, _, frame_seq, *_ = HEADER.unpack(header)
    return bool(frame_len == length - _LENGTH_FIELD_LEN and frame_seq == seq)


def convert(buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int], data_bytes: int) -> tuple[bytes, bytes]:
    """Log frames → the segment's frames, which will lie at `data_bytes`, and their entries in the index."""
    count = len(entries) // ENTRY_WORDS
    halves = array("I")
    halves.frombytes(entries.tobytes())
    idx = array("I", bytes(count * ENTRY_LEN))
    idx[2::5] = halves[2::8]
    idx[3::5] = halves[3::8]
    location_flags = halves[7::8].tolist()
    if not _GONE_FLAGS.isdisjoint(location_flags):
        lengths = array("I", bytes(count * 4))
        offsets = array("I", bytes(count * 4))
        live = array("Q")
        at_live = []
        for at, flags in enumerate(location_flags):
            if flags & LOCATION_DELETED:
                location_flags[at] = LOCATION_DELETED
            elif flags & LOCATION_LOST:
                location_flags[at] = LOCATION_LOST
                offsets[at] = halves[at * 8 + 4]
            else:
                at_live.append(at)
                live.extend(entries[at * ENTRY_WORDS : (at + 1) * ENTRY_WORDS])
        data, live_offsets, live_lengths = _frames(buffer, topic_id, live, data_bytes)
        for at, offset, length in zip(at_live, live_offsets, live_lengths, strict=True):
            offsets[at], lengths[at] = offset, length
    else:
        data, offsets, lengths = _frames(buffer, topic_id, entries, data_bytes)
    idx[0::5] = offsets
    idx[1::5] = lengths
    idx[4::5] = array("I", [flags & _KEPT_FLAGS for flags in location_flags])
    return data, idx.tobytes()


def _frames(
    buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int], data_bytes: int
) -> tuple[bytes, array[int], array[int]]:
    """The frames of live records back to back, and their offsets and lengths."""
    if isinstance(buffer, memoryview) and isinstance(buffer.obj, bytes) and buffer.nbytes == len(buffer.obj):
        buffer = buffer.obj  # a slice of it costs half
    offset_lens = entries[2::ENTRY_WORDS]
    bodies = [
        _FLAG_BYTES[buffer[(start := offset_len & 0xFFFF_FFFF) + _WAL_FLAGS_AT]]
        + buffer[start + _WAL_SEQ_AT : start + (offset_len >> 32) - WAL_CHECKSUM_LEN]
        for offset_len in offset_lens
    ]
    identities = [
        buffer[(start := (offset_len & 0xFFFF_FFFF) + _WAL_IDENTITY_AT) : start + _WAL_IDENTITY_LEN]
        for offset_len in offset_lens
    ]
    expected = array("Q", [topic_id]) * (2 * len(bodies))
    expected[1::2] = entries[0::ENTRY_WORDS]
    if b"".join(identities) != expected.tobytes():
        raise ValueError(f"the log's frames are not those of topic {topic_id:#x} that the entries name")
    if not bodies:
        return b"", array("I"), array("I")
    lengths = array("I", [(offset_len >> 32) - LOG_FRAME_EXTRA_LEN for offset_len in offset_lens])
    frame_lens = [length - _LENGTH_FIELD_LEN for length in lengths]
    parts: list[bytes] = [b""] * (2 * len(bodies) + 1)
    parts[0] = _FRAME_LEN.pack(frame_lens[0])
    parts[1::2] = bodies
    next_frame_lens = [*frame_lens[1:], 0]
    parts[2::2] = map(_TAIL_AND_NEXT.pack, map(xxh3_64_intdigest, bodies), repeat(0), next_frame_lens)
    parts[-1] = parts[-1][:TAIL_LEN]  # nothing is behind the last one
    offsets = list(accumulate(lengths, initial=data_bytes))
    offsets.pop()
    return b"".join(parts), array("I", offsets), lengths


def _entry_defect(offset: int, length: int, flags: int, pad: bytes) -> str | None:
    """Why an entry of the index cannot be one; None if it can."""
    if any(pad):
        return f"padding is {pad.hex()}, not zeros"
    if flags & ~_KEPT_FLAGS:
        return f"unknown flags {flags:#x}"
    if length:
        return "a lost record with a frame" if flags & LOCATION_LOST else None
    if flags == LOCATION_DELETED:
        return None if offset == 0 else f"a record without a frame at offset {offset}"
    if flags == LOCATION_LOST:
        return None if offset in _REASONS else f"unknown reason {offset} for a lost record"
    return f"no frame, but flags {flags:#x}"


def map_file(path: str, length: int) -> mmap.mmap | bytes:
    """So many bytes of a segment's file, read-only. Raises CorruptSegment when it is shorter, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes < length:
            raise CorruptSegment(path, size_bytes, f"the file ends there, {length} bytes are committed")
        return mmap.mmap(fd, length, prot=mmap.PROT_READ) if length else b""
    finally:
        os.close(fd)
