"""Log frames into segment frames: by columns where they are a table, one by one where not; the bytes are the same."""

from __future__ import annotations

import mmap
import random
import tempfile
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from topics.core.location import LOCATION_DELETED, LOCATION_LOST, offsets_of
from topics.storage import segment_convert
from topics.storage.frame import LENGTH_FIELD_LEN, LOCATION_FLAGS, encode, lay_out, scan, stamp
from topics.storage.segment import ENTRY, HEADER, TAIL
from topics.storage.segment_convert import convert

TOPIC_ID = 9
FILE_NO = 7
DATA_BYTES = 1000

Write = Sequence[tuple[bytes, bytes, bytes, bytes]]


def log_of(writes: Sequence[tuple[Write, int]], first_seq: int = 5) -> tuple[bytes, array[int]]:
    """(a log file, its index entries) of writes with so many other bytes behind each."""
    log, entries = bytearray(b"head"), array("Q")
    for number, (records, gap) in enumerate(writes):
        laid_out = lay_out(records)
        stamp(laid_out.buffer, laid_out.offset_len, TOPIC_ID, first_seq, 2**40 + number, number % 2 * 4)
        for at, place in enumerate(laid_out.offset_len):
            entries.extend((first_seq + at, 2**40 + number, place + len(log), FILE_NO | laid_out.flags[at] << 32))
        first_seq += laid_out.count
        log += laid_out.buffer + bytes(gap)
    return bytes(log), entries


def expected(log: bytes, entries: array[int]) -> tuple[bytes, bytes]:
    """Return what the page of the formats says, record by record."""
    data, idx = bytearray(), bytearray()
    for seq, ts, place, file_flags in zip(*(entries[column::4] for column in range(4)), strict=True):
        offset, flags = place & 0xFFFF_FFFF, file_flags >> 32
        if flags & LOCATION_DELETED:
            idx += ENTRY.pack(0, 0, ts, LOCATION_DELETED)
            continue
        if flags & LOCATION_LOST:
            idx += ENTRY.pack(offset, 0, ts, LOCATION_LOST)
            continue
        ((_, length, _, frame_flags, _, _, _, node_len, tag_len, data_len),) = scan(log, offset, len(log), 1).frames
        lengths = (node_len, tag_len, data_len)
        body = HEADER.pack(0, frame_flags, seq, ts, *lengths)[4:] + log[offset + 38 : offset + length - 8]
        frame = (len(body) + 9).to_bytes(4, "little") + body + TAIL.pack(xxh3_64_intdigest(body), 0)
        idx += ENTRY.pack(DATA_BYTES + len(data), len(frame), ts, LOCATION_FLAGS[frame_flags])
        data += frame
    return bytes(data), bytes(idx)


texts = st.sampled_from([b"", b"", b"a", "tä".encode()])
one = st.tuples(texts, texts, st.integers(1, 60).map(b"1".__mul__), st.sampled_from([b"", b'{"a":1}']))
like = st.builds(
    lambda record, count: [record] * count, one, st.sampled_from([1, 2, 16, 31, 32, 33, 100, 128, 150, 300])
)
some_writes = st.lists(
    st.tuples(like | st.lists(one, min_size=1, max_size=60), st.sampled_from([0, 0, 1, 500])), min_size=1, max_size=6
)


@given(some_writes, st.data())
def test_the_same_as_record_by_record(writes: list[tuple[Write, int]], data: st.DataObject) -> None:
    log, entries = log_of(writes)
    count = len(entries) // 4
    for at in data.draw(st.lists(st.integers(0, count - 1), max_size=3)):
        gone = data.draw(st.sampled_from([LOCATION_DELETED, LOCATION_LOST, LOCATION_DELETED | LOCATION_LOST]))
        entries[at * 4 + 3] |= gone << 32
        if gone == LOCATION_LOST:
            entries[at * 4 + 2] = 4
    for buffer in (log, memoryview(log), bytearray(log)):
        assert convert(buffer, TOPIC_ID, entries, DATA_BYTES) == expected(log, entries)


def test_from_a_mapped_file() -> None:
    log, entries = log_of(
        [([(b"", b"t", b"123", b"")] * 100, 10), ([(b"", b"", b"1" * at, b"") for at in range(9)], 0)]
    )
    with tempfile.TemporaryFile() as file:
        file.write(log)
        file.flush()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert convert(mapped, TOPIC_ID, entries, DATA_BYTES) == expected(log, entries)


def test_records_that_do_not_lie_in_their_order() -> None:
    """A write that was repeated in a later place: its neighbours by seq lie elsewhere."""
    log, entries = log_of([([(b"", b"", b"123", b"")] * 200, 0)])
    chance = random.Random(5)
    total_len = entries[2] >> 32
    moved = [*range(0, 50), *chance.sample(range(50, 100), 50), *range(100, 200)]
    rebuilt, places = bytearray(), array("Q", bytes(8 * 200))
    for at in moved:
        offset = offsets_of(entries)[at]
        places[at] = len(rebuilt) | total_len << 32
        rebuilt += log[offset : offset + total_len]
    entries[2::4] = places
    assert convert(bytes(rebuilt), TOPIC_ID, entries, DATA_BYTES) == expected(bytes(rebuilt), entries)


def test_no_entries() -> None:
    assert convert(b"", TOPIC_ID, array("Q"), DATA_BYTES) == (b"", b"")


@pytest.mark.parametrize("rows", [5, 100])
def test_frames_that_are_others_are_refused_wherever_they_are(rows: int) -> None:
    log, entries = log_of([([(b"", b"", b"123", b"")] * rows, 0)])
    total_len = entries[2] >> 32
    for at in range(rows):
        offset = offsets_of(entries)[at]
        for topic_id, seq in ((TOPIC_ID + 1, 5 + at), (TOPIC_ID, 5 + at + 1), (TOPIC_ID, 5 + at + 2**40)):
            other = encode(1, 0, topic_id, seq, 1, b"", b"", b'"data":123')
            assert len(other) == total_len
            with pytest.raises(ValueError, match="not those of topic 0x9"):
                convert(log[:offset] + other + log[offset + total_len :], TOPIC_ID, entries, DATA_BYTES)


@pytest.mark.parametrize("rows", [5, 100])
def test_a_damaged_frame_is_not_given_a_new_checksum(rows: int) -> None:
    log, entries = log_of([([(b"", b"", b"123", b"")] * rows, 0)])
    damaged = bytearray(log)
    damaged[offsets_of(entries)[rows // 2] + 45] ^= 1  # in the payload
    with pytest.raises(ValueError, match=f"frame of record {5 + rows // 2} .* is damaged"):
        convert(damaged, TOPIC_ID, entries, DATA_BYTES)


@pytest.mark.parametrize("rows", [5, 100])
def test_no_flipped_bit_is_given_a_new_checksum(rows: int) -> None:
    log, entries = log_of([([(b"n", b"t", b"123", b"")] * rows, 0)])
    offset, total_len = offsets_of(entries)[rows // 2], entries[2] >> 32
    for at in range(LENGTH_FIELD_LEN, total_len):
        for bit in range(8):
            damaged = bytearray(log)
            damaged[offset + at] ^= 1 << bit
            with pytest.raises(ValueError, match="not those of topic 0x9" if 6 <= at < 22 else "is damaged"):
                convert(damaged, TOPIC_ID, entries, DATA_BYTES)


def test_a_table_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all of the above would hold without one."""
    monkeypatch.delattr(segment_convert, "_one_by_one")
    record = (b"", b"t", b"123", b"")
    for sizes in (
        [32] * 5,
        [100] * 5,
        [1000] * 5,
        [1] * 300,
        [3, 1, 1, 100, 2, 5, 50, 50, 7],
        [88, 100, 100, 100, 100],
    ):
        assert sum(sizes) % 512 >= 32, "what is left is a table as well"
        for gap in (0, 3):
            log, entries = log_of([([record] * size, gap) for size in sizes])
            assert convert(log, TOPIC_ID, entries, DATA_BYTES) == expected(log, entries)
