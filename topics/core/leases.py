"""The lease machine of one queue (api §9): who has which job, until when. Pure; `job.py` has the picture.

What it is asked to do it does at once; what must be in the log first is `hold`ed until then. Time is passed in. Leases
and delays run on the monotonic clock; what is told to clients and logged is the wall clock of that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from heapq import heappush
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from topics.core.job import Holder, Job, JobView, Now, Phase, State
from topics.core.jobs import Jobs
from topics.core.queue_state import LeaseBody, QueueState
from topics.core.seq_set import Run, seqs_of

CARRY_MS: Final = 30_000
"""A frontend that does not bring a job to the dead letters in this time has failed to."""
PEEK_LOOK_MAX: Final = 1024
"""Records that one `peek` looks at, of which few may be what is looked for."""
PEEK_PASS_MAX: Final = 16_384
"""And how many it passes over at most, most of them gone: the oldest job may have millions of acked ones behind it."""
LEASE_NO_END: Final = 1 << 64
_FREE: Final = (Phase.READY, Phase.RETURNED, Phase.DELAYED)


class Leased(NamedTuple):
    """Ascending seqs, their leases `first_lease_no` and up, how often each was handed out with this."""

    seqs: list[int]
    first_lease_no: int
    deadline_ms: int
    deliveries: list[int]


class Marked(NamedTuple):
    """Jobs that a consumer named: those leased to it, and the others in the order they were asked for."""

    seqs: list[int]
    skipped: list[int]


class Leases(Jobs):
    """All of a queue that its records do not say themselves."""

    # -- what the log says

    def restore(self, state: QueueState) -> None:
        """A snapshot's; the log goes on behind it."""
        self.dead_lettered = max(self.dead_lettered, state.dead_lettered)
        for first, last in state.done:
            self.done.add(first, last)
        for seq, deliver_at_ms, order_key in state.attributes:
            self.add(seq, deliver_at_ms, order_key)
        for body in state.leases:
            self.logged(body)

    def state(self) -> QueueState:
        """As `restore` takes it."""
        leases = self.bodies([seq for seq, job in self._jobs.items() if job.deliveries])
        return msgspec.structs.replace(
            self.attributes(), dead_lettered=self.dead_lettered, done=self.done.runs(), leases=leases
        )

    def attributes(self) -> QueueState:
        """The part of `state` that was written with the records."""
        jobs = sorted(self._jobs.items())
        return QueueState(
            attributes=[
                (seq, job.deliver_at_ms, job.order_key) for seq, job in jobs if job.deliver_at_ms or job.order_key
            ]
        )

    def logged(self, body: LeaseBody) -> None:
        """A LEASE frame of the log."""
        holder = (body.frontend, body.stream) if body.stream else None
        for seq, lease_no, deliveries in zip(body.seqs, body.lease_nos, body.deliveries, strict=True):
            job = self._jobs.get(seq) or self._track(seq, Job())
            job.node, job.lease_no, job.deliveries, job.holder = body.node, lease_no, deliveries, holder
            job.deadline_ms, job.lease_ms = body.deadline_ms, body.lease_ms

    def start(self, now: Now, next_lease_no: int, keep_leases: bool) -> None:
        """The log has been read. Jobs whose records are gone are forgotten; so are all leases unless `keep_leases`.

        `next_lease_no` is random enough never to have been used: lease ids are fences over restarts as well.
        """
        self._started = True
        self._next_lease_no = next_lease_no
        self._fresh_seq = self._records.earliest_seq
        jobs, self._jobs, self._tracked = self._jobs, {}, []
        self._counts = [0] * len(Phase)
        self.done.discard_below(self._records.earliest_seq)
        for seq in self._records.live_of(sorted(jobs)):
            if seq in self.done:
                continue
            known = jobs[seq]
            job = known if keep_leases else Job(known.deliver_at_ms, known.order_key)
            if job.deliveries or job.deliver_at_ms or job.order_key:
                self._track(seq, job)
                self._start_job(seq, job, now)
        self.advance(now)

    def _start_job(self, seq: int, job: Job, now: Now) -> None:
        if job.order_key:
            self._line_up(seq, job.order_key)
        if not job.deliveries:
            if not job.order_key or self._lines[job.order_key][0] == seq:
                self._arm(seq, job)
            return
        job.due_ms = now.mono_ms + max(0, min(job.deadline_ms - now.wall_ms, job.lease_ms))
        self._set(seq, job, Phase.LEASED if job.node else Phase.DELAYED)
        heappush(self._due, (job.due_ms, seq))

    # -- consumers

    def take(self, most: int, deliveries_max: int, carrier: int, now: Now) -> tuple[list[int], list[int]]:
        """(jobs to `lease` at once, dead ones): at most `most` jobs that are ready, ascending. Those that were handed
        out `deliveries_max` times (0: no bound) are dead instead: HELD, for the frontend `carrier` to take them away
        within CARRY_MS. Call `advance` first.
        """
        seqs, dead = self._take(most, deliveries_max)
        for seq in dead:
            self._carry(seq, self._jobs[seq], carrier, now)
        return seqs, dead

    def carry(self, seqs: Iterable[int], carrier: int, now: Now) -> list[int]:
        """Of these live records the jobs that nobody has and that wait for nothing but a delay: HELD, as dead ones in
        `take`. Call `advance` first.
        """
        carried = []
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is None:
                if seq in self.done:
                    continue
                job = self._track(seq, Job())
            elif job.phase not in _FREE:
                continue
            self._carry(seq, job, carrier, now)
            carried.append(seq)
        self._tidy()
        return carried

    def _carry(self, seq: int, job: Job, carrier: int, now: Now) -> None:
        job.holder = (carrier, 0)
        job.due_ms = now.mono_ms + CARRY_MS
        self._set(seq, job, Phase.HELD)
        heappush(self._due, (job.due_ms, seq))

    def lease(self, seqs: list[int], node: str, lease_ms: int, now: Now, holder: Holder | None) -> Leased:
        """Leases what was taken."""
        first_lease_no = self._next_lease_no
        self._next_lease_no += len(seqs)
        if self._next_lease_no >= LEASE_NO_END:
            first_lease_no, self._next_lease_no = 1, 1 + len(seqs)
        deadline_ms, due_ms = now.wall_ms + lease_ms, now.mono_ms + lease_ms
        deliveries = []
        for lease_no, seq in enumerate(seqs, first_lease_no):
            job = self._jobs.get(seq) or self._track(seq, Job())
            job.node, job.lease_no, job.lease_ms = node, lease_no, lease_ms
            job.deadline_ms, job.due_ms = deadline_ms, due_ms
            job.deliveries += 1
            job.holder = holder
            deliveries.append(job.deliveries)
            self._set(seq, job, Phase.LEASED)
            heappush(self._due, (due_ms, seq))
        self._tidy()
        return Leased(seqs, first_lease_no, deadline_ms, deliveries)

    def unclaim(self, seqs: Iterable[int], delay_ms: int, now: Now) -> None:
        """They never reached anybody: as before the claim, but that they come first now, or after `delay_ms`."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None and job.phase in (Phase.LEASED, Phase.HELD):
                job.deliveries -= 1
                self.give_back((seq,), delay_ms, now)

    def owned(
        self, node: str, seqs: Sequence[int], lease_nos: Sequence[int] | None, dying: Set[int] = frozenset()
    ) -> Marked:
        """Those that are leased to `node`, by these very leases if given, and not `dying`."""
        found: list[int] = []
        skipped: list[int] = []
        seen: set[int] = set()
        for at, seq in enumerate(seqs):
            job = self._jobs.get(seq)
            if (
                job is None
                or job.phase != Phase.LEASED
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
        """What to log of jobs that are to be given back."""
        jobs = [self._jobs[seq] for seq in seqs]
        lease_nos, deliveries = [job.lease_no for job in jobs], [job.deliveries for job in jobs]
        return LeaseBody("", now.wall_ms + delay_ms, delay_ms, seqs, lease_nos, deliveries)

    def hold(self, seqs: Iterable[int]) -> None:
        """Their leases end once that is in the log: then `gone`, `finish` or `give_back`; if it fails, `unhold`."""
        for seq in seqs:
            self._set(seq, self._jobs[seq], Phase.HELD)

    def unhold(self, seqs: Iterable[int]) -> None:
        """The log does not have it: leased as before, unless it does not have the lease either."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None and job.phase == Phase.HELD:
                self._set(seq, job, Phase.LEASED)
                heappush(self._due, (job.due_ms, seq))

    def finish(self, runs: Iterable[Run]) -> None:
        """Acknowledged, their records stay; also what the log says of that."""
        for first, last in runs:
            self.done.add(first, last)
        for seq in seqs_of(runs):
            job = self._jobs.get(seq)
            if job is not None:
                self._drop(seq, job)
        self._tidy()

    def give_back(self, seqs: Iterable[int], delay_ms: int, now: Now) -> None:
        """Nobody's any more; ready after `delay_ms`."""
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is None:
                continue
            job.deadline_ms, job.lease_ms = now.wall_ms + delay_ms, delay_ms
            if not delay_ms:
                self._return(seq, job)
                continue
            job.due_ms = now.mono_ms + delay_ms
            self._set(seq, job, Phase.DELAYED)
            heappush(self._due, (job.due_ms, seq))

    def extend(self, seqs: Iterable[int], lease_ms: int, now: Now) -> list[tuple[int, int, int, int]]:
        """Their leases end `lease_ms` from now. Returns what they were, for `unextend`."""
        former = []
        for seq in seqs:
            job = self._jobs[seq]
            former.append((seq, job.deadline_ms, job.due_ms, job.lease_ms))
            job.deadline_ms, job.due_ms, job.lease_ms = now.wall_ms + lease_ms, now.mono_ms + lease_ms, lease_ms
            heappush(self._due, (job.due_ms, seq))
        self._tidy()
        return former

    def unextend(self, former: Iterable[tuple[int, int, int, int]]) -> None:
        """The log does not have it."""
        for seq, deadline_ms, due_ms, lease_ms in former:
            job = self._jobs.get(seq)
            if job is not None and job.phase == Phase.LEASED:
                job.deadline_ms, job.due_ms, job.lease_ms = deadline_ms, due_ms, lease_ms
                heappush(self._due, (due_ms, seq))

    def carried_by(self, frontend: int, seqs: Iterable[int]) -> list[int]:
        """Those of them that are on their way to the dead letters by this frontend, ascending."""
        return sorted(self._holders.get((frontend, 0), set()).intersection(seqs))

    def deliveries_of(self, seqs: Iterable[int]) -> list[int]:
        """How often each of these was handed out."""
        return [self._jobs[seq].deliveries for seq in seqs]

    def order_keys_of(self, seqs: Iterable[int]) -> list[str]:
        """What each of these was written with, "" for none."""
        return [self._jobs[seq].order_key for seq in seqs]

    def leases_of(self, holder: Holder) -> list[int]:
        """What a stream has, ascending."""
        return sorted(self._holders.get(holder, ()))

    def is_ending(self, holder: Holder) -> bool:
        """Whether the end of anything that a stream has is being committed."""
        return any(self._jobs[seq].phase == Phase.HELD for seq in self._holders.get(holder, ()))

    def holders_at(self, frontend: int) -> list[Holder]:
        """Who has anything by way of this frontend."""
        return [holder for holder in self._holders if holder[0] == frontend]

    # -- what can be asked

    def held_by(self, holder: Holder) -> int:
        """How many leases a stream has."""
        return len(self._holders.get(holder, ()))

    def peek(self, from_seq: int, state: State | None, most: int) -> tuple[list[JobView], int]:
        """The first jobs behind `from_seq` that are in this state (None: any but "done"), and up to where that is all
        of them: no more than PEEK_LOOK_MAX records are looked at, PEEK_PASS_MAX with those that are gone. Moves
        nothing; call `advance` first.
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
            case Phase.HELD if job.holder is not None and not job.holder[1]:
                state = "dead"
            case Phase.LEASED | Phase.HELD:
                state, at_ms, node = "leased", job.deadline_ms, job.node
            case Phase.DELAYED:
                state, at_ms = "scheduled", job.deadline_ms
            case Phase.BEHIND if job.order_key and self._lines[job.order_key][0] != seq:
                state = "behind"
            case Phase.BEHIND:
                state, at_ms = "scheduled", job.deliver_at_ms
        return JobView(seq, state, at_ms, job.deliveries, node, job.order_key)

    def bodies(self, seqs: Iterable[int]) -> list[LeaseBody]:
        """What to log of these jobs, as they are now."""

        def situation(seq: int) -> tuple[str, int, int, Holder]:
            job = self._jobs[seq]
            leased = job.phase in (Phase.LEASED, Phase.HELD) or (not self._started and bool(job.node))
            return job.node if leased else "", job.deadline_ms, job.lease_ms, (job.holder if leased else None) or (0, 0)

        bodies = []
        for (node, deadline_ms, lease_ms, holder), group in groupby(sorted(seqs, key=situation), situation):
            together = sorted(group)
            jobs = [self._jobs[seq] for seq in together]
            lease_nos, deliveries = [job.lease_no for job in jobs], [job.deliveries for job in jobs]
            bodies.append(LeaseBody(node, deadline_ms, lease_ms, together, lease_nos, deliveries, *holder))
        return bodies
