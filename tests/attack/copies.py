"""Clients whose records go to other topics: through routers, around a cycle, in transactions."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from tests.attack.actor import RETRY_S, Actor, Moment, World
from tests.attack.asking import COUNTS, Finding, Json, Page, need

SETTLE_S: Final = 20.0
ROUNDS: Final = 8
"""Times that a record goes around a cycle."""


class RouterClient(Actor):
    """Writes to a source. One dest has all of it, one a part, one is `fsync`, one ends a chain. It writes to
    the first of them itself, too.
    """

    def __init__(self, world: World, guarantee: str) -> None:
        super().__init__(world, f"routed.{guarantee}")
        self._guarantee = guarantee
        self._source, self._all, self._part, self._chain, self._fsync = (
            f"{self.id}.{name}" for name in ("source", "all", "part", "chain", "fsync")
        )
        self._order: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._direct: dict[str, Moment] = {}

    def set_up(self) -> None:
        for topic in (self._source, self._all, self._part, self._chain):
            self.sure("PUT", f"/v0/topics/{topic}", {})
        self.sure("PUT", f"/v0/topics/{self._fsync}", {"durability": "fsync"})
        edges = (
            (self._source, self._all, None),
            (self._source, self._part, "a*"),
            (self._source, self._fsync, None),
            (self._all, self._chain, None),
        )
        for number, (source, dest, match) in enumerate(edges):
            body = {"source": source, "dest": dest, "filter": match, "guarantee": self._guarantee}
            self.sure("PUT", f"/v0/routers/{self.id}.{number}", body)

    def step(self) -> None:
        if self.rng.random() < 0.1:
            value, at = "d" + self.value(), self.now
            dest = self.rng.choice([self._all, self._fsync])
            self.sure("POST", f"/v0/topics/{dest}", {"records": [self.record(value)], "idempotency_key": value})
            if dest == self._all:
                self._direct[value] = at
            return
        values = [self.value() for _ in range(self.rng.choice([1, 1, 4, 30]))]
        for value in values:
            self._tags[value] = self.rng.choice(["a1", "a2", "b"])
            self._order[value] = len(self._order)
        records = [self.record(value, tag=self._tags[value]) for value in values]
        self.sure("POST", f"/v0/topics/{self._source}", {"records": records, "idempotency_key": values[0]})
        if self.rng.random() < 0.1:
            last = _copies(self.read(self._all))[-1]
            need(last == values[-1], self.id, "a read of the dest is behind", last, values[-1])

    def check(self) -> None:
        source = self.read(self._source)
        live = source.values()
        part = [value for value in live if self._tags[value].startswith("a")]
        for dest, wanted in ((self._all, live), (self._part, part), (self._fsync, live), (self._chain, live)):
            page = self.read(dest)
            need(not page.silent, self.id, dest, "silent", page.silent[:3])
            if self.now.power_losses:
                self._check_after_power_loss(dest, page, wanted)
            else:
                need(not page.gaps, self.id, dest, "gaps", page.gaps)
                same(f"{self.id} {dest}", _copies(page), wanted)
            COUNTS["records"] += len(page.records)
            if dest == self._all:
                values = set(page.values())
                for value, at in list(self._direct.items()):
                    if value not in values:
                        need(self.may_lose("disk", at), self.id, f"LOST {value}, acknowledged at {at}")
                        del self._direct[value]

    def _check_after_power_loss(self, dest: str, page: Page, wanted: list[str]) -> None:
        """Check that what lives in the source is in the dest, in order. A dest of a dest may have lost copies too."""
        have = _copies(page)
        there = set(have)
        missing = [value for value in wanted if value not in there]
        need(not missing, self.id, dest, f"has not {len(missing)} that live in the source", missing[:3], page.gaps)
        if dest == self._chain:
            return
        twice = [value for value, count in Counter(have).items() if count > 1]
        need(not twice, self.id, dest, "twice", twice[:5])
        need(have == sorted(have, key=self._order.__getitem__), self.id, dest, "order")


def _copies(page: Page) -> list[str]:
    """Return what routers copied, without what was written to the dest itself."""
    return [value for value in page.values() if not value.startswith("d")]


def same(what: str, have: list[str], wanted: list[str]) -> None:
    """Check that two lists are the same, and say where they begin to differ."""
    COUNTS["checks"] += 1
    if have != wanted:
        pairs = enumerate(zip(have, wanted, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(have), len(wanted)))
        found = f"at {at} of {len(have)} and {len(wanted)}: has {have[at : at + 4]}, wanted {wanted[at : at + 4]}"
        raise Finding(f"{what}: {found}")


class CycleClient(Actor):
    """Writes to one of two topics that copy each other."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "cycle")
        self._made: dict[str, Moment] = {}

    def set_up(self) -> None:
        self.sure("PUT", "/v0/routers/c1", {"source": "cyc.x", "dest": "cyc.y", "allow_cycle": True})
        self.sure("PUT", "/v0/routers/c2", {"source": "cyc.y", "dest": "cyc.x", "allow_cycle": True})

    def step(self) -> None:
        value, at = self.value(), self.now
        self.sure("POST", "/v0/topics/cyc.x", {"records": [self.record(value)], "idempotency_key": value})
        self._made[value] = at
        if self.rng.random() < 0.1:
            answer = self.sure("PUT", "/v0/routers/c3", {"source": "cyc.y", "dest": "cyc.x"}, 409)
            need(answer["error"]["code"] == "router_cycle", answer)
            answer = self.sure("PUT", "/v0/routers/c4", {"source": "elsewhere", "dest": "cyc.x"}, 409)
            need(answer["error"]["detail"]["reason"] == "router_dest_fan_in", answer)
        time.sleep(0.05)

    def check(self) -> None:
        end = time.monotonic() + SETTLE_S
        while True:
            x, y = (Counter(self.read(topic).values()) for topic in ("cyc.x", "cyc.y"))
            unfinished = [value for value in self._made if not self._is_around(value, x[value], y[value])]
            if not unfinished:
                break
            counts = [(value, x[value], y[value], self._made[value]) for value in unfinished[:5]]
            need(time.monotonic() < end, self.id, "has not gone around", counts, self.now)
            time.sleep(RETRY_S)
        for value in x | y:
            # A power loss may have a record copied again, and a client that had no answer write it again.
            losses = self.now.power_losses - self._made.get(value, Moment()).power_losses
            need(max(x[value], y[value]) <= ROUNDS * (1 + 2 * losses), self.id, "too many", value, x[value], y[value])

    def _is_around(self, value: str, x: int, y: int) -> bool:
        """Return whether a record was copied as it should be."""
        if self.may_lose("disk", self._made[value]):
            return True
        return (x, y) == (ROUNDS, ROUNDS) or bool(self.now.power_losses and x and y)


class TransactionClient(Actor):
    """Commits batches over topics of several shards: all of one or nothing, once, in order."""

    def __init__(self, world: World, durability: str) -> None:
        super().__init__(world, f"txn.{durability}")
        self._topics = [f"{self.id}.t{number}" for number in range(4)]
        self._durability = durability
        self._batch = 0
        self._committed: dict[str, list[str]] = {topic: [] for topic in self._topics}

    def set_up(self) -> None:
        for topic in self._topics:
            self.sure("PUT", f"/v0/topics/{topic}", {"durability": self._durability})

    def step(self) -> None:
        batch = self._batch + self.rng.choice([1, 1, 1, 5])
        stages: list[str] = []
        staged: dict[str, list[str]] = {}
        for topic in self.rng.sample(self._topics, self.rng.randrange(1, 5)):
            for _ in range(self.rng.choice([1, 1, 2])):
                values = [f"{batch}/{self.value()}" for _ in range(self.rng.choice([1, 3, 30]))]
                body: Json = {"txn": f"{batch}", "records": [self.record(value) for value in values]}
                stages.append(self.sure("POST", f"/v0/stage/{topic}", body)["stage"])
                staged.setdefault(topic, []).extend(values)
        if self.rng.random() < 0.15:
            for topic in staged:
                self.sure("DELETE", f"/v0/stage/{topic}?txn={batch}")
            return
        commit = {"batch": batch, "stages": stages}
        answer = self.sure("POST", f"/v0/txn/{self.id}/commit", commit)
        need(answer["last_batch"] == batch, self.id, answer)
        self._batch = batch
        for topic, values in staged.items():
            self._committed[topic] += values
        if self.rng.random() < 0.2:
            answer = self.sure("POST", f"/v0/txn/{self.id}/commit", commit)
            need(answer["duplicate"], self.id, answer)
            need(not answer["count"], self.id, answer)
        if self.rng.random() < 0.2:
            for topic, values in staged.items():
                same(f"{self.id} {topic}, just committed", self.read(topic).values()[-len(values) :], values)

    def check(self) -> None:
        last_batch = self.sure("GET", f"/v0/txn/{self.id}")["last_batch"]
        need((last_batch or 0) == self._batch, self.id, "last_batch", last_batch, self._batch)
        for topic in self._topics:
            page = self.read(topic)
            need(not page.silent, self.id, topic, "silent")
            same(f"{self.id} {topic}, gaps {page.gaps[-3:]}", page.values(), self._committed[topic])
            COUNTS["records"] += len(page.records)
