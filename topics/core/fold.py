"""The fold: it reads a shard's log frame by frame and builds the state of the shard. Pure.

Recovery and the compactor both use it. `core/control_bodies.py` has the bodies of the frames. A run of frames may come
twice, because the writer copies the end of a file whose sync failed into the next file. The second time it changes
nothing: the fold skips a frame whose revision is not above the topic's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from topics.core import control_bodies
from topics.core.ceilings import Ceilings
from topics.core.floors import EvictReason, Floors
from topics.core.idempotency import WriteOutcome
from topics.core.job import ConsumerState
from topics.core.location import ENTRY_WORDS, dense_run, in_order, lost_entries
from topics.core.record_index import RecordIndex
from topics.core.routers import FoldedRouters, decode_feed
from topics.core.seq_set import decode_runs, seqs_of
from topics.core.shard_state import FoldedTopic, RamPeriods, ShardState
from topics.core.topic import Topic


class FoldError(Exception):
    """The log contradicts itself: its frames are valid, but no shard can have written them in this order."""


class LostEnd(NamedTuple):
    """Ids of topics about which the log lost something with its end.

    The shard must log this before anything else. Later nobody could tell lost seqs from seqs that were never given out,
    and an archive has the log but not the deletion marks in segments. A topic in `heads` has the highest head that a
    watermark allows. A topic in `deletions` may have deletions that only its segments know.
    """

    heads: set[int]
    deletions: set[int]


class Fold:
    """Applies frames in log order and owns the topics, sessions and routers that result.

    It gathers Appends per topic and hands them over in runs, so that a record costs a few list operations. The records
    of an `ephemeral` topic come from two logs, and those in the RAM log follow all durable ones. Recovery calls
    `restore` if there is a snapshot, feeds the RAM log, then the durable log, and calls `finish`. To make a snapshot,
    feed only the durable log and call `state`.
    """

    def __init__(self, make_index: Callable[[int], RecordIndex], is_located: bool = True) -> None:
        """`make_index` makes the empty index of a topic id, beginning with seq 1. `is_located` says that such an index
        keeps an entry for each record.
        """
        self._make_index = make_index
        self.is_located = is_located
        self.topics: dict[int, Topic] = {}
        self.sessions: dict[str, control_bodies.SessionFrameBody] = {}
        self.created_ids: set[int] = set()
        """Ids of all topics, deleted ones too: an id is never used again."""
        self.deleted_names: set[str] = set()
        """Names of deleted topics: a new topic of such a name is `recreated`."""
        self.routers = FoldedRouters()
        self._pending: dict[int, array[int]] = {}
        """Entries of the durable log that their topics do not have yet."""
        self._in_ram: dict[int, array[int]] = {}
        """Entries of the RAM log. It is read first, but they go behind all durable ones."""
        # The RAM log is read first, so it may name topics that the durable log has yet to create. These wait here:
        self._early_keys: dict[int, list[tuple[bytes, WriteOutcome]]] = {}
        self._early_attributes: dict[int, list[bytes]] = {}
        self._ram_states: dict[int, control_bodies.RamStateFrameBody] = {}
        self._ram = RamPeriods()
        self._ceilings: dict[int, int] = {}
        """Head watermarks of durable topics."""
        self.lost_end = LostEnd(set(), set())
        """The loss at the end of the log; complete after `finish`."""
        self._uncounted: set[int] = set()
        """Topics to count by their index: the durable log cannot know how many records came from RAM or were lost."""

    # -- snapshots

    def state(self) -> ShardState:
        """Return the fold of the durable log alone, at the end of a write. Raise FoldError if it lacks records."""
        topics = []
        for topic in self.topics.values():
            self._apply_pending(topic, at_end=True)
            topics.append(
                FoldedTopic(
                    topic.id,
                    topic.name,
                    topic.config,
                    topic.recreated,
                    topic.head_seq,
                    topic.last_write_ts,
                    msgspec.structs.replace(topic.floors(), revision=topic.revision),
                    list(topic.index.segments),
                    topic.idempotency.unexpired(topic.last_write_ts, topic.config.idempotency_window_ms),
                    self._ram.ceiling(topic.id),
                    ConsumerState(None if topic.queue is None else topic.queue.state(), topic.cursors.bodies()),
                    self._ram.deleted_runs(topic),
                    self._ram.exact_head(topic.id),
                    self._ceilings.get(topic.id, 0),
                    topic.lost_tail_seq,
                    topic.restored_seq,
                )
            )
        state = ShardState(topics, [], sorted(self.deleted_names), self.routers)
        state.set_deleted_ids(self.created_ids - self.topics.keys())
        return state

    def restore(self, state: ShardState) -> None:
        """Start from the state that another fold returned. Raise FoldError if it lacks records."""
        assert not self.created_ids
        self.deleted_names = set(state.deleted_names)
        self.created_ids = state.all_deleted_ids()
        self.routers = state.routers
        for kept in state.topics:
            self._restore_topic(kept)

    def _restore_topic(self, kept: FoldedTopic) -> None:
        index = self._make_index(kept.id)
        topic = Topic(kept.id, kept.name, kept.config, index, kept.recreated)
        self.topics[kept.id] = topic
        self.created_ids.add(kept.id)
        index.checkpointed(kept.segments)
        index.skip_to(kept.head_seq + 1)
        topic.head_seq = kept.head_seq
        topic.last_write_ts = kept.last_write_ts
        self._check_count(topic.id, kept.floors)
        topic.logged(kept.floors)
        for key, *outcome in kept.keys:
            topic.idempotency.remember(key, WriteOutcome(*outcome))
        _restore_consumers(topic, kept.consumers)
        self._ram.restore(kept)
        self._ceilings[kept.id] = kept.head_ceiling
        topic.lost_tail_seq, topic.restored_seq = kept.lost_tail_seq, kept.restored_seq
        held_seq = max(index.segments.last_seq, topic.earliest_seq - 1)
        if held_seq < topic.head_seq:
            raise FoldError(
                f"the snapshot has topic {kept.name!r} ({kept.id:#x}) up to record {topic.head_seq}, "
                f"but its segments end at {held_seq}"
            )

    # -- frames

    def records(self, topic_id: int, entries: array[int], in_ram: bool = False) -> None:
        """Gather a run of Append frames of one topic, given as index entries in log order."""
        if not in_ram:
            self.topic(topic_id)
        waiting = self._in_ram if in_ram else self._pending
        pending = waiting.get(topic_id)
        if pending is None:
            waiting[topic_id] = entries
        else:
            pending.extend(entries)

    def extended(self, topic_id: int, first_seq: int, last_seq: int, ts: int, size_bytes: int) -> bool:
        """Add a run of Append frames of one topic without their entries, `size_bytes` long. False, with nothing done,
        if it does not follow the records that the topic has.
        """
        topic = self.topics.get(topic_id)
        if topic is None or first_seq != topic.head_seq + 1 or topic_id in self._pending:
            return False
        topic.extended(last_seq, ts, size_bytes)
        return True

    def topic_create(self, topic_id: int, data: bytes) -> None:
        if topic_id in self.created_ids:
            return
        body = control_bodies.decode_create(data)
        topic = Topic(topic_id, body.name, body.config, self._make_index(topic_id), body.recreated)
        self.topics[topic_id] = topic
        self.created_ids.add(topic_id)
        self._ceilings[topic_id] = body.head_ceiling
        state = self._ram_states.pop(topic_id, None)
        if state is not None:
            self._restore_ram_state(topic, state)
        for key, outcome in self._early_keys.pop(topic_id, ()):
            topic.idempotency.remember(key, outcome)
        for attributes in self._early_attributes.pop(topic_id, ()):
            _add_jobs(topic, attributes)

    def topic_delete(self, topic_id: int) -> None:
        topic = self.topic(topic_id)
        if topic is not None:
            self.deleted_names.add(topic.name)
            self.routers.topic_deleted(topic_id)
            self._pending.pop(topic_id, None)
            self._in_ram.pop(topic_id, None)
            self._ram.forget(topic_id)
            self._ceilings.pop(topic_id, None)
            topic.index.drop_before(topic.head_seq + 1)
            del self.topics[topic_id]

    def config_update(self, topic: Topic, data: bytes) -> None:
        self._apply_pending(topic)
        # The log has its own frames for the evictions that a new configuration causes.
        former, topic.config = topic.config, control_bodies.decode_config(data).config
        if topic.config.durability != former.durability:  # all its records are on the disk
            self._ceilings.pop(topic.id, None)
        if topic.queue is not None and not topic.config.leases_durable:
            topic.queue.forget_logged()

    def delete(self, topic: Topic, data: bytes) -> None:
        body = control_bodies.decode_delete(data)
        seqs = decode_runs(body.runs)
        self._end_jobs(topic, seqs)
        if self._is_new(topic, body.floors.revision, body.floors.earliest_seq):
            self._flag_deleted(topic, seqs)
            self._apply_floors(topic, body.floors)

    def evict_watermark(self, topic: Topic, data: bytes) -> None:
        floors = control_bodies.decode_evict(data).floors
        if self._is_new(topic, floors.revision, floors.earliest_seq):
            self._apply_floors(topic, floors)

    def checkpoint_mark(self, topic: Topic, up_to_seq: int, data: bytes) -> None:
        body = control_bodies.decode_mark(data)
        if self._is_new(topic, body.floors.revision, body.floors.earliest_seq):
            if up_to_seq > topic.head_seq:
                self._uncounted.add(topic.id)
            topic.index.checkpointed(body.segments)
            topic.extend_head(up_to_seq)
            self._apply_floors(topic, body.floors)
            topic.index.drop_before(topic.earliest_seq)

    def head_watermark(self, topic: Topic, seq: int, data: bytes) -> None:
        body = control_bodies.decode_head(data)
        if topic.config.durability == "ephemeral":
            self._ram.head(topic.id, seq, body.exact)
            return
        self._ceilings[topic.id] = max(seq, self._ceilings.get(topic.id, 0))
        if body.exact:
            self._apply_pending(topic)
            _lose_tail(topic, seq, body.reason)

    def idempotency(self, topic_id: int, seq: int, ts: int, data: bytes) -> None:
        count, key = control_bodies.decode_idempotency(data)
        outcome = WriteOutcome(seq, count, ts)
        topic = self.topics.get(topic_id)
        if topic is not None:
            topic.idempotency.remember(key, outcome)
        elif topic_id not in self.created_ids:
            self._early_keys.setdefault(topic_id, []).append((key, outcome))

    def job_attributes(self, topic_id: int, data: bytes) -> None:
        topic = self.topics.get(topic_id)
        if topic is not None:
            _add_jobs(topic, data)
        elif topic_id not in self.created_ids:
            self._early_attributes.setdefault(topic_id, []).append(data)

    def lease(self, topic: Topic, data: bytes) -> None:
        if topic.queue is not None:
            topic.queue.logged(control_bodies.decode_lease(data))

    def ack(self, topic: Topic, data: bytes) -> None:
        body = control_bodies.decode_ack(data)
        if topic.queue is not None:
            topic.queue.dead_lettered = max(topic.queue.dead_lettered, body.dead_lettered)
            if body.keep:
                topic.queue.finish(body.runs)
        if not body.keep:
            seqs = body.seqs()
            self._end_jobs(topic, seqs)
            if self._is_new(topic, body.revision, body.earliest_seq):
                self._flag_deleted(topic, seqs)
                self._apply_floors(topic, body.floors_of(topic))

    def cursor(self, topic: Topic, data: bytes) -> None:
        topic.cursors.logged(control_bodies.decode_cursor(data))

    def ram_state(self, topic_id: int, data: bytes) -> None:
        """Take the state that only removed files of the RAM log had. The latest such frame counts."""
        state = control_bodies.decode_ram_state(data)
        topic = self.topics.get(topic_id)
        if topic is not None:
            self._restore_ram_state(topic, state)
        elif topic_id not in self.created_ids:
            self._ram_states[topic_id] = state

    def router_cursor(self, topic_id: int, seq: int, data: bytes, in_ram: bool) -> None:
        """Take the cursor of a dest; the RAM log may have one before the durable log creates the dest."""
        feed = decode_feed(data)
        if not in_ram:
            topic = self.topic(topic_id)
            if topic is None:
                return
            if feed.trimmed and topic.config.durability != "ephemeral":
                self._apply_pending(topic)
                topic.skipped(seq, EvictReason(feed.trim_reason or EvictReason.SOURCE_TRIM))
        self.routers.cursor(topic_id, feed, in_ram)

    def session(self, data: bytes) -> None:
        session = control_bodies.decode_session(data)
        if session.body is None:
            self.sessions.pop(session.wid, None)
        else:
            self.sessions[session.wid] = session

    def finish(self, ram_log_survived: bool, has_end: bool = True) -> None:
        """Complete the topics once all logs are read.

        If the RAM log survived (only a process crashed), the head of an `ephemeral` topic is its last record, or its
        last exact watermark if that is higher. If it did not survive, the records in RAM are lost and the head
        watermark gives the head. Without `has_end` the durable log may lack its end: then the watermark also gives the
        heads of topics that show records before they are synced.
        """
        for topic in self.topics.values():
            self._apply_pending(topic, at_end=True)
            in_ram = self._in_ram.pop(topic.id, None)
            if in_ram is not None:
                # If the topic became durable, the durable log has some of them again: `_apply_pending` skips those.
                self._uncounted.add(topic.id)
                topic.last_write_ts = max(topic.last_write_ts, *in_ram[1::ENTRY_WORDS])
                self._pending[topic.id] = in_ram
                self._apply_pending(topic, at_end=True)
            head_ceiling = self._ram.ceiling(topic.id) or 0
            topic.had_ram_records = self._ram.ceiling(topic.id) is not None
            # Both happen only after an operator accepted a data loss: segments reach beyond the end of the log, or
            # begin behind losses that the log does not mention any more.
            if topic.index.segments.last_seq > topic.head_seq:
                topic.extend_head(topic.index.segments.last_seq)
                self._uncounted.add(topic.id)
            if topic.index.segments.dense_from_seq > topic.earliest_seq:
                topic.missing_below(topic.index.segments.dense_from_seq)
                self._uncounted.add(topic.id)
            exact_head_seq = self._ram.exact_head(topic.id)
            lost_seq = exact_head_seq if ram_log_survived else head_ceiling
            if lost_seq > topic.head_seq:
                self._mark_lost(topic, lost_seq, topic.last_write_ts)
                if lost_seq > exact_head_seq:
                    self.lost_end.heads.add(topic.id)
            durability = topic.config.durability
            tail_ceiling = self._ceilings.get(topic.id, 0)
            topic.ceilings = Ceilings(head_ceiling if durability == "ephemeral" else tail_ceiling)
            if not has_end and durability != "ephemeral" and tail_ceiling > topic.head_seq:
                _lose_tail(topic, tail_ceiling)
                self.lost_end.heads.add(topic.id)
            if self._ram.has_deleted(topic.id):
                # The RAM log may have lost records that were deleted before: flag them as deleted, not lost.
                self._uncounted.add(topic.id)
                deleted = list(seqs_of(self._ram.deleted_runs(topic)))
                topic.index.flag_deleted(deleted[: bisect_right(deleted, topic.head_seq)])
            if topic.id in self._uncounted:
                topic.recount()
                may_lack_deletions = not has_end and len(topic.index.segments) > 0
            else:
                may_lack_deletions = not has_end and topic.recount_marked()
            if may_lack_deletions:
                self.lost_end.deletions.add(topic.id)
            # Every reader of the log computes this floor.
            topic.logged_floor = topic.evict_floor
            # The evictions of the last writes may not be in the log.
            topic.evict_over_cap()

    def is_counted(self, topic: Topic) -> bool:
        """True if `topic.records` follows from the durable log alone: no record was ever in RAM only."""
        return topic.id not in self._uncounted and self._ram.ceiling(topic.id) is None

    def apply_pending(self) -> None:
        """Hand every topic the records that were fed so far, as far as they follow each other."""
        for topic_id in list(self._pending):
            topic = self.topics.get(topic_id)
            if topic is None:
                del self._pending[topic_id]
            else:
                self._apply_pending(topic)

    def topic(self, topic_id: int) -> Topic | None:
        """Return the topic that a frame belongs to, None if it was deleted. Raise FoldError for an unknown id."""
        topic = self.topics.get(topic_id)
        if topic is None and topic_id not in self.created_ids:
            raise FoldError(f"a frame names topic {topic_id:#x}, which the log never created")
        return topic

    def _apply_pending(self, topic: Topic, at_end: bool = False) -> None:
        """Hand a topic the records gathered for it, in seq order. A hole between them counts as lost if its seqs were
        assigned in RAM: a former RAM log lost or deleted these records, or release 0.1.0 did not log them when the
        topic became durable. Any other hole raises FoldError `at_end`. Before that, a later frame may explain it.
        """
        entries = self._pending.pop(topic.id, None)
        if entries is None:
            return
        # Leave out repeats (from a file whose end was copied into the next one) and records that the topic has.
        entries = in_order(entries, topic.head_seq)
        while entries:
            expected = topic.head_seq + 1
            if entries[0] > expected:
                if (self._ram.ceiling(topic.id) or 0) < entries[0] - 1:
                    if not at_end:
                        self._pending[topic.id] = entries
                        return
                    raise FoldError(
                        f"topic {topic.name!r} ({topic.id:#x}): record {entries[0]} follows {expected - 1}, "
                        f"the records between are missing from the log"
                    )
                self._mark_lost(topic, entries[0] - 1, min(topic.last_write_ts, entries[1]))
                continue
            run = dense_run(entries)
            topic.restored(entries[: run * ENTRY_WORDS])
            entries = entries[run * ENTRY_WORDS :]

    def _is_new(self, topic: Topic, revision: int, earliest_seq: int) -> bool:
        """True if a frame with this revision says anything new. In that case give the topic all records before it."""
        if topic.queue is not None:
            topic.queue.forget_below(earliest_seq)
        if revision <= topic.revision:
            return False
        self._apply_pending(topic)
        return True

    def _end_jobs(self, topic: Topic, seqs: Sequence[int]) -> None:
        """End deleted jobs, even if the frame comes again: frames before it came again too and brought jobs back."""
        if topic.queue is not None:
            topic.queue.deleted(seqs)

    def _flag_deleted(self, topic: Topic, seqs: Sequence[int]) -> None:
        self._ram.deleted(topic.id, seqs)
        topic.index.flag_deleted(seqs[bisect_left(seqs, topic.earliest_seq) : bisect_right(seqs, topic.head_seq)])

    def _apply_floors(self, topic: Topic, floors: Floors) -> None:
        if floors.earliest_seq > topic.head_seq + 1:
            # Records of an `ephemeral` topic below the floor need not be in any log.
            self._uncounted.add(topic.id)
            topic.extend_head(floors.earliest_seq - 1)
        elif floors.earliest_seq < topic.earliest_seq:
            # The fold counted the records between the two floors as lost with the RAM log. If a segment has them, they
            # were not: the compactor of 0.1.0 read the RAM log of a topic that was no longer `ephemeral`.
            if topic.index.base_seq <= floors.earliest_seq:
                topic.earliest_seq = floors.earliest_seq
            else:
                floors = msgspec.structs.replace(topic.floors(), revision=floors.revision)
        self._check_count(topic.id, floors)
        topic.logged(floors)

    def _check_count(self, topic_id: int, floors: Floors) -> None:
        """Have a topic counted again if its counts are below 0, as earlier versions may have logged them."""
        if floors.records < 0 or floors.live_bytes < 0:
            self._uncounted.add(topic_id)

    def _restore_ram_state(self, topic: Topic, state: control_bodies.RamStateFrameBody) -> None:
        self._uncounted.add(topic.id)
        if state.earliest_seq > topic.head_seq + 1:
            topic.lost_below(state.earliest_seq, EvictReason(state.evict_reason))
            topic.evict_floor, topic.evict_run_seq = state.evict_floor, state.evict_run_seq
        topic.last_write_ts = max(topic.last_write_ts, state.last_write_ts)
        for key, *outcome in state.keys:
            topic.idempotency.remember(key, WriteOutcome(*outcome))
        _restore_consumers(topic, state.consumers)

    def _mark_lost(self, topic: Topic, last_seq: int, ts: int) -> None:
        """Count the seqs up to `last_seq` as lost with the RAM log; `ts` is the commit time of their entries."""
        self._uncounted.add(topic.id)
        if topic.earliest_seq <= topic.head_seq:
            topic.restored(lost_entries(topic.head_seq + 1, last_seq, ts, EvictReason.RESTART))
        else:
            topic.lost_below(last_seq + 1, EvictReason.RESTART)


def _lose_tail(topic: Topic, last_seq: int, reason: EvictReason = EvictReason.LOST_TAIL) -> None:
    """Count the seqs up to `last_seq` as lost with the end of the log."""
    if last_seq > topic.head_seq:
        topic.skipped(last_seq, reason)
        topic.lost_tail_seq = last_seq
        topic.restored_seq = last_seq if reason == EvictReason.RESTORED else topic.restored_seq


def _add_jobs(topic: Topic, data: bytes) -> None:
    if topic.queue is not None:
        for row in control_bodies.decode_job_rows(data):
            topic.queue.add(*row)


def _restore_consumers(topic: Topic, state: ConsumerState) -> None:
    if state.queue is not None and topic.queue is not None:
        topic.queue.restore(state.queue)
    for body in state.cursors:
        topic.cursors.logged(body)
