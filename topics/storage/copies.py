"""Frames of records that a router copies, made from the frames of their originals.

A copy has the layout of an Append. In the RAM log, where it can be read but counts for nothing once the shard starts
again, it is of type ROUTER_COPY, which no recovery takes for a record; `as_appends` makes Appends of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    HEADER,
    HEADER_LEN,
    HOPS_SHIFT,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    OVERHEAD_LEN,
    Bytes,
    FrameType,
)

_LENGTH_FIELD_LEN: Final = 4
_TYPE_AT: Final = 4
_FLAGS_AT: Final = 5


class Original(NamedTuple):
    """A record as its frame has it; `frame` is that frame, `payload_at` where its payload begins, `type` APPEND, or
    ROUTER_COPY of a copy that no durable log has.
    """

    type: int
    ts: int
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
    """The record in `frame`; ValueError when it is not this one."""
    frame_len, type_, flags, found_id, found_seq, ts, node_len, tag_len, _ = HEADER.unpack_from(frame)
    if (frame_len + _LENGTH_FIELD_LEN, found_id, found_seq) != (len(frame), topic_id, seq):
        raise ValueError(f"not record {seq} of topic {topic_id:#x}")
    if CHECKSUM.unpack_from(frame, len(frame) - CHECKSUM_LEN)[0] != xxh3_64_intdigest(frame[_TYPE_AT:-CHECKSUM_LEN]):
        raise ValueError(f"the checksum of record {seq} of topic {topic_id:#x} does not match")
    tag_at = HEADER_LEN + node_len
    payload_at = tag_at + tag_len
    return Original(
        type_,
        ts,
        bytes(frame[HEADER_LEN:tag_at]),
        bytes(frame[tag_at:payload_at]),
        bool(flags & FLAG_META),
        flags >> HOPS_SHIFT,
        frame,
        payload_at,
    )


def read_segment_original(frame: memoryview, seq: int) -> Original:
    """As `read_original`, of a segment's frame (`segment.py`)."""
    if len(frame) < segment.HEADER_LEN + segment.TAIL_LEN:
        raise ValueError(f"no frame of record {seq}: {len(frame)} bytes")
    _, flags, found_seq, ts, node_len, tag_len, data_len = segment.HEADER.unpack_from(frame)
    frame = frame[: len(frame) - segment.TAIL_LEN + CHECKSUM_LEN]
    if CHECKSUM.unpack_from(frame, len(frame) - CHECKSUM_LEN)[0] != xxh3_64_intdigest(
        frame[_LENGTH_FIELD_LEN:-CHECKSUM_LEN]
    ):
        raise ValueError(f"the checksum of record {seq} does not match")
    tag_at = segment.HEADER_LEN + node_len
    payload_at = tag_at + tag_len
    if found_seq != seq or payload_at + data_len + CHECKSUM_LEN != len(frame):
        raise ValueError(f"not record {seq}")
    return Original(
        FrameType.APPEND,
        ts,
        bytes(frame[segment.HEADER_LEN : tag_at]),
        bytes(frame[tag_at:payload_at]),
        bool(flags & FLAG_META),
        flags >> HOPS_SHIFT,
        frame,
        payload_at,
    )


def make_copy(
    type: FrameType,
    topic_id: int,
    seq: int,
    ts: int,
    node: bytes,
    tag: bytes,
    payload: Bytes,
    has_meta: bool,
    hops: int,
) -> tuple[bytes, int]:
    """(the copy's frame, its location flags). As an Append it is never the last of its write: the cursor is."""
    flags = (FLAG_MORE if type == FrameType.APPEND else 0) | hops << HOPS_SHIFT
    location_flags = 0
    if node:
        flags |= FLAG_NODE
        location_flags |= LOCATION_HAS_NODE
    if tag:
        flags |= FLAG_TAG
        location_flags |= LOCATION_HAS_TAG
    if has_meta:
        flags |= FLAG_META
        location_flags |= LOCATION_HAS_META
    frame_len = OVERHEAD_LEN - _LENGTH_FIELD_LEN + len(node) + len(tag) + len(payload)
    header = HEADER.pack(frame_len, type, flags, topic_id, seq, ts, len(node), len(tag), len(payload))
    frame = b"".join((header, node, tag, payload))
    return frame + CHECKSUM.pack(xxh3_64_intdigest(memoryview(frame)[_TYPE_AT:])), location_flags


def as_appends(buffer: bytearray, offset_len: Sequence[int], topic_id: int, first_seq: int) -> None:
    """Turns copies in place into Appends of one write that goes on behind them; ValueError when one of them is not
    the copy with its seq.
    """
    view = memoryview(buffer)
    seq = first_seq
    for entry in offset_len:
        start = entry & 0xFFFF_FFFF
        checksum_at = start + (entry >> 32) - CHECKSUM_LEN
        frame_len, type_, flags, found_id, found_seq, *_ = HEADER.unpack_from(view, start)
        found = (frame_len + _LENGTH_FIELD_LEN, type_, found_id, found_seq)
        if found != (entry >> 32, FrameType.ROUTER_COPY, topic_id, seq):
            raise ValueError(f"not the copy with seq {seq} of topic {topic_id:#x}")
        view[start + _TYPE_AT] = FrameType.APPEND
        view[start + _FLAGS_AT] = flags | FLAG_MORE
        CHECKSUM.pack_into(view, checksum_at, xxh3_64_intdigest(view[start + _TYPE_AT : checksum_at]))
        seq += 1
