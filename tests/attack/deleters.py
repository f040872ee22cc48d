"""Clients that delete, and topics that lose records by caps and by ttl."""

from __future__ import annotations

import time
from typing import Final

from tests.attack.actor import Actor, Moment, World
from tests.attack.asking import COUNTS, Finding, Json, need

TAGS: Final = ("a:1", "a:2", "b:1", "b:22", "")
MATCHES: Final = ("a:*", "b:*", "a:1", ["tag", "Eq", "b:1"], ["tag", "Glob", "b:2*"], None)
TTL_MS: Final = 3000
CLOCK_MS: Final = 100
"""The most that the clocks of a request and of its answer may differ by."""


def fits(match: Json, before_seq: int, seq: int, tag: str) -> bool:
    """Return whether a delete takes this record."""
    if before_seq and seq >= before_seq:
        return False
    if not match:
        return True
    pattern = match[2] if isinstance(match, list) else match
    return bool(tag) and (tag.startswith(pattern[:-1]) if pattern.endswith("*") else tag == pattern)


class Deleter(Actor):
    """The only one who writes to a topic and deletes from it; it knows each record that lives."""

    def __init__(self, world: World, durability: str, cap_records: int = 0) -> None:
        super().__init__(world, f"del.{durability}.{cap_records}")
        self._durability = durability
        self._cap_records = cap_records
        self._live: dict[int, tuple[str, str]] = {}
        self._evicted_seq = 0
        self._power_losses = 0
        self._path = f"/v0/topics/{self.id}"

    def set_up(self) -> None:
        self.sure("PUT", self._path, {"durability": self._durability, "cap_records": self._cap_records})

    def _evict(self) -> None:
        while self._cap_records and len(self._live) > self._cap_records:
            self._evicted_seq = next(iter(self._live))
            del self._live[self._evicted_seq]

    def step(self) -> None:
        self._note_power_loss()
        chance = self.rng.random()
        if chance < 0.65:
            values = [(self.value(), self.rng.choice(TAGS)) for _ in range(self.rng.choice([1, 2, 4, 30]))]
            records = [self.record(value, **({"tag": tag} if tag else {})) for value, tag in values]
            answer = self.sure("POST", self._path, {"records": records, "idempotency_key": values[0][0]})
            self._live.update(zip(answer["seqs"], values, strict=True))
            self._evict()
        elif chance < 0.9:
            self._delete()
        elif chance < 0.93 and self._cap_records:
            self._cap_records = self.rng.choice([5, 20, 60])
            self.set_up()
            self._evict()
        else:
            self.check()

    def _delete(self) -> None:
        match: Json = self.rng.choice(MATCHES)
        before_seq = 0
        if self._live and self.rng.random() < 0.3:
            before_seq = self.rng.choice(list(self._live)) + self.rng.choice([0, 1])
        if match is None and not before_seq:
            return
        body = ({"match": match} if match else {}) | ({"before_seq": before_seq} if before_seq else {})
        self.sure("POST", f"{self._path}/delete", body)
        self._live = {
            seq: (value, tag) for seq, (value, tag) in self._live.items() if not fits(match, before_seq, seq, tag)
        }

    def _records(self) -> dict[int, tuple[str, str]]:
        records = self.read(self.id, include_tags=True).records
        return {seq: (record["data"]["v"], record.get("$tag", "")) for seq, record in records.items()}

    def _note_power_loss(self) -> None:
        """Take what is there for what should be: a power loss may have taken records, and deletes."""
        if self._durability != "fsync" and self._power_losses != self.now.power_losses:
            self._power_losses = self.now.power_losses
            self._live = self._records()

    def check(self) -> None:
        self._note_power_loss()
        page = self.read(self.id, include_tags=True)
        if self._durability != "fsync" and self._power_losses != self.now.power_losses:
            return
        have = {seq: (record["data"]["v"], record.get("$tag", "")) for seq, record in page.records.items()}
        if have != self._live:
            back = [one for one in have.items() if one[0] not in self._live][:5]
            lost = [one for one in self._live.items() if one[0] not in have][:5]
            raise Finding(f"{self.id}: deleted and there {back}, LOST {lost}, gaps {page.gaps[-3:]}, now {self.now}")
        state = self.sure("GET", self._path)
        need(state["count"] == len(have), self.id, "count", state["count"], len(have))
        need(state["earliest_seq"] == min(have, default=state["head_seq"] + 1), self.id, "earliest", state)
        if self._evicted_seq:
            told = max((last for _, last, _ in page.gaps), default=0)
            need(told >= self._evicted_seq, self.id, "no tombstone", page.gaps, self._evicted_seq)
        elif not self.may_lose(self._durability, Moment()):
            need(not page.gaps, self.id, "tombstone", page.gaps)
        COUNTS["records"] += len(have)


class Expirer(Actor):
    """Writes to a topic with a ttl: nothing is read after its time, and nothing is missing before."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "ttl")
        self._mine: list[tuple[str, float]] = []

    def set_up(self) -> None:
        self.sure("PUT", "/v0/topics/ttl", {"ttl_ms": TTL_MS, "durability": "fsync"})

    def step(self) -> None:
        value, sent_s = self.value(), time.time()
        self.sure("POST", "/v0/topics/ttl", {"records": [self.record(value)], "idempotency_key": value})
        self._mine = [*self._mine, (value, sent_s)][-2000:]
        if self.rng.random() < 0.1:
            self.check()
        time.sleep(0.02)

    def check(self) -> None:
        began_s = time.time()
        page = self.read("ttl")
        ended_s = time.time()
        for record in page.records.values():
            need(record["$ts"] >= began_s * 1000 - TTL_MS - CLOCK_MS, "an expired record", record["$ts"], began_s)
        values = set(page.values())
        for value, sent_s in self._mine:
            if (ended_s - sent_s) * 1000 < TTL_MS - CLOCK_MS:
                need(value in values, f"{value}, {ended_s - sent_s} s old, has expired", page.gaps[-2:])
