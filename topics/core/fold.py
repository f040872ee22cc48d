"""The fold: what a shard's log says, one frame after the other. Pure; recovery and the compactor use the same.

Bodies of control frames (msgpack maps; a writer in another language needs nothing else):

    TOPIC_CREATE     topic_id                 {"name": str, "config": {…}, "recreated": bool}
    CONFIG_UPDATE    topic_id                 {"config": {…}}               fields at their default are left out
    TOPIC_DELETE     topic_id                 -
    DELETE           topic_id, seq = head     {"before_seq": u64 | nil, "op": "eq" | "glob" | nil, "tag": bytes}
    EVICT_WATERMARK  topic_id, seq = floor    {"reason": 1 cap, 2 ttl, 3 mixed, 4 restart}
    HEAD_WATERMARK   topic_id, seq            {"exact": bool}               no seq above was assigned in RAM
    IDEMPOTENCY      topic_id, seq = first    count u32 | key bytes         first frame of the write it names
    LEASE, JOB_ATTRIBUTES, ACK, CURSOR        see `core/queue_log.py`
    RAM_STATE        topic_id                 {"earliest_seq": u64, "evict_floor": u64, …}, see RamStateBody
    ROUTER_…         see core/router_state.py
    SESSION          0                        {"wid": str, "body": bytes | nil, "positions": {…}, "exact": bool}

A run of frames may come twice (a file whose sync failed is copied into the next one): the second changes nothing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import Literal

import msgspec

from topics.core.config import U64_MAX, TopicConfig
from topics.core.idempotency import Outcome
from topics.core.queue_log import (
    ConsumerState,
    fold_ack,
    fold_cursor,
    fold_job_attributes,
    fold_lease,
    restore_consumers,
)
from topics.core.router_state import RouterState, decode_feed
from topics.core.tags import Match, TagsOf
from topics.core.topic import ENTRY_WORDS, LOCATION_LOST, EvictReason, RecordIndex, Topic

_COUNT = struct.Struct("<I")


class CreateBody(msgspec.Struct):
    name: str
    config: TopicConfig
    recreated: bool = False


class ConfigBody(msgspec.Struct):
    config: TopicConfig


class DeleteBody(msgspec.Struct):
    """`op` and `tag` as in `tags.Match`; a nil `op` matches every record."""

    before_seq: int | None
    op: Literal["eq", "glob"] | None
    tag: bytes = b""


class EvictBody(msgspec.Struct):
    reason: int


class HeadBody(msgspec.Struct):
    exact: bool


class SessionBody(msgspec.Struct):
    """A watch session as it is logged: `body` on creation, then positions; a nil body on collection."""

    wid: str
    body: bytes | None
    positions: dict[str, int] = {}
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
_decode_create = msgspec.msgpack.Decoder(CreateBody).decode
_decode_config = msgspec.msgpack.Decoder(ConfigBody).decode
_decode_delete = msgspec.msgpack.Decoder(DeleteBody).decode
_decode_evict = msgspec.msgpack.Decoder(EvictBody).decode
_decode_head = msgspec.msgpack.Decoder(HeadBody).decode
_decode_ram_state = msgspec.msgpack.Decoder(RamStateBody).decode
decode_session = msgspec.msgpack.Decoder(SessionBody).decode


def encode_idempotency(count: int, key: bytes) -> bytes:
    return _COUNT.pack(count) + key


class FoldError(Exception):
    """The log contradicts itself: frames are valid, but their order cannot have been written by a shard."""


class Fold:
    """Applies frames in log order.

    Appends are gathered per topic and reach it in runs, so that the cost of a record is a few list operations.
    A topic's records may come from two logs (it was `ephemeral` for a while): the RAM log is read first, then the
    durable one, then `finish` is called.
    """

    def __init__(self, make_index: Callable[[], RecordIndex], tags_of: Callable[[Topic], TagsOf]) -> None:
        self._make_index = make_index
        self._tags_of = tags_of
        self.topics: dict[int, Topic] = {}
        self.sessions: dict[str, SessionBody] = {}
        self.created_ids: set[int] = set()
        """Deleted topics as well: ids are never used again."""
        self.deleted_names: set[str] = set()
        """Whoever takes one again is `recreated`."""
        self.routers = RouterState()
        self._pending: dict[int, array[int]] = {}
        self._early_keys: dict[int, list[tuple[bytes, Outcome]]] = {}
        self._early_attributes: dict[int, list[bytes]] = {}
        self._ram_states: dict[int, RamStateBody] = {}
        self._ephemeral_heads: dict[int, int] = {}

    def records(self, topic_id: int, entries: array[int]) -> None:
        """A run of Append frames of one topic: index entries in log order."""
        pending = self._pending.get(topic_id)
        if pending is None:
            self._pending[topic_id] = entries
        else:
            pending.extend(entries)

    def topic_create(self, topic_id: int, data: bytes) -> None:
        if topic_id in self.created_ids:
            return
        body = _decode_create(data)
        topic = Topic(topic_id, body.name, body.config, self._make_index(), body.recreated)
        self.topics[topic_id] = topic
        self.created_ids.add(topic_id)
        state = self._ram_states.pop(topic_id, None)
        if state is not None:
            _restore_ram_state(topic, state)
        for key, outcome in self._early_keys.pop(topic_id, ()):
            topic.idempotency.remember(key, outcome)
        for attributes in self._early_attributes.pop(topic_id, ()):
            fold_job_attributes(topic, attributes)

    def topic_delete(self, topic_id: int) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            self.deleted_names.add(topic.name)
            self.routers.topic_deleted(topic_id)
            self._pending.pop(topic_id, None)
            self._ephemeral_heads.pop(topic_id, None)
            del self.topics[topic_id]

    def config_update(self, topic_id: int, data: bytes) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            self._settle(topic)
            # Its evictions, if any, are in the log themselves.
            topic.config = _decode_config(data).config

    def delete(self, topic_id: int, head_seq: int, data: bytes) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            self._settle(topic)
            body = _decode_delete(data)
            match = None if body.op is None else Match(body.op, body.tag)
            topic.deleted(topic.plan_delete(head_seq, body.before_seq, match, self._tags_of(topic)))

    def evict_watermark(self, topic_id: int, seq: int, data: bytes) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            self._settle(topic)
            topic.evict_below(seq, EvictReason(_decode_evict(data).reason))

    def head_watermark(self, topic_id: int, seq: int, data: bytes) -> None:
        if self._topic(topic_id) is not None:
            known = self._ephemeral_heads.get(topic_id, 0)
            self._ephemeral_heads[topic_id] = seq if _decode_head(data).exact else max(seq, known)

    def idempotency(self, topic_id: int, seq: int, ts: int, data: bytes) -> None:
        (count,) = _COUNT.unpack_from(data)
        key, outcome = data[_COUNT.size :], Outcome(seq, count, ts)
        topic = self.topics.get(topic_id)
        if topic is not None:
            topic.idempotency.remember(key, outcome)
        elif topic_id not in self.created_ids:
            self._early_keys.setdefault(topic_id, []).append((key, outcome))

    def job_attributes(self, topic_id: int, data: bytes) -> None:
        topic = self.topics.get(topic_id)
        if topic is not None:
            fold_job_attributes(topic, data)
        elif topic_id not in self.created_ids:
            self._early_attributes.setdefault(topic_id, []).append(data)

    def lease(self, topic_id: int, data: bytes) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            fold_lease(topic, data)

    def ack(self, topic_id: int, data: bytes) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            self._settle(topic)
            fold_ack(topic, data)

    def cursor(self, topic_id: int, data: bytes) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            fold_cursor(topic, data)

    def ram_state(self, topic_id: int, data: bytes) -> None:
        """The latest one counts, and everything about the topic that the RAM log says after it."""
        state = _decode_ram_state(data)
        topic = self.topics.get(topic_id)
        if topic is not None:
            _restore_ram_state(topic, state)
        elif topic_id not in self.created_ids:
            self._ram_states[topic_id] = state

    def router_cursor(self, topic_id: int, seq: int, data: bytes, in_ram: bool) -> None:
        """`in_ram`: from the RAM log, which is read before the topic is known."""
        feed = decode_feed(data)
        if not in_ram:
            topic = self._topic(topic_id)
            if topic is None:
                return
            if feed.trimmed and topic.config.durability != "ephemeral":
                self._settle(topic)
                topic.skipped(seq, EvictReason.SOURCE_TRIM)
        self.routers.cursor(topic_id, feed, in_ram)

    def router_source(self, topic_id: int, hold_seq: int) -> None:
        topic = self._topic(topic_id)
        if topic is not None:
            self._settle(topic)
            topic.index.hold(hold_seq or U64_MAX)
            self.routers.source(topic_id, hold_seq)

    def session(self, data: bytes) -> None:
        session = decode_session(data)
        if session.body is None:
            self.sessions.pop(session.wid, None)
        else:
            self.sessions[session.wid] = session

    def finish(self, ram_log_survived: bool) -> None:
        """All logs are read. Without the RAM log, what `ephemeral` topics held is gone and their heads are what
        the watermarks say; with it (one process crashed, not the service), the records themselves say it.
        """
        for topic in self.topics.values():
            self._settle(topic, at_end=True)
            head_ceiling = self._ephemeral_heads.get(topic.id, 0)
            topic.head_ceiling = head_ceiling
            if not ram_log_survived and head_ceiling > topic.head_seq:
                if topic.records:
                    self._fill_lost(topic, head_ceiling)
                else:
                    topic.lost_below(head_ceiling + 1, EvictReason.RESTART)
            # What the last writes evicted may not have been logged any more.
            topic.evict_over_cap()

    def _topic(self, topic_id: int) -> Topic | None:
        """None for a topic that was deleted since."""
        topic = self.topics.get(topic_id)
        if topic is None and topic_id not in self.created_ids:
            raise FoldError(f"a frame names topic {topic_id:#x}, which the log never created")
        return topic

    def _settle(self, topic: Topic, at_end: bool = False) -> None:
        """Hands a topic the records gathered for it, in seq order, holes filled where RAM records are lost.

        The RAM log is read first: what it says of a topic that was durable in between waits for the records between.
        """
        entries = self._pending.pop(topic.id, None)
        if entries is None:
            return
        entries = self._in_order(topic, entries)
        while entries:
            expected = topic.head_seq + 1
            if entries[0] > expected:
                if self._ephemeral_heads.get(topic.id, 0) < entries[0] - 1:
                    if not at_end:
                        self._pending[topic.id] = entries
                        return
                    raise FoldError(
                        f"topic {topic.name!r} ({topic.id:#x}): record {entries[0]} follows {expected - 1}, "
                        f"the records between are missing from the log"
                    )
                if topic.records:
                    self._fill_lost(topic, entries[0] - 1)
                else:
                    topic.lost_below(entries[0], EvictReason.RESTART)
                continue
            run = _dense_run(entries)
            topic.restored(entries[: run * ENTRY_WORDS])
            entries = entries[run * ENTRY_WORDS :]

    def _in_order(self, topic: Topic, entries: array[int]) -> array[int]:
        """Sorted by seq, repeats (a file that was salvaged into the next one) and known records left out."""
        seqs = entries[0::4]
        count = len(seqs)
        if entries[0] == topic.head_seq + 1 and seqs == array("Q", range(entries[0], entries[0] + count)):
            return entries
        rows = {seqs[at]: entries[at * 4 : at * 4 + 4] for at in range(count) if seqs[at] > topic.head_seq}
        ordered = array("Q")
        for seq in sorted(rows):
            ordered.extend(rows[seq])
        return ordered

    def _fill_lost(self, topic: Topic, last_seq: int) -> None:
        count = last_seq - topic.head_seq
        lost = array("Q", bytes(count * ENTRY_WORDS * 8))
        lost[0::4] = array("Q", range(topic.head_seq + 1, last_seq + 1))
        lost[1::4] = array("Q", [topic.last_write_ts]) * count
        lost[2::4] = array("Q", [EvictReason.RESTART]) * count
        lost[3::4] = array("Q", [LOCATION_LOST << 32]) * count
        topic.restored(lost)


def _restore_ram_state(topic: Topic, state: RamStateBody) -> None:
    if state.earliest_seq > topic.head_seq + 1:
        topic.lost_below(state.earliest_seq, EvictReason(state.evict_reason))
        topic.evict_floor, topic.evict_run_seq = state.evict_floor, state.evict_run_seq
    topic.last_write_ts = max(topic.last_write_ts, state.last_write_ts)
    for key, *outcome in state.keys:
        topic.idempotency.remember(key, Outcome(*outcome))
    restore_consumers(topic, state.consumers)


def _dense_run(entries: array[int]) -> int:
    """How many entries from the start have consecutive seqs."""
    seqs = entries[0::4]
    first = seqs[0]
    if seqs[-1] == first + len(seqs) - 1:
        return len(seqs)
    return next(at for at, seq in enumerate(seqs) if seq != first + at)
