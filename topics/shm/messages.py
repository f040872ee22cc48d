"""The encoding of messages between frontends, the compactor and shards in the rings.

A request begins with

    | kind u8 | flags u8 | reserved u16 | count u32 | request_id u64 |                        16 bytes, native order

Append, the hot path, continues in a layout of its own (`append_messages.py`). Every other request has one msgpack body,
a `Message` of `topic_messages.py` or `queue_messages.py`. With BY_REFERENCE set, the body is the path of a file in
shared memory that holds the whole message, which is too long for a ring.

A reply begins with

    | kind u8 | flags u8 | reserved u16 | count u32 | request_id u64 |                        16 bytes

`request_id` is unique over all incarnations of a frontend (incarnation << 40 | counter). By it a frontend recognises
and drops an answer to a former incarnation, or a second answer after a shard's restart.
"""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import Any, Final

import msgspec

from topics.core.errors import TopicsError
from topics.shm import queue_messages, topic_messages
from topics.shm.asks import Asks, Message
from topics.shm.queue_messages import Dealt

HEAD: Final = struct.Struct("=BBHIQ")
HEAD_BYTES: Final = HEAD.size
BY_REFERENCE: Final = 0x80

Part = bytes | bytearray | memoryview


class MessageKind(IntEnum):
    """The kind of a message in a ring. CALL is every request but an append, and its reply."""

    APPEND = 1
    CALL = 2
    ERROR = 3
    NOTIFY = 4
    GENERATION = 5
    DEALT = 6


class ErrorReply(msgspec.Struct, array_like=True, frozen=True):
    """A TopicsError in a ring."""

    code: str
    message: str
    detail: dict[str, Any] | None


_defined = [*vars(topic_messages).values(), *vars(queue_messages).values()]
_any_message = reduce(or_, [one for one in _defined if isinstance(one, type) and issubclass(one, Message)])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_any_message)
_error_decoder = msgspec.msgpack.Decoder(ErrorReply)
_dealt_decoder = msgspec.msgpack.Decoder(Dealt)


def head(message: memoryview) -> tuple[int, int, int]:
    """Return (kind with BY_REFERENCE, request_id, count) of a request or reply."""
    kind, _flags, _reserved, count, request_id = HEAD.unpack_from(message)
    return kind, request_id, count


def encode_call(request_id: int, call: Message | Asks[Any]) -> list[Part]:
    """Encode a request other than an append."""
    return [HEAD.pack(MessageKind.CALL, 0, 0, 0, request_id), _encoder.encode(call)]


def encode_reply(request_id: int, reply: Message) -> bytearray:
    return bytearray(HEAD.pack(MessageKind.CALL, 0, 0, 0, request_id) + _encoder.encode(reply))


def decode(message: memoryview) -> Message:
    """Decode a request other than an append, or the reply to one."""
    return _decoder.decode(message[HEAD_BYTES:])


def encode_error(request_id: int, error: TopicsError) -> bytearray:
    body = _encoder.encode(ErrorReply(error.code, error.message, error.detail))
    return bytearray(HEAD.pack(MessageKind.ERROR, 0, 0, 0, request_id) + body)


def decode_error(message: memoryview) -> TopicsError:
    error = _error_decoder.decode(message[HEAD_BYTES:])
    return TopicsError(error.code, error.message, error.detail)


def encode_reference(kind: int, request_id: int, path: str) -> list[Part]:
    """Encode a reference to a message in a file."""
    return [HEAD.pack(kind | BY_REFERENCE, 0, 0, 0, request_id), path.encode()]


def decode_reference(message: memoryview) -> str:
    return str(message[HEAD_BYTES:], "utf-8")


def encode_notify(tokens: list[int]) -> bytearray:
    """Encode a notice: topics (by the frontend's own tokens) that changed."""
    return bytearray(HEAD.pack(MessageKind.NOTIFY, 0, 0, len(tokens), 0) + array("Q", tokens).tobytes())


def decode_notify(message: memoryview) -> list[int]:
    tokens: list[int] = message[HEAD_BYTES:].cast("Q").tolist()
    return tokens


def encode_generation() -> bytearray:
    """Encode a notice: the shard has recovered. It has a new arena, and knows no watches."""
    return bytearray(HEAD.pack(MessageKind.GENERATION, 0, 0, 0, 0))


def encode_dealt(push_id: int, dealt: Dealt) -> bytearray:
    """Encode jobs for a stream."""
    return bytearray(HEAD.pack(MessageKind.DEALT, 0, 0, 0, push_id) + _encoder.encode(dealt))


def decode_dealt(message: memoryview) -> Dealt:
    return _dealt_decoder.decode(message[HEAD_BYTES:])
