"""Frames of the records that routers copy, made from the frames of their originals.

A copy is an Append of the dest like any other. An unstamped copy lacks its topic id, seq, time and checksum, which
`frame.stamp` fills in for a whole page. The frames of the originals are checked and become unstamped copies. A page
that passes its router unchanged is stamped as it is; otherwise each copy is laid out, which costs several times that.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

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

_TYPE_AND_IDS: Final = Struct("<BxQQ")
"""From TYPE_AT on: type, flags (skipped), topic id, seq."""
_HEAD_OF_A_COPY: Final = Struct("<IBB24x")
"""Frame length, type, flags; topic id, seq and time are not known yet."""
_FLAGS_AND_LENGTHS: Final = Struct("<B24xHH")
"""From FLAGS_AT on: flags, topic id, seq and time (skipped), length of node and tag."""
_KEPT_FLAGS: Final = FLAG_META | FLAG_NODE | FLAG_TAG | 0xFF << HOPS_SHIFT & 0xFF


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


def read_copy(frame: memoryview) -> Original:
    """Return the parts of an unstamped copy."""
    flags, node_len, tag_len = _FLAGS_AND_LENGTHS.unpack_from(frame, FLAGS_AT)
    tag_at = HEADER_LEN + node_len
    node, tag = bytes(frame[HEADER_LEN:tag_at]), bytes(frame[tag_at : tag_at + tag_len])
    return Original(node, tag, bool(flags & FLAG_META), flags >> HOPS_SHIFT, frame[tag_at + tag_len : -CHECKSUM_LEN])


def lay_out_copy(node: bytes, tag: bytes, payload: Bytes, has_meta: bool, hops: int) -> tuple[bytes, int]:
    """Return (an unstamped frame, its location flags). A copy is never the last frame of its write: the cursor is."""
    flags = FLAG_MORE | hops << HOPS_SHIFT
    flags |= (FLAG_NODE if node else 0) | (FLAG_TAG if tag else 0) | (FLAG_META if has_meta else 0)
    frame_len = OVERHEAD_LEN - LENGTH_FIELD_LEN + len(node) + len(tag) + len(payload)
    header = HEADER.pack(frame_len, FrameType.APPEND, flags, 0, 0, 0, len(node), len(tag), len(payload))
    return b"".join((header, node, tag, payload, bytes(CHECKSUM_LEN))), LOCATION_FLAGS[flags]


def as_copies(buffer: bytearray, offset_len: Sequence[int], topic_id: int, first_seq: int) -> None:
    """Turn the frames of records from `first_seq` on into unstamped copies, in place. Raise ValueError if one is not
    the record with its seq, or is damaged: a damaged record must not get a good checksum.
    """
    view = memoryview(buffer)
    unpack, unpack_checksum = _TYPE_AND_IDS.unpack_from, CHECKSUM.unpack_from
    seq = first_seq
    for entry in offset_len:
        start = entry & 0xFFFF_FFFF
        checksum_at = start + (entry >> 32) - CHECKSUM_LEN
        if unpack(view, start + TYPE_AT) != (FrameType.APPEND, topic_id, seq):
            raise ValueError(f"not record {seq} of topic {topic_id:#x}")
        if unpack_checksum(view, checksum_at)[0] != xxh3_64_intdigest(view[start + TYPE_AT : checksum_at]):
            raise ValueError(f"the checksum of record {seq} of topic {topic_id:#x} does not match")
        view[start + FLAGS_AT] = view[start + FLAGS_AT] & _KEPT_FLAGS | FLAG_MORE
        seq += 1


def segment_as_copies(part: memoryview, places: Sequence[int], first_seq: int) -> tuple[bytearray, array[int]]:
    """Return unstamped copies of the records from `first_seq` on, which lie in a part of a segment's `.data`, and the
    place of each copy. `places` are offset | length << 32 in that part. Raise ValueError as `as_copies` does.
    """
    buffer, rows, overhead_len = bytearray(), array("Q"), segment.HEADER_LEN + segment.TAIL_LEN
    unpack, unpack_tail, pack = segment.HEADER.unpack_from, segment.TAIL.unpack_from, _HEAD_OF_A_COPY.pack
    for seq, place in enumerate(places, first_seq):
        start, length = place & 0xFFFF_FFFF, place >> 32
        if length < overhead_len or start + length > len(part):
            raise ValueError(f"no frame of record {seq}: {length} bytes")
        _, flags, found_seq, _, node_len, tag_len, data_len = unpack(part, start)
        tail_at = start + length - segment.TAIL_LEN
        if unpack_tail(part, tail_at)[0] != xxh3_64_intdigest(part[start + LENGTH_FIELD_LEN : tail_at]):
            raise ValueError(f"the checksum of record {seq} does not match")
        if found_seq != seq or overhead_len + node_len + tag_len + data_len != length:
            raise ValueError(f"not record {seq}")
        copy_len = length + segment.LOG_FRAME_EXTRA_LEN
        rows.append(len(buffer) | copy_len << 32)
        buffer += pack(copy_len - LENGTH_FIELD_LEN, FrameType.APPEND, flags & _KEPT_FLAGS | FLAG_MORE)
        buffer += part[start + segment.NODE_LEN_AT : tail_at + CHECKSUM_LEN]  # this checksum is not yet the copy's
    return buffer, rows
