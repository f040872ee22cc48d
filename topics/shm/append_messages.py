"""The encoding of appends and their answers, the hot path of the rings.

A request, behind the head that all messages have (`messages.py`):

    | if_head_seq u64 | key_len u16 | reserved u16 | config_len u32 | name | key | config | jobs | pad to 8 |
    | offset_len u64 × count | record flags u8 × count | frames … |

`jobs`, with HAS_JOBS only: its length as u32, then msgpack of `JobAttributes`. `frames` are unstamped Append frames
(`storage/frame.py`); `offset_len` has the offset and the length of each.

A reply, behind the head:

    | first_seq u64 | head_seq u64 | wal_us u32 | fsync_us u32 |
"""

from __future__ import annotations

import struct
from array import array
from typing import Final

import msgspec

from topics.core.config import CLASSES, TopicConfig
from topics.shm.messages import HEAD, HEAD_BYTES, MessageKind, Part

_APPEND: Final = struct.Struct("=QHHI")
_APPEND_REPLY: Final = struct.Struct("=QQII")
_TIMES: Final = struct.Struct("=II")
_LENGTH: Final = struct.Struct("=I")

# Request flags
CREATE: Final = 1
HAS_IF_HEAD: Final = 2
HAS_KEY: Final = 4
HAS_CONFIG: Final = 8
HAS_JOBS: Final = 16
# Reply flags
CREATED: Final = 1
DEDUPED: Final = 2
_CLASS_SHIFT: Final = 4


JobAttributes = list[tuple[int, int, int, str]]
"""(position in the write, deliver_at_ms, delay_ms, order_key) of records that have one of them; 0 and "" are none."""


class AppendRequest(msgspec.Struct, frozen=True):
    """An append as the shard gets it; `frames` is its own copy, to be stamped."""

    name: str
    create: bool
    if_head_seq: int | None
    key: bytes
    config: TopicConfig | None
    count: int
    offset_len: array[int]
    record_flags: bytes
    frames: bytearray
    jobs: JobAttributes = []


class AppendReply(msgspec.Struct, frozen=True):
    """The answer to an append."""

    first_seq: int
    count: int
    head_seq: int
    created: bool
    deduped: bool
    durability: str
    wal_us: int
    fsync_us: int
    throttled_us: int = 0
    """The time for which the request waited for room in the ring; its frontend sets it."""


_encoder = msgspec.msgpack.Encoder()
_jobs_decoder = msgspec.msgpack.Decoder(JobAttributes)
_config_decoder = msgspec.msgpack.Decoder(TopicConfig)


def encode_append(
    request_id: int,
    name: bytes,
    create: bool,
    if_head_seq: int | None,
    key: bytes,
    config: TopicConfig | None,
    offset_len: array[int],
    record_flags: bytes,
    frames: bytes | bytearray,
    jobs: JobAttributes | None = None,
) -> list[Part]:
    """Return the parts of an Append request, for `Ring.push`."""
    count = len(offset_len)
    config_body = b"" if config is None else _encoder.encode(config)
    flags = (
        (CREATE if create else 0)
        | (0 if if_head_seq is None else HAS_IF_HEAD)
        | (HAS_KEY if key else 0)
        | (0 if config is None else HAS_CONFIG)
        | (HAS_JOBS if jobs else 0)
    )
    jobs_body = b""
    if jobs:
        encoded = _encoder.encode(jobs)
        jobs_body = _LENGTH.pack(len(encoded)) + encoded
    texts = len(name) + len(key) + len(config_body) + len(jobs_body)
    start = (
        HEAD.pack(MessageKind.APPEND, flags, len(name), count, request_id)
        + _APPEND.pack(if_head_seq or 0, len(key), 0, len(config_body))
        + name
        + key
        + config_body
        + jobs_body
        + bytes(-texts % 8)
    )
    return [start, memoryview(offset_len).cast("B"), record_flags, frames]


def decode_append(message: memoryview) -> AppendRequest:
    """Decode a request, copying everything out of the ring."""
    _kind, flags, name_len, count, _request_id = HEAD.unpack_from(message)
    if_head_seq, key_len, _reserved, config_len = _APPEND.unpack_from(message, HEAD_BYTES)
    at = HEAD_BYTES + _APPEND.size
    name = str(message[at : at + name_len], "utf-8")
    at += name_len
    key = bytes(message[at : at + key_len])
    at += key_len
    config = _config_decoder.decode(message[at : at + config_len]) if flags & HAS_CONFIG else None
    at += config_len
    jobs: JobAttributes = []
    if flags & HAS_JOBS:
        (jobs_len,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        jobs = _jobs_decoder.decode(message[at : at + jobs_len])
        at += jobs_len
    at += -(at - HEAD_BYTES - _APPEND.size) % 8
    offset_len = array("Q")
    offset_len.frombytes(message[at : at + 8 * count])
    at += 8 * count
    return AppendRequest(
        name=name,
        create=bool(flags & CREATE),
        if_head_seq=if_head_seq if flags & HAS_IF_HEAD else None,
        key=key,
        config=config,
        jobs=jobs,
        count=count,
        offset_len=offset_len,
        record_flags=bytes(message[at : at + count]),
        frames=bytearray(message[at + count :]),
    )


def encode_append_reply(request_id: int, reply: AppendReply) -> bytearray:
    flags = (
        (CREATED if reply.created else 0)
        | (DEDUPED if reply.deduped else 0)
        | CLASSES.index(reply.durability) << _CLASS_SHIFT
    )
    return bytearray(
        HEAD.pack(MessageKind.APPEND, flags, 0, reply.count, request_id)
        + _APPEND_REPLY.pack(reply.first_seq, reply.head_seq, reply.wal_us, reply.fsync_us)
    )


def add_times(reply: bytearray, wal_us: int, fsync_us: int) -> None:
    """Put the times of the commit into an encoded append reply; replies of other kinds stay as they are."""
    if reply[0] == MessageKind.APPEND:
        _TIMES.pack_into(reply, HEAD_BYTES + _APPEND_REPLY.size - _TIMES.size, wal_us, fsync_us)


def decode_append_reply(message: memoryview) -> AppendReply:
    _kind, flags, _reserved, count, _request_id = HEAD.unpack_from(message)
    first_seq, head_seq, wal_us, fsync_us = _APPEND_REPLY.unpack_from(message, HEAD_BYTES)
    created, deduped, durability = bool(flags & CREATED), bool(flags & DEDUPED), CLASSES[flags >> _CLASS_SHIFT]
    return AppendReply(first_seq, count, head_seq, created, deduped, durability, wal_us, fsync_us)
