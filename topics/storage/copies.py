"""The frames of router copies, made from the frames of their originals.

A copy is an ordinary Append of the dest. An *unstamped* copy lacks its topic id, seq, time and checksum; `frame.stamp`
fills them in for a whole page. This module checks the frames of originals, from the log or a segment, and turns them
into unstamped copies. The shard stamps these at once if the router changes nothing in the record. Otherwise it lays
the record out again, which costs several times as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.location import LOW_WORD
from topics.storage import segment
from topics.storage.frame import (
    CHECKSUM,
    CHECKSUM_LEN,
    FLAG_META,
    FLAG_MORE,
    FLAG_NODE,
    FLAG_TAG,
    FLAGS_AT,
    HEADER,
    HEADER_LEN,
    HOPS_SHIFT,
    LENGTH_FIELD_LEN,
    LOCATION_FLAGS,
    OVERHEAD_LEN,
    TYPE_AT,
    Bytes,
    FrameType,
)

_LOG_HEAD: Final = Struct("<IBBQQ")
"""Frame length, type, flags, topic id, seq."""
_HEAD_OF_A_COPY: Final = Struct("<IBB24x")
"""Frame length, type, flags; topic id, seq and time are not known yet."""
_FLAGS_AND_LENGTHS: Final = Struct("<B24xHH")
"""From FLAGS_AT on: flags, topic id, seq and time (skipped), length of node and tag."""
_KEPT_FLAGS: Final = FLAG_META | FLAG_NODE | FLAG_TAG | 0xFF << HOPS_SHIFT & 0xFF


class UnstampedCopies(NamedTuple):
    """Unstamped copies of consecutive records, back to back, with the place and the index flags of each."""

    frames: bytearray
    rows: array[int]
    location_flags: bytearray


class Original(NamedTuple):
    """The parts of a record; `payload` lies in its frame."""

    node: bytes
    tag: bytes
    has_meta: bool
    hops: int
    payload: memoryview


def tag_of(frames: memoryview, at: int) -> bytes:
    """Return the tag of the unstamped copy at an offset."""
    _, node_len, tag_len = _FLAGS_AND_LENGTHS.unpack_from(frames, at + FLAGS_AT)
    tag_at = at + HEADER_LEN + node_len
    return bytes(frames[tag_at : tag_at + tag_len])


def each_copy(frames: bytearray, rows: Sequence[int]) -> Iterator[Original]:
    """Yield the parts of unstamped copies."""
    view = memoryview(frames)
    for row in rows:
        start = row & LOW_WORD
        frame = view[start : start + (row >> 32)]
        flags, node_len, tag_len = _FLAGS_AND_LENGTHS.unpack_from(frame, FLAGS_AT)
        tag_at = HEADER_LEN + node_len
        node, tag = bytes(frame[HEADER_LEN:tag_at]), bytes(frame[tag_at : tag_at + tag_len])
        payload = frame[tag_at + tag_len : -CHECKSUM_LEN]
        yield Original(node, tag, bool(flags & FLAG_META), flags >> HOPS_SHIFT, payload)


def lay_out_copy(node: bytes, tag: bytes, payload: Bytes, has_meta: bool, hops: int) -> tuple[bytes, int]:
    """Return (an unstamped frame, its location flags). It has FLAG_MORE, because the cursor ends the write."""
    flags = FLAG_MORE | hops << HOPS_SHIFT
    flags |= (FLAG_NODE if node else 0) | (FLAG_TAG if tag else 0) | (FLAG_META if has_meta else 0)
    frame_len = OVERHEAD_LEN - LENGTH_FIELD_LEN + len(node) + len(tag) + len(payload)
    header = HEADER.pack(frame_len, FrameType.APPEND, flags, 0, 0, 0, len(node), len(tag), len(payload))
    return b"".join((header, node, tag, payload, bytes(CHECKSUM_LEN))), LOCATION_FLAGS[flags]


def as_copies(frames: bytearray, rows: array[int], topic_id: int, first_seq: int) -> UnstampedCopies:
    """Turn the frames of records from `first_seq` on into unstamped copies, in place. Raise ValueError if one is not
    the record with its seq, or is damaged: a damaged record must not get a good checksum.
    """
    view, location_flags = memoryview(frames), bytearray()
    unpack, unpack_checksum = _LOG_HEAD.unpack_from, CHECKSUM.unpack_from
    for seq, row in enumerate(rows, first_seq):
        start = row & LOW_WORD
        checksum_at = start + (row >> 32) - CHECKSUM_LEN
        frame_len, type_, flags, found_id, found_seq = unpack(view, start)
        if (frame_len, type_, found_id, found_seq) != ((row >> 32) - LENGTH_FIELD_LEN, FrameType.APPEND, topic_id, seq):
            raise ValueError(f"not record {seq} of topic {topic_id:#x}")
        if unpack_checksum(view, checksum_at)[0] != xxh3_64_intdigest(view[start + TYPE_AT : checksum_at]):
            raise ValueError(f"the checksum of record {seq} of topic {topic_id:#x} does not match")
        view[start + FLAGS_AT] = flags & _KEPT_FLAGS | FLAG_MORE
        location_flags.append(LOCATION_FLAGS[flags])
    return UnstampedCopies(frames, rows, location_flags)


def segment_as_copies(part: memoryview, places: Sequence[int], first_seq: int) -> UnstampedCopies:
    """Make unstamped copies of the records from `first_seq` on, which lie in a part of a segment's `.data`: `places`
    are offset | length << 32 in that part. Raise ValueError as `as_copies` does.
    """
    frames, rows, location_flags = bytearray(), array("Q"), bytearray()
    unpack, unpack_tail, pack = segment.HEADER.unpack_from, segment.TAIL.unpack_from, _HEAD_OF_A_COPY.pack
    overhead_len = segment.HEADER_LEN + segment.TAIL_LEN
    for seq, place in enumerate(places, first_seq):
        start, length = place & LOW_WORD, place >> 32
        if length < overhead_len or start + length > len(part):
            raise ValueError(f"no frame of record {seq}: {length} bytes")
        _, flags, found_seq, _, node_len, tag_len, data_len = unpack(part, start)
        tail_at = start + length - segment.TAIL_LEN
        if unpack_tail(part, tail_at)[0] != xxh3_64_intdigest(part[start + LENGTH_FIELD_LEN : tail_at]):
            raise ValueError(f"the checksum of record {seq} does not match")
        if found_seq != seq or overhead_len + node_len + tag_len + data_len != length:
            raise ValueError(f"not record {seq}")
        copy_len = length + segment.LOG_FRAME_EXTRA_LEN
        rows.append(len(frames) | copy_len << 32)
        location_flags.append(LOCATION_FLAGS[flags])
        frames += pack(copy_len - LENGTH_FIELD_LEN, FrameType.APPEND, flags & _KEPT_FLAGS | FLAG_MORE)
        frames += part[start + segment.NODE_LEN_AT : tail_at + CHECKSUM_LEN]  # with the original's checksum so far
    return UnstampedCopies(frames, rows, location_flags)
