"""The leases of one queue's jobs (api §9): consumers take, extend and end them, and the log records that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from heapq import heappush
from itertools import groupby, islice
from typing import Final, NamedTuple

from topics.core.job import Holder, JobPhase, JobView, LeaseFrameBody, Now, QueueState, State, TrackedJob
from topics.core.jobs import QueueJobs

CARRY_MS: Final = 30_000
"""Time that a frontend has to bring a job to the dead letters; after it the job returns to the queue."""
PEEK_LOOK_MAX: Final = 1024
"""The most live records that one `peek` looks at: perhaps few of them are in the wanted state."""
PEEK_PASS_MAX: Final = 16_384
"""The most records that one `peek` passes: the oldest job may have millions of deleted ones behind it."""
LEASE_NO_END: Final = 1 << 64
_FREE: Final = (JobPhase.READY, JobPhase.RETURNED, JobPhase.DELAYED)


class LeasedSeqs(NamedTuple):
    """Leased jobs: ascending seqs, and how often each was delivered, this time included. Job i has the lease number
    `first_lease_no` + i. All leases end at `deadline_ms` (wall clock).
    """

    seqs: list[int]
    first_lease_no: int
    deadline_ms: int
    deliveries: list[int]


class Leases(QueueJobs):
    """The jobs of one queue with their leases. It owns everything about jobs that their records do not say."""

    # -- the log

    def restore(self, state: QueueState) -> None:
        """Restore the state of a snapshot, before the rest of the log."""
        self.dead_lettered = max(self.dead_lettered, state.dead_lettered)
        for first, last in state.done:
            self.done.add(first, last)
        for seq, deliver_at_ms, order_key in state.attributes:
            self.add(seq, deliver_at_ms, order_key)
        for body in state.leases:
            self.logged(body)

    def state(self) -> QueueState:
        """Return the state for a snapshot."""
        leases = self.bodies([seq for seq, job in self._jobs.items() if job.deliveries])
        return QueueState(self.dead_lettered, self.done.runs(), self.attributes().attributes, leases)

    def attributes(self) -> QueueState:
        """Return only the part of `state` that came with the records: delivery times and order keys."""
        return QueueState(attributes=self.attributes_of(sorted(self._jobs)))

    def attributes_of(self, seqs: Iterable[int]) -> list[tuple[int, int, str]]:
        """Return (seq, deliver_at_ms, order_key) of each of these jobs that has a time or an order key."""
        jobs = [(seq, job) for seq in seqs if (job := self._jobs.get(seq)) is not None]
        return [(seq, job.deliver_at_ms, job.order_key) for seq, job in jobs if job.deliver_at_ms or job.order_key]

    def logged(self, body: LeaseFrameBody) -> None:
        """Apply a LEASE frame of the log."""
        holder = (body.frontend, body.stream) if body.stream else None
        for seq, lease_no, deliveries in zip(body.seqs, body.lease_nos, body.deliveries, strict=True):
            job = self._jobs.get(seq) or self._track(seq, TrackedJob())
            job.node, job.lease_no, job.deliveries, job.holder = body.node, lease_no, deliveries, holder
            job.deadline_ms, job.lease_ms = body.deadline_ms, body.lease_ms

    def forget_logged(self) -> None:
        """Forget the leases that the log gave so far: from here on the queue does not log them (`leases_durable`)."""
        for job in self._jobs.values():
            job.deliveries = 0

    def begin_logging(self, is_durable: bool) -> None:
        """Note that the log has to get all leases that are held, or none (`leases_durable`)."""
        self.unlogged = [seq for seq, job in self._jobs.items() if is_durable and job.deliveries]

    def take_unlogged(self, most: int) -> list[int]:
        """Take jobs from `unlogged`, and return those whose leases have not ended meanwhile."""
        seqs = self.unlogged[-most:]
        del self.unlogged[-most:]
        return [seq for seq in seqs if (job := self._jobs.get(seq)) is not None and job.deliveries]

    def start(self, now: Now, next_lease_no: int, keep_leases: bool) -> None:
        """Start the queue once the log has been read. Forget jobs without a live record, and all leases unless
        `keep_leases`. The caller draws `next_lease_no` at random, so an old lease id does not match after a restart.
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
                self._enqueue(seq, job)
            return
        due_ms = now.mono_ms + max(0, min(job.deadline_ms - now.wall_ms, job.lease_ms))
        self._set_until(seq, job, JobPhase.LEASED if job.node else JobPhase.DELAYED, due_ms)

    # -- consumers

    def take(self, most: int, deliveries_max: int, carrier: int, now: Now) -> tuple[list[int], list[int]]:
        """Take at most `most` ready jobs; return (seqs to `lease` at once, seqs of dead jobs). Call `advance` first.

        A job that was handed out `deliveries_max` times (0: no bound) is dead. It stays HELD until the frontend
        `carrier` has moved it to the dead letters, for CARRY_MS at most.
        """
        seqs, dead = self._take(most, deliveries_max)
        for seq in dead:
            self._carry(seq, self._jobs[seq], carrier, now)
        return seqs, dead

    def carry(self, seqs: Iterable[int], carrier: int, now: Now) -> list[int]:
        """Hold these live records for `carrier`, like `take` holds dead jobs. Return those that could be held: leased,
        held and done jobs are left out.
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
        self._compact()
        return carried

    def _carry(self, seq: int, job: TrackedJob, carrier: int, now: Now) -> None:
        job.holder = (carrier, 0)
        self._set_until(seq, job, JobPhase.HELD, now.mono_ms + CARRY_MS)

    def _set_until(self, seq: int, job: TrackedJob, phase: JobPhase, due_ms: int) -> None:
        self._set(seq, job, phase)
        job.due_ms = due_ms
        heappush(self._due, (due_ms, seq))

    def lease(self, seqs: list[int], node: str, lease_ms: int, now: Now, holder: Holder | None) -> LeasedSeqs:
        """Lease the jobs that `take` returned to `node`; `holder` is the stream that gets them, if any."""
        first_lease_no = self._next_lease_no
        self._next_lease_no += len(seqs)
        if self._next_lease_no >= LEASE_NO_END:
            first_lease_no, self._next_lease_no = 1, 1 + len(seqs)
        deadline_ms, due_ms = now.wall_ms + lease_ms, now.mono_ms + lease_ms
        deliveries = []
        for lease_no, seq in enumerate(seqs, first_lease_no):
            job = self._jobs.get(seq) or self._track(seq, TrackedJob())
            job.node, job.lease_no, job.lease_ms = node, lease_no, lease_ms
            job.deadline_ms, job.holder = deadline_ms, holder
            job.deliveries += 1
            deliveries.append(job.deliveries)
            self._set_until(seq, job, JobPhase.LEASED, due_ms)
        self._compact()
        return LeasedSeqs(seqs, first_lease_no, deadline_ms, deliveries)

    def unclaim(self, seqs: Iterable[int], delay_ms: int, now: Now) -> None:
        """Undo leases that reached nobody: the deliveries do not count, and the jobs are ready after `delay_ms`."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None and job.phase in (JobPhase.LEASED, JobPhase.HELD):
                job.deliveries -= 1
                self.release((seq,), delay_ms, now)

    def leased_to(
        self, node: str, seqs: Sequence[int], lease_nos: Sequence[int] | None, dying: Set[int] = frozenset()
    ) -> tuple[list[int], list[int]]:
        """Split seqs into (jobs leased to `node`, the others). Given `lease_nos`, a job must have exactly that lease. A
        `dying` job or a repeated seq counts as another.
        """
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
        return found, skipped

    def hold(self, seqs: Iterable[int]) -> None:
        """Hold jobs while the end of their leases is logged; call `unhold` if that fails."""
        for seq in seqs:
            self._set(seq, self._jobs[seq], JobPhase.HELD)

    def unhold(self, seqs: Iterable[int]) -> None:
        """Return held jobs to their leases. A job that is not HELD any more stays as it is."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.HELD:
                self._set_until(seq, job, JobPhase.LEASED, job.due_ms)

    def release(self, seqs: Iterable[int], delay_ms: int, now: Now) -> None:
        """End the leases of these jobs: nobody has them any more, and they are ready after `delay_ms`."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is None:
                continue
            job.node, job.deadline_ms, job.lease_ms = "", now.wall_ms + delay_ms, delay_ms
            if delay_ms:
                self._set_until(seq, job, JobPhase.DELAYED, now.mono_ms + delay_ms)
            else:
                self._return(seq, job)

    def extend(self, seqs: Iterable[int], lease_ms: int, now: Now) -> list[tuple[int, int, int, int]]:
        """Let leases end `lease_ms` from now. Return their former times as `unextend` takes them."""
        former = []
        for seq in seqs:
            job = self._jobs[seq]
            former.append((seq, job.deadline_ms, job.due_ms, job.lease_ms))
            job.deadline_ms, job.due_ms, job.lease_ms = now.wall_ms + lease_ms, now.mono_ms + lease_ms, lease_ms
            heappush(self._due, (job.due_ms, seq))
        self._compact()
        return former

    def unextend(self, former: Iterable[tuple[int, int, int, int]]) -> None:
        """Restore the former times of leases: the extension was not logged."""
        for seq, deadline_ms, due_ms, lease_ms in former:
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.LEASED:
                job.deadline_ms, job.due_ms, job.lease_ms = deadline_ms, due_ms, lease_ms
                heappush(self._due, (due_ms, seq))

    # -- queries

    def carried_by(self, frontend: int, seqs: Iterable[int]) -> list[int]:
        """Return those of these jobs that this frontend is carrying to the dead letters, ascending."""
        return sorted(self._holders.get((frontend, 0), set()).intersection(seqs))

    def deliveries_of(self, seqs: Iterable[int]) -> list[int]:
        """Return the number of deliveries of each of these tracked jobs."""
        return [self._jobs[seq].deliveries for seq in seqs]

    def order_keys_of(self, seqs: Iterable[int]) -> list[str]:
        """Return the order key of each of these tracked jobs, "" for none."""
        return [self._jobs[seq].order_key for seq in seqs]

    def made_ready_by(self, seqs: Iterable[int], now: Now) -> int:
        """Count the jobs that get ready when these leased jobs end: the next one of each order key, if it is due."""
        if not self._lines:
            return 0
        lines = (self._lines.get(self._jobs[seq].order_key, ()) for seq in seqs)
        nexts = (next((seq for seq in islice(line, 1, None) if seq in self._jobs), 0) for line in lines)
        jobs = (self._jobs[seq] for seq in nexts if seq)
        return sum(job.due_ms <= now.mono_ms if job.due_ms else job.deliver_at_ms <= now.wall_ms for job in jobs)

    def leases_of(self, holder: Holder) -> list[int]:
        """Return the jobs of a stream, ascending."""
        return sorted(self._holders.get(holder, ()))

    def held_by(self, holder: Holder) -> int:
        """Count the jobs of a stream."""
        return len(self._holders.get(holder, ()))

    def is_ending(self, holder: Holder) -> bool:
        """True while the end of any job of a stream is being committed."""
        return any(self._jobs[seq].phase == JobPhase.HELD for seq in self._holders.get(holder, ()))

    @property
    def has_holders(self) -> bool:
        """Return whether jobs belong to streams, or are on their way to the dead letters."""
        return bool(self._holders)

    def holders_at(self, frontend: int) -> list[Holder]:
        """Return the holders (streams and carriers) of jobs at this frontend."""
        return [holder for holder in self._holders if holder[0] == frontend]

    def peek(self, from_seq: int, state: State | None, most: int) -> tuple[list[JobView], int]:
        """Return (the first jobs behind `from_seq` in this state, the seq up to which none is missing). State None
        means any but "done". It looks at PEEK_LOOK_MAX live records and passes PEEK_PASS_MAX records at most. It
        changes nothing; call `advance` first.
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
            case JobPhase.BEHIND:
                state = "behind"
            case JobPhase.SCHEDULED:
                state, at_ms = "scheduled", job.deliver_at_ms
        return JobView(seq, state, at_ms, job.deliveries, node, job.order_key)

    def bodies(self, seqs: Iterable[int]) -> list[LeaseFrameBody]:
        """Return LEASE bodies of these jobs as they are now."""

        def lease_of(seq: int) -> tuple[str, int, int, Holder]:
            # `node` decides and not the phase: a follower reads the log after `start`, and LEASE frames set no phase.
            job = self._jobs[seq]
            return job.node, job.deadline_ms, job.lease_ms, (job.holder if job.node else None) or (0, 0)

        groups = groupby(sorted(seqs, key=lease_of), lease_of)
        return [self._body(*lease, sorted(group)) for lease, group in groups]

    def release_body(self, seqs: list[int], delay_ms: int, now: Now) -> LeaseFrameBody:
        """Return the LEASE body of jobs that `release` is going to release."""
        return self._body("", now.wall_ms + delay_ms, delay_ms, (0, 0), seqs)

    def _body(self, node: str, deadline_ms: int, lease_ms: int, holder: Holder, seqs: list[int]) -> LeaseFrameBody:
        jobs = [self._jobs[seq] for seq in seqs]
        lease_nos, deliveries = [job.lease_no for job in jobs], [job.deliveries for job in jobs]
        return LeaseFrameBody(node, deadline_ms, lease_ms, seqs, lease_nos, deliveries, *holder)
