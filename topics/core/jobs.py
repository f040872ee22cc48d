"""The jobs of one queue (api §9) and the phase of each. Pure.

A job is a live record that is not acknowledged. Most jobs are *fresh* and cost no memory: nobody has been handed them,
and they wait in order. They are the live records from `_fresh_seq` on that are neither tracked nor done. Any other job
has a `TrackedJob` (`job.py` has the picture).

A record below `_fresh_seq` is deleted, done or tracked. `done` has the acknowledged jobs whose records stay
(`on_ack: "keep"`).

A heap entry goes stale when its job changes. The queue skips stale entries when they reach the top of the heap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from topics.core.job import Holder, JobPhase, Now, TrackedJob
from topics.core.seq_set import Run, SeqSet, seqs_of

DEAD_PER_TAKE_MAX: Final = 100
"""The most jobs that one claim sends to the dead letters; the next claim goes on."""
WALL_POLL_MS: Final = 1_000
"""Longest time between two checks of jobs that wait for the wall clock: somebody may set that clock."""
_LOOK_MAX: Final = 1024
"""The most records that `_take_fresh` looks at in one step when few of them are fresh."""


class JobRecords(Protocol):
    """The part of a topic that its queue needs."""

    records: int
    head_seq: int
    earliest_seq: int

    def live_from(self, seq: int, most: int) -> list[int]: ...
    def live_within(self, seq: int, most: int, looks: int) -> tuple[list[int], int]: ...
    def live_of(self, seqs: Sequence[int]) -> list[int]: ...


_DUE: Final = (JobPhase.LEASED, JobPhase.DELAYED, JobPhase.HELD)
"""Phases that the clock may end; it ends HELD only for a job on its way to the dead letters."""


class QueueJobs:
    """All jobs of one queue: phases, due times, holders. Before `Leases.start` it only collects what the log says."""

    def __init__(self, records: JobRecords) -> None:
        self._records = records
        self._jobs: dict[int, TrackedJob] = {}
        self._counts = [0] * len(JobPhase)
        self._tracked: list[int] = []
        """Heap of all seqs in `_jobs`."""
        self._returned: list[int] = []
        """Heap of RETURNED jobs."""
        self._ready: list[int] = []
        """Heap of READY jobs."""
        self._due: list[tuple[int, int]] = []
        """Heap of (due_ms, seq) of leases and delays."""
        self._scheduled: list[tuple[int, int]] = []
        """Heap of (deliver_at_ms, seq) of jobs that wait for the wall clock."""
        self._delayed: list[tuple[int, int]] = []
        """Heap of (due_ms, seq) of jobs that were written with a delay since this process started."""
        self._lines: dict[str, deque[int]] = {}
        """Jobs by order_key, oldest first; all but the first may be stale. Only the first can be handed out."""
        self._lined = 0
        """Entries in all lines together."""
        self._holders: dict[Holder, set[int]] = {}
        self._freed: dict[Holder, None] = {}
        """Holders that have fewer jobs than at the last `take_freed`."""
        self.unlogged: list[int] = []
        """Jobs whose leases the log has yet to get, as they were held before `leases_durable` was switched on."""
        self._started = False
        self._fresh_seq = 1
        self._next_lease_no = 0
        self.done = SeqSet()
        self.dead_lettered = 0

    # -- records

    def add(self, seq: int, deliver_at_ms: int, order_key: str, due_ms: int = 0) -> None:
        """Add a record that was written with a delivery time or an order key (0, "" for none). Call this in seq order.
        If `deliver_at_ms` (wall clock) is the end of a delay, `due_ms` is the same end on the monotonic clock.
        """
        if seq in self.done or (self._started and seq < self._records.earliest_seq):
            return
        known = self._jobs.get(seq)
        if known is not None:
            if not self._started:  # the snapshot had the job's lease, the RAM log has its attributes
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
        self._enqueue(seq, job)

    def deleted(self, seqs: Sequence[int]) -> None:
        """Forget jobs whose records were deleted."""
        for seq in seqs:
            self.done.discard(seq)
        self._end(seqs)

    def floor_moved(self, seq: int) -> None:
        """Forget jobs below `seq`, because no record there is live any more. Do nothing while a log is still read: a
        RAM log or a segment may have live records there. `start` or `forget_below` forgets the jobs later.
        """
        if self._started:
            self.forget_below(seq)

    def forget_below(self, seq: int) -> None:
        """Forget jobs below `seq`: no record there is live, whatever else the log says."""
        self.done.discard_below(seq)
        while self._tracked and self._tracked[0] < seq:
            first = heappop(self._tracked)
            job = self._jobs.get(first)
            if job is not None:
                self._drop(first, job)
        self._compact()

    def finish(self, runs: Iterable[Run]) -> None:
        """End acknowledged jobs whose records stay. The shard calls this, and the fold when it reads an ACK."""
        for first, last in runs:
            self.done.add(first, last)
        self._end(seqs_of(runs))

    def _end(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            job = self._jobs.get(seq)
            if job is not None:
                self._drop(seq, job)
        self._compact()

    # -- counts and times

    @property
    def ready(self) -> int:
        """Number of jobs that a claim would get now."""
        counts = self._counts
        fresh = self._records.records - len(self._jobs) - self.done.count
        return max(0, fresh + counts[JobPhase.READY] + counts[JobPhase.RETURNED])

    @property
    def in_flight(self) -> int:
        """Number of leased jobs."""
        return self._counts[JobPhase.LEASED]

    @property
    def scheduled(self) -> int:
        """Number of jobs that wait for a time: their own, or the end of a nack's delay."""
        return self._counts[JobPhase.SCHEDULED] + self._counts[JobPhase.DELAYED]

    def take_freed(self) -> Iterable[Holder]:
        """Return the holders that have fewer jobs than at the last call."""
        freed, self._freed = self._freed, {}
        return freed

    def due_in_ms(self, now: Now) -> int | None:
        """Return the ms until `advance` has something to do; None if no job waits for a clock."""
        waits = []
        if self._due:
            waits.append(self._due[0][0] - now.mono_ms)
        if self._delayed:
            waits.append(self._delayed[0][0] - now.mono_ms)
        if self._scheduled:
            waits.append(min(self._scheduled[0][0] - now.wall_ms, WALL_POLL_MS))
        return max(0, min(waits)) if waits else None

    def advance(self, now: Now) -> bool:
        """End leases and delays whose time is over, and make due scheduled jobs ready. True if any job got ready."""
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
                if job is not None and job.phase == JobPhase.SCHEDULED:
                    self._set(seq, job, JobPhase.READY)
                    heappush(self._ready, seq)
        return self._counts[JobPhase.READY] + self._counts[JobPhase.RETURNED] > before

    # -- phases

    def _take(self, most: int, deliveries_max: int) -> tuple[list[int], list[int]]:
        """Take ready jobs off the heaps, returned ones first, then by seq; return (jobs to lease, dead jobs)."""
        seqs: list[int] = []
        dead: list[int] = []
        last_seq = 0
        while self._returned and len(seqs) < most and len(dead) < DEAD_PER_TAKE_MAX:
            seq = heappop(self._returned)
            job = self._jobs.get(seq)
            if job is not None and job.phase == JobPhase.RETURNED and seq != last_seq:
                last_seq = seq  # a job that was carried and returned is in the heap twice
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
        fresh = self._take_fresh(wanted, ready)
        kept = wanted - len(fresh)
        for seq in ready[kept:]:
            heappush(self._ready, seq)
        return sorted(seqs + ready[:kept] + fresh), dead

    def _take_fresh(self, most: int, ready: list[int]) -> list[int]:
        """Return the fresh jobs among the first `most` jobs by seq, counted over fresh jobs and `ready` (ascending).

        A fresh job that comes earlier takes the place of the last of `ready`. `_fresh_seq` moves behind each record
        that this looks at, so it looks at none twice, however many other jobs there are.
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
                self._clear_holder(seq, job)

    def _clear_holder(self, seq: int, job: TrackedJob) -> None:
        assert job.holder is not None
        self._freed[job.holder] = None
        held = self._holders.get(job.holder)
        if held is not None:
            held.discard(seq)
            if not held:
                del self._holders[job.holder]
        job.holder = None

    def _return(self, seq: int, job: TrackedJob) -> None:
        job.node = ""
        self._set(seq, job, JobPhase.RETURNED)
        heappush(self._returned, seq)

    def _drop(self, seq: int, job: TrackedJob) -> None:
        del self._jobs[seq]
        self._counts[job.phase] -= 1
        if job.holder is not None:
            self._clear_holder(seq, job)
        line = self._lines.get(job.order_key) if job.order_key else None
        if not line or line[0] != seq:
            return
        while line and line[0] not in self._jobs:
            line.popleft()
            self._lined -= 1
        if line:
            self._enqueue(line[0], self._jobs[line[0]])
        else:
            del self._lines[job.order_key]

    def _line_up(self, seq: int, order_key: str) -> deque[int]:
        """Put a job behind the others of its order key; return the whole line."""
        line = self._lines.setdefault(order_key, deque())
        line.append(seq)
        self._lined += 1
        return line

    def _enqueue(self, seq: int, job: TrackedJob) -> None:
        """Let the first job of a line (or one without order key) wait for its time, or make it ready if it has none."""
        if job.due_ms:
            self._set(seq, job, JobPhase.SCHEDULED)
            heappush(self._delayed, (job.due_ms, seq))
        elif job.deliver_at_ms:
            self._set(seq, job, JobPhase.SCHEDULED)
            heappush(self._scheduled, (job.deliver_at_ms, seq))
        else:
            self._set(seq, job, JobPhase.READY)
            heappush(self._ready, seq)

    def _compact(self) -> None:
        """Rebuild each heap whose entries may be mostly stale: a stale entry may never come to the top by itself. The
        cost is the size of that heap, not the number of all jobs, because many more jobs may be scheduled.
        """
        counts, jobs = self._counts, self._jobs
        if len(self._due) > _entries_max(sum(counts[phase] for phase in _DUE)):
            self._due = [
                (at, seq)
                for at, seq in set(self._due)
                if (job := jobs.get(seq)) is not None and job.due_ms == at and job.phase in _DUE
            ]
            heapify(self._due)
        if len(self._ready) > _entries_max(counts[JobPhase.READY]):
            self._ready = self._in_phase(self._ready, JobPhase.READY)
        if len(self._returned) > _entries_max(counts[JobPhase.RETURNED]):
            self._returned = self._in_phase(self._returned, JobPhase.RETURNED)
        for waiting in (self._scheduled, self._delayed):
            if len(waiting) > _entries_max(counts[JobPhase.SCHEDULED]):
                seqs = set(self._in_phase([seq for _, seq in waiting], JobPhase.SCHEDULED))
                waiting[:] = sorted((at, seq) for at, seq in waiting if seq in seqs)
        if len(self._tracked) > _entries_max(len(jobs)):
            self._tracked = sorted(jobs)
        if self._lined > _entries_max(len(jobs)):
            self._lines = {key: deque([seq for seq in line if seq in jobs]) for key, line in self._lines.items()}
            self._lined = sum(map(len, self._lines.values()))

    def _in_phase(self, seqs: Iterable[int], phase: JobPhase) -> list[int]:
        """Return those of these jobs that are in this phase, ascending."""
        jobs = self._jobs
        return sorted({seq for seq in seqs if (job := jobs.get(seq)) is not None and job.phase == phase})


def _entries_max(current: int) -> int:
    """Return the number of entries above which a heap is rebuilt, given the number that are not stale."""
    return 64 + 4 * current
