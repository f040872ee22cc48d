"""The WAL frame (storage.md): layout, stamping, validation."""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from topics.storage.frame import (
    FLAG_DURABLE,
    FLAG_META,
    FLAG_MORE,
    FLAG_NODE,
    FLAG_TAG,
    HEADER_LEN,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    Bytes,
    Defect,
    FrameTooLarge,
    FrameType,
    encode,
    lay_out,
    lay_out_plain,
    scan,
    stamp,
)

texts = st.text(max_size=12).map(str.encode)
records = st.lists(
    st.tuples(texts, texts, st.binary(min_size=1, max_size=40), st.sampled_from([b"", b'{"a":"b"}'])), max_size=12
)


class Frame(NamedTuple):
    """A valid frame; its parts are copies."""

    type: int
    flags: int
    topic_id: int
    seq: int
    ts: int
    node: bytes
    tag: bytes
    data: bytes
    total_len: int


def read_frame(buffer: Bytes, offset: int, end: int) -> Frame | Defect:
    """Read and validate the frame at `offset`; return the defect if there is none. The bytes end at `end`."""
    frames, _, defect = scan(buffer, offset, end, limit=1)
    if not frames:
        return defect if defect is not None else Defect.EMPTY
    _, total_len, type_, flags, topic_id, seq, ts, node_len, tag_len, data_len = frames[0]
    tag_at = offset + HEADER_LEN + node_len
    data_at = tag_at + tag_len
    node, tag = bytes(buffer[offset + HEADER_LEN : tag_at]), bytes(buffer[tag_at:data_at])
    data = bytes(buffer[data_at : data_at + data_len])
    return Frame(type_, flags, topic_id, seq, ts, node, tag, data, total_len)


def test_every_byte_is_where_the_format_says() -> None:
    frame = encode(FrameType.APPEND, FLAG_DURABLE, 2**64 - 1, 2, 3, b"n1", "tä".encode(), b"payload")
    body = (
        bytes([1, FLAG_TAG | FLAG_NODE | FLAG_DURABLE])
        + struct.pack("<QQQHHI", 2**64 - 1, 2, 3, 2, 3, 7)
        + b"n1t\xc3\xa4payload"
    )
    assert frame == struct.pack("<I", len(body) + 8) + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    assert len(frame) == HEADER_LEN + 2 + 3 + 7 + 8


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_records_without_attributes_are_laid_out_alike(data: list[bytes]) -> None:
    assert lay_out_plain(data) == lay_out([(b"", b"", one, b"") for one in data])


def test_more_lengths_than_are_remembered() -> None:
    data = [b"x" * length for length in range(5000)]
    assert lay_out_plain(data) == lay_out([(b"", b"", one, b"") for one in data])


@given(records)
def test_what_is_laid_out_and_stamped_reads_back(written: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
    laid_out = lay_out(iter(written))
    stamp(laid_out.buffer, laid_out.offset_len, 5, 100, 1234, FLAG_DURABLE)
    found = scan(laid_out.buffer, 0, len(laid_out.buffer))
    assert found.defect is None
    assert found.end == len(laid_out.buffer)
    assert len(found.frames) == laid_out.count == len(written) == len(laid_out.offset_len) == len(laid_out.flags)
    for position, (node, tag, data, meta) in enumerate(written):
        offset = laid_out.offset_len[position] & 0xFFFF_FFFF
        frame = read_frame(laid_out.buffer, offset, len(laid_out.buffer))
        payload = b'"data":' + data + (b',"meta":' + meta if meta else b"")
        more = FLAG_MORE if position + 1 < len(written) else 0
        flags = more | FLAG_DURABLE | (FLAG_NODE if node else 0) | (FLAG_TAG if tag else 0) | (FLAG_META if meta else 0)
        assert isinstance(frame, Frame)
        assert frame == Frame(1, flags, 5, 100 + position, 1234, node, tag, payload, frame.total_len)
        assert laid_out.offset_len[position] == offset | frame.total_len << 32
        assert laid_out.flags[position] == (
            (LOCATION_HAS_NODE if node else 0) | (LOCATION_HAS_TAG if tag else 0) | (LOCATION_HAS_META if meta else 0)
        )
        # The one-frame encoder and the batch agree to the byte.
        assert (
            encode(1, frame.flags, 5, 100 + position, 1234, node, tag, payload)
            == laid_out.buffer[offset : offset + frame.total_len]
        )


@pytest.mark.parametrize("count", [47, 48, 511, 512, 513, 1025])
@pytest.mark.parametrize("extra_flags", [0, FLAG_DURABLE])
@pytest.mark.parametrize("other_at", [None, 0, 20, -1])
def test_a_table_is_stamped_as_each_frame_is(count: int, extra_flags: int, other_at: int | None) -> None:
    """A buffer that is no bytearray is stamped frame by frame; so is one with a record of another length."""
    records = [(b"n", b"t", b"%06d" % n, b"") for n in range(count)]
    if other_at is not None:
        records[other_at] = (b"", b"", b"another length", b"{}")
    laid_out = lay_out(records)
    one_by_one = bytearray(laid_out.buffer)
    stamp(memoryview(one_by_one), laid_out.offset_len, 1 << 63 | 5, 2**32 - 9, 2**41 + 7, extra_flags)
    stamp(laid_out.buffer, laid_out.offset_len, 1 << 63 | 5, 2**32 - 9, 2**41 + 7, extra_flags)
    assert laid_out.buffer == one_by_one


def test_a_table_is_stamped_where_it_lies() -> None:
    laid_out = lay_out([(b"", b"", b"%06d" % n, b"") for n in range(60)])
    around = bytearray(b"<" * 7) + laid_out.buffer + b">" * 9
    stamp(around, array("Q", [place + 7 for place in laid_out.offset_len]), 1, 2, 3, 0)
    stamp(laid_out.buffer, laid_out.offset_len, 1, 2, 3, 0)
    assert around == b"<" * 7 + laid_out.buffer + b">" * 9


def test_stamping_again_replaces_the_first_stamp() -> None:
    laid_out = lay_out([(b"", b"", b"1", b""), (b"n", b"t", b"2", b"")])
    stamp(laid_out.buffer, laid_out.offset_len, 1, 1, 1, 0)
    stamp(memoryview(laid_out.buffer), laid_out.offset_len, 2, 50, 3, 0)
    found = scan(laid_out.buffer, 0, len(laid_out.buffer))
    assert [(frame[4], frame[5], frame[6]) for frame in found.frames] == [(2, 50, 3), (2, 51, 3)]
    assert found.defect is None


def test_no_single_bit_can_change_unnoticed() -> None:
    frame = encode(FrameType.APPEND, 0, 1, 2, 3, b"node", b"tag", b'"data":{"a":1}')
    missed = []
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        if isinstance(read_frame(damaged, 0, len(damaged)), Frame):
            missed.append(bit)
    assert missed == []


def test_no_prefix_is_a_frame() -> None:
    frame = encode(FrameType.APPEND, 0, 1, 2, 3, b"node", b"tag", b"payload")
    for length in range(len(frame)):
        for rest in (b"", bytes(len(frame) - length), b"\xff" * (len(frame) - length)):
            damaged = frame[:length] + rest
            assert isinstance(read_frame(damaged, 0, len(damaged)), Defect)


def test_each_defect_has_its_name() -> None:
    good = encode(FrameType.APPEND, 0, 1, 2, 3, b"node", b"tag", b"payload")

    def defect(frame: bytes) -> Defect:
        found = read_frame(frame, 0, len(frame))
        assert isinstance(found, Defect)
        return found

    assert defect(bytes(100)) is Defect.EMPTY
    assert defect(good[:-1]) is Defect.LENGTH
    assert defect(encode(77, 0, 0, 0, 0, b"", b"", b"")) is Defect.TYPE
    assert defect(good[:30] + b"\x05" + good[31:]) is Defect.LENGTHS
    assert defect(encode(1, 0, 1, 2, 3, b"\xff", b"", b"")) is Defect.TEXT
    assert defect(good[:-1] + bytes([good[-1] ^ 1])) is Defect.CHECKSUM
    # Each of node and tag must be UTF-8 alone, not only both together.
    assert defect(encode(1, 0, 1, 2, 3, b"\xc3", b"\xa4", b"")) is Defect.TEXT


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(FrameTooLarge, match="node of 65536 bytes: a frame holds at most 65535"):
        lay_out([(b"n" * 65536, b"", b"1", b"")])
    with pytest.raises(FrameTooLarge, match="tag of 65536 bytes"):
        encode(1, 0, 1, 1, 1, b"", b"t" * 65536, b"")
    largest = lay_out([(b"n" * 65535, b"t" * 65535, b"1", b"")])
    stamp(largest.buffer, largest.offset_len, 1, 1, 1, 0)
    assert scan(largest.buffer, 0, len(largest.buffer)).defect is None


def test_a_scan_can_stop_after_some_frames() -> None:
    laid_out = lay_out([(b"", b"", b"1", b"")] * 5)
    stamp(laid_out.buffer, laid_out.offset_len, 1, 1, 1, 0)
    first = scan(laid_out.buffer, 0, len(laid_out.buffer), limit=2)
    rest = scan(laid_out.buffer, first.end, len(laid_out.buffer))
    assert (len(first.frames), first.defect) == (2, None)
    assert (len(rest.frames), rest.defect) == (3, None)
