"""The jobs of one queue (api §9), where each of them stands, and who has them. Pure.

A job is a live record that is not acknowledged. Most jobs cost no memory: jobs that were never handed out and wait in
order are simply the live records from `fresh_seq` on. Only a job that is out of order has a `Job` (`job.py` has the
picture).

Everything below `fresh_seq` is gone, done, or has a `Job`. `done` are acknowledged jobs whose records stay
(`on_ack: "keep"`).

Time is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Final, NamedTuple, Protocol

import msgspec

from topics.core.job import Holder, JobPhase, JobView, LeaseBody, Now, QueueState, State, TrackedJob
from topics.core.seq_set import Run, SeqSet, seqs_of

DEAD_PER_TAKE_MAX: Final = 100
"""One claim sends at most so many jobs to the dead letters; the next claim goes on."""

WALL_LOOK_MS: Final = 1_000
"""Somebody may set the wall clock, so jobs that wait for it are looked at that often."""

_LOOK_MAX: Final = 1024
"""So many records are looked at in one go where there are only jobs of other kinds."""


class JobRecords(Protocol):
    """The part of a topic that its jobs need."""

    records: int
    head_seq: int
    earliest_seq: int

    def live_from(self, seq: int, most: int) -> list[int]: ...
    def live_within(self, seq: int, most: int, looks: int) -> tuple[list[int], int]: ...
    def live_of(self, seqs: Sequence[int]) -> list[int]: ...


_DUE: Final = (JobPhase.LEASED, JobPhase.DELAYED, JobPhase.HELD)
"""Phases that may end by the clock; HELD does on its way to the dead letters."""


class QueueJobs:
    """The jobs of one queue and where each stands. Before `start` it only takes in what the log says."""

    def __init__(self, records: JobRecords) -> None:
        self._records = records
        self._jobs: dict[int, TrackedJob] = {}
        self._counts = [0] * len(JobPhase)
        self._tracked: list[int] = []
        """A heap of all seqs in `_jobs`, and of some that were there."""
        self._returned: list[int] = []
        self._ready: list[int] = []
        self._due: list[tuple[int, int]] = []
        """(due_ms, seq) of leases and delays, some of them over."""
        self._scheduled: list[tuple[int, int]] = []
        """(deliver_at_ms, seq) of jobs that wait for the wall clock, and of some that do not any more."""
        self._delayed: list[tuple[int, int]] = []
        """(due_ms, seq) of jobs that were written with a delay in this life of the process."""
        self._lines: dict[str, deque[int]] = {}
        """All jobs of an order_key, oldest first; some behind the first one are gone. Only the first can be handed out.
        """
        self._lined = 0
        """The number of jobs in all lines together."""
        self._holders: dict[Holder, set[int]] = {}
        self._freed: dict[Holder, None] = {}
        """Holders that have fewer jobs than when `take_freed` was called last."""
        self._started = False
        self._fresh_seq = 1
        self._next_lease_no = 0
        self.done = SeqSet()
        self.dead_lettered = 0

    # -- records come and go

    def add(self, seq: int, deliver_at_ms: int, order_key: str, due_ms: int = 0) -> None:
        """Adds a record that was written with a time or an order key (0, "" for none). Calls come in the order of seqs.
        `due_ms`: `deliver_at_ms` is the end of a delay, and this is that end on the monotonic clock.
        """
        if seq in self.done or (self._started and seq < self._records.earliest_seq):
            return
        known = self._jobs.get(seq)
        if known is not None:
            if not self._started:  # a snapshot had its leases, the RAM log has what it was written with
                known.deliver_at_ms, known.order_key = deliver_at_ms, order_key
            return
        job = self._track(seq, TrackedJob(deliver_at_ms, order_key, due_ms))
        if not self._started:
            return
        if self._fresh_seq == seq:
            self._fresh_seq += 1
        if order_key:
            line = self._line_up(seq, order_key)
            if line[0] != seq:
                return
        self._arm(seq, job)

    def gone(self, seqs: Iterable[int]) -> None:
        """The records of these jobs were deleted, by anybody."""
        for seq in seqs:
            self.done.discard(seq)
            job = self._jobs.get(seq)
            if job is not None:
                self._drop(seq, job)
        self._tidy()

    def gone_below(self, seq: int) -> None:
        """Nothing below `seq` is live any more. While a log is read it may only look so, because a RAM log or a segment
        has the records: then it counts from `start` on, or once a frame says so by `forget_below`.
        """
        if self._started:
            self.forget_below(seq)

    def forget_below(self, seq: int) -> None:
        """Nothing below `seq` was or will be live."""
        self.done.discard_below(seq)
        while self._tracked and self._tracked[0] < seq:
            first = heappop(self._tracked)
            job = self._jobs.get(first)
            if job is not None:
                self._drop(first, job)
        self._tidy()

    # -- what can be asked

    @property
    def ready(self) -> int:
        """Counts the jobs that a claim would get now."""
        counts = self._counts
        fresh = self._records.records - len(self._jobs) - self.done.count
        return max(0, fresh + counts[JobPhase.READY] + counts[JobPhase.RETURNED])

    @property
    def in_flight(self) -> int:
        """Counts the jobs that are leased."""
        return self._counts[JobPhase.LEASED]

    def take_freed(self) -> Iterable[Holder]:
        """Returns the holders that have fewer jobs than at the last call."""
        freed, self._freed = self._freed, {}
        return freed

    def next_due_ms(self, now: Now) -> int | None:
        """In how many ms the next thing happens by itself; None: nothing ever does."""
        waits = []
        if self._due:
            waits.append(self._due[0][0] - now.mono_ms)
        if self._delayed:
            waits.append(self._delayed[0][0] - now.mono_ms)
        if self._scheduled:
            waits.append(min(self._scheduled[0][0] - now.wall_ms, WALL_LOOK_MS))
        return max(0, min(waits)) if waits else None

    # -- time

    def advance(self, now: Now) -> bool:
        """Ends leases and delays whose time is over and readies jobs that are due. True when that made a job ready."""
        before = self._counts[JobPhase.READY] + self._counts[JobPhase.RETURNED]
        due, jobs = self._due, self._jobs
        while due and due[0][0] <= now.mono_ms:
            at, seq = heappop(due)
            job = jobs.get(seq)
            if job is None or job.due_ms != at:
                continue
            carried = job.phase == JobPhase.HELD and job.holder is not None and not job.holder[1]
            if carried or job.phase in (JobPhase.LEASED, JobPhase.DELAYED):
                self._return(seq, job)
        for waiting, until_ms in ((self._delayed, now.mono_ms), (self._scheduled, now.wall_ms)):
            while waiting and waiting[0][0] <= until_ms:
                _, seq = heappop(waiting)
                job = jobs.get(seq)
                if job is not None and job.phase == JobPhase.BEHIND:
                    self._set(seq, job, JobPhase.READY)
                    heappush(self._ready, seq)
        return self._counts[JobPhase.READY] + self._counts[JobPhase.RETURNED] > before

    # -- moving jobs

    def _take(self, most: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        """Takes ready jobs off their heaps: returned ones first, then by seq."""
        seqs: list[int] = []
        dead: list[int] = []
        last_seq = 0
        while self._returned and len(seqs) < most and len(dead) < DEAD_PER_TAKE_MAX:
            seq = heappop(self._returned)
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.RETURNED and seq != last_seq:
                last_seq = seq  # a job that was carried off and came back is in the heap twice
                (dead if deliveries_max and job.deliveries >= deliveries_max else seqs).append(seq)
        wanted = most - len(seqs)
        if not wanted:
            return sorted(seqs), dead
        ready: list[int] = []
        while self._ready and len(ready) < wanted:
            seq = heappop(self._ready)
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.READY:
                ready.append(seq)
        fresh = self._fresh(wanted, ready)
        kept = wanted - len(fresh)
        for seq in ready[kept:]:
            heappush(self._ready, seq)
        return sorted(seqs + ready[:kept] + fresh), dead

    def _fresh(self, most: int, ready: list[int]) -> list[int]:
        """Takes fresh jobs that are among the first `most` of them and `ready` (ascending) together: each replaces the
        last of `ready` that has a place. `_fresh_seq` moves over all records that were looked at, so none is looked at
        twice, however many jobs of other kinds there are.
        """
        found: list[int] = []
        records, jobs, done = self._records, self._jobs, self.done
        seq = max(self._fresh_seq, records.earliest_seq)
        look = most
        while len(found) < most:
            place = most - len(found) - 1
            if seq > (ready[place] if place < len(ready) else records.head_seq):
                break
            seq = done.next_absent(seq)
            live = records.live_from(seq, max(look, most - len(found)))
            if not live:
                seq = records.head_seq + 1
                break
            seq = live[-1] + 1
            if done.count:
                fresh = [one for one in live if one not in jobs and one not in done]
            else:
                fresh = [one for one in live if one not in jobs]
            if len(ready) + len(found) + len(fresh) <= most:
                found += fresh
            else:
                for one in fresh:
                    place = most - len(found) - 1
                    if place < 0 or (place < len(ready) and one > ready[place]):
                        seq = one
                        break
                    found.append(one)
            if not fresh:
                look = min(2 * look, _LOOK_MAX)
        self._fresh_seq = max(self._fresh_seq, seq)
        return found

    def _track(self, seq: int, job: TrackedJob) -> TrackedJob:
        self._jobs[seq] = job
        self._counts[job.phase] += 1
        heappush(self._tracked, seq)
        return job

    def _set(self, seq: int, job: TrackedJob, phase: JobPhase) -> None:
        self._counts[job.phase] -= 1
        self._counts[phase] += 1
        job.phase = phase
        if job.holder is not None:
            if phase in (JobPhase.LEASED, JobPhase.HELD):
                self._holders.setdefault(job.holder, set()).add(seq)
            else:
                self._let_go(seq, job)

    def _let_go(self, seq: int, job: TrackedJob) -> None:
        assert job.holder is not None
        self._freed[job.holder] = None
        held = self._holders.get(job.holder)
        if held is not None:
            held.discard(seq)
            if not held:
                del self._holders[job.holder]
        job.holder = None

    def _return(self, seq: int, job: TrackedJob) -> None:
        self._set(seq, job, JobPhase.RETURNED)
        heappush(self._returned, seq)

    def _drop(self, seq: int, job: TrackedJob) -> None:
        del self._jobs[seq]
        self._counts[job.phase] -= 1
        if job.holder is not None:
            self._let_go(seq, job)
        line = self._lines.get(job.order_key) if job.order_key else None
        if not line or line[0] != seq:
            return
        while line and line[0] not in self._jobs:
            line.popleft()
            self._lined -= 1
        if line:
            self._arm(line[0], self._jobs[line[0]])
        else:
            del self._lines[job.order_key]

    def _line_up(self, seq: int, order_key: str) -> deque[int]:
        """Puts a job behind the others of its key; returns them all."""
        line = self._lines.setdefault(order_key, deque())
        line.append(seq)
        self._lined += 1
        return line

    def _arm(self, seq: int, job: TrackedJob) -> None:
        """Arms the first job of a key, or one without a key: it only waits for its time, if it has one."""
        if job.due_ms:
            heappush(self._delayed, (job.due_ms, seq))
        elif job.deliver_at_ms:
            heappush(self._scheduled, (job.deliver_at_ms, seq))
        else:
            self._set(seq, job, JobPhase.READY)
            heappush(self._ready, seq)

    def _tidy(self) -> None:
        """Makes heaps anew before entries that are over become most of them. An entry stays in a heap until it comes
        up, which may be never. The cost is the size of the heap, never all jobs: many more may be scheduled.
        """
        counts, jobs = self._counts, self._jobs
        if len(self._due) > _room(sum(counts[phase] for phase in _DUE)):
            self._due = [
                (at, seq)
                for at, seq in set(self._due)
                if (job := jobs.get(seq)) is not None and job.due_ms == at and job.phase in _DUE
            ]
            heapify(self._due)
        if len(self._ready) > _room(counts[JobPhase.READY]):
            self._ready = self._still(self._ready, JobPhase.READY)
        if len(self._returned) > _room(counts[JobPhase.RETURNED]):
            self._returned = self._still(self._returned, JobPhase.RETURNED)
        for waiting in (self._scheduled, self._delayed):
            if len(waiting) > _room(counts[JobPhase.BEHIND]):
                seqs = set(self._still([seq for _, seq in waiting], JobPhase.BEHIND))
                waiting[:] = sorted((at, seq) for at, seq in waiting if seq in seqs)
        if len(self._tracked) > _room(len(jobs)):
            self._tracked = sorted(jobs)
        if self._lined > _room(len(jobs)):
            # Each line has a first job that is there; those behind it may be gone.
            self._lines = {key: deque([seq for seq in line if seq in jobs]) for key, line in self._lines.items()}
            self._lined = sum(map(len, self._lines.values()))

    def _still(self, seqs: Iterable[int], phase: JobPhase) -> list[int]:
        """Returns those of these jobs, ascending, that are in that phase."""
        jobs = self._jobs
        return sorted({seq for seq in seqs if (job := jobs.get(seq)) is not None and job.phase == phase})


def _room(live: int) -> int:
    """The most entries of a heap when so many of them are not over."""
    return 64 + 4 * live


CARRY_MS: Final = 30_000
"""A frontend that needs longer to bring a job to the dead letters has failed."""
PEEK_LOOK_MAX: Final = 1024
"""One `peek` looks at so many records, of which few may be what is looked for."""
PEEK_PASS_MAX: Final = 16_384
"""One `peek` passes over so many at most, most of them gone: the oldest job may have millions of acked ones behind it.
"""
LEASE_NO_END: Final = 1 << 64
_FREE: Final = (JobPhase.READY, JobPhase.RETURNED, JobPhase.DELAYED)


class LeasedSeqs(NamedTuple):
    """Jobs that were handed out: ascending seqs, their leases `first_lease_no` and up, and their deliveries, this one
    included.
    """

    seqs: list[int]
    first_lease_no: int
    deadline_ms: int
    deliveries: list[int]


class Marked(NamedTuple):
    """The jobs that a consumer named: `owned` are leased to it, the others come in the order they were asked for."""

    seqs: list[int]
    skipped: list[int]


class Leases(QueueJobs):
    """Returns everything of a queue that its records do not say themselves."""

    # -- what the log says

    def restore(self, state: QueueState) -> None:
        """Takes over the state of a snapshot; the log goes on behind it."""
        self.dead_lettered = max(self.dead_lettered, state.dead_lettered)
        for first, last in state.done:
            self.done.add(first, last)
        for seq, deliver_at_ms, order_key in state.attributes:
            self.add(seq, deliver_at_ms, order_key)
        for body in state.leases:
            self.logged(body)

    def state(self) -> QueueState:
        """Returns these bodies as `restore` takes them."""
        leases = self.bodies([seq for seq, job in self._jobs.items() if job.deliveries])
        return msgspec.structs.replace(
            self.attributes(), dead_lettered=self.dead_lettered, done=self.done.runs(), leases=leases
        )

    def attributes_of(self, seqs: Iterable[int]) -> list[tuple[int, int, str]]:
        """Returns the rows of `attributes` for some jobs."""
        jobs = [(seq, job) for seq in seqs if (job := self._jobs.get(seq)) is not None]
        return [(seq, job.deliver_at_ms, job.order_key) for seq, job in jobs if job.deliver_at_ms or job.order_key]

    def attributes(self) -> QueueState:
        """Returns the part of `state` that was written with the records."""
        jobs = sorted(self._jobs.items())
        return QueueState(
            attributes=[
                (seq, job.deliver_at_ms, job.order_key) for seq, job in jobs if job.deliver_at_ms or job.order_key
            ]
        )

    def logged(self, body: LeaseBody) -> None:
        """Applies a LEASE frame of the log."""
        holder = (body.frontend, body.stream) if body.stream else None
        for seq, lease_no, deliveries in zip(body.seqs, body.lease_nos, body.deliveries, strict=True):
            job = self._jobs.get(seq) or self._track(seq, TrackedJob())
            job.node, job.lease_no, job.deliveries, job.holder = body.node, lease_no, deliveries, holder
            job.deadline_ms, job.lease_ms = body.deadline_ms, body.lease_ms

    def start(self, now: Now, next_lease_no: int, keep_leases: bool) -> None:
        """The log has been read. Jobs whose records are gone are forgotten; so are all leases unless `keep_leases`.
        `next_lease_no` is random enough never to have been used: a lease id is a fence over restarts as well.
        """
        self._started = True
        self._next_lease_no = next_lease_no
        self._fresh_seq = self._records.earliest_seq
        jobs, self._jobs, self._tracked = self._jobs, {}, []
        self._counts = [0] * len(JobPhase)
        self.done.discard_below(self._records.earliest_seq)
        for seq in self._records.live_of(sorted(jobs)):
            if seq in self.done:
                continue
            known = jobs[seq]
            job = known if keep_leases else TrackedJob(known.deliver_at_ms, known.order_key)
            if job.deliveries or job.deliver_at_ms or job.order_key:
                self._track(seq, job)
                self._start_job(seq, job, now)
        self.advance(now)

    def _start_job(self, seq: int, job: TrackedJob, now: Now) -> None:
        if job.order_key:
            self._line_up(seq, job.order_key)
        if not job.deliveries:
            if not job.order_key or self._lines[job.order_key][0] == seq:
                self._arm(seq, job)
            return
        job.due_ms = now.mono_ms + max(0, min(job.deadline_ms - now.wall_ms, job.lease_ms))
        self._set(seq, job, JobPhase.LEASED if job.node else JobPhase.DELAYED)
        heappush(self._due, (job.due_ms, seq))

    # -- consumers

    def take(self, most: int, deliveries_max: int, carrier: int, now: Now) -> tuple[list[int], list[int]]:
        """Takes at most `most` ready jobs, ascending: (jobs to `lease` at once, dead ones). A job that was handed out
        `deliveries_max` times (0: no bound) is dead: it is HELD, and the frontend `carrier` takes it away within
        CARRY_MS. Call `advance` first.
        """
        seqs, dead = self._take(most, deliveries_max)
        for seq in dead:
            self._carry(seq, self._jobs[seq], carrier, now)
        return seqs, dead

    def carry(self, seqs: Iterable[int], carrier: int, now: Now) -> list[int]:
        """Takes the jobs of these live records that nobody has and that wait for nothing but a delay. They are HELD,
        like dead ones in `take`. Call `advance` first.
        """
        carried = []
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is None:
                if seq in self.done:
                    continue
                job = self._track(seq, TrackedJob())
            elif job.phase not in _FREE:
                continue
            self._carry(seq, job, carrier, now)
            carried.append(seq)
        self._tidy()
        return carried

    def _carry(self, seq: int, job: TrackedJob, carrier: int, now: Now) -> None:
        job.holder = (carrier, 0)
        job.due_ms = now.mono_ms + CARRY_MS
        self._set(seq, job, JobPhase.HELD)
        heappush(self._due, (job.due_ms, seq))

    def lease(self, seqs: list[int], node: str, lease_ms: int, now: Now, holder: Holder | None) -> LeasedSeqs:
        """Leases the jobs that `take` returned."""
        first_lease_no = self._next_lease_no
        self._next_lease_no += len(seqs)
        if self._next_lease_no >= LEASE_NO_END:
            first_lease_no, self._next_lease_no = 1, 1 + len(seqs)
        deadline_ms, due_ms = now.wall_ms + lease_ms, now.mono_ms + lease_ms
        deliveries = []
        for lease_no, seq in enumerate(seqs, first_lease_no):
            job = self._jobs.get(seq) or self._track(seq, TrackedJob())
            job.node, job.lease_no, job.lease_ms = node, lease_no, lease_ms
            job.deadline_ms, job.due_ms = deadline_ms, due_ms
            job.deliveries += 1
            job.holder = holder
            deliveries.append(job.deliveries)
            self._set(seq, job, JobPhase.LEASED)
            heappush(self._due, (due_ms, seq))
        self._tidy()
        return LeasedSeqs(seqs, first_lease_no, deadline_ms, deliveries)

    def unclaim(self, seqs: Iterable[int], delay_ms: int, now: Now) -> None:
        """These leases never reached anybody: the jobs are as before the claim, but come first now, or after
        `delay_ms`.
        """
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None and job.phase in (JobPhase.LEASED, JobPhase.HELD):
                job.deliveries -= 1
                self.give_back((seq,), delay_ms, now)

    def owned(
        self, node: str, seqs: Sequence[int], lease_nos: Sequence[int] | None, dying: Set[int] = frozenset()
    ) -> Marked:
        """Returns the jobs that are leased to `node`, by these very leases if given, and are not `dying`."""
        found: list[int] = []
        skipped: list[int] = []
        seen: set[int] = set()
        for at, seq in enumerate(seqs):
            job = self._jobs.get(seq)
            if (
                job is None
                or job.phase != JobPhase.LEASED
                or job.node != node
                or seq in seen
                or seq in dying
                or (lease_nos is not None and lease_nos[at] != job.lease_no)
            ):
                skipped.append(seq)
            else:
                seen.add(seq)
                found.append(seq)
        return Marked(found, skipped)

    def freed(self, seqs: list[int], delay_ms: int, now: Now) -> LeaseBody:
        """Returns the LEASE body of jobs that are to be given back."""
        jobs = [self._jobs[seq] for seq in seqs]
        lease_nos, deliveries = [job.lease_no for job in jobs], [job.deliveries for job in jobs]
        return LeaseBody("", now.wall_ms + delay_ms, delay_ms, seqs, lease_nos, deliveries)

    def hold(self, seqs: Iterable[int]) -> None:
        """Holds jobs until the end of their leases is in the log. Then call `gone`, `finish` or `give_back`; if it
        fails, `unhold`.
        """
        for seq in seqs:
            self._set(seq, self._jobs[seq], JobPhase.HELD)

    def unhold(self, seqs: Iterable[int]) -> None:
        """The end of these leases is not in the log: they are as before, unless the lease is not in the log either."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.HELD:
                self._set(seq, job, JobPhase.LEASED)
                heappush(self._due, (job.due_ms, seq))

    def finish(self, runs: Iterable[Run]) -> None:
        """These jobs are acknowledged and their records stay. The log says it with the same call."""
        for first, last in runs:
            self.done.add(first, last)
        for seq in seqs_of(runs):
            job = self._jobs.get(seq)
            if job is not None:
                self._drop(seq, job)
        self._tidy()

    def give_back(self, seqs: Iterable[int], delay_ms: int, now: Now) -> None:
        """Gives jobs back: nobody has them any more, and they are ready after `delay_ms`."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is None:
                continue
            job.deadline_ms, job.lease_ms = now.wall_ms + delay_ms, delay_ms
            if not delay_ms:
                self._return(seq, job)
                continue
            job.due_ms = now.mono_ms + delay_ms
            self._set(seq, job, JobPhase.DELAYED)
            heappush(self._due, (job.due_ms, seq))

    def extend(self, seqs: Iterable[int], lease_ms: int, now: Now) -> list[tuple[int, int, int, int]]:
        """Leases end `lease_ms` from now. Returns their former times, for `unextend`."""
        former = []
        for seq in seqs:
            job = self._jobs[seq]
            former.append((seq, job.deadline_ms, job.due_ms, job.lease_ms))
            job.deadline_ms, job.due_ms, job.lease_ms = now.wall_ms + lease_ms, now.mono_ms + lease_ms, lease_ms
            heappush(self._due, (job.due_ms, seq))
        self._tidy()
        return former

    def unextend(self, former: Iterable[tuple[int, int, int, int]]) -> None:
        """The extension is not in the log: the former times count."""
        for seq, deadline_ms, due_ms, lease_ms in former:
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.LEASED:
                job.deadline_ms, job.due_ms, job.lease_ms = deadline_ms, due_ms, lease_ms
                heappush(self._due, (due_ms, seq))

    def carried_by(self, frontend: int, seqs: Iterable[int]) -> list[int]:
        """Returns the jobs, ascending, that this frontend carries to the dead letters."""
        return sorted(self._holders.get((frontend, 0), set()).intersection(seqs))

    def deliveries_of(self, seqs: Iterable[int]) -> list[int]:
        """Returns how often each of these was handed out."""
        return [self._jobs[seq].deliveries for seq in seqs]

    def order_keys_of(self, seqs: Iterable[int]) -> list[str]:
        """Returns the order key of each of these, "" for none."""
        return [self._jobs[seq].order_key for seq in seqs]

    def leases_of(self, holder: Holder) -> list[int]:
        """Returns the jobs of a stream, ascending."""
        return sorted(self._holders.get(holder, ()))

    def is_ending(self, holder: Holder) -> bool:
        """True while the end of any job of a stream is being committed."""
        return any(self._jobs[seq].phase == JobPhase.HELD for seq in self._holders.get(holder, ()))

    def holders_at(self, frontend: int) -> list[Holder]:
        """Returns everybody who has a job by way of this frontend."""
        return [holder for holder in self._holders if holder[0] == frontend]

    # -- what can be asked

    def held_by(self, holder: Holder) -> int:
        """Counts the leases of a stream."""
        return len(self._holders.get(holder, ()))

    def peek(self, from_seq: int, state: State | None, most: int) -> tuple[list[JobView], int]:
        """Returns the first jobs behind `from_seq` in this state (None: any but "done"), and the seq up to which these
        are all. It looks at PEEK_LOOK_MAX records at most, PEEK_PASS_MAX with those that are gone. It moves nothing;
        call `advance` first.
        """
        seq = from_seq + 1 if state == "done" else self.done.next_absent(from_seq + 1)
        look = PEEK_LOOK_MAX if state is not None or self.done.count else min(most, PEEK_LOOK_MAX)
        live, up_to_seq = self._records.live_within(seq, look, PEEK_PASS_MAX)
        found = []
        for one in live:
            view = self._view(one)
            if view.state == state or (state is None and view.state != "done"):
                found.append(view)
                if len(found) == most:
                    return found, one
        return found, up_to_seq

    def _view(self, seq: int) -> JobView:
        job = self._jobs.get(seq)
        if job is None:
            return JobView(seq, "done" if seq in self.done else "waiting", 0, 0, "", "")
        state: State = "waiting"
        at_ms, node = 0, ""
        match job.phase:
            case JobPhase.HELD if job.holder is not None and not job.holder[1]:
                state = "dead"
            case JobPhase.LEASED | JobPhase.HELD:
                state, at_ms, node = "leased", job.deadline_ms, job.node
            case JobPhase.DELAYED:
                state, at_ms = "scheduled", job.deadline_ms
            case JobPhase.BEHIND if job.order_key and self._lines[job.order_key][0] != seq:
                state = "behind"
            case JobPhase.BEHIND:
                state, at_ms = "scheduled", job.deliver_at_ms
        return JobView(seq, state, at_ms, job.deliveries, node, job.order_key)

    def bodies(self, seqs: Iterable[int]) -> list[LeaseBody]:
        """Returns LEASE bodies of these jobs as they are now."""

        def situation(seq: int) -> tuple[str, int, int, Holder]:
            job = self._jobs[seq]
            leased = job.phase in (JobPhase.LEASED, JobPhase.HELD) or (not self._started and bool(job.node))
            return job.node if leased else "", job.deadline_ms, job.lease_ms, (job.holder if leased else None) or (0, 0)

        bodies = []
        for (node, deadline_ms, lease_ms, holder), group in groupby(sorted(seqs, key=situation), situation):
            together = sorted(group)
            jobs = [self._jobs[seq] for seq in together]
            lease_nos, deliveries = [job.lease_no for job in jobs], [job.deliveries for job in jobs]
            bodies.append(LeaseBody(node, deadline_ms, lease_ms, together, lease_nos, deliveries, *holder))
        return bodies
