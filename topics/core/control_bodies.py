"""Bodies of the control frames in a shard's log.

They are msgpack maps, so that a reader in another language needs nothing else. docs/storage-format.md ("Log frame")
lists them all, with the topic id and the seq of each frame.

A frame has the state that results from it, so its reader needs no record: when somebody reads the log, records may be
marked, rewritten or evicted. Frames with floors, and an ACK that deletes, have a revision, so a run of frames that
comes twice changes nothing the second time.
"""

from __future__ import annotations

import struct

import msgspec

from topics.core.config import TopicConfig
from topics.core.cursors import CursorFrameBody
from topics.core.floors import Deletion, EvictReason, Floors
from topics.core.job import ConsumerState, LeaseFrameBody
from topics.core.segment_list import SegmentInfo
from topics.core.seq_set import Run, runs_of, seqs_of
from topics.core.topic import Topic

JobRow = tuple[int, int, str]
"""(seq, deliver_at_ms, order_key)"""
_COUNT = struct.Struct("<I")


class CreateFrameBody(msgspec.Struct):
    name: str
    config: TopicConfig
    recreated: bool = False
    head_ceiling: int = 0


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


class HeadFrameBody(msgspec.Struct, omit_defaults=True):
    """A head watermark. `reason` says why the seqs up to an exact mark of a durable topic are lost (`EvictReason`)."""

    exact: bool
    reason: EvictReason = EvictReason.LOST_TAIL


class SessionFrameBody(msgspec.Struct):
    """A watch session. A nil `body` means that the session was removed. `positions` say where its last stream was that
    ended in order, without topics that were deleted; nil before the first such stream.
    """

    wid: str
    body: bytes | None
    positions: dict[str, int] | None = None
    exact: bool = True


class AckFrameBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Jobs that are over. If `keep`, their records stay. Otherwise the records are deleted, and the topic has `records`
    and `size_bytes` less.

    `revision`, `earliest_seq` and `evict_…` are as in `Floors`. `dead_lettered` is the number of all jobs that went to
    the dead letters so far, 0 for no change. Unlike a DELETE, the body has no count of the records that remain: an ack
    is one of many writes in a group and does not know the others.
    """

    runs: list[Run]
    keep: bool = False
    dead_lettered: int = 0
    revision: int = 0
    records: int = 0
    size_bytes: int = 0
    earliest_seq: int = 1
    evict_floor: int = 1
    evict_reason: int = 0
    evict_run_seq: int = 1

    @staticmethod
    def removing(topic: Topic, deletion: Deletion, revision: int, dead_lettered: int) -> AckFrameBody:
        """Return the body to log for this deletion."""
        floors = topic.floors_without(deletion)
        taken = deletion.records, deletion.size_bytes, deletion.earliest_seq
        evicted = floors.evict_floor, floors.evict_reason, floors.evict_run_seq
        return AckFrameBody(runs_of(deletion.seqs), False, dead_lettered, revision, *taken, *evicted)

    def seqs(self) -> list[int]:
        return list(seqs_of(self.runs))

    def floors_of(self, topic: Topic) -> Floors:
        """Return the floors of a topic after this ack; the topic has everything before it."""
        evicted: AckFrameBody | Floors = self if self.evict_floor > topic.evict_floor else topic.floors()
        return Floors(
            self.revision,
            max(topic.earliest_seq, self.earliest_seq),
            evicted.evict_floor,
            evicted.evict_reason,
            evicted.evict_run_seq,
            # The durable log alone knows fewer records of an `ephemeral` topic than this ack may take.
            max(0, topic.records - self.records),
            max(0, topic.live_bytes - self.size_bytes),
        )


class RamStateFrameBody(msgspec.Struct):
    """State of a topic with records in the RAM log: the part that only removed files of that log had. `keys` are (key,
    first_seq, records, ts), oldest first. `consumers` has the attributes of jobs whose records are in the RAM log.
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
decode_job_rows = msgspec.msgpack.Decoder(list[JobRow]).decode
decode_lease = msgspec.msgpack.Decoder(LeaseFrameBody).decode
decode_ack = msgspec.msgpack.Decoder(AckFrameBody).decode
decode_cursor = msgspec.msgpack.Decoder(CursorFrameBody).decode
decode_ram_state = msgspec.msgpack.Decoder(RamStateFrameBody).decode
decode_session = msgspec.msgpack.Decoder(SessionFrameBody).decode


def encode_idempotency(count: int, key: bytes) -> bytes:
    """Encode the IDEMPOTENCY body of a write of `count` records."""
    return _COUNT.pack(count) + key


def decode_idempotency(data: bytes) -> tuple[int, bytes]:
    """Return (count, key)."""
    (count,) = _COUNT.unpack_from(data)
    return count, data[_COUNT.size :]
