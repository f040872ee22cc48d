"""A queue as its workers see it: `for job in queue.work()`, with leases kept, retries and a quiet end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from topics.client.calls import Call
from topics.client.commands import AsyncService, Caller, QueueCommands
from topics.client.errors import ClientError, LeaseLostError
from topics.client.loop_thread import LoopThread
from topics.client.shift import Backoff, Shift, StreamedJob

T = TypeVar("T")

log = logging.getLogger("topics.worker")
LEASE_MS: Final = 30_000


class _Job:
    """What both kinds of job have in common."""

    def __init__(self, leased: StreamedJob, topic: str, shift: Shift) -> None:
        self._leased = leased
        self.claimed = leased.job
        self.topic = topic
        self._shift = shift
        self._settled = False

    @property
    def seq(self) -> int:
        return self.claimed.seq

    @property
    def data(self) -> Any:
        """What was produced, decoded at each call."""
        return self.claimed.data

    @property
    def meta(self) -> dict[str, Any]:
        return self.claimed.meta or {}

    @property
    def tag(self) -> str | None:
        return self.claimed.tag

    @property
    def deliveries(self) -> int:
        """How often it was handed out, this time included."""
        return self.claimed.deliveries

    @property
    def key(self) -> str:
        """Names this job for ever, whoever gets it and how often, also when it was a dead letter between: the
        idempotency key of its effects.
        """
        known = self.meta.get("$job_key")  # api §9: of one that a redrive brought back
        # A router, or a program, may have brought a copy of it to another queue: there it is another job.
        if isinstance(known, str) and known.rsplit(":", 2)[0] == self.topic:
            return known
        return f"{self.topic}:{self._leased.epoch}:{self.claimed.seq}"

    @property
    def lost(self) -> bool:
        """Its lease ended meanwhile: somebody else may be at it."""
        return not self._settled and not self._shift.holds(self.claimed)

    def __repr__(self) -> str:
        return f"<job {self.seq} of {self.topic!r}, delivery {self.deliveries}>"


class AsyncJob(_Job):
    """A job in an `async for`. `async with job:` settles it at once: done, or failed and to be repeated."""

    async def ack(self) -> None:
        """It is done. LeaseLostError when it may be done once more."""
        self._settled = True
        await self._shift.ack(self.claimed)

    async def nack(self, delay_ms: int | None = None) -> None:
        """It is to be done again, by anyone, after the back-off or this delay."""
        self._settled = True
        await self._shift.nack(self.claimed, delay_ms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        await self._end(error)
        return isinstance(error, Exception)

    async def _end(self, error: BaseException | None) -> None:
        if self._settled:
            if isinstance(error, Exception):
                log.error("%r was settled before its block failed, and is not repeated", self, exc_info=error)
            return
        try:
            if error is None:
                await self.ack()
            else:
                log.error("%r failed, to be repeated", self, exc_info=error)
                await self.nack()
        except LeaseLostError as lost:
            log.warning("%s", lost)
        except ClientError as trouble:
            # The worker goes on: the lease, which is not kept any more, ends by itself.
            log.error("%r could not be settled, it comes again when its lease ends: %s", self, trouble)


class Job(_Job):
    """A job in a `for`. `with job:` settles it at once: done, or failed and to be repeated."""

    def __init__(self, job: AsyncJob, loop: LoopThread) -> None:
        super().__init__(job._leased, job.topic, job._shift)
        self._job = job
        self._loop = loop

    def ack(self) -> None:
        """It is done. LeaseLostError when it may be done once more."""
        self._settled = True
        self._loop.run(self._job.ack())

    def nack(self, delay_ms: int | None = None) -> None:
        """It is to be done again, by anyone, after the back-off or this delay."""
        self._settled = True
        self._loop.run(self._job.nack(delay_ms))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._loop.run(self._job._end(error))
        self._settled = True
        return isinstance(error, Exception)


class AsyncQueue(QueueCommands):
    """A queue for programs with an event loop."""

    def __init__(self, client: AsyncService, topic: str, node: str | None) -> None:
        super().__init__(topic, node or _node())
        self._client = client
        self._shifts: set[Shift] = set()

    async def call(self, call: Call[T]) -> T:
        """Carries out a call of this queue."""
        return await self._client.call(call)

    async def work(
        self,
        *,
        max_jobs: int = 1,
        lease_ms: int = LEASE_MS,
        backoff: Backoff = Backoff(),  # noqa: B008 — frozen
    ) -> AsyncGenerator[AsyncJob, None]:
        """Jobs, for ever or until `stop`. Each is acked when the next one is asked for, unless it was settled before;
        the one at hand when the loop is left by an exception or `break` is repeated. With `max_jobs` > 1 jobs are
        fetched ahead. An exception that is kept keeps the loop open: where that matters, use `contextlib.aclosing`.
        """
        async with self._shift(max_jobs, lease_ms, backoff) as shift:
            while (leased := await shift.next()) is not None:
                job = AsyncJob(leased, self.topic, shift)
                try:
                    yield job
                except GeneratorExit:
                    if not job._settled:
                        with suppress(ClientError):  # it is given back with the stream
                            await job.nack()
                    raise
                await job._end(None)

    async def run(
        self,
        handler: Callable[[AsyncJob], Awaitable[object]],
        *,
        concurrency: int = 1,
        lease_ms: int = LEASE_MS,
        backoff: Backoff = Backoff(),  # noqa: B008 — frozen
    ) -> None:
        """Hands jobs to `handler`, so many at a time, until `stop`; then those that were begun are finished. What it
        raises is logged, and the job repeated.
        """
        async with self._shift(concurrency, lease_ms, backoff) as shift:
            await _serve(shift, self.topic, handler, concurrency)

    def stop(self) -> None:
        """Ends `work` and `run` when the jobs at hand are done. What was fetched ahead is given back."""
        for shift in self._shifts:
            shift.stop()

    @asynccontextmanager
    async def _shift(self, max_jobs: int, lease_ms: int, backoff: Backoff) -> AsyncIterator[Shift]:
        shift = Shift(self._client, self.topic, self.node, max_jobs=max_jobs, lease_ms=lease_ms, backoff=backoff)
        self._shifts.add(shift)
        try:
            async with shift:
                yield shift
        finally:
            self._shifts.discard(shift)


async def _serve(shift: Shift, topic: str, handler: Callable[[AsyncJob], Awaitable[object]], concurrency: int) -> None:
    """Hands out the shift's jobs until it is to end. When one hand fails the others finish what they have begun, with
    their leases kept, before its error is raised.
    """

    async def serve() -> None:
        try:
            while (leased := await shift.next()) is not None:
                async with AsyncJob(leased, topic, shift) as job:
                    await handler(job)
        except BaseException:
            shift.stop()
            raise

    for outcome in await asyncio.gather(*(serve() for _ in range(concurrency)), return_exceptions=True):
        if outcome is not None:
            raise outcome


class Queue(QueueCommands):
    """A queue for programs with threads: a thread of its own keeps leases while the program works."""

    def __init__(
        self,
        client: Caller,
        connect: Callable[[], AbstractAsyncContextManager[AsyncService]],
        topic: str,
        node: str | None,
    ) -> None:
        super().__init__(topic, node or _node())
        self._client = client
        self._connect = connect
        self._serving: set[tuple[LoopThread, Shift]] = set()

    def call(self, call: Call[T]) -> T:
        """Carries out a call of this queue."""
        return self._client.call(call)

    def work(
        self,
        *,
        max_jobs: int = 1,
        lease_ms: int = LEASE_MS,
        backoff: Backoff = Backoff(),  # noqa: B008 — frozen
        stop_on: Sequence[signal.Signals] = (),
    ) -> Generator[Job, None, None]:
        """As `AsyncQueue.work`. `stop_on`: signals that `stop` it, to be had in the main thread only."""
        with self._open(stop_on, max_jobs, lease_ms, backoff) as (loop, shift):
            while (leased := loop.run(shift.next())) is not None:
                job = Job(AsyncJob(leased, self.topic, shift), loop)
                try:
                    yield job
                except GeneratorExit:
                    if not job._settled:
                        with suppress(ClientError):  # it is given back with the stream
                            job.nack()
                    raise
                if not job._settled:
                    with job:
                        pass

    def run(
        self,
        handler: Callable[[Job], object],
        *,
        threads: int = 1,
        lease_ms: int = LEASE_MS,
        backoff: Backoff = Backoff(),  # noqa: B008 — frozen
        stop_on: Sequence[signal.Signals] = (),
    ) -> None:
        """Hands jobs to `handler` in so many threads, until `stop`; then those that were begun are finished. What it
        raises is logged, and the job repeated.
        """
        with (
            self._open(stop_on, threads, lease_ms, backoff) as (loop, shift),
            ThreadPoolExecutor(threads, "topics-worker") as pool,
        ):
            ends: list[BaseException] = []

            def work(job: AsyncJob) -> Exception | None:
                """What the handler raised. The loop settles the job, which costs this thread nothing."""
                mine = Job(job, loop)
                try:
                    handler(mine)
                except Exception as error:  # noqa: BLE001 — as a value: a future would make others of some of them
                    return error
                except BaseException as end:  # noqa: BLE001 — sys.exit: in the loop it would end that instead of us
                    loop.run(job._end(end))
                    ends.append(end)
                    loop.call(shift.stop)
                finally:
                    mine._settled = True
                return None

            async def hand_over(job: AsyncJob) -> None:
                error = await asyncio.get_running_loop().run_in_executor(pool, work, job)
                if error is not None:
                    raise error

            serving = loop.start(_serve(shift, self.topic, hand_over, threads))
            try:
                serving.result()
            except BaseException:
                # Ctrl-C: as at a stop what was begun is finished, and nothing is handed to a pool that is gone.
                loop.call(shift.stop)
                wait([serving])
                raise
            if ends:
                raise ends[0]

    def stop(self) -> None:
        """Ends `work` and `run` when the jobs at hand are done; from any thread, or a signal handler."""
        for loop, shift in list(self._serving):
            loop.call(shift.stop)

    @contextmanager
    def _open(
        self, stop_on: Sequence[signal.Signals], max_jobs: int, lease_ms: int, backoff: Backoff
    ) -> Iterator[tuple[LoopThread, Shift]]:
        with LoopThread() as loop, ExitStack() as at_end:
            client = loop.run(loop.enter(self._connect()))
            shift = Shift(client, self.topic, self.node, max_jobs=max_jobs, lease_ms=lease_ms, backoff=backoff)
            # It can be stopped before it begins: no signal is lost that comes from here on.
            self._serving.add((loop, shift))
            at_end.callback(self._serving.discard, (loop, shift))
            for number in stop_on:
                at_end.callback(signal.signal, number, signal.signal(number, lambda *_: self.stop()))
            loop.run(loop.enter(shift))
            yield loop, shift


def _node() -> str:
    """Who this worker is: told apart from every other one, and found again by people."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
