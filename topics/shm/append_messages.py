"""The encoding of appends and their answers, the hot path of the rings.

A request, behind the head that all messages have (`messages.py`):

    | options_len u32 | options | offset_len u64 × count | record flags u8 × count | frames … |

`options` are msgpack of `AppendOptions`. `frames` are unstamped Append frames (`storage/frame.py`), each at the offset
and with the length that `offset_len` has.

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

_LENGTH: Final = struct.Struct("=I")
_APPEND_REPLY: Final = struct.Struct("=QQII")
_TIMES: Final = struct.Struct("=II")

# Reply flags
CREATED: Final = 1
DEDUPED: Final = 2
_CLASS_SHIFT: Final = 4


JobAttributes = list[tuple[int, int, int, str]]
"""(position in the write, deliver_at_ms, delay_ms, order_key) of records that have one of them; 0 and "" are none."""


class AppendOptions(msgspec.Struct, array_like=True, frozen=True):
    """All of an append but its records. With `create` a topic that is not there is made, as `config` says."""

    name: str
    create: bool = True
    if_head_seq: int | None = None
    key: bytes = b""
    config: TopicConfig | None = None
    jobs: JobAttributes = []
    has_begun: bool = False


class AppendRequest(msgspec.Struct, frozen=True):
    """An append as the shard gets it; `frames` is its own copy, to be stamped."""

    options: AppendOptions
    count: int
    offset_len: array[int]
    record_flags: bytes
    frames: bytearray


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
_options_decoder = msgspec.msgpack.Decoder(AppendOptions)


def encode_append(
    request_id: int, options: AppendOptions, offset_len: array[int], record_flags: bytes, frames: bytes | bytearray
) -> list[Part]:
    """Return the parts of an Append request, for `Ring.push`."""
    encoded = _encoder.encode(options)
    start = HEAD.pack(MessageKind.APPEND, 0, 0, len(offset_len), request_id) + _LENGTH.pack(len(encoded)) + encoded
    return [start, memoryview(offset_len).cast("B"), record_flags, frames]


def decode_append(message: memoryview) -> AppendRequest:
    """Decode a request, copying everything out of the ring."""
    count = HEAD.unpack_from(message)[3]
    at = HEAD_BYTES + _LENGTH.size
    words_at = at + _LENGTH.unpack_from(message, HEAD_BYTES)[0]
    flags_at = words_at + 8 * count
    frames_at = flags_at + count
    offset_len = array("Q")
    offset_len.frombytes(message[words_at:flags_at])
    record_flags, frames = bytes(message[flags_at:frames_at]), bytearray(message[frames_at:])
    return AppendRequest(_options_decoder.decode(message[at:words_at]), count, offset_len, record_flags, frames)


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
