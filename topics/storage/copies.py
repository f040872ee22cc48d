"""Frames of the records that routers copy, made from the frames of their originals.

A copy is an Append of the dest like any other. It is laid out without its topic id, seq, time and checksum, which
`frame.stamp` fills in for a whole page. If a page passes its router unchanged, the frames of the originals are stamped
again (`as_copies`), which costs a fraction of laying them out.
"""

from __future__ import annotations

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
_KEPT_FLAGS: Final = FLAG_META | FLAG_NODE | FLAG_TAG | 0xFF << HOPS_SHIFT & 0xFF


class Original(NamedTuple):
    """The parts of a record in its frame; the payload begins at `payload_at` of `frame`."""

    node: bytes
    tag: bytes
    has_meta: bool
    hops: int
    frame: memoryview
    payload_at: int

    @property
    def payload(self) -> memoryview:
        return self.frame[self.payload_at : -CHECKSUM_LEN]


def read_original(frame: memoryview, topic_id: int, seq: int) -> Original:
    """Read the record in a frame of the log; ValueError if it is another or damaged."""
    frame_len, type_, flags, found_id, found_seq, _, node_len, tag_len, _ = HEADER.unpack_from(frame)
    found = (frame_len + LENGTH_FIELD_LEN, type_, found_id, found_seq)
    if found != (len(frame), FrameType.APPEND, topic_id, seq):
        raise ValueError(f"not record {seq} of topic {topic_id:#x}")
    if CHECKSUM.unpack_from(frame, len(frame) - CHECKSUM_LEN)[0] != xxh3_64_intdigest(frame[TYPE_AT:-CHECKSUM_LEN]):
        raise ValueError(f"the checksum of record {seq} of topic {topic_id:#x} does not match")
    return _parts(frame, flags, HEADER_LEN, node_len, tag_len)


def read_segment_original(frame: memoryview, seq: int) -> Original:
    """Read the record in a frame of a segment (`segment.py`); ValueError if it is another or damaged."""
    if len(frame) < segment.HEADER_LEN + segment.TAIL_LEN:
        raise ValueError(f"no frame of record {seq}: {len(frame)} bytes")
    _, flags, found_seq, _, node_len, tag_len, data_len = segment.HEADER.unpack_from(frame)
    frame = frame[: len(frame) - segment.TAIL_LEN + CHECKSUM_LEN]
    if CHECKSUM.unpack_from(frame, len(frame) - CHECKSUM_LEN)[0] != xxh3_64_intdigest(
        frame[LENGTH_FIELD_LEN:-CHECKSUM_LEN]
    ):
        raise ValueError(f"the checksum of record {seq} does not match")
    if found_seq != seq or segment.HEADER_LEN + node_len + tag_len + data_len + CHECKSUM_LEN != len(frame):
        raise ValueError(f"not record {seq}")
    return _parts(frame, flags, segment.HEADER_LEN, node_len, tag_len)


def _parts(frame: memoryview, flags: int, node_at: int, node_len: int, tag_len: int) -> Original:
    tag_at = node_at + node_len
    payload_at = tag_at + tag_len
    node, tag = bytes(frame[node_at:tag_at]), bytes(frame[tag_at:payload_at])
    return Original(node, tag, bool(flags & FLAG_META), flags >> HOPS_SHIFT, frame, payload_at)


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
