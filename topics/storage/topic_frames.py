"""The frames that a shard logs about a topic: its creation, its records, its floors, and its head watermarks.

EVICT_WATERMARK says what ttl and caps evicted. A ttl evicts nothing before the log says so. Caps evict when records
come, and the next commit logs it. If a log ends before that, its reader computes the eviction again.

HEAD_WATERMARK says how far the heads of topics may be (`core/ceilings.py`). The shard logs a ceiling before it gives
out seqs up to it, so that no seq is given out twice if the RAM log or the end of the log is lost. An exact watermark
says that all seqs up to it were given out: the log goes on behind them, or they were lost.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple

from topics.core.control_bodies import (
    CreateFrameBody,
    DeleteFrameBody,
    EvictFrameBody,
    HeadFrameBody,
    encode_body,
    encode_idempotency,
)
from topics.core.floors import Floors
from topics.core.idempotency import WriteOutcome
from topics.core.pending import PendingWrite
from topics.core.seq_set import encode_runs
from topics.core.topic import Topic
from topics.storage.frame import FLAG_DURABLE, FLAG_MORE, HEADER, Bytes, FrameType, encode, stamp


def control_frame(type: FrameType, topic_id: int, ts: int, body: bytes = b"", *, seq: int = 0, flags: int = 0) -> bytes:
    """Return the frame of a control entry."""
    return encode(type, flags, topic_id, seq, ts, b"", b"", body)


def create_frame(topic: Topic, ts: int, flags: int = 0) -> bytes:
    """Return TOPIC_CREATE."""
    body = encode_body(CreateFrameBody(topic.name, topic.config, topic.recreated, topic.ceilings.seq))
    return encode(FrameType.TOPIC_CREATE, flags, topic.id, 0, ts, b"", b"", body)


def idempotency_frame(topic: Topic, key: bytes, outcome: WriteOutcome) -> bytes:
    """Return the IDEMPOTENCY frame for the records that follow it."""
    first_seq, count, ts = outcome
    body = encode_idempotency(count, key)
    return encode(FrameType.IDEMPOTENCY, FLAG_MORE, topic.id, first_seq, ts, b"", b"", body)


def floor_frame(topic: Topic, floors: Floors, ts: int, flags: int = 0) -> bytes:
    """Return EVICT_WATERMARK with the floors after the eviction."""
    body = encode_body(EvictFrameBody(floors))
    return encode(FrameType.EVICT_WATERMARK, flags, topic.id, floors.earliest_seq, ts, b"", b"", body)


def delete_frame(topic: Topic, below_seq: int, seqs: Sequence[int], floors: Floors, ts: int) -> bytes:
    """Return DELETE of everything below `below_seq` and of these seqs (ascending), with the floors after it."""
    body = encode_body(DeleteFrameBody(below_seq, encode_runs(seqs), floors))
    return encode(FrameType.DELETE, 0, topic.id, topic.head_seq, ts, b"", b"", body)


def head_frame(topic: Topic, seq: int, ts: int, *, exact: bool, flags: int = 0) -> bytes:
    """Return HEAD_WATERMARK. If `exact`, every seq up to `seq` was given out, and none above it. Otherwise the topic
    may give out seqs up to `seq`.
    """
    return encode(FrameType.HEAD_WATERMARK, flags, topic.id, seq, ts, b"", b"", encode_body(HeadFrameBody(exact)))


class AppendFrames(NamedTuple):
    """The frames of an append. `records`, with their key and the attributes of their jobs, are one atomic write; its
    first record begins at `prefix_len`. The frames in `before` are durable writes of their own.
    """

    before: list[bytes]
    records: list[Bytes]
    prefix_len: int


def append_frames(write: PendingWrite, laid_out: bytearray, *, created: bool) -> AppendFrames:
    """Return the frames of a write. `laid_out` has the frames of its records; this stamps them in place. If the write
    `created` the topic, TOPIC_CREATE is in the same atomic write, or before it if the records go to the RAM log.
    """
    topic, (first_seq, _count, ts) = write.topic, write.outcome
    before: list[bytes] = []
    records: list[Bytes] = []
    if created and write.in_ram:
        before.append(create_frame(topic, ts))
    elif created:
        records.append(create_frame(topic, ts, FLAG_MORE))
    if write.ceiling is not None:
        before.append(head_frame(topic, write.ceiling.seq, ts, exact=False))
    if write.key:
        records.append(idempotency_frame(topic, write.key, write.outcome))
    if write.jobs:
        body = encode_body(write.jobs)
        records.append(encode(FrameType.JOB_ATTRIBUTES, FLAG_MORE, topic.id, 0, ts, b"", b"", body))
    prefix_len = sum(map(len, records))
    stamp(laid_out, write.records.offset_len, topic.id, first_seq, ts, FLAG_DURABLE if write.sync else 0)
    records.append(laid_out)
    return AppendFrames(before, records, prefix_len)


def check_header(content: Bytes, at: int, topic: Topic, seq: int, file_no: int, offset: int) -> tuple[int, int]:
    """Return the lengths of node and tag of the frame at `at`, which is at `offset` of a log file. Raise OSError
    unless it is this record of the topic.
    """
    _, _, _, topic_id, found_seq, _, node_len, tag_len, _ = HEADER.unpack_from(content, at)
    if topic_id != topic.id or found_seq != seq:
        raise OSError(errno.EIO, f"log file {file_no}, offset {offset}: not record {seq} of topic {topic.name!r}")
    return node_len, tag_len
