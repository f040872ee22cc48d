"""What control frames of a shard's log say: their bodies.

Msgpack maps, so that a reader in another language needs nothing else:

    TOPIC_CREATE     topic_id                 {"name": str, "config": {…}, "recreated": bool}
    CONFIG_UPDATE    topic_id                 {"config": {…}}               fields at their default are left out
    TOPIC_DELETE     topic_id                 -
    DELETE           topic_id, seq = head     {"below_seq": u64, "runs": [u64, …], "floors": […]}
    EVICT_WATERMARK  topic_id, seq = floor    {"floors": […]}
    CHECKPOINT_MARK  topic_id, seq            {"segments": [[…], …], "floors": […]}   records up to seq are in segments
    HEAD_WATERMARK   topic_id, seq            {"exact": bool}               no seq above was assigned in RAM
    IDEMPOTENCY      topic_id, seq = first    count u32 | key bytes         first frame of the write it names
    LEASE, JOB_ATTRIBUTES, ACK, CURSOR        see `core/queue_log.py`
    RAM_STATE        topic_id                 {"earliest_seq": u64, "evict_floor": u64, …}, see RamStateBody
    ROUTER_…         see core/routers.py
    SESSION          0                        {"wid": str, "body": bytes | nil, "positions": {…} | nil, "exact": bool}

`floors` are what the topic is afterwards (`floors.Floors`), `segments` what is new or changed
(`segment_list.SegmentInfo`), both as arrays. `runs` are the seqs that a DELETE took above `below_seq`: how many to pass
over (from 1 on at first), how many it took, and so on. So nothing is worked out again when the log is read: records may
be marked, evicted or rewritten by then.
"""

from __future__ import annotations

import struct

import msgspec

from topics.core.config import TopicConfig
from topics.core.floors import Floors
from topics.core.job import ConsumerState
from topics.core.segment_list import SegmentInfo

_COUNT = struct.Struct("<I")


class CreateBody(msgspec.Struct):
    name: str
    config: TopicConfig
    recreated: bool = False


class ConfigBody(msgspec.Struct):
    config: TopicConfig


class DeleteFrameBody(msgspec.Struct):
    """Everything below `below_seq` is gone (0: nothing of the kind), and what `runs` (`core/seq_set.py`) has."""

    below_seq: int
    runs: list[int]
    floors: Floors


class EvictBody(msgspec.Struct):
    floors: Floors


class MarkBody(msgspec.Struct):
    segments: list[SegmentInfo]
    floors: Floors


class HeadBody(msgspec.Struct):
    exact: bool


class SessionBody(msgspec.Struct):
    """A watch session as it is logged: `body` on creation, then positions; a nil body on collection. `positions`: where
    its last stream that ended in order came to, without topics that have ended; nil before there was one.
    """

    wid: str
    body: bytes | None
    positions: dict[str, int] | None = None
    exact: bool = True


class RamStateBody(msgspec.Struct):
    """Of a topic with records in the RAM log: what only files said that are gone now. Keys are (key, first_seq,
    records, ts), oldest first. `consumers`: attributes of jobs whose records are there.
    """

    earliest_seq: int
    evict_floor: int
    evict_reason: int
    evict_run_seq: int
    last_write_ts: int
    keys: list[tuple[bytes, int, int, int]]
    consumers: ConsumerState = ConsumerState()


encode_body = msgspec.msgpack.Encoder().encode
decode_create = msgspec.msgpack.Decoder(CreateBody).decode
decode_config = msgspec.msgpack.Decoder(ConfigBody).decode
decode_delete = msgspec.msgpack.Decoder(DeleteFrameBody).decode
decode_evict = msgspec.msgpack.Decoder(EvictBody).decode
decode_mark = msgspec.msgpack.Decoder(MarkBody).decode
decode_head = msgspec.msgpack.Decoder(HeadBody).decode
decode_ram_state = msgspec.msgpack.Decoder(RamStateBody).decode
decode_session = msgspec.msgpack.Decoder(SessionBody).decode


def encode_idempotency(count: int, key: bytes) -> bytes:
    """IDEMPOTENCY of a write of `count` records."""
    return _COUNT.pack(count) + key


def decode_idempotency(data: bytes) -> tuple[int, bytes]:
    """(count, key)"""
    (count,) = _COUNT.unpack_from(data)
    return count, data[_COUNT.size :]
