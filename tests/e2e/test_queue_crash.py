"""kill -9 of any process under workers: every job is done at least once, none is lost, none stuck beyond its lease."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff_records, put, state, write
from tests.contract.working import Work, claim, counts, seqs, until_counts
from tests.e2e.lease_watch import LeaseWatch
from tests.e2e.load import PATIENT, REQUEST_TIMEOUT_S
from tests.harness import Service, poll

JOBS = 400
LEASE_MS = 1_500
KILLS = 2


class Ledger:
    """Jobs that workers were given, and jobs that they were told are done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.delivered: Counter[int] = Counter()
        self.acked: Counter[int] = Counter()

    def job(self, seq: int) -> None:
        with self._lock:
            self.delivered[seq] += 1

    def done(self, seqs: set[int]) -> None:
        with self._lock:
            self.acked.update(seqs)

    def progress(self) -> int:
        with self._lock:
            return len(self.acked)


class Workers:
    """Threads that claim, or stream, and ack one job after the other, whatever happens to the service."""

    def __init__(self, url: str, topic: str, ledger: Ledger) -> None:
        self._url = url
        self._topic = topic
        self._ledger = ledger
        self._stop = threading.Event()
        self.unexpected: list[str] = []
        self._threads = [threading.Thread(target=self._claims, args=(n,), daemon=True) for n in range(3)]
        self._threads += [threading.Thread(target=self._streams, args=(n,), daemon=True) for n in range(3)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_TIMEOUT_S + 5)
            assert not thread.is_alive()

    def _claims(self, n: int) -> None:
        while not self._stop.is_set():
            try:
                with httpx.Client(base_url=self._url, timeout=REQUEST_TIMEOUT_S) as http:
                    while not self._stop.is_set():
                        jobs = claim(http, self._topic, node=f"p{n}", max=3)
                        for job in jobs:
                            self._finish(http, f"p{n}", job)
            except (httpx.TransportError, AssertionError) as error:
                self._note(error)

    def _streams(self, n: int) -> None:
        while not self._stop.is_set():
            try:
                with (
                    httpx.Client(base_url=self._url, timeout=REQUEST_TIMEOUT_S) as http,
                    Work(self._url, self._topic, node=f"s{n}", max=3, heartbeat_ms=20) as work,
                ):
                    while not self._stop.is_set():
                        frame = work.next()
                        if frame.raw.startswith((b":", b"retry")):
                            continue
                        assert frame.event == "job", frame.raw
                        self._finish(http, f"s{n}", frame.json)
            except (httpx.TransportError, AssertionError, StopIteration) as error:
                self._note(error)

    def _finish(self, http: httpx.Client, node: str, job: dict[str, Any]) -> None:
        seq = job["$seq"]
        self._ledger.job(seq)
        body = {"node": node, "seqs": [seq], "lease_ids": [job["lease_id"]]}
        answer = http.post(f"/v0/topics/{self._topic}/ack", json=body)
        if answer.status_code == 200:
            self._ledger.done({seq} - set(answer.json()["skipped"]))
        else:
            self._note(AssertionError(f"{answer.status_code}: {answer.text[:300]}"))

    def _note(self, error: BaseException) -> None:
        """A connection may end, a shard may be away; anything else is a finding."""
        text = str(error)
        if isinstance(error, AssertionError) and "503" not in text and "ended inside a frame" not in text:
            self.unexpected.append(text[:500])


@contextmanager
def working(service: Service, topic: str) -> Iterator[tuple[Workers, Ledger]]:
    ledger = Ledger()
    workers = Workers(service.url, topic, ledger)
    workers.start()
    try:
        yield workers, ledger
    finally:
        workers.stop()
    assert not workers.unexpected, workers.unexpected[:5]


@pytest.mark.parametrize("leases_durable", [False, True], ids=["forgotten", "durable"])
@pytest.mark.parametrize("role", ["walshard", "frontend"])
def test_every_job_is_done_when_processes_are_killed(role: str, leases_durable: bool) -> None:
    with Service(shards=1, frontends=2, env=PATIENT | {"TOPICS_TEST_MIN_HEARTBEAT_MS": "20"}) as service:
        put(service.client, "q", type="queue", lease_ms=LEASE_MS, leases_durable=leases_durable)
        watch = LeaseWatch(service.url, "q", LEASE_MS / 1000, gone=lambda node: True, staffed=lambda: True)
        with watch, working(service, "q") as (_, ledger):
            for kill in range(KILLS):
                for _ in range(JOBS // KILLS // 50):
                    write(service.client, "q", *range(50))
                seen = ledger.progress()
                poll("some jobs to be done", lambda: ledger.progress() > seen, 30)
                pid = service.kill(role, kill % 2 if role == "frontend" else 0)
                service.wait_healed(pid)
            poll("every job to be done", lambda: state(service.client, "q")["count"] == 0, 60)
            until_counts(service.client, "q", 0, 0, 0)
            watch.wait_seen()
        # Nobody extends: what is held is done, or delivered again once its lease is over.
        print(
            f"{watch.seen} leases were seen, {watch.longest_s:.2f} s at most until the job was done or delivered again"
        )
        assert not watch.stuck
        # An ack whose answer was lost with its frontend is done all the same.
        assert set(ledger.delivered) == set(range(1, JOBS + 1))
        twice = [seq for seq, count in ledger.acked.items() if count > 1]
        assert not twice, f"acknowledged twice: {twice}"
        if role == "walshard":
            assert set(ledger.acked) == set(range(1, JOBS + 1))


def test_the_watch_tells_a_job_that_is_stuck_from_one_that_is_delivered_again() -> None:
    with Service(shards=1, frontends=1) as service:
        put(service.client, "q", type="queue", lease_ms=3_600_000)
        write(service.client, "q", 1, 2)
        with LeaseWatch(service.url, "q", 0.25, gone=lambda node: node == "dead", staffed=lambda: True) as watch:
            assert seqs(claim(service.client, "q", node="dead", max=2)) == [1, 2]
            watch.wait_seen()
            nacked = service.client.post("/v0/topics/q/nack", json={"node": "dead", "seqs": [2]})
            assert nacked.json()["nacked"] == 1
            assert seqs(claim(service.client, "q", node="alive", max=2)) == [2]
            poll("the other one to be called stuck", lambda: len(watch.stuck) == 1)
        assert "seq=1" in watch.stuck[0]
        assert watch.seen == 2


def test_leases_of_a_killed_frontend_are_free_long_before_they_end() -> None:
    with Service(shards=2, frontends=1, env=PATIENT) as service:
        put(service.client, "q", type="queue", lease_ms=3_600_000)
        write(service.client, "q", *range(5))
        work = Work(service.url, "q", max=5)
        work.jobs(5)
        until_counts(service.client, "q", 0, 5, 0)
        service.wait_healed(service.kill("frontend", 0))
        until_counts(service.client, "q", 5, 0, 0)
        work.close()


def test_a_stream_goes_on_when_its_shard_was_killed() -> None:
    with Service(shards=1, frontends=1, env=PATIENT) as service:
        put(service.client, "q", type="queue", lease_ms=3_600_000)
        with Work(service.url, "q", max=2) as work:
            for _ in range(3):
                write(service.client, "q", 1)
                (job,) = work.jobs(1)
                answer = service.client.post(
                    "/v0/topics/q/ack", json={"node": "w", "seqs": [job["$seq"]], "lease_ids": [job["lease_id"]]}
                )
                assert answer.json()["acked"] == 1
                service.wait_healed(service.kill("walshard", 0))


def test_dead_letters_are_in_one_of_the_two_topics_whoever_is_killed() -> None:
    with Service(shards=2, frontends=2, env=PATIENT) as service:
        put(service.client, "q", type="queue", lease_ms=100, max_deliveries=1, dead_letter="dead")
        write(service.client, "q", *range(60))
        poll("all to be handed out", lambda: not claim(service.client, "q", max=100) or None)
        victims = itertools.cycle([("walshard", 0), ("walshard", 1), ("frontend", 0), ("frontend", 1)])

        def all_dead() -> bool:
            try:
                claim(service.client, "q", max=7)
                return bool(state(service.client, "q")["count"] == 0)
            except (httpx.TransportError, AssertionError):
                return False

        for role, index in itertools.islice(victims, 4):
            all_dead()
            service.wait_healed(service.kill(role, index))
        poll("all to be dead letters", all_dead, 90)
        records = diff_records(service.client, "dead", limit=1000)
        assert sorted(int(record.data) for record in records) == list(range(60))


def test_queues_and_cursors_move_to_another_number_of_shards() -> None:
    with Service(shards=1, frontends=1, env=PATIENT) as service:
        names = [f"q{n}" for n in range(6)]
        for name in names:
            put(service.client, name, type="queue", leases_durable=True, lease_ms=3_600_000)
            write(service.client, name, *range(5))
            first = claim(service.client, name, max=3)[0]
            body = {"node": "w", "seqs": [1], "lease_ids": [first["lease_id"]]}
            assert service.client.post(f"/v0/topics/{name}/ack", json=body).json()["acked"] == 1
            assert service.client.put(f"/v0/topics/{name}/cursors/c", json={"from_seq": 3}).status_code == 201
        service.stop()
        service.shards = 3
        service.start()
        for name in names:
            assert counts(service.client, name) == (2, 2, 0)
            assert service.client.get(f"/v0/topics/{name}/cursors/c").json()["cursor_seq"] == 3
            assert seqs(claim(service.client, name, max=9)) == [4, 5]
