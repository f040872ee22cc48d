"""An entry of a record index: where a record lies, and whether it is deleted or lost.

    | seq u64 | ts u64 | offset u32 | len_bytes u32 | file_no u32 | flags u32 |       4 words of 64 bits

In an `array("Q")` of entries words 2 and 3 are `offset | len_bytes << 32` and `file_no | flags << 32`. `flags` also has
the flags of the record's frame (`storage/frame.py`, LOCATION_HAS_…).
"""

from __future__ import annotations

import sys
from array import array
from typing import Final

assert sys.byteorder == "little", "columns of entries are steps over their bytes"

ENTRY_WORDS: Final = 4
_ENTRY_LEN: Final = 8 * ENTRY_WORDS
_OFFSET_AT_U32: Final = 4
_LEN_AT_U32: Final = 5
_FLAGS_AT: Final = 28  # the low byte of the u32 `flags`, which is little-endian
FLAGS_SHIFT: Final = 32
LOW_WORD: Final = 0xFFFF_FFFF

LOCATION_IN_RAM_LOG: Final = 1
LOCATION_DELETED: Final = 2
LOCATION_LOST: Final = 32
"""Flag of a record that was lost though its neighbours live; `offset` is an EvictReason then."""
LOCATION_GONE: Final = LOCATION_DELETED | LOCATION_LOST
FILE_BITS: Final = LOCATION_IN_RAM_LOG << FLAGS_SHIFT | LOW_WORD
"""Bits of word 3 that name a file: the log and the number."""


def file_flags_of(file_no: int, record_flags: bytes | bytearray, location_flags: int) -> array[int]:
    """Return word 3 for each frame of one file. `record_flags` has a byte for each; all get `location_flags` too."""
    first = record_flags[0]
    if record_flags.count(first) == len(record_flags):
        return array("Q", [file_no | (first | location_flags) << FLAGS_SHIFT]) * len(record_flags)
    return array("Q", [file_no | (flags | location_flags) << FLAGS_SHIFT for flags in record_flags])


def flags_of(entries: array[int]) -> bytes:
    """Return the flags of each entry, a byte each: no flag needs more."""
    return entries.tobytes()[_FLAGS_AT::_ENTRY_LEN]


def lengths_of(entries: array[int]) -> array[int]:
    """Return len_bytes (u32) of each entry."""
    return array("I", entries.tobytes())[_LEN_AT_U32 :: 2 * ENTRY_WORDS]


def offsets_of(entries: array[int]) -> array[int]:
    """Return the offset (u32) of each entry."""
    return array("I", entries.tobytes())[_OFFSET_AT_U32 :: 2 * ENTRY_WORDS]


def any_flagged(entries: array[int], mask: int) -> bool:
    """True if any entry has any of these flags."""
    flags = flags_of(entries)
    # Most often all entries have the same flags. To find that out is quicker than to collect different ones.
    return any(flag & mask for flag in (flags[:1] if flags.count(flags[:1]) == len(flags) else set(flags)))


def dense_entries(first_seq: int, ts: int, offset_lens: array[int], file_flags: array[int]) -> array[int]:
    """Return entries of consecutive seqs, all of one commit time."""
    count = len(offset_lens)
    entries = array("Q", bytes(count * ENTRY_WORDS * 8))
    entries[0::4] = array("Q", range(first_seq, first_seq + count))
    entries[1::4] = array("Q", [ts]) * count
    entries[2::4] = offset_lens
    entries[3::4] = file_flags
    return entries


def lost_entries(first_seq: int, last_seq: int, ts: int, reason: int) -> array[int]:
    """Return entries of records lost for `reason`, an EvictReason; `ts` is the time of the record before them."""
    entries = array("Q", [0, ts, reason, LOCATION_LOST << FLAGS_SHIFT]) * (last_seq + 1 - first_seq)
    entries[0::ENTRY_WORDS] = array("Q", range(first_seq, last_seq + 1))
    return entries


def in_order(entries: array[int], head_seq: int) -> array[int]:
    """Return the entries above `head_seq`, sorted by seq. If several have the same seq, the last one counts."""
    seqs = entries[0::4]
    count = len(seqs)
    if entries[0] == head_seq + 1 and seqs == array("Q", range(entries[0], entries[0] + count)):
        return entries
    rows = {seqs[at]: entries[at * 4 : at * 4 + 4] for at in range(count) if seqs[at] > head_seq}
    ordered = array("Q")
    for seq in sorted(rows):
        ordered.extend(rows[seq])
    return ordered


def dense_run(entries: array[int]) -> int:
    """Count the entries from the start that have consecutive seqs."""
    seqs = entries[0::4]
    first = seqs[0]
    if seqs[-1] == first + len(seqs) - 1:
        return len(seqs)
    return next(at for at, seq in enumerate(seqs) if seq != first + at)
