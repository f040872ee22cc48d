"""A queue for its workers: `for job in queue.work()`, with leases extended, retries, and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from topics.client.arguments import require, require_counts
from topics.client.commands import AsyncMember, AsyncService, Caller, QueueCommands, SyncMember
from topics.client.errors import ClientError, LeaseLostError
from topics.client.links import THIS_PROCESS
from topics.client.shift import BACKOFF, Backoff, Shift, StreamedJob

T = TypeVar("T")

log = logging.getLogger("topics.worker")
LEASE_MS: Final = 30_000


class _Job:
    """The common part of both kinds of job: the claimed job, and whether it is settled."""

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
        """The job's data, decoded at each access."""
        return self.claimed.data

    @property
    def meta(self) -> dict[str, Any]:
        return self.claimed.meta or {}

    @property
    def tag(self) -> str | None:
        return self.claimed.tag

    @property
    def deliveries(self) -> int:
        """The number of its deliveries, this one included."""
        return self.claimed.deliveries

    @property
    def key(self) -> str:
        """The permanent name of the job, the same at each delivery and redrive: an idempotency key for its effects."""
        known = self.meta.get("$job_key")  # api §9: a redriven job has it
        # In another queue, where a router or a program copied it, it is another job.
        if isinstance(known, str) and known.rsplit(":", 2)[0] == self.topic:
            return known
        return f"{self.topic}:{self._leased.epoch}:{self.claimed.seq}"

    @property
    def lost(self) -> bool:
        """True if the job's lease has ended, so that another worker may do it."""
        return not self._settled and not self._shift.holds(self.claimed)

    def __repr__(self) -> str:
        return f"<job {self.seq} of {self.topic!r}, delivery {self.deliveries}>"


class AsyncJob(_Job):
    """A job of an `async for`. The end of an `async with job:` settles it: done, or failed and to be repeated."""

    def __init__(self, leased: StreamedJob, topic: str, shift: Shift) -> None:
        super().__init__(leased, topic, shift)
        self._was = ""
        """The end of the job, once the service has confirmed it: "acked" or "given back"."""
        self._turn = asyncio.Lock()  # of two calls at once the second one sees what became of the first

    async def ack(self) -> None:
        """Acknowledge the job: it is done. Again does nothing. LeaseLostError when it may be done again, as after a
        `nack`.
        """
        self._settled = True
        async with self._turn:
            if not self._has_been("acked"):
                await self._shift.ack(self.claimed)
                self._was = "acked"

    async def nack(self, delay_ms: int | None = None) -> None:
        """Give the job back, to be done again by anyone after the back-off, or after this delay. Again does nothing.
        RuntimeError after `ack`.
        """
        self._settled = True
        async with self._turn:
            if not self._has_been("given back"):
                await self._shift.nack(self.claimed, delay_ms)
                self._was = "given back"

    def _has_been(self, end: str) -> bool:
        """Return whether the job has ended in this way. If it has ended in the other: LeaseLostError for one that was
        given back, by the end of its loop or a `nack`, and RuntimeError for one that is done.
        """
        if (self._was, end) == ("given back", "acked"):
            raise LeaseLostError(self.topic, self.seq)
        if (self._was, end) == ("acked", "given back"):
            raise RuntimeError(f"job {self.seq} of {self.topic!r} was acked before, so it cannot be given back now")
        return self._was == end

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
            # The worker goes on with other jobs. The lease is no longer extended and ends by itself.
            log.error("%r could not be settled, it comes again when its lease ends: %s", self, trouble)


class Job(_Job):
    """A job of a `for`. The end of a `with job:` settles it: done, or failed and to be repeated."""

    def __init__(self, job: AsyncJob, loop: LoopThread) -> None:
        super().__init__(job._leased, job.topic, job._shift)
        self._job = job
        self._loop = loop

    def ack(self) -> None:
        """Acknowledge the job like `AsyncJob.ack`."""
        self._settled = True
        if not self._job._has_been("acked"):
            self._settle(self._job.ack)

    def nack(self, delay_ms: int | None = None) -> None:
        """Give the job back like `AsyncJob.nack`."""
        self._settled = True
        if not self._job._has_been("given back"):
            self._settle(partial(self._job.nack, delay_ms))

    def _settle(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` in the loop; LeaseLostError when that has ended, and the job's lease with it."""
        if self._loop.ended:
            raise LeaseLostError(self.topic, self.seq)
        self._loop.run(work())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            self._settle(partial(self._job._end, error))
        except LeaseLostError as lost:
            if error is not None or not self._settled:
                log.warning("%s", lost, exc_info=error)
        self._settled = True
        return isinstance(error, Exception)


class AsyncQueue(QueueCommands, AsyncMember):
    """A queue for one worker with an event loop, called `node`."""

    def __init__(self, client: AsyncService, topic: str, node: str | None) -> None:
        self.node = node or _node()
        super().__init__(client, topic, self.node)
        self._service = client
        self._shifts: set[Shift] = set()

    async def work(
        self, *, max_jobs: int = 1, lease_ms: int = LEASE_MS, backoff: Backoff = BACKOFF
    ) -> AsyncGenerator[AsyncJob, None]:
        """Yield jobs until `stop`. A job is acked when the next one is asked for, unless it was settled before. If an
        exception or `break` ends the loop, its job is given back. With `max_jobs` > 1 jobs are fetched ahead. Python
        closes the loop late while somebody keeps the exception: where that matters, use `contextlib.aclosing`.
        """
        async with self._shift(max_jobs, lease_ms, backoff) as shift:
            while (leased := await shift.next()) is not None:
                job = AsyncJob(leased, self.topic, shift)
                try:
                    yield job
                except GeneratorExit:
                    if not job._settled:
                        with contextlib.suppress(ClientError):  # the end of the stream gives it back
                            await job.nack()
                    raise
                await job._end(None)

    async def run(
        self,
        handler: Callable[[AsyncJob], Awaitable[object]],
        *,
        concurrency: int = 1,
        lease_ms: int = LEASE_MS,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """Give jobs to `handler`, so many at a time, until `stop`; then finish those that were begun. An exception of
        the handler is logged, and its job repeated.
        """
        require_counts(concurrency=concurrency)
        require(callable(handler), "handler", handler, "a function, which gets a job")
        async with self._shift(concurrency, lease_ms, backoff) as shift:
            await _serve(shift, self.topic, handler, concurrency)

    def stop(self) -> None:
        """End `work` and `run` after the jobs that were begun. Jobs fetched ahead are given back."""
        for shift in self._shifts:
            shift.stop()

    @contextlib.asynccontextmanager
    async def _shift(self, max_jobs: int, lease_ms: int, backoff: Backoff) -> AsyncIterator[Shift]:
        shift = Shift(self._service, self.topic, self.node, max_jobs=max_jobs, lease_ms=lease_ms, backoff=backoff)
        self._shifts.add(shift)
        try:
            async with shift:
                yield shift
        finally:
            self._shifts.discard(shift)


async def _serve(shift: Shift, topic: str, handler: Callable[[AsyncJob], Awaitable[object]], concurrency: int) -> None:
    """Give the shift's jobs to `handler` until it stops. An error is raised after the jobs that were begun end."""

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


class LoopThread:
    """An event loop in a thread of its own. Its end closes the context managers entered in it, last first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="topics-queue", daemon=True)
        self._stack = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    @property
    def ended(self) -> bool:
        """True where a wait for the loop would never end: after the loop's end, in a forked child, at Python's exit
        (which may close a leftover generator), and in the loop's own thread (where the garbage collector may do that).
        """
        return sys.is_finalizing() or not self._thread.is_alive() or threading.current_thread() is self._thread

    def __exit__(self, *_: object) -> None:
        if self.ended:
            if threading.current_thread() is self._thread:
                self.start(self._stack.aclose()).add_done_callback(lambda _: self._loop.stop())
            return
        try:
            self.run(self._stack.aclose())
        finally:
            self.call(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result; this thread waits."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def enter(self, manager: contextlib.AbstractAsyncContextManager[T]) -> T:
        """Enter a context manager in the loop, which the end of the loop exits."""
        return self.run(self._stack.enter_async_context(manager))


class Queue(QueueCommands, SyncMember):
    """A queue for one worker with threads, called `node`. A thread of the queue's own extends leases meanwhile."""

    def __init__(
        self,
        client: Caller,
        connect: Callable[[], contextlib.AbstractAsyncContextManager[AsyncService]],
        topic: str,
        node: str | None,
    ) -> None:
        self.node = node or _node()
        super().__init__(client, topic, self.node)
        self._connect = connect
        self._serving: set[tuple[LoopThread, Shift]] = set()

    def work(
        self,
        *,
        max_jobs: int = 1,
        lease_ms: int = LEASE_MS,
        backoff: Backoff = BACKOFF,
        stop_on: Sequence[signal.Signals] = (),
    ) -> Generator[Job, None, None]:
        """Yield jobs as `AsyncQueue.work` does. `stop_on`: signals that `stop` it (in the main thread only)."""
        with self._open(stop_on, max_jobs, lease_ms, backoff) as (loop, shift):
            while (leased := loop.run(shift.next())) is not None:
                job = Job(AsyncJob(leased, self.topic, shift), loop)
                try:
                    yield job
                except GeneratorExit:
                    if not job._settled:
                        with contextlib.suppress(ClientError):  # the end of the stream gives it back
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
        backoff: Backoff = BACKOFF,
        stop_on: Sequence[signal.Signals] = (),
    ) -> None:
        """Give jobs to `handler`, in so many threads, until `stop`; then finish those that were begun. An exception of
        the handler is logged, and its job repeated.
        """
        require_counts(threads=threads)
        require(callable(handler), "handler", handler, "a function, which gets a job")
        with (
            self._open(stop_on, threads, lease_ms, backoff) as (loop, shift),
            ThreadPoolExecutor(threads, "topics-worker") as pool,
        ):
            ends: list[BaseException] = []

            def work(job: AsyncJob) -> Exception | None:
                """Return the handler's exception or None. The loop settles the job, so this thread does not wait."""
                mine = Job(job, loop)
                try:
                    handler(mine)
                except Exception as error:  # noqa: BLE001 — returned: a future replaces some exceptions by others
                    return error
                except BaseException as end:  # noqa: BLE001 — sys.exit: raised in the loop it would end only that
                    loop.run(job._end(end))
                    ends.append(end)
                    loop.call(shift.stop)
                finally:
                    mine._settled = True
                return None

            async def hand_over(job: AsyncJob) -> None:
                try:
                    working = asyncio.get_running_loop().run_in_executor(pool, work, job)
                except RuntimeError as refusal:
                    if "shutdown" not in str(refusal):  # no new thread can be started; the others go on
                        raise
                    # Python's pools take no work once the main thread has ended. The job has not failed: the end of the
                    # stream gives it back.
                    job._settled = True
                    what = f"the worker of {self.topic!r} can begin no job, as the main thread has ended: have it wait"
                    ends.append(RuntimeError(what))
                    shift.stop()
                    return
                error = await working
                if error is not None:
                    raise error

            serving = loop.start(_serve(shift, self.topic, hand_over, threads))
            try:
                serving.result()
            except BaseException:
                # Ctrl-C works like `stop`: jobs that were begun are finished, and no others begin.
                loop.call(shift.stop)
                wait([serving])
                raise
            if ends:
                raise ends[0]

    def stop(self) -> None:
        """End `work` and `run` after the jobs that were begun; for any thread, and for signal handlers."""
        for loop, shift in list(self._serving):
            loop.call(shift.stop)

    def _stop_on(self, number: signal.Signals) -> Any:
        """Have a signal stop this worker; return its former handler, which a forked child goes back to."""
        pid = THIS_PROCESS[0]

        def stop(*_: object) -> None:
            if pid == THIS_PROCESS[0]:
                self.stop()
            else:
                signal.signal(number, former)
                signal.raise_signal(number)

        former = signal.signal(number, stop)
        return former

    @contextlib.contextmanager
    def _open(
        self, stop_on: Sequence[signal.Signals], max_jobs: int, lease_ms: int, backoff: Backoff
    ) -> Iterator[tuple[LoopThread, Shift]]:
        with LoopThread() as loop, contextlib.ExitStack() as at_end:
            client = loop.enter(self._connect())
            shift = Shift(client, self.topic, self.node, max_jobs=max_jobs, lease_ms=lease_ms, backoff=backoff)
            require(not isinstance(stop_on, int), "stop_on", stop_on, "a list like [signal.SIGTERM]")
            # Registered before it begins: a signal that comes from here on is not lost.
            self._serving.add((loop, shift))
            at_end.callback(self._serving.discard, (loop, shift))
            for number in stop_on:
                at_end.callback(signal.signal, number, self._stop_on(number))
            loop.enter(shift)
            yield loop, shift


def _node() -> str:
    """Return a name for this worker: unique, and telling people where it runs."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
