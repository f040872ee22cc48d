"""One worker's shift at a queue: jobs come over one `/work` stream, their leases are kept while they are held.

The service ties leases to the stream: when it breaks, everything leased over it is released at once and may be
somebody else's. So jobs that were not begun are forgotten then, and those in hand are `lost`: settling them says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Final, NamedTuple, Self

import httpx
import msgspec

from topics.api.answers import JobAnswer
from topics.client import calls
from topics.client.acks import Acks
from topics.client.attempts import NOT_CARRIED_OUT, Attempts, Retry, describe
from topics.client.calls import Call, path_of
from topics.client.commands import AsyncService
from topics.client.errors import LeaseLostError, ServiceBusyError, ServiceFaultError, UnreachableError

log = logging.getLogger("topics.worker")

EXTENDS_PER_LEASE: Final = 3
EXTEND_PATIENCE_S: Final = 1.0
"""A service that is busy is not to be asked more often for that, unless the lease is shorter than it allows."""
LEASE_MS_RANGE: Final = (100, 86_400_000)
"""What the service makes of a `lease_ms` outside of it is its bound (api §1)."""
SILENCE_MAX_S: Final = 45.0
"""Three heartbeats: a stream that is silent for longer is dead, whatever TCP believes."""
EXTEND_MAX_JOBS: Final = 1000
FOR_EVER: Final = Retry(total_s=math.inf)

_job = msgspec.json.Decoder(JobAnswer).decode


class Backoff(msgspec.Struct, frozen=True):
    """How long a job that failed rests: doubled with each delivery, drawn from the upper half."""

    first_ms: int = 1_000
    max_ms: int = 300_000

    def delay_ms(self, deliveries: int, random: float) -> int:
        """After delivery number `deliveries`; `random` gives 0 ≤ x < 1."""
        whole_ms = min(self.max_ms, self.first_ms << min(max(deliveries - 1, 0), 40))
        return int(whole_ms * (0.5 + random / 2))


def extend_every_s(lease_ms: int) -> float:
    """The pause between two extensions of a lease that was asked to be so long."""
    shortest_ms, longest_ms = LEASE_MS_RANGE
    return max(shortest_ms, min(lease_ms, longest_ms)) / EXTENDS_PER_LEASE / 1000


def extend_patience_s(lease_ms: int) -> float:
    """How long an extension may take before it is sent again, over another connection: a frontend may hang, perhaps
    the one that the next connection leads to as well. So there are several attempts before the lease ends, and at
    least one more.
    """
    every_s = extend_every_s(lease_ms)
    return min(every_s, max(EXTEND_PATIENCE_S, every_s / 4))


class StreamedJob(NamedTuple):
    """A job as it came over a stream. `epoch` is the instance of its topic: with it a seq names it for ever."""

    job: JobAnswer
    epoch: str


class Shift:
    """Begins with `async with`; its end closes the stream, which gives back whatever is still held."""

    def __init__(
        self, client: AsyncService, topic: str, node: str, *, max_jobs: int, lease_ms: int, backoff: Backoff
    ) -> None:
        self._client = client
        self._topic = topic
        self._node = node
        self._query = {"node": node, "max": str(max_jobs), "lease_ms": str(lease_ms), "heartbeat_ms": "15000"}
        self._lease_ms = lease_ms
        self._extend_every_s = extend_every_s(lease_ms)
        self._extend_patience_s = extend_patience_s(lease_ms)
        self._backoff = backoff
        self._waiting: deque[StreamedJob] = deque()
        self._held: dict[int, JobAnswer] = {}
        """Seq → job: leased to us, settled by nobody yet, `_waiting` ones included."""
        self._acks = Acks(topic, self._ack)
        self._settling: set[str] = set()
        """Lease ids of those of which the answer is awaited."""
        self._news = asyncio.Event()
        self._dealt = asyncio.Event()
        """A job has come over the stream of the moment."""
        self._confirmed = False
        """It is known which instance of the topic that stream is of."""
        self._stopping = False
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reached = False
        """The service has answered."""
        self._heard = False
        """Something has come over the stream of the moment."""

    async def __aenter__(self) -> Self:
        # Waits for nothing: a stop is heard also while the service is down. `next` says what cannot work.
        self._tasks = [asyncio.create_task(self._watched(work)) for work in (self._listen(), self._keep())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._acks.close()
        self._drop()

    def stop(self) -> None:
        """No further job is begun."""
        self._stopping = True
        self._news.set()

    async def next(self) -> StreamedJob | None:
        """The next job, as soon as there is one; None once the shift is to end. Raises what ended the stream for
        good: an ApiError, or UnreachableError when no service was ever reached.
        """
        while True:
            if self._stopping:
                return None
            while self._waiting and self._confirmed:
                leased = self._waiting.popleft()
                if self.holds(leased.job):  # by now it may be known to be somebody else's
                    return leased
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()

    def holds(self, job: JobAnswer) -> bool:
        """Whether its lease is still ours, as far as we know."""
        return self._held.get(job.seq) is job

    async def ack(self, job: JobAnswer) -> None:
        """It is done. LeaseLostError when somebody else may have been given it meanwhile."""
        settled = await self._acks.add(job)
        if settled is None:
            # What is acked is deleted. With `on_ack: "keep"` it stays and nobody can tell: then this says too much.
            look = calls.diff(self._topic, job.seq - 1, limit=1, include_meta=False)
            settled = all(record.seq != job.seq for record in (await self._client.call(look)).records)
        if not settled:
            raise LeaseLostError(self._topic, job.seq)

    async def nack(self, job: JobAnswer, delay_ms: int | None = None) -> None:
        """It is to be done again, after a pause that grows with its deliveries unless one is given."""
        if delay_ms is None:
            delay_ms = self._backoff.delay_ms(job.deliveries, random.random())
        call = calls.nack(self._topic, self._node, [job], delay_ms=delay_ms)
        if await self._settle([job], call) == [False]:
            raise LeaseLostError(self._topic, job.seq)

    async def _ack(self, jobs: Sequence[JobAnswer]) -> list[bool | None]:
        return await self._settle(jobs, calls.ack(self._topic, self._node, jobs))

    async def _settle(self, jobs: Sequence[JobAnswer], call: Call[list[int]]) -> list[bool | None]:
        """Of each whether it was ours to settle; None when it was not at a repeat: the first attempt may have settled
        it, or a shard that was killed may have forgotten the lease. Until the answer is there the leases are kept.
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
                skipped = set(await self._client.call(msgspec.structs.replace(call, repeatable=True)))
                return [
                    True if job.seq not in skipped else None if job.seq in held and self.holds(job) else False
                    for job in jobs
                ]
        finally:
            # Also when it failed: who gave up settling them is done with them, and a kept lease would be for ever.
            self._settling -= leases
            for job in jobs:
                if self.holds(job):
                    del self._held[job.seq]

    # -- in the background

    async def _watched(self, work: Coroutine[None, None, None]) -> None:
        """Whatever ends it is raised to whoever asks for the next job: nobody else waits for these tasks."""
        try:
            await work
        except Exception as error:  # noqa: BLE001
            self._failure = error
            self._news.set()

    async def _listen(self) -> None:
        """Takes jobs from the stream, over every disconnect."""
        attempts: Attempts | None = None
        while True:
            trouble: Exception = httpx.RemoteProtocolError("the stream ended")
            self._heard = False
            try:
                await self._take_stream()
            except httpx.TransportError as error:
                trouble = error
            except (UnreachableError, ServiceBusyError) as error:
                if not self._reached:
                    raise
                trouble = error
            finally:
                self._drop()
            if attempts is None or self._heard:
                attempts = Attempts(FOR_EVER, True, f"GET work of {self._topic}", time.monotonic())
            pause_s = attempts.no_answer(trouble, True, time.monotonic(), random.random())
            log.warning("the stream of jobs of %s broke (%s), again in %.1f s", self._topic, describe(trouble), pause_s)
            await asyncio.sleep(pause_s)

    async def _take_stream(self) -> None:
        """One stream, until it ends."""
        epoch = await self._epoch()
        self._reached = True
        # At once: a busy service may let `_confirm` wait for longer than a lease, and what comes meanwhile is held.
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
                    self._news.set()

    async def _confirm(self, epoch: str) -> bool:
        """Lets the stream's jobs begin. The same instance before the stream and in it: so it is the stream's. False:
        the topic was made anew between.
        """
        await self._dealt.wait()
        self._confirmed = await self._epoch() == epoch
        self._news.set()
        return self._confirmed

    async def _epoch(self) -> str:
        """The instance of the topic as it is now."""
        return (await self._client.call(calls.get_topic(self._topic, touch=False))).epoch

    def _drop(self) -> None:
        """The stream is over, and with it every lease."""
        self._waiting.clear()
        self._held.clear()
        self._dealt.clear()
        self._confirmed = False

    async def _keep(self) -> None:
        """Extends the leases of everything held, well before they end."""
        while True:
            await asyncio.sleep(self._extend_every_s)
            while not await self._extend():
                pass

    async def _extend(self) -> bool:
        """False: some of it was not answered in time, and is to be extended again at once."""
        in_time = True
        jobs = list(self._held.values())
        for first in range(0, len(jobs), EXTEND_MAX_JOBS):
            part = jobs[first : first + EXTEND_MAX_JOBS]
            call = calls.extend(self._topic, self._node, part, lease_ms=self._lease_ms)
            try:
                async with asyncio.timeout(self._extend_patience_s):
                    skipped = set(await self._client.call(call))
            except TimeoutError:
                in_time = False
                patience_s = self._extend_patience_s
                log.warning("leases in %s could not be extended within %.2g s, again at once", self._topic, patience_s)
                continue
            except (UnreachableError, ServiceBusyError, ServiceFaultError) as error:
                log.warning("leases in %s could not be extended: %s", self._topic, error)
                continue
            for job in part:
                # One that is being settled is perhaps skipped for that.
                if job.seq in skipped and self.holds(job) and job.lease_id not in self._settling:
                    del self._held[job.seq]
                    log.warning("the lease of job %d in %s is lost", job.seq, self._topic)
        return in_time
