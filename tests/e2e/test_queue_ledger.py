"""Queues while processes are killed, checked by a ledger of all leases: who had which job from when until when, as
which delivery, and what became of it.

TOPICS_LEDGER_KILLS says how many kills. TOPICS_LEDGER_SEED=<seed> repeats the decisions of the clients.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import httpx
import pytest

from tests.contract.asking import diff, ok, put, state
from tests.e2e.load import PATIENT, DecidingClient
from tests.harness import Service, poll

KILLS: Final = int(os.environ.get("TOPICS_LEDGER_KILLS", "3"))
SEED: Final = int(os.environ.get("TOPICS_LEDGER_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
EAGER = PATIENT | {"TOPICS_CHECKPOINT_INTERVAL_MS": "100", "TOPICS_SEGMENT_MAX_EVENTS": "40"}
ROLES = (("walshard", 0), ("walshard", 1), ("frontend", 0), ("compactor", 0), ("frontend", 1))
LEASE_MS = 700
DELIVERIES_MAX = 3
WAITING_MAX = 60
STEP_MS = 120
"""A shard looks at the clock once for all requests that it takes together. Where it could be older, times of the shard
are compared with each other, and those of clients with each other.
"""
CLOCK_MS = 10
"""The wall clock and that by which a shard waits may be so far apart: one of them is adjusted, and both are rounded."""
JOBS_BETWEEN_KILLS = 30
RETRY_S = 0.02


class OpenError(Exception):
    """Nobody knows whether the request was carried out."""


@dataclass(eq=False)
class Lease:
    """One delivery, in wall ms. The shard says when it was granted, until when, and when the job was written."""

    seq: int
    id: str
    number: int
    granted_ms: float
    until_ms: float
    told_ms: float
    """The consumer had the answer then."""
    written_ms: float
    """The shard wrote the job then."""
    ended_ms: float | None = None
    """Its consumer asked for its end then."""
    extended: bool = False
    """An extension is open, so nobody knows when the lease ends."""


@dataclass(eq=False)
class Ledger:
    """All that the clients of one queue know."""

    queue: str
    leases_durable: bool
    shard_kills: list[tuple[float, float]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    made: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    """(value, order key, delay in ms) of each job that was acknowledged."""
    leases: dict[int, list[Lease]] = field(default_factory=lambda: defaultdict(list))
    done: dict[int, float] = field(default_factory=dict)
    """The answer to its ack came then, by seq."""
    perhaps_done: set[int] = field(default_factory=set)
    refused: list[tuple[Lease, float]] = field(default_factory=list)
    """Leases that the service did not know any more, and when it said so."""
    wrong: list[str] = field(default_factory=list)
    checks: int = 0

    def forgets(self, from_ms: float, to_ms: float) -> bool:
        """Return whether a crash may have taken leases and counts of a job in this time."""
        crashed = any(killed < to_ms + STEP_MS and from_ms - STEP_MS < healed for killed, healed in self.shard_kills)
        return crashed and not self.leases_durable

    def need(self, holds: bool, *what: object) -> None:
        self.checks += 1
        if not holds:
            self.wrong.append(" ".join(map(str, (self.queue, *what))))

    def check(self, dead: dict[int, list[dict[str, Any]]]) -> None:
        """Check what happened, once all is over. `dead` are the dead letters by the seq that they had."""
        ids = [lease.id for leases in self.leases.values() for lease in leases]
        self.need(len(ids) == len(set(ids)), "a lease id was used twice")
        for seq, (value, _, delay_ms) in self.made.items():
            leases = sorted(self.leases[seq], key=lambda lease: (lease.granted_ms, lease.number))
            for lease in leases:
                self.need(
                    lease.granted_ms >= lease.written_ms + delay_ms - CLOCK_MS, "before its time", delay_ms, lease
                )
                self.need(1 <= lease.number <= DELIVERIES_MAX, "number of the delivery", lease)
                if seq in self.done:
                    self.need(lease.granted_ms <= self.done[seq] + STEP_MS, "DONE AND BACK", self.done[seq], lease)
            for first, then in itertools.pairwise(leases):
                if not self.forgets(first.granted_ms, then.granted_ms):
                    self.need(first.number < then.number, "not counted up", first, then)
                    has_ended = first.ended_ms is not None and first.ended_ms <= then.told_ms
                    is_over = first.extended or has_ended or first.until_ms <= then.granted_ms + CLOCK_MS
                    self.need(is_over, "LEASED TWICE", first, then)
            letters = dead.get(seq, [])
            self.need(len(letters) <= 1, "more than one dead letter", letters)
            for letter in letters:
                self.need(letter["data"] == value, "another dead letter", letter)
                self.need(letter["meta"]["$dead_letter_deliveries"] == str(DELIVERIES_MAX), letter)
                # Its move may have been cut short, and then the job was ready again, and done.
                done_ms = self.done.get(seq)
                self.need(done_ms is None or self.forgets(letter["$ts"] - LEASE_MS, done_ms), "dead and done", letter)
            self.need(bool(letters) or seq in self.done or seq in self.perhaps_done, "LOST", seq, leases)
        for lease, at_ms in self.refused:
            is_over = lease.until_ms <= at_ms + STEP_MS or self.forgets(lease.granted_ms, at_ms)
            self.need(is_over, "its lease was not over", at_ms, lease)
        self._check_order()

    def _check_order(self) -> None:
        """Check that no job of an order key was handed out after a later one."""
        last: dict[str, Lease] = {}
        for seq in sorted(self.made):
            key = self.made[seq][1]
            for lease in self.leases[seq] if key else ():
                before = last.get(key)
                in_turn = before is None or before.granted_ms <= lease.granted_ms
                self.need(in_turn, "out of order", key, before, lease)
            last |= {key: max(self.leases[seq], key=lambda lease: lease.granted_ms)} if self.leases[seq] else {}


class Asker(DecidingClient):
    """A client of one queue, which takes one step after the other."""

    def __init__(self, url: str, ledger: Ledger, name: str) -> None:
        super().__init__(url, f"{ledger.queue} {name}", SEED)
        self.ledger = ledger
        self._http: httpx.Client

    def work(self, http: httpx.Client) -> None:
        self._http = http
        while not self._stop_asked.is_set():
            self.step()

    @abstractmethod
    def step(self) -> None:
        """Make jobs, or claim and end some."""

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._http.post(f"/v0/topics/{self.ledger.queue}{path}", json=body)
        except httpx.TransportError:
            raise OpenError from None
        if answer.status_code in (429, 503):
            raise OpenError
        return ok(answer)


class Producer(Asker):
    """Makes jobs, some with an order key or a delay; a key makes each write one write, whatever is killed."""

    numbers = 0

    def step(self) -> None:
        ledger = self.ledger
        if len(ledger.made) - len(ledger.done) > WAITING_MAX:
            self._stop_asked.wait(RETRY_S)
            return
        records, delays = list[dict[str, Any]](), list[int]()
        for _ in range(self.rng.choice((1, 1, 2, 8))):
            self.numbers += 1
            delays.append(self.rng.choice((0, 0, 0, 0, 50, 400)))
            record = {"data": f"{ledger.queue}.{self.numbers}", "order_key": self.rng.choice("kl")}
            if self.rng.random() < 0.5:
                del record["order_key"]
            records.append(record | ({"delay_ms": delays[-1]} if delays[-1] else {}))
        body = {"records": records, "idempotency_key": records[0]["data"]}
        while True:
            try:
                seqs = self.ask("", body)["seqs"]
                break
            except OpenError:
                time.sleep(RETRY_S)
        with ledger.lock:
            for seq, record, delay_ms in zip(seqs, records, delays, strict=True):
                ledger.made[seq] = (record["data"], record.get("order_key", ""), delay_ms)


class Consumer(Asker):
    """Claims jobs, keeps some for a while, and ends most of their leases in one way or another."""

    def step(self) -> None:
        lease_ms = self.rng.choice((150, 300, LEASE_MS))
        try:
            body = {"node": self.name, "max": self.rng.choice((1, 2, 5, 20)), "lease_ms": lease_ms}
            jobs = self.ask("/claim", body)["claimed"]
        except OpenError:
            self._stop_asked.wait(RETRY_S)
            return
        seqs = [job["$seq"] for job in jobs]
        self.ledger.need(seqs == sorted(set(seqs)), "order of a claim", seqs)
        told_ms = _now_ms()
        leases = [
            Lease(job["$seq"], job["lease_id"], job["deliveries"], until_ms - lease_ms, until_ms, told_ms, job["$ts"])
            for job, until_ms in ((job, job["deadline"]) for job in jobs)
        ]
        with self.ledger.lock:
            for lease in leases:
                self.ledger.leases[lease.seq].append(lease)
        if not leases or self.rng.random() < 0.3:
            self._stop_asked.wait(self.rng.random() * 0.3)
        if leases and self.rng.random() < 0.2:
            self._extend(leases)
        acked = [lease for lease in leases if self.rng.random() < 0.6]
        self._end("/ack", acked)
        self._end("/nack", [lease for lease in leases if lease not in acked and self.rng.random() < 0.6])

    def _body(self, leases: list[Lease]) -> dict[str, Any]:
        return {"node": self.name, "seqs": [one.seq for one in leases], "lease_ids": [one.id for one in leases]}

    def _extend(self, leases: list[Lease]) -> None:
        try:
            answer = self.ask("/extend", self._body(leases) | {"lease_ms": LEASE_MS})
        except OpenError:
            for lease in leases:
                lease.extended = True
            return
        at_ms = _now_ms()
        for lease in leases:
            until_ms = answer["deadlines"].get(str(lease.seq))
            if until_ms is None:
                self.ledger.refused.append((lease, at_ms))
            else:
                lease.until_ms = until_ms

    def _end(self, path: str, leases: list[Lease]) -> None:
        if not leases:
            return
        asked_ms = _now_ms()
        for lease in leases:
            lease.ended_ms = asked_ms
        ledger, seqs = self.ledger, {lease.seq for lease in leases}
        try:
            skipped = set(self.ask(path, self._body(leases))["skipped"])
        except OpenError:
            if path == "/ack":
                ledger.perhaps_done |= seqs
            return
        at_ms = _now_ms()
        ledger.refused += [(lease, at_ms) for lease in leases if lease.seq in skipped and not lease.extended]
        if path == "/ack":
            with ledger.lock:
                for seq in seqs - skipped:
                    ledger.need(seq not in ledger.done, "done twice", seq)
                    ledger.done[seq] = at_ms


def _now_ms() -> float:
    return time.time() * 1000


def _dead_letters(http: httpx.Client, topic: str) -> Iterator[dict[str, Any]]:
    from_seq, is_over = 0, http.get(f"/v0/topics/{topic}").status_code == 404
    while not is_over:
        page = diff(http, topic, from_seq=from_seq, limit=1000)
        yield from page["records"]
        from_seq, is_over = page["next_from_seq"], page["caught_up"]


@pytest.mark.parametrize(
    "queues",
    [[("fsync", True), ("disk", False)], [("ephemeral", True), ("memory", False)]],
    ids=["fsync durable, disk", "ephemeral durable, memory"],
)
def test_each_job_is_one_consumers_at_a_time_and_comes_to_one_end(queues: list[tuple[str, bool]]) -> None:
    print(f"TOPICS_LEDGER_SEED={SEED}")
    kills = list[tuple[float, float]]()
    with Service(env=EAGER) as service:
        ledgers = [Ledger(f"{durability}.{durable}", durable, kills) for durability, durable in queues]
        for ledger, (durability, durable) in zip(ledgers, queues, strict=True):
            config = {"durability": durability, "leases_durable": durable, "lease_ms": LEASE_MS}
            dead = {"max_deliveries": DELIVERIES_MAX, "dead_letter": f"{ledger.queue}.dead"}
            put(service.client, ledger.queue, type="queue", **config, **dead)
        producers = [Producer(service.url, ledger, "makes") for ledger in ledgers]
        consumers = [Consumer(service.url, ledger, f"w{n}") for ledger in ledgers for n in range(3)]
        clients: list[Asker] = [*producers, *consumers]
        for client in clients:
            client.start()
        for role, index in itertools.islice(itertools.cycle(ROLES), KILLS):
            wanted = {ledger.queue: len(ledger.done) + JOBS_BETWEEN_KILLS for ledger in ledgers}
            poll("all to go on", partial(_all_have_done, ledgers, wanted), 60)
            killed_ms = _now_ms()
            pid = service.kill(role, index)
            if role == "walshard":
                kills.append((killed_ms, float("inf")))
            service.wait_healed(pid)
            if role == "walshard":
                kills[-1] = (killed_ms, _now_ms())
        for producer in producers:
            producer.stop()

        def all_are_over() -> bool:
            for client in clients:
                client.raise_failure()
            return not any(_left(service, ledger) for ledger in ledgers)

        poll("all jobs to be over", all_are_over, 60, 0.1)
        for consumer in consumers:
            consumer.stop()
        for client in clients:
            client.raise_failure()
        for ledger in ledgers:
            letters = defaultdict[int, list[dict[str, Any]]](list)
            for letter in _dead_letters(service.client, f"{ledger.queue}.dead"):
                letters[int(letter["meta"]["$dead_letter_src_seq"])].append(letter)
            ledger.check(letters)
            handed_out = Counter(len(leases) for leases in ledger.leases.values())
            print(f"{ledger.queue}: {len(ledger.made)} jobs, {dict(handed_out)}, {ledger.checks} checks")
            assert not ledger.wrong, ledger.wrong[:5]


def _left(service: Service, ledger: Ledger) -> int:
    return int(state(service.client, ledger.queue)["count"])


def _all_have_done(ledgers: list[Ledger], wanted: dict[str, int]) -> bool:
    return all(len(ledger.done) >= wanted[ledger.queue] for ledger in ledgers)
