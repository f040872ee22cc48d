"""One worker's shift at a queue: jobs come over a `/work` stream, and their leases are extended while they are held.

The service ties leases to the stream. When the stream breaks, it releases them at once, and other workers may get the
jobs. So the shift forgets jobs that were not begun; those that were are `lost`, and settling one raises LeaseLostError.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple, Self

import msgspec

from topics.api.answers import JobAnswer
from topics.client import calls
from topics.client.arguments import Numbers, require, require_counts
from topics.client.attempts import NOT_CARRIED_OUT, RETRY, STOPPING, Attempts, describe
from topics.client.calls import Call, path_of
from topics.client.commands import AsyncService
from topics.client.errors import ClientError, LeaseLostError, ServiceBusyError, ServiceFaultError, UnreachableError
from topics.client.http import TransportError

log = logging.getLogger("topics.worker")

ACK_MAX_JOBS: Final = 1000
HOLD_UP_MAX_S: Final = 1.0
"""Longest time for which a request of acks holds up the next one: its frontend may hang."""
EXTENDS_PER_LEASE: Final = 3
EXTEND_TIMEOUT_S: Final = 1.0
"""The shortest time-out of an extension, so that a busy service is not asked more often; short leases need less."""
LEASE_MS_RANGE: Final = (100, 86_400_000)
"""The service clamps `lease_ms` to this (api §1)."""
SILENCE_MAX_S: Final = 45.0
"""Three heartbeats: a stream that is silent for longer is taken for dead, even if TCP reports nothing."""
EXTEND_MAX_JOBS: Final = 1000

_job = msgspec.json.Decoder(JobAnswer).decode


class Backoff(Numbers, frozen=True):
    """The pause before a failed job is delivered again: doubled with each delivery, drawn from its upper half."""

    first_ms: int = 1_000
    max_ms: int = 300_000

    def delay_ms(self, deliveries: int, random: float) -> int:
        """Return the pause after delivery number `deliveries`; 0 ≤ `random` < 1."""
        whole_ms = min(self.max_ms, self.first_ms << min(max(deliveries - 1, 0), 40))
        return int(whole_ms * (0.5 + random / 2))


BACKOFF: Final = Backoff()


def extend_every_s(lease_ms: int) -> float:
    """Return the pause between two extensions of a lease of this length."""
    shortest_ms, longest_ms = LEASE_MS_RANGE
    return max(shortest_ms, min(lease_ms, longest_ms)) / EXTENDS_PER_LEASE / 1000


def extend_timeout_s(lease_ms: int) -> float:
    """Return how long an extension may take before it is sent again, over another connection. A frontend may hang, and
    the next connection may lead to it as well, so a lease leaves time for several attempts; a short one for one only.
    """
    every_s = extend_every_s(lease_ms)
    return min(every_s, max(EXTEND_TIMEOUT_S, every_s / 4))


class StreamedJob(NamedTuple):
    """A job from a stream. `epoch` is the instance of its topic; together with the seq it names the job for ever."""

    job: JobAnswer
    epoch: str


Outcome = asyncio.Future[bool | None]


class Acks:
    """Sends acks of one queue together: for a short job the ack's HTTP request is most of the client's cost.

    An ack is sent at once if none is in progress. Acks that are added meanwhile go together in the next request. So a
    single worker waits only for its own ack, and many workers share a few requests. `settle` sends the ack of some
    jobs, no two with the same seq, and returns the same as `Shift._settle`.
    """

    def __init__(self, topic: str, settle: Callable[[Sequence[JobAnswer]], Awaitable[list[bool | None]]]) -> None:
        self._topic = topic
        self._settle = settle
        self._waiting: list[tuple[JobAnswer, Outcome]] = []
        self._sender: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, job: JobAnswer) -> bool | None:
        """Ack a job; return or raise what `settle` does for it."""
        outcome: Outcome = asyncio.get_running_loop().create_future()
        self._waiting.append((job, outcome))
        if self._sender is None or self._sender.done():
            self._sender = self._start(self._send_all())
        return await outcome

    async def close(self) -> None:
        """Give up all acks that are not answered: their callers get a LeaseLostError."""
        waiting, self._waiting = self._waiting, []
        self._give_up(waiting)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_all(self) -> None:
        """Send what waits. A request holds up the next one until it is answered, or for HOLD_UP_MAX_S."""
        while self._waiting:
            await asyncio.wait((self._start(self._request()),), timeout=HOLD_UP_MAX_S)

    async def _request(self) -> None:
        """Send what waits by now, acks added in the same round of the event loop included."""
        batch = self._next_batch()
        try:
            settled = await self._settle([job for job, _ in batch])
        except Exception as error:  # noqa: BLE001 — every waiting caller gets it
            for _, outcome in batch:
                if not outcome.done():  # it is done if the caller was cancelled; the job is acked all the same
                    outcome.set_exception(error)
        else:
            for (_, outcome), ours in zip(batch, settled, strict=True):
                if not outcome.done():
                    outcome.set_result(ours)
        finally:
            self._give_up(batch)

    def _next_batch(self) -> list[tuple[JobAnswer, Outcome]]:
        """Take the next batch. Answers name seqs, so two leases of one job (lost, claimed again) need two batches."""
        batch: dict[int, tuple[JobAnswer, Outcome]] = {}
        rest: list[tuple[JobAnswer, Outcome]] = []
        for entry in self._waiting:
            seq = entry[0].seq
            if len(batch) < ACK_MAX_JOBS and seq not in batch:
                batch[seq] = entry
            else:
                rest.append(entry)
        self._waiting = rest
        return list(batch.values())

    def _give_up(self, entries: Sequence[tuple[JobAnswer, Outcome]]) -> None:
        for job, outcome in entries:
            if not outcome.done():
                outcome.set_exception(LeaseLostError(self._topic, job.seq))


class Shift:
    """The jobs of one worker. The end of its `async with` closes the stream, which releases jobs that are still held.

    It guarantees that a job is begun only while its lease is held, as far as this side can know.
    """

    def __init__(
        self, client: AsyncService, topic: str, node: str, *, max_jobs: int, lease_ms: int, backoff: Backoff
    ) -> None:
        require_counts(max_jobs=max_jobs, lease_ms=lease_ms)
        require(isinstance(backoff, Backoff), "backoff", backoff, "a Backoff, like Backoff(first_ms=1000)")
        self._client = client
        self._topic = topic
        self._node = node
        self._query = {"node": node, "max": str(max_jobs), "lease_ms": str(lease_ms), "heartbeat_ms": "15000"}
        self._lease_ms = lease_ms
        self._backoff = backoff
        self._waiting: deque[StreamedJob] = deque()
        self._held: dict[int, JobAnswer] = {}
        """Seq → job: leased to this worker and not settled yet, `_waiting` ones included."""
        self._acks = Acks(topic, self._ack)
        self._settling: set[str] = set()
        """Lease ids of jobs whose settlement is not answered yet."""
        self._changed = asyncio.Event()
        """Set when `next` has to look again."""
        self._dealt = asyncio.Event()
        """Set when a job has come over the current stream."""
        self._confirmed = False
        """True once it is certain which instance of the topic the current stream serves."""
        self._stopping = False
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reached = False
        """True once the service has answered."""
        self._heard = False
        """True once something has come over the current stream."""
        self._end_announced = False

    async def __aenter__(self) -> Self:
        # Do not wait for the service here, so that a stop works while it is down. `next` raises errors.
        work = (self._receive_jobs(), self._keep_leases())
        self._tasks = [asyncio.create_task(self._report_failure(one)) for one in work]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._acks.close()
        self._forget_stream()

    def stop(self) -> None:
        """Begin no further job."""
        self._stopping = True
        self._changed.set()

    async def next(self) -> StreamedJob | None:
        """Return the next job as soon as there is one; None after `stop`. Raise what ended the stream for good: an
        ApiError, or UnreachableError when no service was ever reached.
        """
        while True:
            if self._stopping:
                return None
            while self._waiting and self._confirmed:
                leased = self._waiting.popleft()
                if self.holds(leased.job):  # the job's lease may have been lost meanwhile
                    return leased
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    def holds(self, job: JobAnswer) -> bool:
        """Return whether this worker still holds the job's lease, as far as it knows."""
        return self._held.get(job.seq) is job

    async def ack(self, job: JobAnswer) -> None:
        """Acknowledge a job. LeaseLostError if another worker may have got it meanwhile."""
        settled = await self._acks.add(job)
        if settled is None:
            # An acked job is deleted, so its absence proves the ack. With `on_ack: "keep"` it stays, and an ack that
            # was carried out is reported as lost.
            found = calls.of_leader(calls.diff(self._topic, job.seq - 1, limit=1, include_meta=False))
            settled = all(record.seq != job.seq for record in (await self._client.call(found)).records)
        if not settled:
            raise LeaseLostError(self._topic, job.seq)

    async def nack(self, job: JobAnswer, delay_ms: int | None = None) -> None:
        """Give a job back, to be done again after the back-off, or after `delay_ms`."""
        if delay_ms is None:
            delay_ms = self._backoff.delay_ms(job.deliveries, random.random())
        call = calls.nack(self._topic, self._node, [job], delay_ms=delay_ms)
        if await self._settle([job], call) == [False]:
            raise LeaseLostError(self._topic, job.seq)

    async def _ack(self, jobs: Sequence[JobAnswer]) -> list[bool | None]:
        return await self._settle(jobs, calls.ack(self._topic, self._node, jobs))

    async def _settle(self, jobs: Sequence[JobAnswer], call: Call[list[int]]) -> list[bool | None]:
        """Return for each job whether its lease was still held. None: the lease was gone at a second attempt. The first
        attempt may have settled the job, or a killed shard may have forgotten the lease. Leases are extended until
        the answer comes.
        """
        leases = {job.lease_id for job in jobs}
        self._settling |= leases
        try:
            try:
                skipped = set(await self._client.call(call))
                return [job.seq not in skipped for job in jobs]
            except (UnreachableError, ServiceBusyError) as error:
                if isinstance(error, ServiceBusyError) and error.code in NOT_CARRIED_OUT:
                    raise
                held = {job.seq for job in jobs if self.holds(job)}
                try:
                    skipped = set(await self._client.call(msgspec.structs.replace(call, repeatable=True)))
                except ClientError as last:
                    last.may_be_done |= error.may_be_done
                    raise
                return [
                    True if job.seq not in skipped else None if job.seq in held and self.holds(job) else False
                    for job in jobs
                ]
        finally:
            # Even after a failure: nobody settles these jobs any more, so their leases must not be extended for ever.
            self._settling -= leases
            for job in jobs:
                if self.holds(job):
                    del self._held[job.seq]

    # -- in the background

    async def _report_failure(self, work: Coroutine[None, None, None]) -> None:
        """Do `work`; `next` raises the error that ends it, since nobody waits for these tasks."""
        try:
            await work
        except Exception as error:  # noqa: BLE001
            self._failure = error
            self._changed.set()

    async def _receive_jobs(self) -> None:
        """Receive jobs from one stream after the other."""
        attempts: Attempts | None = None
        while True:
            trouble: Exception = TransportError("the stream ended")
            self._heard = self._end_announced = False
            try:
                await self._receive_stream()
            except TransportError as error:
                trouble = error
            except (UnreachableError, ServiceBusyError) as error:
                if not self._reached:
                    raise
                trouble = error
            finally:
                self._forget_stream()
            if attempts is None or self._heard:
                attempts = Attempts(RETRY.for_ever(), True, f"GET work of {self._topic}")
            if self._end_announced:
                await asyncio.sleep(attempts.pause_after_announced_end())
                continue
            pause_s = attempts.pause_after_failure(trouble)
            log.warning("the stream of jobs of %s broke (%s), again in %.1f s", self._topic, describe(trouble), pause_s)
            await asyncio.sleep(pause_s)

    async def _receive_stream(self) -> None:
        """Receive jobs from one stream until it ends."""
        epoch = await self._epoch()
        self._reached = True
        # Read at once, beside `_confirm`: a busy service may take longer for that than a lease lasts. Jobs that have
        # come are held and their leases extended meanwhile.
        reading = asyncio.create_task(self._read_stream(epoch))
        confirming = asyncio.create_task(self._confirm(epoch))
        try:
            await asyncio.wait((reading, confirming), return_when=asyncio.FIRST_COMPLETED)
            if not confirming.done() or confirming.result():
                await reading
        finally:
            for task in (reading, confirming):
                task.cancel()
            await asyncio.gather(reading, confirming, return_exceptions=True)

    async def _read_stream(self, epoch: str) -> None:
        path = path_of("topics", self._topic, "work")
        async with aclosing(self._client.events(path, self._query, silence_max_s=SILENCE_MAX_S)) as events:
            async for event in events:
                self._heard = True
                if event.event == "job":
                    job = _job(event.data)
                    self._held[job.seq] = job
                    self._waiting.append(StreamedJob(job, epoch))
                    self._dealt.set()
                    self._changed.set()
                elif event.event == "error":
                    self._end_announced = msgspec.json.decode(event.data)["code"] == STOPPING

    async def _confirm(self, epoch: str) -> bool:
        """Let the stream's jobs begin if the topic is the same instance as before it; return whether it is."""
        await self._dealt.wait()
        self._confirmed = await self._epoch() == epoch
        self._changed.set()
        return self._confirmed

    async def _epoch(self) -> str:
        return (await self._client.call(calls.of_leader(calls.get_topic(self._topic, touch=False)))).epoch

    def _forget_stream(self) -> None:
        """Forget the jobs of a stream that ended, and with it their leases."""
        self._waiting.clear()
        self._held.clear()
        self._dealt.clear()
        self._confirmed = False

    async def _keep_leases(self) -> None:
        """Extend the leases of all held jobs, well before they end."""
        while True:
            await asyncio.sleep(extend_every_s(self._lease_ms))
            while not await self._extend():
                pass

    async def _extend(self) -> bool:
        """Extend all leases. False if an answer did not come in time: then the caller must try again at once."""
        in_time = True
        timeout_s = extend_timeout_s(self._lease_ms)
        jobs = list(self._held.values())
        for first in range(0, len(jobs), EXTEND_MAX_JOBS):
            part = jobs[first : first + EXTEND_MAX_JOBS]
            call = calls.extend(self._topic, self._node, part, lease_ms=self._lease_ms)
            try:
                async with asyncio.timeout(timeout_s):
                    skipped = set(await self._client.call(call))
            except TimeoutError:
                in_time = False
                log.warning("leases in %s could not be extended within %.2g s, again at once", self._topic, timeout_s)
                continue
            except (UnreachableError, ServiceBusyError, ServiceFaultError) as error:
                log.warning("leases in %s could not be extended: %s", self._topic, error)
                continue
            for job in part:
                # A job that is being settled may have no lease any more: that is no loss.
                if job.seq in skipped and self.holds(job) and job.lease_id not in self._settling:
                    del self._held[job.seq]
                    log.warning("the lease of job %d in %s is lost", job.seq, self._topic)
        return in_time
