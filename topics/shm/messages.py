"""What frontends and shards say to each other through the rings.

A request begins with

    | kind u8 | flags u8 | name_len u16 | count u32 | request_id u64 |                        16 bytes, native order

Append (the hot path) goes on with

    | if_head_seq u64 | key_len u16 | reserved u16 | config_len u32 | name | key | config | jobs | pad to 8 |
    | offset_len u64 × count | record flags u8 × count | frames … |

`jobs` is there with HAS_JOBS: its length as u32, then msgpack of `JobAttributes`.
`frames` are unstamped Append frames (`storage/frame.py`); `offset_len` says where each begins in them and how
long it is. Every other request is one msgpack body, a member of `Call`. With BY_REFERENCE set, the body is the
path of a file in shared memory that holds the whole message: for what is too long for a ring.

A reply begins with

    | kind u8 | flags u8 | reserved u16 | count u32 | request_id u64 |                        16 bytes

`request_id` is unique over the incarnations of a frontend (incarnation << 40 | counter), so an answer to a dead
incarnation, or a second answer after a shard's restart, is recognised and dropped.
"""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum
from typing import Any, Final, Literal

import msgspec

from topics.core.config import CLASSES, TopicConfig
from topics.core.errors import TopicsError
from topics.core.routers import Router, RouterSpec
from topics.core.segment_list import SegmentInfo
from topics.shm.queue_messages import Dealt, QueueCall, QueueReply

_HEAD: Final = struct.Struct("=BBHIQ")
_APPEND: Final = struct.Struct("=QHHI")
_APPEND_REPLY: Final = struct.Struct("=QQII")
_TIMES: Final = struct.Struct("=II")
_LENGTH: Final = struct.Struct("=I")
HEAD_BYTES: Final = _HEAD.size
BY_REFERENCE: Final = 0x80


class Kind(IntEnum):
    APPEND = 1
    CALL = 2
    ERROR = 3
    NOTIFY = 4
    GENERATION = 5
    DEALT = 6


# Append request flags
CREATE: Final = 1
HAS_IF_HEAD: Final = 2
HAS_KEY: Final = 4
HAS_CONFIG: Final = 8
HAS_JOBS: Final = 16
# Append reply flags
CREATED: Final = 1
DEDUPED: Final = 2
_CLASS_SHIFT: Final = 4


class PutTopic(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Create a topic or replace its configuration."""

    name: str
    config: TopicConfig
    type_given: bool


class DeleteTopic(msgspec.Struct, tag=True, array_like=True, frozen=True):
    name: str
    if_empty: bool


class DeleteRecords(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Delete what is below `before_seq` and matches (`core/tags.py`); a nil `op` matches every record."""

    name: str
    before_seq: int | None
    op: Literal["eq", "glob"] | None
    pattern: bytes


class Expire(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A reader saw expired records at the front: move the floors now."""

    name: str


class Watch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Notify me (with my `token`) of every change of this topic; at once if it is not what I have seen."""

    token: int
    name: str
    seen_topic_id: int
    seen_head_seq: int


class Unwatch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    token: int
    name: str


class SessionPut(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Keep a watch session; `body` is the frontends' own affair."""

    wid: str
    body: bytes


class SessionLook(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a SessionOpen would be answered now; nothing begins or ends by asking."""

    wid: str


class SessionOpen(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A stream of this session begins; `stream` identifies it (unique per frontend incarnation)."""

    wid: str
    stream: int


class SessionClose(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The stream ended in order; these are the positions it has sent up to."""

    wid: str
    stream: int
    positions: dict[str, int]


class SessionAbandon(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nobody waits for the answer to that SessionOpen any more: no stream has begun."""

    wid: str
    stream: int


class TxnBegin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Decide a batch of a sink: from here on its stages, (id, topic) each, will be published."""

    sink: str
    batch: int
    stages: list[tuple[str, str]]


class StagePublish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Append a stage of a decided batch, once; answered as an append."""

    name: str
    stage: str
    sink: str
    batch: int


class TxnEnd(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Every stage of the batch is published."""

    sink: str
    batch: int


class StagesOver(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The batch is over: what the topic keeps to publish each stage once may go."""

    name: str
    sink: str
    batch: int


class TxnLook(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What has this sink committed?"""

    sink: str


class TxnForget(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The sink will not be used any more."""

    sink: str


class TxnPending(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Which batches are decided and not over?"""


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A frontend's new incarnation: what the former one watched and streamed is over."""

    incarnation: int


class TopicCheckpoint(msgspec.Struct, array_like=True, frozen=True):
    """One topic's records up to `up_to_seq` are in segments, on the disk; `segments` are those that are new or changed.

    `up_to_seq` is what it was before when a segment was only sealed, rewritten or relocated.
    """

    topic_id: int
    up_to_seq: int
    segments: list[SegmentInfo]


class Checkpoint(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the compactor: log that these are in segments, then let go of their locations."""

    topics: list[TopicCheckpoint]


class Trim(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the compactor: log files numbered below `file_no` hold nothing that two snapshots do not."""

    file_no: int


class MarkAgain(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the compactor: mark these deletions in their segments once more, a sync that should have covered the marks
    may have failed. `runs`: (first_seq, last_seq) of records that the log says are deleted.
    """

    topic_id: int
    runs: list[tuple[int, int]]


class EnsureTopic(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Create a topic with the default configuration; one that is there stays as it is. Answered as PutTopic."""

    name: str


class PutRouter(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To shard 0, as the next two: register a router, or change it."""

    name: str
    spec: RouterSpec


class DeleteRouter(msgspec.Struct, tag=True, array_like=True, frozen=True):
    name: str


class RemoveRouters(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Those that are still there of these."""

    router_ids: list[int]


class SyncRouters(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the shard of a dest: do what the table of routers says now. Has this router (0: any) begun?"""

    dest: str
    router_id: int
    version: int


class CatchUp(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the shard of a dest: copy what its source has now."""

    dest: str


RouterCall = PutRouter | DeleteRouter | RemoveRouters | SyncRouters | CatchUp

Call = (
    PutTopic
    | EnsureTopic
    | RouterCall
    | DeleteTopic
    | DeleteRecords
    | Expire
    | Watch
    | Unwatch
    | SessionPut
    | SessionLook
    | SessionOpen
    | SessionClose
    | SessionAbandon
    | TxnBegin
    | StagePublish
    | TxnEnd
    | StagesOver
    | TxnLook
    | TxnForget
    | TxnPending
    | Hello
    | Checkpoint
    | Trim
    | MarkAgain
    | QueueCall
)


class PutTopicReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    created: bool
    config: TopicConfig


class DeleteTopicReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class DeleteRecordsReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How many were deleted, and what the topic is now."""

    deleted: int
    earliest_seq: int
    head_seq: int
    records: int
    live_bytes: int


class SessionOpenReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`exact`: the positions are all that was sent; else the client's Last-Event-ID may know more."""

    body: bytes
    positions: dict[str, int]
    exact: bool


class CheckpointReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Topic ids: `gone` are deleted, `refused` not marked, `held` not yet: their records are needed in the log until
    copies of them are in another, which was asked for. All others of the request are marked.
    """

    gone: list[int]
    refused: list[int]
    held: list[int] = []


class TxnReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A sink after the call: `batch` is its latest, `pending` what of it is still to be published."""

    outcome: Literal["begun", "pending", "committed", "none"]
    batch: int
    pending: list[tuple[str, str]]


class TxnPendingReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """(sink, batch, stages) of each."""

    batches: list[tuple[str, int, list[tuple[str, str]]]]


class PutRouterReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    created: bool
    router: Router


class DeleteRouterReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class SyncRoutersReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`held`: copies need not be logged one by one any more, if ever."""

    begun: bool
    held: bool


class CaughtUp(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`done`: everything was copied that there is room for; else ask again."""

    done: bool


class Done(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Carried out; nothing to say."""


class ErrorReply(msgspec.Struct, array_like=True, frozen=True):
    code: str
    message: str
    detail: dict[str, Any] | None


Reply = (
    PutTopicReply
    | DeleteTopicReply
    | DeleteRecordsReply
    | SessionOpenReply
    | PutRouterReply
    | DeleteRouterReply
    | SyncRoutersReply
    | CaughtUp
    | CheckpointReply
    | TxnReply
    | TxnPendingReply
    | Done
    | QueueReply
)


class AppendReply(msgspec.Struct, frozen=True):
    first_seq: int
    count: int
    head_seq: int
    created: bool
    deduped: bool
    durability: str
    wal_us: int
    fsync_us: int
    throttled_us: int = 0
    """How long the request waited for room in the ring; only its frontend knows."""


JobAttributes = list[tuple[int, int, int, str]]
"""(position in the write, deliver_at_ms, delay_ms, order_key) of records that have any of them; 0 and "" are none."""


class AppendRequest(msgspec.Struct, frozen=True):
    """An append as the shard sees it; `frames` is its own copy, to be stamped."""

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


_call_encoder = msgspec.msgpack.Encoder()
_call_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_error_decoder = msgspec.msgpack.Decoder(ErrorReply)
_jobs_decoder = msgspec.msgpack.Decoder(JobAttributes)
_dealt_decoder = msgspec.msgpack.Decoder(Dealt)
_config_decoder = msgspec.msgpack.Decoder(TopicConfig)

Part = bytes | bytearray | memoryview


def head(message: memoryview) -> tuple[int, int, int]:
    """(kind with BY_REFERENCE, request_id, count) of a request or reply."""
    kind, _flags, _name_len, count, request_id = _HEAD.unpack_from(message)
    return kind, request_id, count


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
    """The parts of an Append request, for `Ring.push`."""
    count = len(offset_len)
    config_body = b"" if config is None else _call_encoder.encode(config)
    flags = (
        (CREATE if create else 0)
        | (0 if if_head_seq is None else HAS_IF_HEAD)
        | (HAS_KEY if key else 0)
        | (0 if config is None else HAS_CONFIG)
        | (HAS_JOBS if jobs else 0)
    )
    jobs_body = b""
    if jobs:
        encoded = _call_encoder.encode(jobs)
        jobs_body = _LENGTH.pack(len(encoded)) + encoded
    texts = len(name) + len(key) + len(config_body) + len(jobs_body)
    start = (
        _HEAD.pack(Kind.APPEND, flags, len(name), count, request_id)
        + _APPEND.pack(if_head_seq or 0, len(key), 0, len(config_body))
        + name
        + key
        + config_body
        + jobs_body
        + bytes(-texts % 8)
    )
    return [start, memoryview(offset_len).cast("B"), record_flags, frames]


def decode_append(message: memoryview) -> AppendRequest:
    """Copies everything out of the ring."""
    _kind, flags, name_len, count, _request_id = _HEAD.unpack_from(message)
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


def encode_call(request_id: int, call: Call) -> list[Part]:
    """Any other request."""
    return [_HEAD.pack(Kind.CALL, 0, 0, 0, request_id), _call_encoder.encode(call)]


def decode_call(message: memoryview) -> Call:
    return _call_decoder.decode(message[HEAD_BYTES:])


def encode_reference(kind: int, request_id: int, path: str) -> list[Part]:
    """A message that lies in a file."""
    return [_HEAD.pack(kind | BY_REFERENCE, 0, 0, 0, request_id), path.encode()]


def decode_reference(message: memoryview) -> str:
    return str(message[HEAD_BYTES:], "utf-8")


def encode_append_reply(request_id: int, reply: AppendReply) -> bytearray:
    flags = (
        (CREATED if reply.created else 0)
        | (DEDUPED if reply.deduped else 0)
        | CLASSES.index(reply.durability) << _CLASS_SHIFT
    )
    return bytearray(
        _HEAD.pack(Kind.APPEND, flags, 0, reply.count, request_id)
        + _APPEND_REPLY.pack(reply.first_seq, reply.head_seq, reply.wal_us, reply.fsync_us)
    )


def add_times(reply: bytearray, wal_us: int, fsync_us: int) -> None:
    """Puts the times of the commit into an encoded append reply; other kinds carry none."""
    if reply[0] == Kind.APPEND:
        _TIMES.pack_into(reply, HEAD_BYTES + _APPEND_REPLY.size - _TIMES.size, wal_us, fsync_us)


def decode_append_reply(message: memoryview) -> AppendReply:
    _kind, flags, _reserved, count, _request_id = _HEAD.unpack_from(message)
    first_seq, head_seq, wal_us, fsync_us = _APPEND_REPLY.unpack_from(message, HEAD_BYTES)
    return AppendReply(
        first_seq,
        count,
        head_seq,
        bool(flags & CREATED),
        bool(flags & DEDUPED),
        CLASSES[flags >> _CLASS_SHIFT],
        wal_us,
        fsync_us,
    )


def encode_reply(request_id: int, reply: Reply) -> bytearray:
    return bytearray(_HEAD.pack(Kind.CALL, 0, 0, 0, request_id) + _call_encoder.encode(reply))


def decode_reply(message: memoryview) -> Reply:
    return _reply_decoder.decode(message[HEAD_BYTES:])


def encode_error(request_id: int, error: TopicsError) -> bytearray:
    body = _call_encoder.encode(ErrorReply(error.code, error.message, error.detail))
    return bytearray(_HEAD.pack(Kind.ERROR, 0, 0, 0, request_id) + body)


def decode_error(message: memoryview) -> TopicsError:
    error = _error_decoder.decode(message[HEAD_BYTES:])
    return TopicsError(error.code, error.message, error.detail)


def encode_notify(tokens: list[int]) -> bytearray:
    """Topics (by the frontend's own tokens) that changed."""
    return bytearray(_HEAD.pack(Kind.NOTIFY, 0, 0, len(tokens), 0) + array("Q", tokens).tobytes())


def decode_notify(message: memoryview) -> list[int]:
    tokens: list[int] = message[HEAD_BYTES:].cast("Q").tolist()
    return tokens


def encode_generation() -> bytearray:
    """The shard has recovered: a new arena is current, watches must be made again."""
    return bytearray(_HEAD.pack(Kind.GENERATION, 0, 0, 0, 0))


def encode_dealt(push_id: int, dealt: Dealt) -> bytearray:
    """Jobs for a stream."""
    return bytearray(_HEAD.pack(Kind.DEALT, 0, 0, 0, push_id) + _call_encoder.encode(dealt))


def decode_dealt(message: memoryview) -> Dealt:
    return _dealt_decoder.decode(message[HEAD_BYTES:])
