"""Frames of originals, of the log and of segments, as copies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.storage.copies import as_copies, segment_as_copies
from topics.storage.frame import FLAG_DURABLE, HOPS_SHIFT, lay_out, scan, stamp
from topics.storage.segment_convert import convert

TOPIC_ID = 9
FIRST_SEQ = 5

Record = tuple[bytes, bytes, bytes, bytes]


def log_of(records: Sequence[Record], hops: int = 0) -> tuple[bytearray, array[int]]:
    """(frames of the log, the place of each)"""
    laid_out = lay_out(records)
    frames, rows = bytearray(laid_out.buffer), array("Q", laid_out.offset_len)
    stamp(frames, rows, TOPIC_ID, FIRST_SEQ, 2**40, FLAG_DURABLE | hops << HOPS_SHIFT)
    return frames, rows


def segment_of(frames: bytearray, rows: array[int], before: int = 0) -> tuple[memoryview, array[int]]:
    """(the same records as a part of a segment behind so many other bytes, the place of each)"""
    entries = array("Q")
    for at, place in enumerate(rows):
        entries.extend((FIRST_SEQ + at, 2**40, place, 7))
    data, idx = convert(bytes(frames), TOPIC_ID, entries, before)
    halves = array("I", idx)
    places = array("Q", [offset | length << 32 for offset, length in zip(halves[0::5], halves[1::5], strict=True)])
    return memoryview(bytes(before) + data), places


texts = st.sampled_from([b"", b"", b"a", "tä".encode()])
record = st.tuples(texts, texts, st.integers(1, 60).map(b"1".__mul__), st.sampled_from([b"", b'{"a":1}']))


@given(st.lists(record, min_size=1, max_size=40), st.integers(0, 7), st.sampled_from([0, 13]))
def test_a_record_of_a_segment_is_the_same_copy_as_one_of_the_log(
    records: list[Record], hops: int, before: int
) -> None:
    frames, rows = log_of(records, hops)
    part, places = segment_of(frames, rows, before)
    of_segment, segment_rows, segment_flags = segment_as_copies(part, places, FIRST_SEQ)
    assert (segment_rows, segment_flags) == as_copies(frames, rows, TOPIC_ID, FIRST_SEQ)[1:]
    for buffer in (frames, of_segment):
        stamp(buffer, rows, 11, 100, 2**41, 0)
    assert of_segment == frames
    found = scan(frames, 0, len(frames)).frames
    assert [(one[4], one[5], one[6]) for one in found] == [(11, 100 + at, 2**41) for at in range(len(records))]


def test_no_flipped_bit_of_a_segment_gets_a_good_checksum() -> None:
    part, places = segment_of(*log_of([(b"n", b"t", b"123", b'{"a":1}')] * 3))
    start, length = places[1] & 0xFFFF_FFFF, places[1] >> 32
    for bit in range(8 * (start + 4), 8 * (start + length - 1)):  # the copy has neither the length nor the mark's byte
        damaged = bytearray(part)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=f"record {FIRST_SEQ + 1}"):
            segment_as_copies(memoryview(damaged), places, FIRST_SEQ)


def test_another_record_of_a_segment_is_refused() -> None:
    part, places = segment_of(*log_of([(b"", b"", b"123", b"")] * 3))
    with pytest.raises(ValueError, match=f"not record {FIRST_SEQ + 1}"):
        segment_as_copies(part, places, FIRST_SEQ + 1)
    for place in (places[0] & 0xFFFF_FFFF | 9 << 32, len(part) - 20 | 50 << 32):
        with pytest.raises(ValueError, match=f"no frame of record {FIRST_SEQ}: {place >> 32} bytes"):
            segment_as_copies(part, [place], FIRST_SEQ)


def test_another_record_of_the_log_is_refused() -> None:
    frames, rows = log_of([(b"", b"", b"123", b"")] * 3)
    for topic_id, first_seq in ((TOPIC_ID + 1, FIRST_SEQ), (TOPIC_ID, FIRST_SEQ + 1)):
        with pytest.raises(ValueError, match=f"not record {first_seq} of topic"):
            as_copies(bytearray(frames), rows, topic_id, first_seq)


def test_no_flipped_bit_of_the_log_gets_a_good_checksum() -> None:
    frames, rows = log_of([(b"n", b"t", b"123", b'{"a":1}')] * 3)
    start, length = rows[1] & 0xFFFF_FFFF, rows[1] >> 32
    for bit in range(8 * start, 8 * (start + length)):  # the length field is in no checksum
        damaged = frames[:]
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=f"record {FIRST_SEQ + 1}"):
            as_copies(damaged, rows, TOPIC_ID, FIRST_SEQ)
