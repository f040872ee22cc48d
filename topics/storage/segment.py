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
import sys
from array import array
from itertools import accumulate, repeat
from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_DELETED, LOCATION_GONE, LOCATION_LOST
from topics.storage.frame import CHECKSUM_LEN as WAL_CHECKSUM_LEN
from topics.storage.frame import (
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
_WAL_FLAGS_AT: Final = 5
_WAL_IDENTITY_AT: Final = 6  # topic_id, seq
_WAL_IDENTITY_LEN: Final = 16
_WAL_SEQ_AT: Final = 14
_GONE_FLAGS: Final = frozenset(flags for flags in range(256) if flags & LOCATION_GONE)
KEPT_FLAGS: Final = LOCATION_GONE | LOCATION_HAS_TAG | LOCATION_HAS_NODE | LOCATION_HAS_META
_FLAG_BYTES: Final = [bytes((flags,)) for flags in range(256)]
# The end of a frame and the length of the one behind it: one pack and one join entry less a record.
_TAIL_AND_NEXT: Final = Struct("<QBI")
_FRAME_LEN: Final = Struct("<I")


class CorruptSegment(Exception):  # noqa: N818 — named for what it is
    """Committed bytes of a segment are not what was written. `.path` and `.offset` (bytes) say where."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(
            f"{path}: corrupt at offset {offset}: {reason}; restore the file from a copy: put that beside it, then"
            " rename it to this name"
        )
        self.path = path
        self.offset = offset
        self.reason = reason


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
    idx[4::5] = array("I", [flags & KEPT_FLAGS for flags in location_flags])
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
