"""Workers of a real queue: a job is kept while it takes long, repeated when it failed, given back at the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.harness import Service, poll
from topics.client import (
    AsyncClient,
    AsyncJob,
    Backoff,
    Client,
    ConflictError,
    Job,
    LeaseLostError,
    NewRecord,
    NotFoundError,
    SeenJobs,
)
from topics.client.shift import extend_every_s, extend_timeout_s

pytestmark = pytest.mark.long

AT_ONCE = Backoff(first_ms=1, max_ms=2)
JOBS = list(range(20))


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


@pytest.fixture
def queue(topics: Client, topic: str) -> str:
    topics.put_topic(topic, type="queue")
    topics.append(topic, JOBS, create=False)
    return topic


def counts(topics: Client, name: str) -> tuple[int, int]:
    """(ready, in flight)"""
    queue = topics.get_topic(name).queue
    assert queue is not None
    return queue.ready, queue.in_flight


def wait_counts(topics: Client, name: str, wanted: tuple[int, int]) -> None:
    poll(f"(ready, in flight) to be {wanted}", lambda: counts(topics, name) == wanted)


def test_a_loop_does_every_job_once_and_in_order(topics: Client, queue: str) -> None:
    done = []
    for job in topics.queue(queue).work(max_jobs=5):
        done.append(job.data)
        assert job.deliveries == 1
        if len(done) == len(JOBS):
            job.ack()
            break
    assert done == JOBS
    wait_counts(topics, queue, (0, 0))
    assert topics.get_topic(queue).count == 0


def test_what_fails_is_repeated_and_the_loop_goes_on(topics: Client, queue: str) -> None:
    seen: list[tuple[int, int]] = []
    done: list[int] = []
    for job in topics.queue(queue).work(backoff=AT_ONCE):
        with job:
            seen.append((job.data, job.deliveries))
            if job.data % 5 == 0 and job.deliveries < 3:
                raise ValueError(job.data)
            done.append(job.data)
        if len(done) == len(JOBS):
            break
    assert sorted(done) == JOBS
    assert [delivery for data, delivery in seen if data == 10] == [1, 2, 3]
    wait_counts(topics, queue, (0, 0))


def test_leaving_the_loop_gives_back_what_was_not_done(topics: Client, queue: str) -> None:
    def fail() -> None:
        with closing(topics.queue(queue).work(max_jobs=4, backoff=AT_ONCE)) as jobs:
            for job in jobs:
                if job.data == 2:
                    raise KeyError(job.data)

    with pytest.raises(KeyError):
        fail()
    wait_counts(topics, queue, (18, 0))


def test_jobs_that_are_to_come_later_or_one_after_the_other(topics: Client, topic: str) -> None:
    topics.put_topic(topic, type="queue")
    later = NewRecord("later", delay_ms=3_600_000)
    at = NewRecord("at", deliver_at=time.time_ns() // 1_000_000 + 3_600_000)
    ordered = [NewRecord(f"{key}{n}", order_key=key) for n in range(2) for key in "ab"]
    topics.append(topic, [at, later, *ordered], create=False)
    queue = topics.queue(topic)
    assert [job.data for job in queue.claim(10).claimed] == ["a0", "b0"]
    topics.append(topic, [NewRecord("soon", delay_ms=400)], create=False)
    assert [job.data for job in poll("the one that comes", lambda: queue.claim(10).claimed or None)] == ["soon"]


def test_a_job_that_takes_longer_than_its_lease_is_kept(service: Service, topics: Client, topic: str) -> None:
    # No clock of the test's own here: the lease is the server's, and it is to pass more than once.
    for lease_ms in (3_500, 7_000, 14_000):
        queue = f"{topic}-{lease_ms}"
        topics.put_topic(queue, type="queue")
        topics.append(queue, ["mine", "another's"], create=False)
        kept, held_up_s = hold_for_two_leases(service, topics, queue, lease_ms)
        if kept:
            return
        # What stands still for so long may extend it too late, and nothing else.
        assert held_up_s * 1000 > lease_ms / 3, "a lease was lost that could have been kept"
    pytest.fail("something stood still for a third of a lease each time")


def hold_for_two_leases(service: Service, topics: Client, queue: str, lease_ms: int) -> tuple[bool, float]:
    """(whether the job stayed with its worker, the longest time in which test or service did nothing, s)"""
    others: list[int] = []
    held_up_s = 0.0
    with closing(topics.queue(queue).work(lease_ms=lease_ms)) as jobs:
        job = next(jobs)
        now_s = time.monotonic()
        until_s = now_s + 2.1 * lease_ms / 1000
        while now_s < until_s:
            # A new connection each time: over any frontend.
            with Client(service.url) as other:
                others += [one.seq for one in other.queue(queue, node="other").claim(100).claimed]
            time.sleep(0.05)
            before_s, now_s = now_s, time.monotonic()
            held_up_s = max(held_up_s, now_s - before_s)
        lost = job.lost
        try:
            job.ack()
        except LeaseLostError:
            lost = True
    return not lost and job.seq not in others, max(held_up_s, time.monotonic() - now_s)


def test_a_job_that_was_fetched_ahead_and_is_known_to_be_lost_is_not_begun(
    topics: Client, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(topics.queue(queue).work(max_jobs=3, lease_ms=12_000)) as jobs:
        assert next(jobs).seq == 1
        wait_counts(topics, queue, (17, 3))
        topics.delete_records(queue, before_seq=3)
        poll("the loss to be noticed", lambda: "the lease of job 2" in caplog.text)
        assert next(jobs).seq == 3


def test_a_lost_lease_is_said(service: Service, topics: Client, queue: str) -> None:
    with closing(topics.queue(queue).work()) as jobs:
        job = next(jobs)
        killed = [service.kill("frontend", index) for index in range(service.frontends)]
        poll("the stream's end to be noticed", lambda: job.lost)
        for pid in killed:  # the next life of a frontend releases what was leased over its streams
            service.wait_healed(pid)
        with pytest.raises(LeaseLostError, match=f"job {job.seq} of '{queue}'"):
            job.ack()
        # The next worker gets it; that may be the same one, even one that was cut off again before it knew.
        other = topics.queue(queue, node="other")
        found = [next(jobs).claimed]

        def taken() -> bool:
            found.extend(other.claim(1).claimed)
            return any(one.seq == job.seq and one.deliveries >= 2 for one in found)

        poll("somebody to get the job", taken)


def test_threads_share_the_jobs_until_they_are_told_to_stop(topics: Client, queue: str) -> None:
    work = topics.queue(queue)
    done: list[int] = []
    together = threading.Barrier(4, timeout=20)

    def handle(job: Job) -> None:
        if job.data < 4:
            together.wait()  # four at a time, or never
        done.append(job.data)
        if len(done) == len(JOBS):
            work.stop()

    work.run(handle, threads=4)
    assert sorted(done) == JOBS
    wait_counts(topics, queue, (0, 0))


def test_threads_share_the_memory_of_what_was_done(topics: Client, queue: str, tmp_path: Path) -> None:
    work = topics.queue(queue)
    together = threading.Barrier(2, timeout=20)
    with SeenJobs(tmp_path / "jobs.db") as seen:
        seen.db.execute("CREATE TABLE effects (job INTEGER)")

        def handle(job: Job) -> None:
            if job.data < 2 and job.deliveries == 1:
                together.wait()  # both threads have one
            with seen.once(job) as db:
                if db is not None:
                    db.execute("INSERT INTO effects VALUES (?)", (job.data,))
            if job.deliveries == 1:
                raise ValueError("the effect was had, and the job comes again")
            if next(done) == len(JOBS):
                work.stop()

        done = itertools.count(1)
        work.run(handle, threads=2, backoff=AT_ONCE)
        assert sorted(row[0] for row in seen.db.execute("SELECT job FROM effects")) == JOBS
    wait_counts(topics, queue, (0, 0))


def test_a_stop_finishes_what_was_begun_and_gives_back_the_rest(topics: Client, queue: str) -> None:
    work = topics.queue(queue)
    done = []
    for job in work.work(max_jobs=10):
        done.append(job.data)
        work.stop()
    assert done == [0]
    wait_counts(topics, queue, (19, 0))


def test_the_asynchronous_worker_does_the_same(service: Service, topics: Client, queue: str) -> None:
    async def run() -> tuple[list[int], list[int]]:
        done: list[int] = []
        failed: list[int] = []
        async with AsyncClient(service.url) as client:
            work = client.queue(queue)

            async def handle(job: AsyncJob) -> None:
                if job.data == 7 and job.deliveries == 1:
                    failed.append(job.data)
                    raise ValueError
                done.append(job.data)
                if len(done) == 10:
                    work.stop()

            await work.run(handle, concurrency=3, backoff=AT_ONCE)
            async for job in client.queue(queue).work():
                done.append(job.data)
                if len(done) == len(JOBS):
                    await job.ack()
                    break
        return done, failed

    done, failed = asyncio.run(run())
    assert sorted(done) == JOBS
    assert failed == [7]
    wait_counts(topics, queue, (0, 0))


def test_a_job_that_has_ended_may_end_so_again_and_in_no_other_way(topics: Client, queue: str) -> None:
    jobs = topics.queue(queue).work()
    done = next(jobs)
    done.ack()
    done.ack()
    back = next(jobs)
    back.nack(60_000)
    for is_last in (False, True):
        if is_last:
            jobs.close()
        done.ack()
        back.nack()
        with pytest.raises(RuntimeError, match=f"job 1 of '{queue}' was acked before, so it cannot be given back now"):
            done.nack()
        with pytest.raises(LeaseLostError, match=f"job 2 of '{queue}' is no longer leased to this worker"):
            back.ack()
    assert not done.lost
    assert topics.get_topic(queue).count == len(JOBS) - 1


def test_an_asynchronous_job_that_has_ended_may_end_so_again_and_in_no_other_way(
    service: Service, topics: Client, queue: str
) -> None:
    async def run() -> None:
        async with AsyncClient(service.url) as client:
            async for job in client.queue(queue).work():
                if job.seq == 1:
                    await job.ack()
                    await job.ack()
                    with pytest.raises(RuntimeError, match=f"job 1 of '{queue}' was acked before"):
                        await job.nack()
                else:
                    await job.nack(60_000)
                    await job.nack()
                    with pytest.raises(LeaseLostError, match=f"job 2 of '{queue}' is no longer leased"):
                        await job.ack()
                    break

    asyncio.run(run())
    assert topics.get_topic(queue).count == len(JOBS) - 1


def test_a_job_that_is_ended_twice_at_once_has_one_end(service: Service, topics: Client, queue: str) -> None:
    """Each call sent a request of its own, and the second one found the lease gone."""

    async def run() -> None:
        async with AsyncClient(service.url) as client:
            async for job in client.queue(queue).work():
                if job.seq == 1:
                    await asyncio.gather(job.ack(), job.ack(), job.ack())
                elif job.seq == 2:
                    acked, given_back = await asyncio.gather(job.ack(), job.nack(), return_exceptions=True)
                    assert acked is None
                    assert isinstance(given_back, RuntimeError)
                else:
                    await asyncio.gather(job.nack(60_000), job.nack(60_000))
                    break

    asyncio.run(run())
    assert topics.get_topic(queue).count == len(JOBS) - 2


def test_a_job_that_threads_end_at_once_has_one_end(topics: Client, queue: str) -> None:
    jobs = topics.queue(queue).work()
    for end in (Job.ack, Job.nack):
        job = next(jobs)
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(end, job) for _ in range(8)]:
                done.result()
    jobs.close()
    assert topics.get_topic(queue).count == len(JOBS) - 1


def test_many_jobs_at_a_time_share_the_requests_of_their_acks(
    topics: Client, queue: str, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "topics.client")

    async def run() -> None:
        async with AsyncClient(service.url) as client:
            work = client.queue(queue)
            all_begun, begun = asyncio.Event(), itertools.count(1)

            async def handle(job: AsyncJob) -> None:
                if next(begun) == len(JOBS):
                    work.stop()
                    all_begun.set()
                await all_begun.wait()

            await work.run(handle, concurrency=len(JOBS))

    asyncio.run(asyncio.wait_for(run(), 60))
    wait_counts(topics, queue, (0, 0))
    # One that a shard left open is sent again, as it was.
    assert sum('/ack "HTTP/1.1 200' in line for line in caplog.messages) == 1


def test_the_key_of_a_job_is_the_same_at_each_delivery(topics: Client, queue: str) -> None:
    keys = []
    for job in topics.queue(queue).work(backoff=AT_ONCE):
        if job.data == 0:
            keys.append(job.key)
            with job:
                if job.deliveries < 3:
                    raise ValueError
                topics.append(f"{queue}.done", [job.data], idempotency_key=job.key)
                topics.append(f"{queue}.done", [job.data], idempotency_key=job.key)
        if len(keys) == 3:
            break
    assert len(set(keys)) == 1
    assert topics.get_topic(f"{queue}.done").count == 1


def test_the_key_of_a_job_is_the_same_after_a_redrive(topics: Client, topic: str) -> None:
    dead = f"{topic}.dead"
    topics.put_topic(topic, type="queue", max_deliveries=1, dead_letter=dead)
    topics.put_topic(dead)
    topics.append(topic, ["x"])
    work = topics.queue(topic)
    keys = []
    for job in work.work(backoff=AT_ONCE):
        keys.append((job.seq, job.key))
        if len(keys) == 3:
            break
        # The effect was had, and the ack lost.
        topics.append(f"{topic}.done", [job.data], idempotency_key=job.key)
        job.nack(0)
        poll("it to be a dead letter", lambda: topics.get_topic(dead).count == 1)
        assert work.redrive(dead).redriven == 1
    assert [seq for seq, _ in keys] == [1, 2, 3]
    assert len({key for _, key in keys}) == 1
    assert topics.get_topic(f"{topic}.done").count == 1


def test_claims_and_dead_letters_by_hand(topics: Client, queue: str) -> None:
    dead = f"{queue}.dead"
    topics.put_topic(queue, type="queue", max_deliveries=1, dead_letter=dead)
    work = topics.queue(queue)
    first = work.claim(3).claimed
    assert [job.data for job in first] == [0, 1, 2]
    assert work.ack(first[:1]) == []
    assert work.ack(first[:1]) == [first[0].seq]
    assert work.nack(first[1:]) == []
    assert work.claim(1).claimed[0].data == 3
    poll("the second delivery to be the dead letter's", lambda: topics.get_topic(dead).count == 2)
    assert work.redrive(dead).redriven == 2


def test_jobs_can_be_looked_at_without_claiming_them(service: Service, topics: Client, topic: str) -> None:
    topics.put_topic(topic, type="queue")
    topics.append(topic, ["a", "b", NewRecord("c", delay_ms=60_000)])
    queue = topics.queue(topic, node="w")
    (job,) = queue.claim().claimed
    seen = queue.peek()
    assert [(one.data, one.state, one.deliveries, one.leased_to) for one in seen.jobs] == [
        ("a", "leased", 1, "w"),
        ("b", "waiting", 0, None),
        ("c", "scheduled", 0, None),
    ]
    assert (seen.jobs[0].deadline, seen.jobs[2].deliver_at) == (job.deadline, seen.jobs[2].ts + 60_000)
    assert seen.next_from_seq is None
    page = queue.peek(max_jobs=1)
    assert page.next_from_seq == 1

    async def rest() -> list[str]:
        async with AsyncClient(service.url) as client:
            return [one.data for one in (await client.queue(topic).peek("waiting", from_seq=1)).jobs]

    assert asyncio.run(rest()) == ["b"]


def test_what_cannot_work_is_said_at_once(topics: Client, topic: str) -> None:
    topics.put_topic(topic)
    with pytest.raises(ConflictError, match="queue"):
        next(topics.queue(topic).work())
    with pytest.raises(NotFoundError):
        next(topics.queue(f"{topic}.absent").work())


@pytest.mark.parametrize(("lease_ms", "every_s"), [(30_000, 10), (10**12, 28_800), (0, 1 / 30)])
def test_leases_are_extended_within_what_the_service_makes_of_them(lease_ms: int, every_s: float) -> None:
    assert extend_every_s(lease_ms) == pytest.approx(every_s)


@pytest.mark.parametrize(("lease_ms", "patience_s"), [(30_000, 2.5), (9_000, 1), (1_500, 0.5), (0, 1 / 30)])
def test_an_extension_that_hangs_leaves_time_for_another(lease_ms: int, patience_s: float) -> None:
    assert extend_timeout_s(lease_ms) == pytest.approx(patience_s)
    assert extend_every_s(lease_ms) + extend_timeout_s(lease_ms) < max(lease_ms, 100) / 1000


def test_the_back_off_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first_ms=100, max_ms=1_000)
    assert [backoff.delay_ms(deliveries, 0.999999) for deliveries in (1, 2, 3, 4, 5, 1_000)] == [
        99,
        199,
        399,
        799,
        999,
        999,
    ]
    assert backoff.delay_ms(3, 0.0) == 200
