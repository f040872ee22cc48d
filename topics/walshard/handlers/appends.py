"""Appends of one group, before they are committed (api §2).

Requests of a group see each other: the second write to a topic gets the seqs behind the first, a repeated key is
recognised inside the group. But nothing touches a topic until the group is in the log: what a group would do to a
topic is `Pending`, thrown away when the commit fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

from topics.core.config import TopicConfig
from topics.core.control_bodies import CreateFrameBody, encode_body, encode_idempotency
from topics.core.errors import TopicsError, not_a_queue, topic_not_found
from topics.core.idempotency import (
    ProducerTurn,
    WriteOutcome,
    check_fence,
    check_order,
    is_pin,
    is_producer_key,
    parse_key,
)
from topics.core.job import Now
from topics.core.location import LOCATION_IN_RAM_LOG, file_flags_of
from topics.shm.append_messages import AppendReply, AppendRequest
from topics.storage import frame
from topics.storage.frame import FLAG_DURABLE, FLAG_MORE, Bytes, FrameType
from topics.walshard.commit.draft import CommitFirst, Draft, LogWrite
from topics.walshard.commit.marks import ceiling_operation
from topics.walshard.handlers.make_room import MakeRoom
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock

CEILING_STEP = 4096
"""Seqs an `ephemeral` topic may give out before its head watermark must move: one fsync for that many records."""


class Pending:
    """What the group so far adds to one topic."""

    __slots__ = (
        "ceiling",
        "claimed_bytes",
        "head_seq",
        "hosted",
        "keys",
        "last",
        "live_bytes",
        "new",
        "now",
        "records",
        "ts",
        "turns",
    )

    def __init__(self, hosted: Hosted, now: Now, new: bool) -> None:
        topic = hosted.topic
        self.hosted = hosted
        self.new = new
        """Nothing of it is prepared yet, its creation least of all."""
        self.head_seq = topic.head_seq
        self.ceiling = topic.head_ceiling
        self.now = now
        self.ts = topic.commit_ts(now.wall_ms)
        self.records = 0
        self.live_bytes = 0
        self.claimed_bytes = 0
        """Of what the whole service may hold."""
        self.keys: dict[bytes, WriteOutcome] = {}
        self.turns: dict[bytes, ProducerTurn] = {}
        """Where producers are that wrote in this group."""
        self.last = WriteOutcome(0, 0, 0)


class Appends:
    """Turns append requests into operations of a group. It owns what the group so far adds to each topic."""

    def __init__(self, catalog: Catalog, holdings: Holdings, make_room: MakeRoom, time: StepClock) -> None:
        self._catalog = catalog
        self._holdings = holdings
        self._make_room = make_room
        self._time = time
        self._pending: dict[str, Pending] = {}

    def group_over(self) -> None:
        """The group is committed or refused."""
        self._pending = {}

    def prepare(self, request: AppendRequest, group: Draft) -> AppendReply:
        """Adds the request's operations, or finds that it repeats a key. Raises TopicsError or ArenaFullError, the
        group being as before, or CommitFirst.
        """
        now = self._time.now
        pending = self._pending_of(request, now)
        size_bytes = len(request.frames)
        records, total_bytes = pending.records + request.count, pending.live_bytes + size_bytes
        if self._make_room.is_needed(pending.hosted, records, total_bytes):
            # By then what is pending now is in the topic.
            raise CommitFirst(self._make_room.make(pending.hosted, request.count, size_bytes))
        try:
            known = self._known(pending, request, now.wall_ms)
            if known is not None:
                return _reply(known, pending, created=False, deduped=True)
            if request.jobs and pending.hosted.topic.queue is None:
                raise not_a_queue(request.name)
            if not is_pin(request.key):
                pending.hosted.topic.check_head(request.if_head_seq, pending.head_seq)
                pending.hosted.topic.check_room(request.count, size_bytes, pending.records, pending.live_bytes)
                pending.claimed_bytes += self._holdings.claim_bytes(size_bytes, lambda: _growth(pending, request))
            elif not request.count:
                raise TopicsError("not_found", f"a stage for topic {request.name!r} is gone before it was published")
            # A batch that is decided is published: whether there was room was asked when it was staged.
            pending.hosted.ring.reserve(pending.records + request.count)
        except Exception:
            if pending.new:
                self._catalog.abandon(self._pending.pop(request.name).hosted)
            raise
        created, pending.new = pending.new, False
        if pending.hosted.topic.config.durability == "ephemeral":
            self._prepare_ram(request, pending, group, created)
        else:
            self._prepare_durable(request, pending, group, created)
        group.touch(pending.hosted)
        return _reply(pending.last, pending, created, deduped=False)

    def _pending_of(self, request: AppendRequest, now: Now) -> Pending:
        pending = self._pending.get(request.name)
        if pending is not None:
            return pending
        hosted = self._catalog.find(request.name)
        if hosted is not None:
            pending = Pending(hosted, now, new=False)
        else:
            config = request.config or TopicConfig()
            if not request.create or not config.auto_create:
                raise topic_not_found(request.name)
            pending = Pending(self._catalog.make(request.name, config, now.wall_ms), now, new=True)
        self._pending[request.name] = pending
        return pending

    def _known(self, pending: Pending, request: AppendRequest, now_ms: int) -> WriteOutcome | None:
        """What the write came to if it is a repeat; `409` for one of a producer that may not write it."""
        key = request.key
        if not key:
            return None
        idempotency = pending.hosted.topic.idempotency
        window_ms = pending.hosted.topic.config.idempotency_window_ms
        known = pending.keys.get(key) or idempotency.find(key, now_ms, window_ms)
        if is_producer_key(key):
            producer, turn = parse_key(key)
            last = pending.turns.get(producer) or idempotency.turn_of(producer, now_ms)
            if last is not None:
                check_fence(producer, last, turn)
                if known is None:
                    check_order(producer, last, turn)
        return known

    def _prepare_durable(self, request: AppendRequest, pending: Pending, group: Draft, created: bool) -> None:
        hosted = pending.hosted
        buffers: list[Bytes] = [create_frame(hosted, pending.ts, FLAG_MORE)] if created else []
        # The stage's file goes once all are published: what took its place is on the disk by then, whatever its class.
        sync = hosted.topic.config.durability == "fsync" or is_pin(request.key)
        apply = self._append(request, pending, buffers, FLAG_DURABLE if sync else 0, 0)

        def apply_with_topic(file_no: int, offset: int) -> None:
            host(self._catalog, hosted, group)
            apply(file_no, offset)

        operation = LogWrite(buffers, apply, more_frames=request.count - 1, sync=sync)
        if created:
            operation.apply, operation.undo = apply_with_topic, partial(abandon, self._catalog, hosted, group)
        group.add(operation)

    def _prepare_ram(self, request: AppendRequest, pending: Pending, group: Draft, created: bool) -> None:
        """The records go to the RAM log; that the topic exists and how far its head may be, to the durable one."""
        hosted = pending.hosted
        if created:
            group.add(creation(self._catalog, hosted, pending.ts, group), carries_out=False)
        if pending.head_seq + request.count > pending.ceiling:
            pending.ceiling = pending.head_seq + max(request.count, CEILING_STEP)
            group.add(ceiling_operation(hosted, pending.ceiling, pending.ts), carries_out=False)
        buffers: list[Bytes] = []
        apply = self._append(request, pending, buffers, 0, LOCATION_IN_RAM_LOG)
        group.add(LogWrite(buffers, apply, more_frames=request.count - 1), in_ram=True)

    def _append(
        self, request: AppendRequest, pending: Pending, buffers: list[Bytes], frame_flags: int, location_flags: int
    ) -> Callable[[int, int], None]:
        """Stamps the request's frames behind `buffers` and notes them in the pending; returns what applies them."""
        topic = pending.hosted.topic
        first_seq, ts, key = pending.head_seq + 1, pending.ts, request.key
        if key:
            body = encode_idempotency(request.count, key)
            buffers.append(frame.encode(FrameType.IDEMPOTENCY, FLAG_MORE, topic.id, first_seq, ts, b"", b"", body))
        # Not from `ts`, which stays ahead of a clock that was put back.
        now = pending.now
        jobs = [
            (first_seq + at, deliver_at_ms or (now.wall_ms + delay_ms if delay_ms else 0), order_key)
            for at, deliver_at_ms, delay_ms, order_key in request.jobs
        ]
        due_ms = [now.mono_ms + delay_ms if delay_ms else 0 for _, _, delay_ms, _ in request.jobs]
        if jobs:
            body = encode_body(jobs)
            buffers.append(frame.encode(FrameType.JOB_ATTRIBUTES, FLAG_MORE, topic.id, 0, ts, b"", b"", body))
        prefix_len = sum(map(len, buffers))
        frame.stamp(request.frames, request.offset_len, topic.id, first_seq, ts, frame_flags)
        buffers.append(request.frames)

        size_bytes = len(request.frames)
        outcome = pending.last = WriteOutcome(first_seq, request.count, ts)
        if key:
            pending.keys[key] = outcome
            if is_producer_key(key):
                producer, turn = parse_key(key)
                pending.turns[producer] = turn
        pending.head_seq += request.count
        pending.records += request.count
        pending.live_bytes += size_bytes
        offset_len, record_flags = request.offset_len, request.record_flags

        def apply(file_no: int, offset: int) -> None:
            base = offset + prefix_len
            absolute = array("Q", [base + entry for entry in offset_len])
            topic.appended(ts, absolute, file_flags_of(file_no, record_flags, location_flags), size_bytes)
            if topic.queue is not None:
                for job, at_ms in zip(jobs, due_ms, strict=True):
                    topic.queue.add(*job, at_ms)
            if key:
                topic.idempotency.remember(key, outcome)

        return apply


def _reply(outcome: WriteOutcome, pending: Pending, created: bool, deduped: bool) -> AppendReply:
    durability = pending.hosted.topic.config.durability
    return AppendReply(outcome.first_seq, outcome.records, pending.head_seq, created, deduped, durability, 0, 0)


def _growth(pending: Pending, request: AppendRequest) -> int:
    """By how much the request makes the topic grow, when its caps have made room, beyond what the group has claimed."""
    grown = pending.hosted.topic.growth(pending.records + request.count, pending.live_bytes + len(request.frames))
    return max(0, grown - pending.claimed_bytes)


def creation(catalog: Catalog, hosted: Hosted, ts: int, group: Draft, *, sync: bool = False) -> LogWrite:
    """TOPIC_CREATE by itself: once it is logged the topic is hosted, else it never was."""

    def apply(_file_no: int, _offset: int) -> None:
        host(catalog, hosted, group)

    undo = partial(abandon, catalog, hosted, group)
    return LogWrite([create_frame(hosted, ts, 0)], apply, sync=sync, undo=undo)


def host(catalog: Catalog, hosted: Hosted, group: Draft) -> None:
    """The creation of a topic is in the log."""
    catalog.host(hosted)
    group.created.append(hosted)


def abandon(catalog: Catalog, hosted: Hosted, group: Draft) -> None:
    """The creation of a topic will never be in the log."""
    group.touched.pop(hosted.topic.id, None)
    catalog.abandon(hosted)


def create_frame(hosted: Hosted, ts: int, flags: int) -> bytes:
    """TOPIC_CREATE of a topic that is not hosted yet."""
    topic = hosted.topic
    body = encode_body(CreateFrameBody(topic.name, topic.config, topic.recreated))
    return frame.encode(FrameType.TOPIC_CREATE, flags, topic.id, 0, ts, b"", b"", body)
