"""Workers while the service, the network or their own program is in trouble: they go on, and say what is not known."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.harness import Service, poll
from topics.client import (
    AsyncClient,
    AsyncJob,
    Backoff,
    Client,
    Job,
    LeaseLostError,
    NotFoundError,
    Retry,
    UnreachableError,
)
from topics.client.calls import Call
from topics.client.queue import LoopThread
from topics.client.shift import Shift

pytestmark = pytest.mark.long

T = TypeVar("T")
QUICK = Retry(total_s=0.4, pause_first_s=0.01, pause_max_s=0.05)
PATIENCE_S = 20.0
JOBS = list(range(5))


@pytest.fixture(scope="module")
def small() -> Iterator[Service]:
    """One process of each kind, and a frontend that waits for its shard for 2 s: not long, for shards hang in here, and
    longer than one that does not may be away on a busy machine.
    """
    with Service(shards=1, frontends=1, env={"TOPICS_SHARD_WAIT_MS": "2000"}) as running:
        yield running


@pytest.fixture
def queue(small: Service, topic: str) -> str:
    with Client(small.url) as topics:
        topics.put_topic(topic, type="queue")
        topics.append(topic, JOBS, create=False)
    return topic


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Callable[[str, int], int]:
    """Return a function that counts requests to a path with this end that were answered with this status so far."""
    caplog.set_level(logging.DEBUG, "topics.client")
    return lambda end, status: sum(f'/{end} "HTTP/1.1 {status}' in line for line in caplog.messages)


@contextmanager
def hung_shard(service: Service) -> Iterator[int]:
    pid = service.pid_of("walshard")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):  # the test has killed it
            os.kill(pid, signal.SIGCONT)


@contextmanager
def open_ack(
    service: Service, pool: ThreadPoolExecutor, job: Job, requests: Callable[[str, int], int]
) -> Iterator[Future[None]]:
    """Send an ack that the shard, which hangs in the body, leaves open."""
    with hung_shard(service):
        acking = pool.submit(job.ack)
        poll("the ack to be left open", lambda: requests("ack", 503) > 0)
        yield acking


def counts(service: Service, name: str) -> tuple[int, int]:
    """(ready, in flight)"""
    queue = service.client.get(f"/v0/topics/{name}").json()["queue"]
    return queue["ready"], queue["in_flight"]


def wait_counts(service: Service, name: str, wanted: tuple[int, int]) -> None:
    poll(f"(ready, in flight) to be {wanted}", lambda: counts(service, name) == wanted)


async def until(what: str, probe: Callable[[], object]) -> None:
    """Poll, in an event loop."""
    end = time.monotonic() + PATIENCE_S
    while not probe():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.005)


def in_time(work: Awaitable[T]) -> T:
    async def run() -> T:
        return await asyncio.wait_for(work, 3 * PATIENCE_S)

    return asyncio.run(run())


# -- settling


def test_an_ack_that_a_hung_shard_leaves_open_is_sent_again(
    small: Service, queue: str, requests: Callable[[str, int], int]
) -> None:
    with Client(small.url) as topics, closing(topics.queue(queue).work()) as jobs, ThreadPoolExecutor(1) as pool:
        job = next(jobs)
        with open_ack(small, pool, job, requests) as acking:
            pass
        acking.result(PATIENCE_S)
        assert next(jobs).seq == 2
    wait_counts(small, queue, (4, 0))


def test_an_ack_left_open_by_a_shard_that_lost_the_lease_says_so(
    small: Service, queue: str, requests: Callable[[str, int], int]
) -> None:
    with Client(small.url) as topics, closing(topics.queue(queue).work()) as jobs, ThreadPoolExecutor(1) as pool:
        job = next(jobs)
        with open_ack(small, pool, job, requests) as acking:
            killed = small.kill("walshard")
            small.wait_healed(killed)
        with pytest.raises(LeaseLostError, match=f"job {job.seq} of '{queue}'"):
            acking.result(PATIENCE_S)


def test_an_ack_left_open_by_a_stream_that_broke_says_so(
    small: Service, queue: str, requests: Callable[[str, int], int], caplog: pytest.LogCaptureFixture
) -> None:
    with Client(small.url) as topics, closing(topics.queue(queue).work()) as jobs, ThreadPoolExecutor(1) as pool:
        job = next(jobs)
        with open_ack(small, pool, job, requests) as acking:
            killed = small.kill("frontend")
            poll("the stream's end to be noticed", lambda: f"the stream of jobs of {queue} broke" in caplog.text)
        with pytest.raises(LeaseLostError, match=f"job {job.seq} of '{queue}'"):
            acking.result(PATIENCE_S)
        small.wait_healed(killed)


class CutOff(AsyncClient):
    """The answer to the first attempt of an ack is lost, and `meanwhile` happens."""

    def __init__(self, url: str, *, arrives: bool) -> None:
        super().__init__(url)
        self._arrives = arrives
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        self.extended: list[int] = []
        """Seqs of which an extension was answered, however."""

    async def call(self, call: Call[T]) -> T:
        if call.path.endswith("/ack") and not call.repeatable:
            if self._arrives:
                await super().call(call)
            if self.meanwhile is not None:
                await self.meanwhile()
            raise UnreachableError("the answer is lost")
        answer = await super().call(call)
        if call.path.endswith("/extend"):
            assert call.body is not None
            self.extended += json.loads(call.body)["seqs"]
        return answer


@pytest.mark.parametrize("arrives", [True, False])
def test_an_ack_whose_answer_was_lost_is_known_by_the_repeat(small: Service, queue: str, arrives: bool) -> None:
    async def body() -> None:
        async with CutOff(small.url, arrives=arrives) as client:
            async for job in client.queue(queue).work():
                await job.ack()
                break

    in_time(body())
    wait_counts(small, queue, (4, 0))
    assert small.client.get(f"/v0/topics/{queue}").json()["count"] == 4


def test_a_job_that_left_its_worker_while_the_answer_was_awaited_is_lost(small: Service, queue: str) -> None:
    async def body() -> None:
        async with CutOff(small.url, arrives=False) as client, AsyncClient(small.url) as other:
            async for job in client.queue(queue, node="me").work():
                # The stream lives on: only the record tells that the job was not done.
                client.meanwhile = partial(other.queue(queue, node="me").nack, [job.claimed], delay_ms=3_600_000)
                with pytest.raises(LeaseLostError):
                    await job.ack()
                break

    in_time(body())


@pytest.mark.parametrize("arrives", [True, False])
def test_of_acks_that_were_sent_together_each_is_told_what_became_of_its_job(
    small: Service, queue: str, arrives: bool
) -> None:
    """The answer to all of them is lost; meanwhile one of the jobs is given back under the worker's feet."""

    async def body() -> list[int]:
        async with CutOff(small.url, arrives=arrives) as client, AsyncClient(small.url) as other:
            shift = Shift(client, queue, "me", max_jobs=len(JOBS), lease_ms=30_000, backoff=Backoff())
            async with shift:
                jobs = [leased.job for _ in JOBS if (leased := await shift.next()) is not None]
                client.meanwhile = partial(other.queue(queue, node="me").nack, jobs[2:3], delay_ms=3_600_000)
                outcomes = await asyncio.gather(*(shift.ack(job) for job in jobs), return_exceptions=True)
                assert not any(shift.holds(job) for job in jobs)
        return [error.seq for error in outcomes if isinstance(error, LeaseLostError)]

    # One that had been acked cannot be given back.
    assert in_time(body()) == ([] if arrives else [3])
    assert small.client.get(f"/v0/topics/{queue}").json()["count"] == (0 if arrives else 1)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lease_is_kept_until_its_ack_is_answered(
    small: Service, queue: str, caplog: pytest.LogCaptureFixture, arrives: bool
) -> None:
    async def body() -> None:
        async with CutOff(small.url, arrives=arrives) as client:
            async for job in client.queue(queue).work(lease_ms=12_000):

                async def meanwhile(seq: int = job.seq) -> None:
                    client.extended.clear()
                    # Of one that was carried out it finds the job skipped: no loss of its lease.
                    await until("the job's lease to be extended", lambda: seq in client.extended)

                client.meanwhile = meanwhile
                await job.ack()
                break

    in_time(body())
    assert "is lost" not in caplog.text
    assert small.client.get(f"/v0/topics/{queue}").json()["count"] == len(JOBS) - 1


def test_a_job_that_cannot_be_settled_ends_no_worker(
    small: Service, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    with Client(small.url, retry=QUICK) as topics, closing(topics.queue(queue).work()) as jobs:
        for job in jobs:
            if done:
                break
            with hung_shard(small) as pid, job:
                done.append(job.seq)
                # Continues while the worker waits in its ack, which has given up by then.
                released = threading.Thread(target=_continue_after, args=(pid, caplog))
                released.start()
        released.join()
    assert "could not be settled, it comes again" in caplog.text


def _continue_after(pid: int, caplog: pytest.LogCaptureFixture) -> None:
    try:
        poll("the ack to be given up", lambda: "could not be settled" in caplog.text)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_leases_are_extended_again_after_a_time_in_which_they_could_not_be(
    small: Service, queue: str, requests: Callable[[str, int], int], caplog: pytest.LogCaptureFixture
) -> None:
    with Client(small.url, retry=QUICK) as topics, closing(topics.queue(queue).work(lease_ms=1_500)) as jobs:
        next(jobs)
        with hung_shard(small):
            poll("an extension to fail", lambda: f"leases in {queue} could not be extended" in caplog.text)
        before = requests("extend", 200)
        poll("the next one", lambda: requests("extend", 200) > before)


@contextmanager
def hung_at_the_first_extension(port: int) -> Iterator[str]:
    """The URL of a relay to the service at `port`. The first connection over which a lease is to be extended carries
    nothing any more, as if it led to a frontend that hangs.
    """
    hung = False

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        nonlocal hung
        silent = False
        while data := await source.read(1 << 16):
            if b"/extend HTTP/1.1" in data and not hung:
                silent = hung = True
            if not silent:
                sink.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service_reader, service_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = [asyncio.create_task(pass_on(reader, service_writer))]
        ways.append(asyncio.create_task(pass_on(service_reader, writer)))
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, service_writer):
            end.close()
        await asyncio.gather(*ways, return_exceptions=True)

    with LoopThread() as loop:
        server = loop.run(asyncio.start_server(relay, "127.0.0.1", 0))
        port_here = server.sockets[0].getsockname()[1]
        loop.enter(server)
        yield f"http://127.0.0.1:{port_here}"
        assert hung


def leased(service: Service, name: str) -> tuple[int, int]:
    """(deliveries, deadline) of the job that is leased."""
    (job,) = service.client.post(f"/v0/topics/{name}/peek", json={"state": "leased"}).json()["jobs"]
    return job["deliveries"], job["deadline"]


def test_a_lease_is_extended_in_time_though_the_first_attempt_gets_no_answer(small: Service, queue: str) -> None:
    with (
        hung_at_the_first_extension(small.port) as url,
        Client(url) as topics,
        closing(topics.queue(queue).work(lease_ms=9_000)) as jobs,
    ):
        job = next(jobs)
        deadline = job.claimed.deadline
        poll("the lease to be extended", lambda: job.lost or leased(small, queue)[1] > deadline)
        assert not job.lost
        assert leased(small, queue)[0] == 1
        job.ack()
    wait_counts(small, queue, (4, 0))


def test_an_asynchronous_worker_extends_in_time_as_well(small: Service, queue: str) -> None:
    async def body() -> None:
        async with AsyncClient(url) as client:
            async for job in client.queue(queue).work(lease_ms=9_000):
                deadline = job.claimed.deadline
                await until("the lease to be extended", lambda: job.lost or leased(small, queue)[1] > deadline)
                assert not job.lost
                assert leased(small, queue)[0] == 1
                await job.ack()
                break

    with hung_at_the_first_extension(small.port) as url:
        in_time(body())
    wait_counts(small, queue, (4, 0))


class LateLook(AsyncClient):
    """A worker's second look at its queue, which its first job brings about, is answered when `answer` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answer = asyncio.Event()
        self.extended: set[int] = set()
        self._looks = 0

    async def call(self, call: Call[T]) -> T:
        answer = await super().call(call)
        if call.method == "GET":
            self._looks += 1
            if self._looks == 2:
                await self.answer.wait()
        if call.path.endswith("/extend"):
            assert call.body is not None
            self.extended.update(json.loads(call.body)["seqs"])
        return answer


def test_jobs_are_kept_while_a_busy_service_is_asked_whose_they_are(
    small: Service, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> list[tuple[int, bool]]:
        begun: list[tuple[int, bool]] = []
        async with LateLook(small.url) as client:

            async def meanwhile() -> None:
                await until("the leases of all to be extended", lambda: client.extended >= {1, 2, 3})
                assert not begun
                put_off = {"node": "me", "seqs": [1], "delay_ms": 3_600_000}
                assert small.client.post(f"/v0/topics/{queue}/nack", json=put_off).json()["nacked"] == 1
                await until("the worker to know that", lambda: f"job 1 in {queue} is lost" in caplog.text)
                client.answer.set()

            happening = asyncio.create_task(meanwhile())
            async for job in client.queue(queue, node="me").work(max_jobs=3, lease_ms=12_000):
                begun.append((job.seq, job.lost))
                await job.ack()
                if len(begun) == 2:
                    break
            await happening
        return begun

    assert in_time(body()) == [(2, False), (3, False)]


# -- ends


def test_what_was_begun_is_finished_before_a_failed_run_ends(
    small: Service, queue: str, requests: Callable[[str, int], int]
) -> None:
    ended_early: list[bool] = []

    async def body() -> None:
        async with AsyncClient(small.url) as client:

            async def handle(job: AsyncJob) -> None:
                await client.delete_topic(queue)
                await until("the worker to hear of it", lambda: requests(f"{queue}?touch=false", 404))
                await asyncio.wait({running}, timeout=0.5)
                ended_early.append(running.done())

            running = asyncio.ensure_future(client.queue(queue).run(handle, concurrency=2))
            with pytest.raises(NotFoundError):
                await running

    with Client(small.url) as topics:
        topics.delete_records(queue, before_seq=len(JOBS))  # one is left
    in_time(body())
    assert ended_early == [False]


def test_a_cancelled_handler_leaves_no_sibling_behind(small: Service, queue: str) -> None:
    begun: list[int] = []
    ended_early: list[bool] = []

    async def body() -> None:
        async with AsyncClient(small.url) as client:
            both = asyncio.Event()

            async def handle(job: AsyncJob) -> None:
                begun.append(job.data)
                if len(begun) == 2:
                    both.set()
                await both.wait()
                if job.data == 0:
                    raise asyncio.CancelledError
                await asyncio.wait({running}, timeout=0.5)
                ended_early.append(running.done())

            running = asyncio.ensure_future(client.queue(queue).run(handle, concurrency=2))
            with pytest.raises(asyncio.CancelledError):
                await running

    in_time(body())
    assert sorted(begun) == [0, 1]
    assert ended_early == [False]


def test_a_shift_that_is_over_gives_out_nothing(small: Service, queue: str) -> None:
    async def body() -> None:
        async with AsyncClient(small.url) as client:
            shift = Shift(client, queue, "me", max_jobs=4, lease_ms=30_000, backoff=Backoff())
            async with shift:
                leased = await shift.next()
                assert leased is not None
                await until("the others to be fetched", lambda: counts(small, queue) == (1, 4))
            assert await asyncio.wait_for(shift.next(), PATIENCE_S) is None
            assert not shift.holds(leased.job)

    in_time(body())


def test_an_interrupted_run_of_threads_fails_no_job(
    small: Service, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def handle(job: Job) -> None:
        if job.seq == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.wait(PATIENCE_S)

    former = signal.signal(signal.SIGINT, interrupt)
    try:
        with Client(small.url) as topics, pytest.raises(KeyboardInterrupt):
            topics.queue(queue).run(handle)
    finally:
        signal.signal(signal.SIGINT, former)
    assert "to be repeated" not in caplog.text
    assert sum(counts(small, queue)) < len(JOBS)


def test_a_handler_that_ends_the_program_ends_the_run(small: Service, queue: str) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_S)
    done: list[int] = []

    def handle(job: Job) -> None:
        if job.seq > 2:
            return  # begun before it was known that the run ends
        both.wait()
        if job.seq == 1:
            raise SystemExit(3)
        done.append(job.seq)

    with Client(small.url) as topics, pytest.raises(SystemExit) as end:
        topics.queue(queue).run(handle, threads=2)
    assert end.value.code == 3
    assert done == [2]


@pytest.mark.parametrize("error", [StopIteration, CancelledError])
def test_an_exception_that_a_future_takes_for_its_own_is_a_failure_of_its_job(
    small: Service, queue: str, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    with Client(small.url) as topics:
        work = topics.queue(queue)

        def handle(job: Job) -> None:
            if job.deliveries == 1:
                raise error
            work.stop()

        work.run(handle, backoff=Backoff(first_ms=1, max_ms=2))
    assert "delivery 1> failed, to be repeated" in caplog.text
    # One that failed last may still be at rest.
    poll("all jobs but one to be there", lambda: sum(counts(small, queue)) == len(JOBS) - 1)


# -- the start


def test_a_worker_that_is_told_to_stop_while_the_service_is_down_stops() -> None:
    """A service that hangs: it takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def stop_when_asked() -> None:
            taken.append(server.accept()[0])
            os.kill(os.getpid(), signal.SIGUSR1)

        thread = threading.Thread(target=stop_when_asked)
        thread.start()
        with Client(f"http://127.0.0.1:{server.getsockname()[1]}") as topics:
            topics.queue("jobs").run(lambda job: None, stop_on=(signal.SIGUSR1,))
        thread.join()
        taken[0].close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_an_asynchronous_worker_that_is_told_to_stop_while_the_service_is_down_stops() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with AsyncClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
                work = client.queue("jobs")
                running = asyncio.ensure_future(work.run(lambda job: asyncio.sleep(0)))
                await asyncio.to_thread(server.accept)
                work.stop()
                await asyncio.wait_for(running, PATIENCE_S)

    in_time(body())


# -- the instance of the queue


def key_of(service: Service, topic: str, seq: int) -> str:
    return f"{topic}:{service.client.get(f'/v0/topics/{topic}').json()['epoch']}:{seq}"


def make_anew(service: Service, topic: str) -> None:
    with Client(service.url) as topics:
        topics.delete_topic(topic)
        topics.put_topic(topic, type="queue")
        topics.append(topic, ["new"], create=False)


def test_a_key_names_the_instance_its_job_came_from(small: Service, queue: str) -> None:
    async def body() -> list[tuple[Any, str]]:
        seen: list[tuple[Any, str]] = []
        async with AsyncClient(small.url) as client:
            async for job in client.queue(queue).work():
                seen.append((job.data, job.key))
                if job.data == "new":
                    await job.ack()
                    return seen
                expected.append(key_of(small, queue, job.seq))
                # Blocks the loop: the worker knows of it all when the new queue is there.
                make_anew(small, queue)
                expected.append(key_of(small, queue, 1))
                assert job.key == expected[0]
        raise AssertionError("the worker ended by itself")

    expected: list[str] = []
    assert in_time(body()) == [(0, expected[0]), ("new", expected[1])]
    assert len(set(expected)) == 2


class LateStream(AsyncClient):
    """Something happens between a worker's look at its queue and the begin of its stream, once."""

    between: Callable[[], object] | None = None

    def events(self, *args: Any, **options: Any) -> Any:
        if self.between is not None:
            self.between()
            self.between = None
        return super().events(*args, **options)


def test_a_key_is_that_of_a_queue_made_anew_before_the_stream_began(small: Service, queue: str) -> None:
    async def body() -> str:
        async with LateStream(small.url) as client:
            client.between = lambda: make_anew(small, queue)
            async for job in client.queue(queue).work():
                await job.ack()
                return job.key
        raise AssertionError("the worker ended by itself")

    key = in_time(body())
    assert key == key_of(small, queue, 1)


# -- blocks


def test_an_exception_after_the_ack_is_logged(small: Service, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    with Client(small.url) as topics, closing(topics.queue(queue).work()) as jobs:
        for job in jobs:
            seen.append(job.seq)
            with job:
                job.ack()
                if job.seq == 1:
                    raise ValueError("too late")
            if job.seq == 2:
                break
    assert seen == [1, 2]
    assert "was settled before its block failed" in caplog.text
    assert "ValueError: too late" in caplog.text


def test_a_lease_that_was_lost_before_the_ack_of_a_block_is_logged(
    small: Service, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(small.url) as topics, closing(topics.queue(queue).work()) as jobs:
        job = next(jobs)
        topics.delete_records(queue, before_seq=2)
        with job:
            job.ack()
    assert f"LeaseLostError: job 1 of {queue!r} is no longer leased" in caplog.text
