"""The segment: a run of one topic's records taken out of the log. Two files, named by the first seq; others have
their offsets from here. All integers are little-endian.

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

import sys
from array import array
from struct import Struct
from typing import Final

from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_GONE
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
KEPT_FLAGS: Final = LOCATION_GONE | LOCATION_HAS_TAG | LOCATION_HAS_NODE | LOCATION_HAS_META


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
