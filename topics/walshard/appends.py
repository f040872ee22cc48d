"""Appends of one group, before they are committed (api §2).

Requests of a group see each other: the second write to a topic gets the seqs behind the first, a repeated key is
recognised inside the group. But nothing touches a topic until the group is in the log: what a group would do to a
topic is a `Draft`, thrown away when the commit fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from topics.core.config import TopicConfig
from topics.core.control_bodies import CreateBody, encode_body, encode_idempotency
from topics.core.errors import TopicsError, not_a_queue, topic_not_found
from topics.core.idempotency import Outcome, Turn, check_fence, check_order, is_pin, is_producer_key, parse_key
from topics.core.job import Now
from topics.core.location import LOCATION_IN_RAM_LOG, file_flags_of
from topics.shm import append_messages
from topics.shm.append_messages import AppendReply, AppendRequest
from topics.storage import frame
from topics.storage.frame import FLAG_DURABLE, FLAG_MORE, Bytes, FrameType
from topics.walshard.head_marks import ceiling_operation
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer, Operation

CEILING_STEP = 4096
"""Seqs an `ephemeral` topic may give out before its head watermark must move: one fsync for that many records."""


class Draft:
    """What the group so far adds to one topic."""

    __slots__ = (
        "ceiling",
        "claimed_bytes",
        "created",
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
        self.created = False
        self.head_seq = topic.head_seq
        self.ceiling = topic.head_ceiling
        self.now = now
        self.ts = topic.commit_ts(now.wall_ms)
        self.records = 0
        self.live_bytes = 0
        self.claimed_bytes = 0
        """Of what the whole service may hold."""
        self.keys: dict[bytes, Outcome] = {}
        self.turns: dict[bytes, Turn] = {}
        """Where producers are that wrote in this group."""
        self.last = Outcome(0, 0, 0)


class Appends:
    """Turns append requests into operations. `make_topic` makes a topic that nobody sees yet, which is then either
    given to `host` or to `abandon_topic`. `expire_for(topic, records, bytes)` has expired what a cap would find in the
    way of so many more, `give_way` has deleted acknowledged jobs that stayed; True if there was any: the group so far
    was committed before.
    """

    def __init__(
        self,
        find: Callable[[str], Hosted | None],
        make_topic: Callable[[str, TopicConfig, int], Hosted],
        abandon_topic: Callable[[Hosted], None],
        host: Callable[[Hosted], None],
        claim_bytes: Callable[[int, Callable[[], int]], int],
        expire_for: Callable[[Hosted, int, int], bool],
        give_way: Callable[[Hosted, int, int], bool],
    ) -> None:
        self._find = find
        self._make_topic = make_topic
        self._abandon_topic = abandon_topic
        self._host = host
        self._claim_bytes = claim_bytes
        self._expire_for = expire_for
        self._give_way = give_way
        self._drafts: dict[str, Draft] = {}
        self.durable: list[Operation] = []
        self.ram: list[Operation] = []
        self.touched: dict[int, Hosted] = {}
        """Topics whose readers must be told after the commit."""

    def reset(self) -> None:
        """The group is over, whichever way."""
        self._drafts = {}
        self.durable = []
        self.ram = []
        self.touched = {}

    def prepare(self, request: AppendRequest, answer: Answer, now: Now) -> None:
        """Adds the request's operations; or answers at once when it repeats a key; or raises TopicsError or
        ArenaFullError, the group being as before.
        """
        draft = self._draft(request, now)
        size_bytes = len(request.frames)
        for make_room in (self._expire_for, self._give_way):
            if make_room(draft.hosted, draft.records + request.count, draft.live_bytes + size_bytes):
                draft = self._draft(request, now)
        try:
            known = self._known(draft, request, now.wall_ms)
            if known is not None:
                answer.reply = self._reply(answer, known, draft, created=False, deduped=True)
                return
            if request.jobs and draft.hosted.topic.queue is None:
                raise not_a_queue(request.name)
            if not is_pin(request.key):
                draft.hosted.topic.check_head(request.if_head_seq, draft.head_seq)
                draft.hosted.topic.check_room(request.count, size_bytes, draft.records, draft.live_bytes)
                draft.claimed_bytes += self._claim_bytes(size_bytes, lambda: _growth(draft, request))
            elif not request.count:
                raise TopicsError("not_found", f"a stage for topic {request.name!r} is gone before it was published")
            # A batch that is decided is published: whether there was room was asked when it was staged.
            draft.hosted.ring.reserve(draft.records + request.count)
        except Exception:
            if draft.new:
                self._abandon_topic(self._drafts.pop(request.name).hosted)
            raise
        if draft.hosted.topic.config.durability == "ephemeral":
            self._prepare_ram(request, draft, answer)
        else:
            self._prepare_durable(request, draft, answer)
        self.touched[draft.hosted.topic.id] = draft.hosted

    def abandon_unhosted(self) -> None:
        """After the commit: topics whose creation did not get into the log never were."""
        for name, draft in self._drafts.items():
            if draft.created and self._find(name) is not draft.hosted:
                self._abandon_topic(draft.hosted)
                self.touched.pop(draft.hosted.topic.id, None)

    def _draft(self, request: AppendRequest, now: Now) -> Draft:
        draft = self._drafts.get(request.name)
        if draft is not None:
            return draft
        hosted = self._find(request.name)
        if hosted is not None:
            draft = Draft(hosted, now, new=False)
        else:
            config = request.config or TopicConfig()
            if not request.create or not config.auto_create:
                raise topic_not_found(request.name)
            draft = Draft(self._make_topic(request.name, config, now.wall_ms), now, new=True)
        self._drafts[request.name] = draft
        return draft

    def _known(self, draft: Draft, request: AppendRequest, now_ms: int) -> Outcome | None:
        """What the write came to if it is a repeat; `409` for one of a producer that may not write it."""
        key = request.key
        if not key:
            return None
        idempotency = draft.hosted.topic.idempotency
        window_ms = draft.hosted.topic.config.idempotency_window_ms
        known = draft.keys.get(key) or idempotency.find(key, now_ms, window_ms)
        if is_producer_key(key):
            producer, turn = parse_key(key)
            last = draft.turns.get(producer) or idempotency.turn_of(producer, now_ms)
            if last is not None:
                check_fence(producer, last, turn)
                if known is None:
                    check_order(producer, last, turn)
        return known

    def _prepare_durable(self, request: AppendRequest, draft: Draft, answer: Answer) -> None:
        hosted = draft.hosted
        created, draft.new = draft.new, False
        draft.created |= created
        buffers: list[Bytes] = [create_frame(hosted, draft.ts, FLAG_MORE)] if created else []
        # The stage's file goes once all are published: what took its place is on the disk by then, whatever its class.
        sync = hosted.topic.config.durability == "fsync" or is_pin(request.key)
        apply = self._append(request, draft, buffers, FLAG_DURABLE if sync else 0, 0)

        def apply_with_topic(file_no: int, offset: int) -> None:
            self._host(hosted)
            apply(file_no, offset)

        answer.reply = self._reply(answer, draft.last, draft, created, deduped=False)
        apply_all = apply_with_topic if created else apply
        more_frames = request.count - 1
        self.durable.append(Operation(buffers, apply_all, more_frames=more_frames, sync=sync, answer=answer))

    def _prepare_ram(self, request: AppendRequest, draft: Draft, answer: Answer) -> None:
        """The records go to the RAM log; that the topic exists and how far its head may be, to the durable one."""
        hosted = draft.hosted
        created, draft.new = draft.new, False
        draft.created |= created
        if created:
            create = create_frame(hosted, draft.ts, 0)
            self.durable.append(Operation([create], lambda _file_no, _offset: self._host(hosted)))
        if draft.head_seq + request.count > draft.ceiling:
            draft.ceiling = draft.head_seq + max(request.count, CEILING_STEP)
            self.durable.append(ceiling_operation(hosted, draft.ceiling, draft.ts))
        buffers: list[Bytes] = []
        apply = self._append(request, draft, buffers, 0, LOCATION_IN_RAM_LOG)
        answer.reply = self._reply(answer, draft.last, draft, created, deduped=False)
        self.ram.append(Operation(buffers, apply, more_frames=request.count - 1, answer=answer))

    def _append(
        self, request: AppendRequest, draft: Draft, buffers: list[Bytes], frame_flags: int, location_flags: int
    ) -> Callable[[int, int], None]:
        """Stamps the request's frames behind `buffers` and notes them in the draft; returns what applies them."""
        topic = draft.hosted.topic
        first_seq, ts, key = draft.head_seq + 1, draft.ts, request.key
        if key:
            body = encode_idempotency(request.count, key)
            buffers.append(frame.encode(FrameType.IDEMPOTENCY, FLAG_MORE, topic.id, first_seq, ts, b"", b"", body))
        # Not from `ts`, which stays ahead of a clock that was put back.
        now = draft.now
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
        outcome = draft.last = Outcome(first_seq, request.count, ts)
        if key:
            draft.keys[key] = outcome
            if is_producer_key(key):
                producer, turn = parse_key(key)
                draft.turns[producer] = turn
        draft.head_seq += request.count
        draft.records += request.count
        draft.live_bytes += size_bytes
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

    def _reply(self, answer: Answer, outcome: Outcome, draft: Draft, created: bool, deduped: bool) -> bytearray:
        durability = draft.hosted.topic.config.durability
        reply = AppendReply(outcome.first_seq, outcome.records, draft.head_seq, created, deduped, durability, 0, 0)
        return append_messages.encode_append_reply(answer.request_id, reply)


def _growth(draft: Draft, request: AppendRequest) -> int:
    """By how much the request makes the topic grow, when its caps have made room, beyond what the group has claimed."""
    grown = draft.hosted.topic.growth(draft.records + request.count, draft.live_bytes + len(request.frames))
    return max(0, grown - draft.claimed_bytes)


def create_frame(hosted: Hosted, ts: int, flags: int) -> bytes:
    """TOPIC_CREATE of a topic that is not hosted yet."""
    topic = hosted.topic
    body = encode_body(CreateBody(topic.name, topic.config, topic.recreated))
    return frame.encode(FrameType.TOPIC_CREATE, flags, topic.id, 0, ts, b"", b"", body)
