"""Bodies of the control frames in a shard's log.

They are msgpack maps, so that a reader in another language needs nothing else:

    TOPIC_CREATE     topic_id                 {"name": str, "config": {…}, "recreated": bool}
    CONFIG_UPDATE    topic_id                 {"config": {…}}               fields at their default are left out
    TOPIC_DELETE     topic_id                 -
    DELETE           topic_id, seq = head     {"below_seq": u64, "runs": [u64, …], "floors": […]}
    EVICT_WATERMARK  topic_id, seq = floor    {"floors": […]}
    CHECKPOINT_MARK  topic_id, seq            {"segments": [[…], …], "floors": […]}   records up to seq are in segments
    HEAD_WATERMARK   topic_id, seq            {"exact": bool}               no seq above was assigned in RAM
    IDEMPOTENCY      topic_id, seq = first    count u32 | key bytes         first frame of the write that has this key
    LEASE, JOB_ATTRIBUTES, ACK, CURSOR        see `core/queue_log.py`
    RAM_STATE        topic_id                 {"earliest_seq": u64, "evict_floor": u64, …}, see RamStateFrameBody
    ROUTER_…                                  see `core/routers.py`
    SESSION          0                        {"wid": str, "body": bytes | nil, "positions": {…} | nil, "exact": bool}

`floors` is the state of the topic after the frame (`floors.Floors`), `segments` the new and changed ones
(`segment_list.SegmentInfo`), both as arrays. `runs` are the seqs above `below_seq` that a DELETE took: how many to pass
over (from 1 on at first), how many were taken, and so on. So reading the log works nothing out again: by then records
may be marked, evicted or rewritten.
"""

from __future__ import annotations

import struct

import msgspec

from topics.core.config import TopicConfig
from topics.core.floors import Floors
from topics.core.job import ConsumerState
from topics.core.segment_list import SegmentInfo

_COUNT = struct.Struct("<I")


class CreateFrameBody(msgspec.Struct):
    name: str
    config: TopicConfig
    recreated: bool = False


class ConfigFrameBody(msgspec.Struct):
    config: TopicConfig


class DeleteFrameBody(msgspec.Struct):
    """Everything below `below_seq` (0: nothing), and the seqs in `runs` (`core/seq_set.py`), are deleted."""

    below_seq: int
    runs: list[int]
    floors: Floors


class EvictFrameBody(msgspec.Struct):
    floors: Floors


class MarkFrameBody(msgspec.Struct):
    segments: list[SegmentInfo]
    floors: Floors


class HeadFrameBody(msgspec.Struct):
    exact: bool


class SessionFrameBody(msgspec.Struct):
    """A watch session: `body` when it is created, then `positions`; a nil body when it is collected. `positions` are
    where its last stream that ended in order was, without topics that have ended; nil before the first such stream.
    """

    wid: str
    body: bytes | None
    positions: dict[str, int] | None = None
    exact: bool = True


class RamStateFrameBody(msgspec.Struct):
    """State of a topic with records in the RAM log that only removed files of that log had. `keys` are (key, first_seq,
    records, ts), oldest first. `consumers` has the attributes of jobs whose records are in the RAM log.
    """

    earliest_seq: int
    evict_floor: int
    evict_reason: int
    evict_run_seq: int
    last_write_ts: int
    keys: list[tuple[bytes, int, int, int]]
    consumers: ConsumerState = ConsumerState()


encode_body = msgspec.msgpack.Encoder().encode
decode_create = msgspec.msgpack.Decoder(CreateFrameBody).decode
decode_config = msgspec.msgpack.Decoder(ConfigFrameBody).decode
decode_delete = msgspec.msgpack.Decoder(DeleteFrameBody).decode
decode_evict = msgspec.msgpack.Decoder(EvictFrameBody).decode
decode_mark = msgspec.msgpack.Decoder(MarkFrameBody).decode
decode_head = msgspec.msgpack.Decoder(HeadFrameBody).decode
decode_ram_state = msgspec.msgpack.Decoder(RamStateFrameBody).decode
decode_session = msgspec.msgpack.Decoder(SessionFrameBody).decode


def encode_idempotency(count: int, key: bytes) -> bytes:
    """Encode the IDEMPOTENCY body of a write of `count` records."""
    return _COUNT.pack(count) + key


def decode_idempotency(data: bytes) -> tuple[int, bytes]:
    """Return (count, key)."""
    (count,) = _COUNT.unpack_from(data)
    return count, data[_COUNT.size :]
