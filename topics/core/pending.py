"""The changes that one group of requests makes to one topic, before any of it is logged. Pure.

Requests of a group see each other: the second write to a topic gets the seqs behind the first, a repeated key is
recognised inside the group, and a record is removed once. The topic itself changes when the group is in the log. If the
log refuses the group, these objects are dropped with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from topics.core import idempotency
from topics.core.ceilings import Ceiling, Ceilings
from topics.core.config import check_room
from topics.core.control_bodies import AckFrameBody, JobRow
from topics.core.errors import TopicsError, not_a_queue
from topics.core.idempotency import ProducerTurn, WriteOutcome, check_turn, is_producer_key, is_stage_key, parse_key
from topics.core.job import Now
from topics.core.location import LOCATION_IN_RAM_LOG, file_flags_of
from topics.core.record_index import live_entries
from topics.core.seq_set import seqs_of
from topics.core.topic import Topic

_SEQS_PER_STEP: Final = 1024
_SPARE_SHARE: Final = 100
"""A topic frees 1/100 of its cap more than a write needs, so that not every write has to ask for room."""


class RecordFrames(NamedTuple):
    """The records of one write in a buffer of `size_bytes`: the place of each frame, and its location's flags."""

    offset_len: array[int]
    flags: bytes
    size_bytes: int


class RoomNeeded(Exception):  # noqa: N818 - not an error
    """The caps refuse a write, but records can be removed to make room for it."""


class PendingWrite(NamedTuple):
    """One admitted write: the seqs and the time that it gets, and all that it changes once it is logged."""

    topic: Topic
    outcome: WriteOutcome
    key: bytes
    records: RecordFrames
    jobs: list[JobRow]
    due_ms: list[int]
    """Monotonic ms at which the delay of each job ends, 0 for none."""
    in_ram: bool
    """The records go to the RAM log."""
    sync: bool
    """The write counts only once it is on the disk."""
    ceiling: Ceiling | None
    """Head watermark that the durable log needs before the write, None if none is due."""

    def ceiling_logged(self) -> None:
        """Note that the durable log has the creation of the topic and the ceiling."""
        if self.ceiling is not None:
            self.topic.ceilings.logged(self.ceiling, self.outcome.first_seq + self.outcome.records - 1)

    def logged(self, prefix_len: int, file_no: int, offset: int) -> None:
        """Apply the write, which is in the log at `offset`; the records begin behind so many bytes of it."""
        topic, (offset_len, flags, size_bytes) = self.topic, self.records
        base = offset + prefix_len
        absolute = array("Q", [base + entry for entry in offset_len])
        file_flags = file_flags_of(file_no, flags, LOCATION_IN_RAM_LOG if self.in_ram else 0)
        topic.appended(self.outcome.ts, absolute, file_flags, size_bytes)
        if topic.queue is not None:
            for job, due_ms in zip(self.jobs, self.due_ms, strict=True):
                topic.queue.add(*job, due_ms)
        if self.key:
            topic.idempotency.remember(self.key, self.outcome)


@dataclass(eq=False, slots=True)
class PendingTopic:
    """The changes that one group has made to one topic so far. It decides which write may join, and gives out seqs."""

    _topic: Topic
    _now: Now
    _ts: int = field(init=False)
    head_seq: int = field(init=False)
    _ceilings: Ceilings = field(init=False)
    records: int = 0
    live_bytes: int = 0
    claimed_bytes: int = 0
    """Bytes that the writes have claimed of what the whole service may hold."""
    keys: dict[bytes, WriteOutcome] = field(default_factory=dict)
    _turns: dict[bytes, ProducerTurn] = field(default_factory=dict)
    _dying: set[int] | None = None
    _earliest_seq: int = 0
    """The first live seq without the removed records, so that no request looks at these again."""
    _revision: int = 0
    """Revision of the last removal."""
    _dead_lettered: int = 0
    """Jobs that went to the dead letters so far, 0 before one did in this group."""

    def __post_init__(self) -> None:
        topic = self._topic
        self._ts, self.head_seq = topic.commit_ts(self._now.wall_ms), topic.head_seq
        self._ceilings = topic.ceilings.copy(topic.durable_seq)

    # -- writes

    @property
    def has_writes(self) -> bool:
        """Return whether the group writes to the topic."""
        return self.head_seq > self._topic.head_seq

    def admit(
        self, key: bytes, records: RecordFrames, if_head_seq: int | None, jobs: bool, expiry_ms: int, begun: bool
    ) -> WriteOutcome | None:
        """Decide about one more write: return the outcome of the write that it repeats, None when it may be added.

        Raise RoomNeeded, or TopicsError: `fenced`, `out_of_order`, `not_a_queue`, `head_mismatch`, `record_too_large`,
        `topic_full`. Records have expired by `expiry_ms`.
        """
        topic, (offset_len, _flags, size_bytes) = self._topic, records
        count = len(offset_len)
        known = self._repeated(key, begun) if key else None
        if known is not None:
            return known
        if jobs and topic.queue is None:
            raise not_a_queue(topic.name)
        is_staged = is_stage_key(key)
        if not is_staged:
            topic.check_head(if_head_seq, self.head_seq)
        if self._room_can_be_made(count, size_bytes, expiry_ms):
            raise RoomNeeded
        if is_staged and not count:
            raise TopicsError("not_found", f"a stage for topic {topic.name!r} is gone before it was published")
        if not is_staged and topic.config.discard == "reject":
            held = topic.records + self.records, topic.live_bytes + self.live_bytes
            check_room(topic.name, topic.config, count, size_bytes, *held)
        return None

    def _room_can_be_made(self, count: int, size_bytes: int, expiry_ms: int) -> bool:
        """Return whether expired records or acknowledged jobs are in the way of so many more, and can go."""
        topic, config = self._topic, self._topic.config
        if not config.ttl_ms and (config.discard == "old" or topic.queue is None):
            return False
        records, total_bytes = self.records + count, self.live_bytes + size_bytes
        jobs = done_jobs_to_drop(topic, records, total_bytes, self.dying)
        return bool(jobs) or topic.must_expire_first(records, total_bytes, expiry_ms)

    def _repeated(self, key: bytes, begun: bool) -> WriteOutcome | None:
        topic, now_ms = self._topic, self._now.wall_ms
        known = self.keys.get(key) or topic.idempotency.find(key, now_ms, topic.config.idempotency_window_ms)
        if is_producer_key(key):
            producer, turn = parse_key(key)
            last = self._turns.get(producer) or topic.idempotency.turn_of(producer, now_ms)
            is_new = last is None or last.epoch < turn.epoch
            may_skip = (is_new or producer not in self._turns) and topic.may_skip(producer, is_new)
            check_turn(producer, last, turn, is_known=known is not None, has_begun=begun, may_skip=may_skip)
        return known

    def growth(self, count: int, size_bytes: int) -> int:
        """Return by how much one more write makes the topic grow, its caps having made room, beyond what is claimed."""
        grown = self._topic.growth(self.records + count, self.live_bytes + size_bytes)
        return max(0, grown - self.claimed_bytes)

    def write(self, key: bytes, records: RecordFrames, jobs: Iterable[tuple[int, int, int, str]]) -> PendingWrite:
        """Give the next seqs to an admitted write. `jobs`: (position in it, deliver_at_ms, delay_ms, order_key)."""
        config = self._topic.config
        count, former_head = len(records.offset_len), self.head_seq
        outcome = WriteOutcome(former_head + 1, count, self._ts)
        if key:
            self.keys[key] = outcome
            if is_producer_key(key):
                producer, turn = parse_key(key)
                self._turns[producer] = turn
        self.head_seq += count
        self.records += count
        self.live_bytes += records.size_bytes
        in_ram = config.durability == "ephemeral"
        ceiling = None
        if not config.is_synced:
            ceiling = self._ceilings.plan(config, former_head, count, self._topic.durable_seq)
        if ceiling is not None:
            self._ceilings.logged(ceiling, self.head_seq)
        rows: list[JobRow] = []
        due_ms: list[int] = []
        for at, deliver_at_ms, delay_ms, order_key in jobs:
            # Not the commit time: that stays ahead of a clock that was put back.
            delayed_ms = self._now.wall_ms + delay_ms if delay_ms else 0
            rows.append((former_head + 1 + at, deliver_at_ms or delayed_ms, order_key))
            due_ms.append(self._now.mono_ms + delay_ms if delay_ms else 0)
        # The stage or record that a move key replaces is removed once the write counts. By then the write must be
        # on the disk, whatever the class.
        sync = config.is_synced or (not in_ram and idempotency.is_move_key(key))
        return PendingWrite(self._topic, outcome, key, records, rows, due_ms, in_ram, sync, ceiling)

    # -- removals

    @property
    def dying(self) -> Set[int]:
        """Seqs of records that the group removes."""
        return self._dying or frozenset()

    def remove(self, seqs: list[int], dead_letters: int) -> tuple[AckFrameBody, Callable[[], None]]:
        """Plan to remove live records (ascending); return the body to log, and what to call once it is logged."""
        topic = self._topic
        dying = self._dying = self._dying or set()
        dying.update(seqs)
        deletion = topic.plan_removal(seqs, dying, self._earliest_seq)
        self._earliest_seq = deletion.earliest_seq
        # The next revision says what caps evicted before this group.
        revision = self._revision = max(topic.revision + 1, self._revision) + 1
        total = 0
        if dead_letters:
            assert topic.queue is not None
            total = self._dead_lettered = (self._dead_lettered or topic.queue.dead_lettered) + dead_letters

        def logged() -> None:
            topic.removed(deletion, revision)
            if topic.queue is not None and total:
                topic.queue.dead_lettered = total

        return AckFrameBody.removing(topic, deletion, revision, total), logged


def done_jobs_to_drop(topic: Topic, records: int, size_bytes: int, dying: Set[int]) -> list[int]:
    """Return the oldest acknowledged jobs (seqs, ascending) to delete so that so many records and bytes fit.

    This is for a queue that refuses what does not fit (`discard: "reject"`) and keeps acknowledged jobs (`on_ack`).
    They stay until cap or ttl takes them, but a write is refused only when deleting them is not enough. Nobody needs
    them, so there is no tombstone. Return none if the write fits anyway, or would not fit without all of them.
    `dying` are being deleted already.
    """
    config, queue = topic.config, topic.queue
    if config.discard != "reject" or queue is None or not queue.done.count:
        return []
    over_records, over_bytes = config.over_caps(topic.records + records, topic.live_bytes + size_bytes)
    if over_records <= 0 and over_bytes <= 0:
        return []
    most_records = over_records + config.cap_records // _SPARE_SHARE
    most_bytes = over_bytes + config.cap_bytes // _SPARE_SHARE
    found: list[int] = []
    found_bytes = 0
    done = seqs_of(queue.done.runs())
    while some := list(islice(done, _SEQS_PER_STEP)):
        for seq, offset_len in live_entries(topic.index, some, topic.earliest_seq, topic.head_seq):
            if seq in dying:
                continue
            if len(found) >= most_records and found_bytes >= most_bytes:
                return found
            found.append(seq)
            found_bytes += offset_len >> 32
    return found if len(found) >= over_records and found_bytes >= over_bytes else []
