"""What a shard does with queue requests (api §9): they join the group commit as appends do.

A claim reads and writes nothing but memory, unless its queue has `leases_durable`: then what is leased is logged before
it is told. An ack is logged as what it is, the deletion of its jobs. The lease machine (`core/jobs.py`) changes as a
request is prepared; what the log must have first is held until the commit, and `Operation.undo` takes it back.

Streams and gathered claims are dealt to after each commit, in `deal`, and when the clock says so, in `tick`. While the
service defers what is not urgent, streams of a queue of negative priority wait as pushes of such a topic do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from topics.core.control_bodies import encode_body
from topics.core.errors import TopicsError, not_a_queue, topic_not_found
from topics.core.governor import INTERVAL_MS
from topics.core.jobs import Leases, Marked
from topics.core.priority import below_zero_ms
from topics.core.queue_log import AckBody
from topics.core.seq_set import runs_of
from topics.shm import messages
from topics.shm.messages import Done
from topics.shm.queue_messages import (
    Ack,
    AckReply,
    Bury,
    Carried,
    Carry,
    Claim,
    Dealt,
    Exhume,
    Extend,
    ExtendReply,
    Nack,
    Peek,
    Peeked,
    QueueCall,
    Remove,
    RemoveReply,
    Unclaim,
    Waiting,
    WorkClose,
    WorkOpen,
)
from topics.storage.frame import FrameType
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer
from topics.walshard.queues.queue_writes import QueueWrites
from topics.walshard.queues.timers import Timers
from topics.walshard.queues.work import Worker, Workers, dealt_of, deliveries_max
from topics.walshard.step_clock import StepClock

QUEUE_CALLS: Final = (Claim, Ack, Nack, Extend, Unclaim, WorkOpen, WorkClose, Bury, Exhume, Peek, Carry, Remove)
REFUSED_WAIT_MS: Final = 1_000
"""Until streams are dealt to again after the log could not be written."""


class Queues:
    """The queues of one shard. `push(frontend, dealt)` tells of jobs once everything before it is told."""

    def __init__(
        self,
        find: Callable[[str], Hosted | None],
        writes: QueueWrites,
        push: Callable[[int, Dealt], None],
        time: StepClock,
        deferring: Callable[[], object],
    ) -> None:
        self._find = find
        self._writes = writes
        self._push = push
        self._time = time
        self._deferring = deferring
        self._workers: dict[int, Workers] = {}
        """By topic id, of queues for which somebody waits."""
        self._changed: dict[int, Hosted] = {}
        """Queues whose counts readers do not know yet, and whose jobs may be dealt."""
        self._timers = Timers()

    # -- the shard's steps

    def changed(self, hosted: Hosted) -> None:
        """Something happened to this topic: appends, evictions, deletions, or one of ours."""
        if hosted.topic.queue is not None:
            self._changed[hosted.topic.id] = hosted

    @property
    def stirred(self) -> bool:
        """Whether `deal` has anything to look at."""
        return bool(self._changed)

    def deal(self) -> bool:
        """Deals to whom waits, and shows what changed. True when something was added to the group by it."""
        changed, self._changed = self._changed, {}
        added = False
        for topic_id, hosted in changed.items():
            leases = hosted.topic.queue
            if leases is None or self._find(hosted.topic.name) is not hosted:
                continue
            leases.advance(self._time.now)
            freed = leases.take_freed()
            workers = self._workers.get(topic_id)
            if workers is not None:
                workers.have_room(freed)
                config, now = hosted.topic.config, self._time.now
                patience_ms = below_zero_ms(config.priority or 0) if self._deferring() else 0
                held = workers.hold(patience_ms, leases.ready, now)
                if workers.may_deal(leases.ready, config.claim_jitter_ms, now, held):
                    added |= self._deal(hosted, leases, workers, held)
            hosted.publish_counts()
            self._set_timer(hosted, leases, workers)
        return added

    def tick(self) -> None:
        """Takes note of queues in which something ends or begins at this time; `deal` is next."""
        for topic_id, name in self._timers.take_due(self._time.now.mono_ms):
            hosted = self._find(name)
            if hosted is not None and hosted.topic.id == topic_id:
                # A log that cannot be written keeps what has expired: the sweep says so, and tries again.
                with suppress(TopicsError):
                    self._writes.settle(hosted)
                self.changed(hosted)

    def next_tick_ms(self) -> int | None:
        """Monotonic time of the next `tick` that will have something to do; None: nothing waits for the clock."""
        return self._timers.next_ms

    def topic_gone(self, hosted: Hosted) -> None:
        """It was deleted: whoever waits for its jobs is told."""
        self._timers.forget(hosted.topic.id)
        workers = self._workers.pop(hosted.topic.id, None)
        for worker in workers.clear() if workers is not None else ():
            frontend, stream = worker.where
            self._push(frontend, Dealt(stream, [], 0, 0, [], 0, ended=True))

    def frontend_died(self, frontend: int, every: list[Hosted]) -> None:
        """Its streams are over and what it carried to dead letters may not have come there."""
        for hosted in every:
            leases = hosted.topic.queue
            if leases is None:
                continue
            workers = self._workers.get(hosted.topic.id)
            if workers is not None:
                workers.remove_frontend(frontend)
                self._forget_if_empty(hosted)
            for holder in leases.holders_at(frontend):
                self._release(hosted, leases, leases.leases_of(holder), 0)

    # -- requests

    def take(self, call: QueueCall, answer: Answer) -> None:
        """Prepares the answer, and what it has the group write; raises TopicsError, the group being as before."""
        match call:
            case Claim():
                self._claim(call, answer)
            case Ack():
                self._ack(call, answer)
            case Nack():
                self._nack(call, answer)
            case Extend():
                self._extend(call, answer)
            case Unclaim():
                hosted, leases = self._queue(call.name)
                seqs = self._owned(hosted, leases, call).seqs
                leases.unclaim(seqs, call.delay_ms, self._time.now)
                self._writes.leases(hosted, seqs)
                answer.reply = messages.encode_reply(answer.request_id, Done())
            case WorkOpen():
                self._open(call, answer)
            case WorkClose():
                self._close(call, answer)
            case Bury():
                hosted, leases = self._queue(call.name)
                seqs = leases.carried_by(answer.frontend, set(call.seqs) - self._writes.dying(hosted))
                answer.reply = messages.encode_reply(answer.request_id, RemoveReply(len(seqs)))
                self._writes.removal(hosted, seqs, answer, dead_letters=len(seqs))
            case Exhume():
                hosted, leases = self._queue(call.name)
                seqs = leases.carried_by(answer.frontend, set(call.seqs) - self._writes.dying(hosted))
                self._release(hosted, leases, seqs, call.delay_ms)
                answer.reply = messages.encode_reply(answer.request_id, Done())
            case Peek():
                hosted, leases = self._queue(call.name)
                jobs, up_to_seq = leases.peek(call.from_seq, call.state, call.max)
                peeked = Peeked(jobs, up_to_seq, up_to_seq < hosted.topic.head_seq)
                answer.reply = messages.encode_reply(answer.request_id, peeked)
            case Carry():
                self._carry(call, answer)
            case Remove():
                self._remove_records(call, answer)

    def _queue(self, name: str) -> tuple[Hosted, Leases]:
        """The queue, its floors and leases as the clock has them now."""
        hosted = self._find(name)
        if hosted is None:
            raise topic_not_found(name)
        leases = hosted.topic.queue
        if leases is None:
            raise not_a_queue(name)
        self._writes.settle(hosted)
        leases.advance(self._time.now)
        self.changed(hosted)
        return hosted, leases

    def _owned(self, hosted: Hosted, leases: Leases, call: Ack | Nack | Extend | Unclaim) -> Marked:
        """The jobs it names that are its consumer's. Those whose removal is prepared in this group are nobody's."""
        return leases.owned(call.node, call.seqs, call.lease_nos, self._writes.dying(hosted))

    def _claim(self, call: Claim, answer: Answer) -> None:
        hosted, leases = self._queue(call.name)
        config = hosted.topic.config
        if config.claim_jitter_ms:
            worker = Worker((answer.frontend, call.stream), call.node, call.max, call.lease_ms, once=True)
            self._workers.setdefault(hosted.topic.id, Workers()).put(worker)
            answer.reply = messages.encode_reply(answer.request_id, Waiting(config.claim_jitter_ms))
            return
        seqs, dead = leases.take(call.max, deliveries_max(config), answer.frontend, self._time.now)
        leased = leases.lease(seqs, call.node, call.lease_ms or config.lease_ms, self._time.now, None)
        dealt = dealt_of(call.stream, leased, dead, leases, config)
        answer.reply = messages.encode_reply(answer.request_id, dealt)
        self._writes.leases(hosted, seqs, answer, partial(self._unclaim, leases, seqs, dead))

    def _ack(self, call: Ack, answer: Answer) -> None:
        hosted, leases = self._queue(call.name)
        topic = hosted.topic
        seqs, skipped = self._owned(hosted, leases, call)
        leases.hold(seqs)
        reply = AckReply(len(seqs), skipped, leases.ready, leases.in_flight)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        seqs.sort()
        if topic.config.on_ack == "delete":
            self._writes.removal(hosted, seqs, answer, undo=partial(leases.unhold, seqs))
        elif seqs:
            runs = runs_of(seqs)
            self._writes.add(
                hosted,
                [(FrameType.ACK, encode_body(AckBody(runs, keep=True)))],
                lambda: leases.finish(runs),
                partial(leases.unhold, seqs),
                answer,
            )

    def _nack(self, call: Nack, answer: Answer) -> None:
        hosted, leases = self._queue(call.name)
        seqs, skipped = self._owned(hosted, leases, call)
        now = self._time.now
        if not hosted.topic.config.leases_durable:
            leases.give_back(seqs, call.delay_ms, now)
            reply = AckReply(len(seqs), skipped, leases.ready, leases.in_flight)
            answer.reply = messages.encode_reply(answer.request_id, reply)
            return
        leases.hold(seqs)
        ready = leases.ready + (0 if call.delay_ms else len(seqs))
        reply = AckReply(len(seqs), skipped, ready, leases.in_flight)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        if seqs:
            seqs.sort()
            body = leases.freed(seqs, call.delay_ms, now)
            self._writes.add(
                hosted,
                [(FrameType.LEASE, encode_body(body))],
                lambda: leases.give_back(seqs, call.delay_ms, now),
                partial(leases.unhold, seqs),
                answer,
            )

    def _extend(self, call: Extend, answer: Answer) -> None:
        hosted, leases = self._queue(call.name)
        seqs, skipped = self._owned(hosted, leases, call)
        former = leases.extend(seqs, call.lease_ms, self._time.now)
        reply = ExtendReply(seqs, skipped, self._time.now.wall_ms + call.lease_ms)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        self._writes.leases(hosted, seqs, answer, partial(leases.unextend, former))

    def _open(self, call: WorkOpen, answer: Answer) -> None:
        hosted, _ = self._queue(call.name)
        worker = Worker((answer.frontend, call.stream), call.node, call.max, call.lease_ms, once=False)
        self._workers.setdefault(hosted.topic.id, Workers()).put(worker)
        answer.reply = messages.encode_reply(answer.request_id, Done())

    def _close(self, call: WorkClose, answer: Answer) -> None:
        answer.reply = messages.encode_reply(answer.request_id, Done())
        where = (answer.frontend, call.stream)
        hosted = self._find(call.name)
        if hosted is not None and hosted.topic.queue is not None and hosted.topic.queue.is_ending(where):
            # An end of a job that is prepared is the job's end; if the log refuses it, the job is this stream's again.
            # Without one the group goes on: when many streams end at once, each would be a commit.
            self._writes.commit()
            hosted = self._find(call.name)
        if hosted is None or hosted.topic.queue is None:
            return
        workers = self._workers.get(hosted.topic.id)
        if workers is not None:
            workers.remove(where)
            self._forget_if_empty(hosted)
        leases = hosted.topic.queue
        leases.advance(self._time.now)
        self._release(hosted, leases, leases.leases_of(where), 0)

    def _carry(self, call: Carry, answer: Answer) -> None:
        hosted = self._records(call.name)
        seqs = hosted.topic.live_of(sorted(set(call.seqs) - self._writes.dying(hosted)))
        leases = hosted.topic.queue
        if leases is not None:
            leases.advance(self._time.now)
            seqs = leases.carry(seqs, answer.frontend, self._time.now)
            self.changed(hosted)
        answer.reply = messages.encode_reply(answer.request_id, Carried(seqs))

    def _remove_records(self, call: Remove, answer: Answer) -> None:
        hosted = self._records(call.name)
        wanted = sorted(set(call.seqs) - self._writes.dying(hosted))
        # What was carried for too long may be somebody's job by now. It is elsewhere all the same, and not to be twice.
        seqs = hosted.topic.live_of(wanted)
        answer.reply = messages.encode_reply(answer.request_id, RemoveReply(len(seqs)))
        self._writes.removal(hosted, seqs, answer)

    def _records(self, name: str) -> Hosted:
        """A topic of whatever type, its floors as the clock has them now."""
        hosted = self._find(name)
        if hosted is None:
            raise topic_not_found(name)
        self._writes.settle(hosted)
        return hosted

    def _release(self, hosted: Hosted, leases: Leases, seqs: list[int], delay_ms: int) -> None:
        leases.give_back(seqs, delay_ms, self._time.now)
        self.changed(hosted)
        self._writes.leases(hosted, seqs)

    # -- dealing

    def _deal(self, hosted: Hosted, leases: Leases, workers: Workers, held: bool) -> bool:
        config = hosted.topic.config
        hands = workers.deal(leases, config.lease_ms, deliveries_max(config), self._time.now, held)
        self._forget_if_empty(hosted)
        for worker, leased, dead in hands:
            frontend, stream = worker.where
            dealt = dealt_of(stream, leased, dead, leases, config)
            if not (leased.seqs and config.leases_durable):
                self._push(frontend, dealt)
                continue
            self._writes.add(
                hosted,
                [(FrameType.LEASE, encode_body(body)) for body in leases.bodies(leased.seqs)],
                partial(self._push, frontend, dealt),
                partial(self._undeal, hosted, leases, frontend, dealt),
                None,
            )
        return bool(hands) and config.leases_durable

    def _undeal(self, hosted: Hosted, leases: Leases, frontend: int, dealt: Dealt) -> None:
        """The log cannot be written: the jobs wait and are dealt again in a while, a claim hears of that."""
        self._unclaim(leases, dealt.seqs, dealt.dead)
        self._push(frontend, Dealt(dealt.stream, [], 0, 0, [], leases.ready, refused=True))
        hosted.publish_counts()
        self._timers.set(hosted.topic.id, hosted.topic.name, self._time.now.mono_ms + REFUSED_WAIT_MS)

    def _unclaim(self, leases: Leases, seqs: list[int], dead: list[int]) -> None:
        leases.unclaim(seqs, 0, self._time.now)
        leases.give_back(dead, 0, self._time.now)

    def _forget_if_empty(self, hosted: Hosted) -> None:
        workers = self._workers.get(hosted.topic.id)
        if workers is not None and not workers:
            del self._workers[hosted.topic.id]

    def _set_timer(self, hosted: Hosted, leases: Leases, workers: Workers | None) -> None:
        wait_ms = leases.next_due_ms(self._time.now)
        at_ms = None if wait_ms is None else self._time.now.mono_ms + wait_ms
        if workers is not None and workers.window_ends_ms is not None:
            at_ms = workers.window_ends_ms if at_ms is None else min(at_ms, workers.window_ends_ms)
        if workers is not None and workers.held_since_ms is not None:
            # To see whether their time, or that of the pressure, is over.
            look_ms = self._time.now.mono_ms + INTERVAL_MS
            at_ms = look_ms if at_ms is None else min(at_ms, look_ms)
        expiry_ms = hosted.topic.next_expiry_ms() if workers is not None else None
        if expiry_ms is not None and expiry_ms > self._time.expiry_ms:
            # What expires is nobody's any more: who had it has room for the next one, before that expires as well.
            gone_ms = self._time.now.mono_ms + expiry_ms - self._time.expiry_ms
            at_ms = gone_ms if at_ms is None else min(at_ms, gone_ms)
        if at_ms is not None:
            self._timers.set(hosted.topic.id, hosted.topic.name, at_ms)
