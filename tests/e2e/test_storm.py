"""SIGKILL of anything, with checkpoints all the time: queues are worked off, topics are capped and deleted from by tag.
What each client was told holds afterwards.

TOPICS_STORM_KILLS sets how many (`make crash`: 60). TOPICS_STORM_SEED=<seed> repeats the clients' decisions.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import pytest

from tests.contract.asking import diff, ok, put, state
from tests.contract.working import claim
from tests.e2e.test_kill_points import verify
from tests.harness import Service, poll

KILLS: Final = int(os.environ.get("TOPICS_STORM_KILLS", "6"))
SEED: Final = int(os.environ.get("TOPICS_STORM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
QUEUES = 6
LOGS = 4
CAP_RECORDS = 5
TAGS = "xyz"
STEPS_BETWEEN_KILLS = 150
RETRY_S = 0.02
CUT_ALL_THE_TIME = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": "100",
    "TOPICS_CHECKPOINT_WAL_BYTES": "64KiB",
    "TOPICS_SEGMENT_MAX_EVENTS": "20",
}


class Client:
    """One thread and what it alone does to one topic; a request is repeated until it is answered."""

    def __init__(self, url: str, topic: str, stop: threading.Event) -> None:
        self.topic = topic
        self.steps = 0
        self.failure: BaseException | None = None
        self._url = url
        self._stop = stop
        self._rng = random.Random(f"{SEED} {topic}")
        self._keys = itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def step(self, http: httpx.Client) -> None:
        raise NotImplementedError

    def append(self, http: httpx.Client, records: list[dict[str, Any]]) -> range:
        """The seqs, whatever died meanwhile: the key makes it one write."""
        body = {"records": records, "idempotency_key": f"{self.topic} {next(self._keys)}"}
        answer = self.answered(lambda: http.post(f"/v0/topics/{self.topic}", json=body))
        return range(answer["first_seq"], answer["last_seq"] + 1)

    def answered(self, ask: Callable[[], httpx.Response]) -> dict[str, Any]:
        while True:
            answer = self.asked(ask)
            if answer is not None:
                return answer
            # Also when all is over: what the last one that was killed had done is known only once it is answered.
            time.sleep(RETRY_S)

    def asked(self, ask: Callable[[], httpx.Response]) -> dict[str, Any] | None:
        """Once; None when nobody knows whether it was done."""
        try:
            response = ask()
        except httpx.TransportError:
            return None
        if response.status_code in (429, 503):
            return None
        return ok(response)

    def _run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=10) as http:
                while not self._stop.is_set():
                    self.step(http)
                    self.steps += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.failure = error


class Worker(Client):
    """Produces jobs, claims them, acknowledges most."""

    def __init__(self, url: str, topic: str, stop: threading.Event) -> None:
        super().__init__(url, topic, stop)
        self.produced: set[int] = set()
        self.acked: set[int] = set()
        self.perhaps: set[int] = set()
        """Acks of which no answer came."""

    def step(self, http: httpx.Client) -> None:
        if self._rng.random() < 0.5:
            self.produced.update(self.append(http, [{"data": n} for n in range(self._rng.randint(1, 4))]))
            return
        body = {"node": "w", "max": self._rng.randint(1, 9)}
        answer = self.answered(lambda: http.post(f"/v0/topics/{self.topic}/claim", json=body))
        jobs = [job["$seq"] for job in answer["claimed"]]
        assert not self.acked & set(jobs), "a job that is done was handed out"
        done = [seq for seq in jobs if self._rng.random() < 0.8]
        left = [seq for seq in jobs if seq not in done]
        if left:
            self.asked(lambda: http.post(f"/v0/topics/{self.topic}/nack", json={"node": "w", "seqs": left}))
        if done:
            acked = self.asked(lambda: http.post(f"/v0/topics/{self.topic}/ack", json={"node": "w", "seqs": done}))
            if acked is None:
                self.perhaps.update(done)
            else:
                self.acked.update(set(done) - set(acked["skipped"]))

    def check(self, http: httpx.Client) -> None:
        """Once nothing is leased any more, every job is there that is not done, and none that is."""

        def drained() -> bool | None:
            rest.update(job["$seq"] for job in claim(http, self.topic, max=1000))
            return len(rest) == state(http, self.topic)["count"] or None

        rest: set[int] = set()
        poll(f"all jobs of {self.topic} to be handed out", drained, 30)
        assert not rest & self.acked, "a job that is done came back"
        assert rest - self.perhaps == self.produced - self.acked - self.perhaps, "a job is lost"


class Writer(Client):
    """Writes tagged records into a topic, which may be capped, and deletes by tag."""

    def __init__(self, url: str, topic: str, stop: threading.Event, cap_records: int) -> None:
        super().__init__(url, topic, stop)
        self.live: dict[int, str] = {}
        self.evicted_to = 0
        self._cap_records = cap_records

    def step(self, http: httpx.Client) -> None:
        if self._rng.random() < 0.7:
            tags = [self._rng.choice(TAGS) for _ in range(self._rng.randint(1, 4))]
            seqs = self.append(http, [{"data": tag, "tag": tag} for tag in tags])
            self.live.update(zip(seqs, tags, strict=True))
            while self._cap_records and len(self.live) > self._cap_records:
                self.evicted_to = next(iter(self.live))
                del self.live[self.evicted_to]
            return
        match = self._rng.choice([*TAGS, "*"])
        # This client alone writes here, so the second deletion finds nothing that the first did not.
        self.answered(lambda: http.post(f"/v0/topics/{self.topic}/delete", json={"match": match}))
        self.live = {seq: tag for seq, tag in self.live.items() if match not in ("*", tag)}

    def check(self, http: httpx.Client) -> None:
        """Check that live records are there, deleted ones are not, and records that a cap took are a tombstone."""
        page = diff(http, self.topic, from_seq=0, limit=1000, include_tags=True)
        assert page["caught_up"]
        assert {record["$seq"]: record["$tag"] for record in page["records"]} == self.live
        tombstone = page["tombstone"]
        assert (tombstone is not None) == (self.evicted_to > 0)
        if tombstone is not None:
            assert tombstone["reason"] == "cap"
            assert self.evicted_to <= tombstone["gap_to"] < min(self.live, default=page["head_seq"] + 1)


@contextmanager
def storm(service: Service, clients: list[Worker | Writer], stop: threading.Event) -> Iterator[None]:
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()
    for client in clients:
        if client.failure is not None:
            raise client.failure


@pytest.mark.timeout(60 + 30 * KILLS)
def test_what_clients_were_told_holds_whatever_is_killed() -> None:
    print(f"TOPICS_STORM_SEED={SEED}")
    chance = random.Random(SEED)
    capped = {f"t{n}": CAP_RECORDS if n % 2 else 0 for n in range(LOGS)}
    with Service(shards=2, frontends=1, env=CUT_ALL_THE_TIME) as service:
        for n in range(QUEUES):
            put(service.client, f"q{n}", type="queue", lease_ms=1000)
        for topic, cap_records in capped.items():
            put(service.client, topic, cap_records=cap_records)
        stop = threading.Event()
        queues = [Worker(service.url, f"q{n}", stop) for n in range(QUEUES)]
        logs = [Writer(service.url, topic, stop, cap_records) for topic, cap_records in capped.items()]
        clients: list[Worker | Writer] = [*queues, *logs]
        with storm(service, clients, stop):
            for _ in range(KILLS):
                before = sum(client.steps for client in clients)
                wanted = before + chance.randrange(STEPS_BETWEEN_KILLS)

                def went_on(wanted: int = wanted) -> bool | None:
                    failed = [client.failure for client in clients if client.failure is not None]
                    if failed:
                        raise failed[0]
                    return sum(client.steps for client in clients) > wanted or None

                poll("clients to get on", went_on, 60)
                if chance.random() < 0.6:
                    service.kill_group()
                    service.start()
                else:
                    role = chance.choice(["walshard", "compactor", "frontend"])
                    service.kill(role, chance.randrange(2) if role == "walshard" else 0)
        for log in logs:
            log.check(service.client)
        for queue in queues:
            queue.check(service.client)
        service.stop()
        verify(service.data_dir)
