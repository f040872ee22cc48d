"""api §9 over crashes and restarts: what leases, deliveries and acks outlive, over HTTP and real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tests.contract.asking import diff_records, ok, put, state, write
from tests.contract.socket_client import Socket
from tests.contract.stream import follow
from tests.contract.test_9_queues import FOREVER_MS
from tests.contract.working import Work, ask, claim, counts, queue, seqs, until_counts
from tests.harness import Service, poll
from topics.shm import shm_names
from topics.shm.control import ControlPage, Role

pytestmark = pytest.mark.long

Crash = Callable[[Service], None]


def shard_dies(service: Service) -> None:
    service.wait_healed(service.kill("walshard", 0))


def all_die(service: Service) -> None:
    service.kill_group()
    service.start()


def stops(service: Service) -> None:
    service.restart()


CRASHES = pytest.mark.parametrize("crash", [shard_dies, all_die, stops])


def metric(client: httpx.Client, name: str) -> int:
    metrics = ok(client.get("/v0/metrics", headers={"Accept": "application/json"}))
    value: int = metrics[name]
    return value


@CRASHES
def test_durable_leases_and_their_deliveries_outlive_a_crash(crash: Crash) -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(6), leases_durable=True, lease_ms=FOREVER_MS)
        first = claim(service.client, "q", node="one", max=3)
        ask(service.client, "q", "nack", 1, 2, node="one")
        again = claim(service.client, "q", node="two")
        assert [(job["$seq"], job["deliveries"]) for job in again] == [(1, 2)]
        ask(service.client, "q", "nack", 3, node="one", delay_ms=FOREVER_MS)
        crash(service)
        # 1 is leased, 2 came back, 3 rests, 4 to 6 never were handed out.
        assert counts(service.client, "q") == (4, 1, 0)
        wrong = ask(service.client, "q", "ack", 1, node="two", lease_ids=[first[0]["lease_id"]])
        assert wrong["skipped"] == [1], "the fence of before the crash holds"
        got = claim(service.client, "q", node="three", max=10)
        assert [(job["$seq"], job["deliveries"]) for job in got] == [(2, 2), (4, 1), (5, 1), (6, 1)]
        assert not {job["lease_id"] for job in got} & {job["lease_id"] for job in first + again}
        deadlines = ask(service.client, "q", "extend", 1, node="two", lease_ms=1000)["deadlines"]
        assert deadlines["1"] <= time.time_ns() // 1_000_000 + 1000
        assert ask(service.client, "q", "ack", 2, node="three", lease_ids=[got[0]["lease_id"]])["acked"] == 1
        until_counts(service.client, "q", 1, 3, 0)
        ((seq, deliveries),) = [(j["$seq"], j["deliveries"]) for j in claim(service.client, "q", node="four", max=10)]
        assert (seq, deliveries) == (1, 3)


def test_a_durable_lease_that_ended_while_nothing_ran_is_over() -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", "job", leases_durable=True, lease_ms=300)
        (job,) = claim(service.client, "q")
        service.kill_group()
        service.start()
        poll("the job to be claimable", lambda: claim(service.client, "q", node="o") != [])
        assert time.time_ns() // 1_000_000 >= job["deadline"]
        assert ask(service.client, "q", "ack", 1)["skipped"] == [1]


@CRASHES
def test_without_durable_leases_everything_unacked_is_ready_after_a_crash(crash: Crash) -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(5), lease_ms=FOREVER_MS)
        old = claim(service.client, "q", max=4)
        ask(service.client, "q", "ack", 2)
        ask(service.client, "q", "nack", 3, delay_ms=FOREVER_MS)
        crash(service)
        assert counts(service.client, "q") == (4, 0, 0)
        stale = ask(service.client, "q", "ack", 1, 4, lease_ids=[old[0]["lease_id"], old[3]["lease_id"]])
        assert stale["skipped"] == [1, 4]
        new = claim(service.client, "q", max=10)
        assert [(job["$seq"], job["deliveries"]) for job in new] == [(1, 1), (3, 1), (4, 1), (5, 1)]
        # The same worker, the same job: the lease of before the crash still is no lease of now.
        assert ask(service.client, "q", "ack", 1, lease_ids=[old[0]["lease_id"]])["skipped"] == [1]
        assert ask(service.client, "q", "ack", 1, lease_ids=[new[0]["lease_id"]])["acked"] == 1


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_an_ack_is_as_durable_as_its_topic(durability: str) -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(4), durability=durability, lease_ms=FOREVER_MS)
        jobs = claim(service.client, "q", max=4)
        before = metric(service.client, "topics_wal_fsyncs_total")
        for job in jobs[:3]:
            ask(service.client, "q", "ack", job["$seq"])
        if durability == "fsync":
            assert metric(service.client, "topics_wal_fsyncs_total") >= before + 3
        service.kill_group()
        service.start()
        assert [record.seq for record in diff_records(service.client, "q")] == [4]
        assert seqs(claim(service.client, "q", max=10)) == [4]


def test_kept_jobs_stay_done_after_a_crash() -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(4), on_ack="keep")
        claim(service.client, "q", max=2)
        ask(service.client, "q", "ack", 1, 2)
        for crash in (shard_dies, all_die):
            crash(service)
            assert [record.seq for record in diff_records(service.client, "q")] == [1, 2, 3, 4]
            assert counts(service.client, "q") == (2, 0, 0)
        assert seqs(claim(service.client, "q", max=10)) == [3, 4]


# -- /work


@pytest.mark.parametrize("durable", [False, True], ids=["forgotten", "durable"])
def test_leases_of_streams_end_with_their_frontend_and_those_of_claims_do_not(durable: bool) -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(6), lease_ms=FOREVER_MS, leases_durable=durable)
        assert seqs(claim(service.client, "q", max=2, node="claims")) == [1, 2]
        with Work(service.url, "q", max=3, node="streams") as work:
            work.jobs(3)
            assert counts(service.client, "q") == (1, 5, 0)
            service.wait_healed(service.kill("frontend", 0))
            until_counts(service.client, "q", 4, 2, 0)
        again = claim(service.client, "q", node="next", max=10)
        assert [(job["$seq"], job["deliveries"]) for job in again] == [(3, 2), (4, 2), (5, 2), (6, 1)]


def test_leases_of_a_stream_end_while_its_frontend_waits_to_be_started_again() -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(3), lease_ms=FOREVER_MS)
        page = ControlPage.attach(shm_names.shm_name(shm_names.identity(str(service.data_dir)), "control"))
        shard, frontend = page.cell(Role.WALSHARD, 0), page.cell(Role.FRONTEND, 0)

        def free_before_the_successor_begins() -> bool:
            """False: the pause was too short to tell. It grows with each death."""
            with Work(service.url, "q", max=2) as work:
                work.jobs(2)
                assert shard.get("leases_in_flight") == 2
                began = frontend.get("incarnation")
                pid = service.kill("frontend", 0)
                poll("the leases to be free", lambda: shard.get("leases_in_flight") == 0, every_s=0.001)
                in_time = frontend.get("incarnation") == began
                service.wait_healed(pid)
                return in_time

        # Without a word of the supervisor only the successor's hello would end them.
        poll("leases to end first", free_before_the_successor_begins)


def test_durable_leases_of_a_stream_are_over_after_a_crash_of_all_and_stay_in_one_of_the_shard() -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", *range(3), lease_ms=FOREVER_MS, leases_durable=True)
        with Work(service.url, "q", max=2) as work:
            jobs = work.jobs(2)
            shard_dies(service)
            assert counts(service.client, "q") == (1, 2, 0), "the stream is still there, and so are its leases"
            ask(service.client, "q", "ack", 1, lease_ids=[jobs[0]["lease_id"]])
            assert [(job["$seq"], job["deliveries"]) for job in work.jobs(1)] == [(3, 1)]
        until_counts(service.client, "q", 2, 0, 0)
        with Work(service.url, "q", max=2) as work:
            work.jobs(2)
            all_die(service)
        until_counts(service.client, "q", 2, 0, 0)
        got = claim(service.client, "q", max=10)
        assert [(job["$seq"], job["deliveries"]) for job in got] == [(2, 3), (3, 3)]


# -- dead letters


def test_redrive_is_safe_whoever_is_killed_meanwhile() -> None:
    """Each dead letter is a job again, once, and no dead letter any more."""
    jobs = 150
    with Service(shards=2, frontends=2) as service:
        dead = "q.dead"
        put(service.client, "q", type="queue", max_deliveries=1, dead_letter=dead)
        write(service.client, "q", *range(jobs))
        got = claim(service.client, "q", max=jobs)
        ask(service.client, "q", "nack", *seqs(got))
        poll(
            "all to be dead letters", lambda: claim(service.client, "q", max=jobs) == [] and dead_count(service) == jobs
        )
        victims = [("walshard", 0), ("frontend", 0), ("walshard", 1), ("frontend", 1)]
        for role, index in victims:
            redrive(service, dead, 20)
            pid = service.kill(role, index)
            redrive(service, dead, 10)
            service.wait_healed(pid)
        poll("all to be jobs again", lambda: redrive(service, dead, jobs) and dead_count(service) == 0, 60)
        assert state(service.client, "q")["count"] == jobs
        again = claim(service.client, "q", max=jobs)
        assert sorted(job["data"] for job in again) == list(range(jobs))
        assert {job["deliveries"] for job in again} == {1}


def dead_count(service: Service) -> Any:
    answer = service.client.get("/v0/topics/q.dead")
    return answer.json()["count"] if answer.status_code == 200 else None


def redrive(service: Service, dead: str, most: int) -> bool:
    """Return whether the redrive was answered; a process that is being killed may not answer."""
    try:
        answer = service.client.post("/v0/topics/q/redrive", json={"from": dead, "max": most})
    except httpx.TransportError:
        return False
    assert answer.status_code in (200, 503), answer.text
    return answer.status_code == 200


def test_a_stop_ends_streams_with_a_last_error_that_says_so() -> None:
    with Service(shards=1, frontends=1) as service:
        queue(service.client, "q", 1)
        put(service.client, "t")
        with Work(service.url, "q", max=1) as work, follow(service, {"t": {}}) as stream, Socket(service) as ws:
            work.jobs(1)
            stream.until_caught_up(1)
            assert ws.ask("subscribe", request_id=1, topic="t")["op"] == "subscribed"
            service.stop()
            message = ws.next()
            while message["op"] != "error":
                message = ws.next()
            assert (message["code"], message["request_id"]) == ("server_shutting_down", None)
            with pytest.raises(ConnectionClosed):
                ws.next()
            for last in (work.event("error"), stream.event("error")):
                assert last.json["code"] == "server_shutting_down"
            for over in (work, stream):
                with pytest.raises(StopIteration):
                    over.next()
        service.start()
