"""A client that makes jobs and works them off under two names, with dead letters that come back."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from tests.attack.actor import Actor, Moment, World
from tests.attack.asking import COUNTS, Json, Unknown, need

LEASE_MS: Final = 1500
DRAIN_S: Final = 40.0
WAITING_MAX: Final = 300
CLOCK_MS: Final = 5


class JobClient(Actor):
    """Knows each job that was made, and each that is done. A seq is never dealt again, a value may be after a kill:
    a move to the dead letters that was cut short leaves a job in both places, and a redrive brings the other one.
    """

    def __init__(self, world: World, durability: str, leases_durable: bool) -> None:
        super().__init__(world, f"queue.{durability}.{int(leases_durable)}")
        self._durability = durability
        self._leases_durable = leases_durable
        self._path = f"/v0/topics/{self.id}"
        self._dead = f"{self.id}.dead"
        self._made: dict[str, Moment] = {}
        self._done: dict[str, Moment] = {}
        self._done_seqs: dict[int, Moment] = {}
        self._perhaps_done: set[str] = set()
        self._held: dict[int, tuple[str, float]] = {}
        """(who has it, until when in ms) of jobs that are leased, by seq."""
        self._lease_ids: set[str] = set()

    def set_up(self) -> None:
        self.sure("PUT", f"/v0/topics/{self._dead}", {"durability": self._durability})
        config = {
            "type": "queue",
            "durability": self._durability,
            "lease_ms": LEASE_MS,
            "leases_durable": self._leases_durable,
            "max_deliveries": 4,
            "dead_letter": self._dead,
        }
        self.sure("PUT", self._path, config)

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.35 and len(self._made) - len(self._done) < WAITING_MAX:
            values = [self.value() for _ in range(self.rng.choice([1, 1, 3, 10]))]
            at = self.now
            more: Json = self.rng.choice([{}, {}, {"delay_ms": 200}, {"order_key": self.rng.choice("kl")}])
            self._made.update(dict.fromkeys(values, at))
            body = {"records": [self.record(value, **more) for value in values], "idempotency_key": values[0]}
            self.sure("POST", self._path, body)
        elif chance < 0.95:
            self._work(self.rng.choice(["n1", "n2"]))
        else:
            self.known("POST", f"{self._path}/redrive", {"from": self._dead, "max": 50})

    def _work(self, node: str) -> None:
        jobs = self.known("POST", f"{self._path}/claim", {"node": node, "max": self.rng.choice([1, 4, 20])})["claimed"]
        seqs = [job["$seq"] for job in jobs]
        need(seqs == sorted(seqs), self.id, "the order of a claim", seqs)
        done: list[Json] = []
        back: list[Json] = []
        for job in jobs:
            self._claimed(job, node)
            chance = self.rng.random()
            if chance < 0.85:
                (done if chance < 0.6 else back).append(job)
        if done and self.rng.random() < 0.2:
            try:
                answer = self.known("POST", f"{self._path}/extend", {**_named(node, done), "lease_ms": 2500})
                self._held.update((int(seq), (node, until_ms)) for seq, until_ms in answer["deadlines"].items())
            except Unknown:
                for job in done:
                    self._held.pop(job["$seq"], None)
        self._end("ack", node, done)
        self._end("nack", node, back)

    def _claimed(self, job: Json, node: str) -> None:
        value, seq = job["data"]["v"], job["$seq"]
        need(value in self._made, self.id, "a job of nobody", value)
        self._not_done(value, seq, "was dealt")
        need(job["lease_id"] not in self._lease_ids, self.id, "a lease id twice", job["lease_id"])
        self._lease_ids.add(job["lease_id"])
        if seq in self._held and self._leases_durable and self._durability == "fsync":
            holder, until_ms = self._held[seq]
            need(time.time() * 1000 >= until_ms - CLOCK_MS, self.id, f"job {seq} of {holder} until {until_ms}, {node}")
        self._held[seq] = (node, job["deadline"])

    def _not_done(self, value: str, seq: int, what: str) -> None:
        """Check that a job which `what` happened to was not done before, but as its class allows."""
        if seq in self._done_seqs:
            at = self._done_seqs.pop(seq)
            need(
                self.may_lose(self._durability, at),
                self.id,
                f"a DONE job {what}: {value}, {seq}, done at {at}, {self.now}",
            )
        elif value in self._done:
            need(self.now.kills, self.id, f"a DONE job {what} with another seq: {value}, {seq}")
        self._done.pop(value, None)

    def _end(self, verb: str, node: str, jobs: list[Json]) -> None:
        if not jobs:
            return
        at = self.now
        body = _named(node, jobs)
        if verb == "nack" and self.rng.random() < 0.3:
            body["delay_ms"] = 300
        for job in jobs:
            self._held.pop(job["$seq"], None)
        try:
            skipped = self.known("POST", f"{self._path}/{verb}", body)["skipped"]
        except Unknown:
            if verb == "ack":
                self._perhaps_done.update(job["data"]["v"] for job in jobs)
            return
        if verb == "ack":
            over = [job for job in jobs if job["$seq"] not in skipped]
            self._done.update((job["data"]["v"], at) for job in over)
            self._done_seqs.update((job["$seq"], at) for job in over)

    def check(self) -> None:
        page, dead = self.read(self.id), self.read(self._dead)
        there = Counter(page.values()) + Counter(dead.values())
        for value, count in there.items():
            need(value in self._made, self.id, "a job of nobody", value)
            need(count == 1 or self.now.kills, self.id, f"{value} is there {count} times")
        for seq, record in page.records.items():
            self._not_done(record["data"]["v"], seq, "is there")
        for value, at in self._made.items():
            if value not in there and value not in self._done and value not in self._perhaps_done:
                lost = self.may_lose(self._durability, at)
                need(lost, self.id, f"LOST job {value} made at {at}, now {self.now}", page.gaps, dead.gaps)
        COUNTS["records"] += len(there)

    def drain(self) -> None:
        self.check()
        end = time.monotonic() + DRAIN_S
        while (state := self.sure("GET", self._path))["count"]:
            need(time.monotonic() < end, self.id, "jobs that nobody gets", state["queue"], state["count"])
            jobs = self.sure("POST", f"{self._path}/claim", {"node": "end", "max": 1000})["claimed"]
            if jobs:
                self.sure("POST", f"{self._path}/ack", {"node": "end", "seqs": [job["$seq"] for job in jobs]})
            else:
                time.sleep(0.1)


def _named(node: str, jobs: list[Json]) -> dict[str, Json]:
    lease_ids = [job["lease_id"] for job in jobs]
    return {"node": node, "seqs": [job["$seq"] for job in jobs], "lease_ids": lease_ids}
