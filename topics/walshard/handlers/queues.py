"""Queue requests (api §9). They join the group commit, like appends.

A claim reads and writes only memory, unless its queue has `leases_durable`: then the log gets the lease before the
worker does. An ack is logged as the deletion of its jobs. The lease machine (`core/leases.py`) changes while a request
is prepared. It holds jobs whose end must be logged until the commit; `LogWrite.undo` releases them if that fails.

`deal` deals jobs to streams and waiting claims after each commit; `tick` has it do so when a timer is due. While the
service defers work that is not urgent, streams of a queue of negative priority wait for jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from topics.core.control_bodies import AckFrameBody, encode_body
from topics.core.errors import not_a_queue, topic_not_found
from topics.core.governor import INTERVAL_MS
from topics.core.leases import Leases
from topics.core.scheduler import below_zero_ms
from topics.core.seq_set import runs_of
from topics.shm.asks import Done
from topics.shm.control import ProcessCell
from topics.shm.queue_messages import (
    Ack,
    AckReply,
    Bury,
    Claim,
    Dealt,
    Extend,
    ExtendReply,
    Nack,
    OfLeased,
    Peek,
    Peeked,
    Release,
    Remove,
    RemoveReply,
    Reserve,
    Reserved,
    Unclaim,
    Waiting,
    WorkClose,
    WorkOpen,
)
from topics.storage.frame import FrameType
from topics.walshard.commit.draft import CommitFirst, ControlBodies, Draft, Steps, Then, control_write
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.handlers.workers import Timers, Worker, Workers, dealt_of, deliveries_max
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock

REFUSED_WAIT_MS: Final = 1_000
"""Wait before jobs of a queue are dealt again after the log refused their leases."""


class Queues:
    """Handles one shard's queues. It owns the workers that wait for jobs, and the queues' timers. `push` sends jobs to
    a frontend, behind earlier answers.
    """

    def __init__(
        self, catalog: Catalog, deletes: Deletes, push: Callable[[int, Dealt], None], cell: ProcessCell, time: StepClock
    ) -> None:
        self._catalog = catalog
        self._deletes = deletes
        self._push = push
        self._cell = cell
        self._time = time
        self._workers: dict[int, Workers] = {}
        """Workers that wait, by topic id of their queue."""
        self._changed: dict[int, Hosted] = {}
        """Queues whose counts are to be published and whose jobs may be dealt, by topic id."""
        self._held: set[int] = set()
        """Ids of queues of which frontends held jobs when `deal` last looked."""
        self._timers = Timers()
        for hosted in catalog:
            if hosted.topic.queue is not None:
                self.changed(hosted)

    # -- the shard's steps

    def changed(self, hosted: Hosted) -> None:
        """Note that a queue changed, by an append, an eviction, a deletion or a queue request."""
        self._changed[hosted.topic.id] = hosted

    @property
    def have_changed(self) -> bool:
        """Return whether `deal` has queues to look at."""
        return bool(self._changed)

    def deal(self, group: Draft) -> None:
        """Deal jobs of changed queues to waiting workers, and publish counts. Durable leases are added to the group."""
        changed, self._changed = self._changed, {}
        for topic_id, hosted in changed.items():
            leases = hosted.topic.queue
            if leases is None or self._catalog.find(hosted.topic.name) is not hosted:
                continue
            leases.advance(self._time.now)
            freed = leases.take_freed()
            workers = self._workers.get(topic_id)
            if workers is not None:
                workers.have_room(freed)
                config, now = hosted.topic.config, self._time.now
                patience_ms = below_zero_ms(config.priority or 0) if self._cell.get("deferring") else 0
                held = workers.hold(patience_ms, leases.ready, now)
                if workers.may_deal(leases.ready, config.claim_jitter_ms, now, held):
                    self._deal(group, hosted, leases, workers, held)
            if leases.has_holders:
                self._held.add(topic_id)
            else:
                self._held.discard(topic_id)
            hosted.publish_counts()
            self._set_timer(hosted, leases, workers)

    def tick(self) -> Steps[None]:
        """Expire records of queues whose timers are due, and note these queues for the next `deal`."""
        for topic_id, name in self._timers.take_due(self._time.now.mono_ms):
            hosted = self._catalog.find(name)
            if hosted is not None and hosted.topic.id == topic_id:
                # If the log cannot be written, expired records stay: the sweep logs that, and tries again.
                yield from self._deletes.expire(hosted)
                self.changed(hosted)

    @property
    def is_due(self) -> bool:
        """Return whether `tick` has something to do."""
        next_ms = self._timers.next_ms
        return next_ms is not None and next_ms <= self._time.now.mono_ms

    @property
    def next_tick_ms(self) -> int | None:
        """Monotonic ms at which the next timer is due; None without timers."""
        return self._timers.next_ms

    def topic_deleted(self, hosted: Hosted) -> None:
        """Tell the workers of a deleted queue that it ended, and forget them."""
        self._timers.forget(hosted.topic.id)
        self._held.discard(hosted.topic.id)
        workers = self._workers.pop(hosted.topic.id, None)
        for worker in workers.clear() if workers is not None else ():
            frontend, stream = worker.where
            self._push(frontend, Dealt(stream, [], 0, 0, [], 0, ended=True))

    def frontend_died(self, frontend: int, group: Draft) -> None:
        """End the streams of a frontend, and release the jobs that it was moving to dead letters."""
        for topic_id in sorted({*self._workers, *self._held, *self._changed}):
            hosted = self._catalog.find_id(topic_id)
            leases = None if hosted is None else hosted.topic.queue
            if hosted is None or leases is None:
                continue
            workers = self._workers.get(hosted.topic.id)
            if workers is not None:
                workers.remove_frontend(frontend)
                self._forget_if_empty(hosted)
            for holder in leases.holders_at(frontend):
                self._release(group, hosted, leases, leases.leases_of(holder), 0)

    # -- requests

    def unclaim(self, call: Unclaim, _frontend: int, group: Draft) -> Done:
        """Take back a claim whose jobs did not reach their worker: it does not count as a delivery."""
        hosted, leases = self._queue(call.name, group)
        seqs, _ = self._owned(group, hosted, leases, call)
        leases.unclaim(seqs, call.delay_ms, self._time.now)
        self._log_leases(group, hosted, seqs)
        return Done()

    def bury(self, call: Bury, frontend: int, group: Draft) -> RemoveReply:
        """Remove jobs that this frontend has moved to the dead letters."""
        hosted, leases = self._queue(call.name, group, call.topic_id)
        seqs = leases.carried_by(frontend, set(call.seqs) - group.dying(hosted.topic))
        self._deletes.remove(group, hosted, seqs, dead_letters=len(seqs))
        return RemoveReply(len(seqs))

    def release(self, call: Release, frontend: int, group: Draft) -> Done:
        """Release jobs that this frontend could not move to the dead letters."""
        hosted, leases = self._queue(call.name, group, call.topic_id)
        seqs = leases.carried_by(frontend, set(call.seqs) - group.dying(hosted.topic))
        self._release(group, hosted, leases, seqs, call.delay_ms)
        return Done()

    def peek(self, call: Peek, _frontend: int, group: Draft) -> Peeked:
        """Return jobs by their state; lease none."""
        hosted, leases = self._queue(call.name, group)
        jobs, up_to_seq = leases.peek(call.from_seq, call.state, call.max)
        return Peeked(jobs, up_to_seq, up_to_seq < hosted.topic.head_seq)

    def _queue(self, name: str, group: Draft, topic_id: int = 0) -> tuple[Hosted, Leases]:
        """Return a queue, its floors and leases as of this step. Raise TopicsError if it is none, or (unless `topic_id`
        is 0) has another id.
        """
        hosted = self._topic(name, group, topic_id)
        leases = hosted.topic.queue
        if leases is None:
            raise not_a_queue(name)
        leases.advance(self._time.now)
        self.changed(hosted)
        return hosted, leases

    def _owned(self, group: Draft, hosted: Hosted, leases: Leases, call: OfLeased) -> tuple[list[int], list[int]]:
        """Return (jobs of the call that its consumer holds, its other jobs). A job that a draft removes is not held."""
        return leases.leased_to(call.node, call.seqs, call.lease_nos, group.dying(hosted.topic))

    def claim(self, call: Claim, frontend: int, group: Draft) -> Dealt | Waiting:
        """Lease jobs to a worker, or have it wait for the end of a window."""
        hosted, leases = self._queue(call.name, group)
        config = hosted.topic.config
        if config.claim_jitter_ms:
            worker = Worker((frontend, call.stream), call.node, call.max, call.lease_ms, once=True)
            self._workers.setdefault(hosted.topic.id, Workers()).put(worker)
            return Waiting(config.claim_jitter_ms)
        seqs, dead = leases.take(call.max, deliveries_max(config), frontend, self._time.now)
        leased = leases.lease(seqs, call.node, call.lease_ms or config.lease_ms, self._time.now, None)
        dealt = dealt_of(call.stream, leased, dead, leases, hosted.topic)
        self._log_leases(group, hosted, seqs, partial(self._unclaim, leases, seqs, dead))
        return dealt

    def ack(self, call: Ack, frontend: int, group: Draft) -> AckReply:
        """End jobs that are done."""
        hosted, leases = self._queue(call.name, group)
        topic = hosted.topic
        seqs, skipped = self._owned(group, hosted, leases, call)
        leases.hold(seqs)
        ready = leases.ready + leases.made_ready_by(seqs, self._time.now)
        reply = AckReply(len(seqs), skipped, ready, leases.in_flight)
        seqs.sort()
        if topic.config.on_ack == "delete":
            self._deletes.remove(group, hosted, seqs, undo=partial(leases.unhold, seqs))
        elif seqs:
            runs = runs_of(seqs)
            bodies = [(FrameType.ACK, encode_body(AckFrameBody(runs, keep=True)))]
            self._log(group, hosted, bodies, lambda: leases.finish(runs), partial(leases.unhold, seqs))
        return reply

    def nack(self, call: Nack, frontend: int, group: Draft) -> AckReply:
        """Release jobs, to be delivered again."""
        hosted, leases = self._queue(call.name, group)
        seqs, skipped = self._owned(group, hosted, leases, call)
        now = self._time.now
        if not hosted.topic.config.leases_durable:
            leases.release(seqs, call.delay_ms, now)
            return AckReply(len(seqs), skipped, leases.ready, leases.in_flight)
        leases.hold(seqs)
        ready = leases.ready + (0 if call.delay_ms else len(seqs))
        reply = AckReply(len(seqs), skipped, ready, leases.in_flight)
        if seqs:
            seqs.sort()
            bodies = [(FrameType.LEASE, encode_body(leases.release_body(seqs, call.delay_ms, now)))]
            release = partial(leases.release, seqs, call.delay_ms, now)
            self._log(group, hosted, bodies, release, partial(leases.unhold, seqs))
        return reply

    def extend(self, call: Extend, frontend: int, group: Draft) -> ExtendReply:
        """Let leases end later."""
        hosted, leases = self._queue(call.name, group)
        seqs, skipped = self._owned(group, hosted, leases, call)
        former = leases.extend(seqs, call.lease_ms, self._time.now)
        reply = ExtendReply(seqs, skipped, self._time.now.wall_ms + call.lease_ms)
        self._log_leases(group, hosted, seqs, partial(leases.unextend, former))
        return reply

    def open_work(self, call: WorkOpen, frontend: int, group: Draft) -> Done:
        """Begin to deal jobs to a stream."""
        hosted, _ = self._queue(call.name, group)
        worker = Worker((frontend, call.stream), call.node, call.max, call.lease_ms, once=False)
        self._workers.setdefault(hosted.topic.id, Workers()).put(worker)
        return Done()

    def close_work(self, call: WorkClose, frontend: int, group: Draft) -> Done:
        """End a stream and release its leases."""
        where = (frontend, call.stream)
        hosted = self._catalog.find(call.name)
        if hosted is None or hosted.topic.queue is None:
            return Done()
        if group and hosted.topic.queue.is_ending(where):
            # The group ends jobs of this stream. If the log refuses that, the stream holds them again, and they must be
            # released: commit first. Other streams need no commit of their own, since many may end at once.
            raise CommitFirst
        workers = self._workers.get(hosted.topic.id)
        if workers is not None:
            workers.remove(where)
            self._forget_if_empty(hosted)
        leases = hosted.topic.queue
        leases.advance(self._time.now)
        self._release(group, hosted, leases, leases.leases_of(where), 0)
        return Done()

    def reserve(self, call: Reserve, frontend: int, group: Draft) -> Reserved:
        """Reserve jobs for a frontend, which is about to move them to another topic."""
        hosted = self._topic(call.name, group, call.topic_id)
        seqs = hosted.topic.live_of(sorted(set(call.seqs) - group.dying(hosted.topic)))
        leases = hosted.topic.queue
        if leases is not None:
            leases.advance(self._time.now)
            seqs = leases.carry(seqs, frontend, self._time.now)
            self.changed(hosted)
        return Reserved(seqs)

    def remove(self, call: Remove, frontend: int, group: Draft) -> RemoveReply:
        """Remove records that a frontend has moved to another topic."""
        hosted = self._topic(call.name, group, call.topic_id)
        wanted = sorted(set(call.seqs) - group.dying(hosted.topic))
        # A reservation may have ended, and a worker may hold the job by now. The record was moved all the same.
        seqs = hosted.topic.live_of(wanted)
        self._deletes.remove(group, hosted, seqs)
        return RemoveReply(len(seqs))

    def _topic(self, name: str, group: Draft, topic_id: int) -> Hosted:
        """Return a topic of any type, its floors as of this step. Raise TopicsError if it has another id than
        `topic_id`, unless that is 0.
        """
        hosted = self._catalog.require(name)
        if topic_id not in (0, hosted.topic.id):
            raise topic_not_found(name)
        self._deletes.evict_first(hosted, group)
        return hosted

    def _release(self, group: Draft, hosted: Hosted, leases: Leases, seqs: list[int], delay_ms: int) -> None:
        leases.release(seqs, delay_ms, self._time.now)
        self.changed(hosted)
        self._log_leases(group, hosted, seqs)

    def _log_leases(self, group: Draft, hosted: Hosted, seqs: list[int], undo: Then = None) -> None:
        """Add the leases of these jobs to the group if the queue has `leases_durable`."""
        leases = hosted.topic.queue
        if seqs and leases is not None and hosted.topic.config.leases_durable:
            bodies = [(FrameType.LEASE, encode_body(body)) for body in leases.bodies(seqs)]
            self._log(group, hosted, bodies, None, undo)

    def _log(self, group: Draft, hosted: Hosted, bodies: ControlBodies, apply: Then, undo: Then) -> None:
        """Add a write to the group. The request that is being handled fails with one that has something to undo."""
        write = control_write(hosted.topic, self._time.now.wall_ms, bodies, apply, undo)
        group.add(write, carries_out=undo is not None)

    # -- dealing

    def _deal(self, group: Draft, hosted: Hosted, leases: Leases, workers: Workers, held: bool) -> None:
        config = hosted.topic.config
        hands = workers.deal(leases, config.lease_ms, deliveries_max(config), self._time.now, held)
        self._forget_if_empty(hosted)
        for worker, leased, dead in hands:
            frontend, stream = worker.where
            dealt = dealt_of(stream, leased, dead, leases, hosted.topic)
            if not (leased.seqs and config.leases_durable):
                self._push(frontend, dealt)
                continue
            bodies = [(FrameType.LEASE, encode_body(body)) for body in leases.bodies(leased.seqs)]
            undo = partial(self._undeal, hosted, leases, frontend, dealt)
            self._log(group, hosted, bodies, partial(self._push, frontend, dealt), undo)

    def _undeal(self, hosted: Hosted, leases: Leases, frontend: int, dealt: Dealt) -> None:
        """Take back jobs whose leases the log refused, and tell the worker. They are dealt again after a while."""
        self._unclaim(leases, dealt.seqs, dealt.dead)
        self._push(frontend, Dealt(dealt.stream, [], 0, 0, [], leases.ready, refused=True))
        hosted.publish_counts()
        self._timers.set(hosted.topic.id, hosted.topic.name, self._time.now.mono_ms + REFUSED_WAIT_MS)

    def _unclaim(self, leases: Leases, seqs: list[int], dead: list[int]) -> None:
        leases.unclaim(seqs, 0, self._time.now)
        leases.release(dead, 0, self._time.now)

    def _forget_if_empty(self, hosted: Hosted) -> None:
        workers = self._workers.get(hosted.topic.id)
        if workers is not None and not workers:
            del self._workers[hosted.topic.id]

    def _set_timer(self, hosted: Hosted, leases: Leases, workers: Workers | None) -> None:
        topic, now_ms = hosted.topic, self._time.now.mono_ms
        wait_ms = leases.due_in_ms(self._time.now)
        moments = [] if wait_ms is None else [now_ms + wait_ms]
        if workers is not None:
            if workers.window_ends_ms is not None:
                moments.append(workers.window_ends_ms)
            if workers.held_since_ms is not None:
                # Look again then: the streams may have waited long enough, or the pressure may be over.
                moments.append(now_ms + INTERVAL_MS)
            expiry_ms = topic.next_expiry_ms()
            if expiry_ms is not None and expiry_ms > self._time.expiry_ms:
                # When a job expires, its worker has room for the next one.
                moments.append(now_ms + expiry_ms - self._time.expiry_ms)
        if moments:
            self._timers.set(topic.id, topic.name, min(moments))
