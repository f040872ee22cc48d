"""Clients that write: to topics of each class, with and without keys, to topics that go and come, that change class."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from tests.attack.actor import Actor, Moment, World
from tests.attack.asking import COUNTS, Json, Page, Unknown, need

KEY_AGE_S: Final = 60.0
"""Keys are repeated while they are younger; the service keeps them for two minutes."""
BATCHES: Final = (1, 1, 1, 2, 5, 40)
WEAK: Final = ("disk", "memory", "ephemeral")


class LogWriter(Actor):
    """Writes to a topic of one class, and knows what was acknowledged. `writers` are all that write to the topic."""

    def __init__(self, world: World, durability: str, how: str, topic: str = "", number: int = 0) -> None:
        super().__init__(world, f"log.{how}.{durability}.{number}")
        self.topic = topic or self.id
        self.durability = durability
        self.acked: dict[int, tuple[str, Moment]] = {}
        self.uncertain: list[list[str]] = []
        self.writers: list[LogWriter] = [self]
        self.durable_seq = 0

    def set_up(self) -> None:
        self.sure("PUT", self.path, {"durability": self.durability})

    @property
    def path(self) -> str:
        return f"/v0/topics/{self.topic}"

    def step(self) -> None:
        values = [self.value() for _ in range(self.rng.choice(BATCHES))]
        at = self.now
        answer = self.write(values, {"records": [self.record(value) for value in values]}, at)
        if answer is None:
            return
        first, last = answer["first_seq"], answer["last_seq"]
        need(answer["seqs"] == list(range(first, last + 1)), self.id, answer)
        need(answer["count"] == len(values), self.id, answer)
        self.acked.update((seq, (value, at)) for seq, value in zip(answer["seqs"], values, strict=True))

    def write(self, values: list[str], body: Json, at: Moment) -> Json:
        """Write one batch; return the answer, None when it was refused as it should be."""
        del at
        return self.only_once(values, body)

    def only_once(self, values: list[str], body: Json, *codes: int) -> Json:
        """Write what must not be repeated."""
        try:
            return self.known("POST", self.path, body, *codes)
        except Unknown:
            self.uncertain.append(values)
            raise

    def check(self) -> None:
        if self.writers[0] is not self:
            return
        page = self.read(self.topic)
        need(not page.silent, self.id, "silent holes", page.silent[:5])
        self._check_gaps(page)
        where: dict[str, int] = {}
        for seq, value in zip(page.records, page.values(), strict=True):
            need(value not in where, self.id, f"{value} twice: {where.get(value)} and {seq}")
            where[value] = seq
        unexplained = set(page.records)
        for writer in self.writers:
            for seq, (value, at) in list(writer.acked.items()):
                if seq in page.records:
                    need(page.records[seq]["data"]["v"] == value, self.id, f"seq {seq} is not {value}")
                    unexplained.discard(seq)
                    continue
                where_to_look = f"seq {seq} {value} acknowledged at {at}, now {self.now}, gaps {page.gaps[-5:]}"
                need(self.may_lose(self.durability, at), self.id, "LOST", where_to_look)
                need(seq > self.durable_seq, self.id, "LOST although durable:", where_to_look)
                need(page.reason_at(seq), self.id, "lost without a gap:", where_to_look)
                del writer.acked[seq]
            for values in writer.uncertain:
                seqs = [where[value] for value in values if value in where]
                if seqs:
                    need(seqs == list(range(seqs[0], seqs[0] + len(values))), self.id, "half a write", values[:3], seqs)
                    unexplained -= set(seqs)
        need(not unexplained, self.id, "records of nobody", sorted(unexplained)[:5])
        if self.durability != "ephemeral":
            self.durable_seq = max(self.durable_seq, page.durable_seq)
        COUNTS["records"] += len(page.records)

    def _check_gaps(self, page: Page) -> None:
        if not self.may_lose(self.durability, Moment()):
            need(not page.gaps, self.id, "gaps", page.gaps)
        for gap in page.gaps:
            need(gap[2] in ("lost_tail", "restart", "mixed"), self.id, "gap", gap)


class KeyWriter(LogWriter):
    """Gives each write an idempotency key, and repeats some of them later."""

    def __init__(self, world: World, durability: str) -> None:
        super().__init__(world, durability, "key")
        self._recent: list[tuple[Json, Json, Moment, float]] = []

    def write(self, values: list[str], body: Json, at: Moment) -> Json:
        body["idempotency_key"] = values[0]
        answer = self.sure("POST", self.path, body)
        self._recent = [one for one in self._recent if time.monotonic() - one[3] < KEY_AGE_S][-50:]
        if self._recent and self.rng.random() < 0.15:
            self._repeat(self.rng.randrange(len(self._recent)))
        self._recent.append((body, answer, at, time.monotonic()))
        return answer

    def _repeat(self, number: int) -> None:
        body, former, at, _ = self._recent[number]
        again = self.sure("POST", self.path, body)
        if again["deduped"]:
            need(again["seqs"] == former["seqs"], self.id, "a repeat has other seqs", again, former)
            return
        need(self.may_lose(self.durability, at), self.id, "a key was forgotten", body["idempotency_key"], former, again)
        for seq, record in zip(again["seqs"], body["records"], strict=True):
            self.acked[seq] = (record["data"]["v"], self.now)
        del self._recent[number]


class ProducerWriter(LogWriter):
    """Numbers its writes, and begins a new epoch now and then: the former one is fenced."""

    def __init__(self, world: World, durability: str) -> None:
        super().__init__(world, durability, "producer")
        self._epoch = self._n = 1

    def write(self, values: list[str], body: Json, at: Moment) -> Json:
        fenced = None
        if self.rng.random() < 0.03:
            fenced = {**body, "producer": {"id": "p", "epoch": self._epoch, "n": 10**6}}
            self._epoch, self._n = self._epoch + 1, self.rng.randrange(1, 1000)
        body["producer"] = {"id": "p", "epoch": self._epoch, "n": self._n}
        answer = self.sure("POST", self.path, body)
        self._n += 1
        if fenced is not None:
            refused = self.sure("POST", self.path, fenced, 409)
            need(refused["error"]["code"] == "fenced", self.id, refused)
        if self.rng.random() < 0.1:
            again = self.sure("POST", self.path, body)
            if not again["deduped"]:
                need(self.may_lose(self.durability, at), self.id, "a number was forgotten", answer, again)
                return again
            need(again["seqs"] == answer["seqs"], self.id, "a repeat has other seqs", answer, again)
        return answer


class HeadWriter(LogWriter):
    """Writes only behind the head that it knows, as others do who write to the same topic."""

    def write(self, values: list[str], body: Json, at: Moment) -> Json:
        head_seq = self.sure("GET", self.path)["head_seq"]
        body["if_head_seq"] = head_seq
        answer = self.only_once(values, body, 200, 409)
        if "error" in answer:
            need(answer["error"]["code"] == "head_mismatch", self.id, answer)
            need(answer["error"]["detail"]["head_seq"] > head_seq, self.id, head_seq, answer)
            return None
        need(answer["first_seq"] == head_seq + 1, self.id, head_seq, answer)
        return answer


class Remaker(Actor):
    """Makes a topic, fills it, deletes it, and makes it again."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"again.{number}")
        self._path = f"/v0/topics/{self.id}"
        self._epochs: set[str] = set()
        self._epoch = ""
        self._durability = ""
        self._values: list[str] = []

    def step(self) -> None:
        if not self._epoch:
            self._durability = self.rng.choice(["fsync", "disk", "disk", "ephemeral"])
            self.sure("PUT", self._path, {"durability": self._durability})
            self._epoch = self.sure("GET", self._path)["epoch"]
            need(self._epoch not in self._epochs, self.id, "an epoch twice")
            self._epochs.add(self._epoch)
            self._values = []
            return
        chance = self.rng.random()
        if chance < 0.6:
            value = self.value()
            body = {"records": [self.record(value)], "idempotency_key": value, "create": False}
            self.sure("POST", self._path, body)
            self._values.append(value)
        elif chance < 0.75:
            self.check()
        else:
            self.sure("DELETE", self._path)
            self._epoch = ""

    def check(self) -> None:
        if not self._epoch:
            self.sure("GET", self._path, None, 404)
            return
        page = self.read(self.id)
        need(page.epoch == self._epoch, self.id, "another epoch", page.epoch, self._epoch)
        have = page.values()
        if self.may_lose(self._durability, Moment()):
            need(set(have) <= set(self._values), self.id, "records of another life", have[:3])
        else:
            need(have == self._values, self.id, "has", have[-3:], "wanted", self._values[-3:])


class ClassChanger(Actor):
    """Changes the class of a topic all the time."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"classes.{number}")
        self._durability = "disk"
        self._acked: dict[int, tuple[str, Moment]] = {}
        self._was: list[tuple[Moment, str]] = []

    def set_up(self) -> None:
        self.sure("PUT", f"/v0/topics/{self.id}", {"durability": "disk"})

    def step(self) -> None:
        path = f"/v0/topics/{self.id}"
        if self.rng.random() < 0.15:
            new = self.rng.choice([*WEAK, "fsync"])
            self._note(self._durability, new)
            self.sure("PUT", path, {"durability": new})
            self._durability = new
            self._note(new)
            return
        value = self.value()
        self._note(self._durability)
        at = self.now
        answer = self.sure("POST", path, {"records": [self.record(value)], "idempotency_key": value})
        need(answer["durability"] == self._durability or answer["deduped"], self.id, answer, self._durability)
        self._acked[answer["seqs"][0]] = (value, at)

    def _note(self, *classes: str) -> None:
        self._was += [(self.now, durability) for durability in classes]
        self._was = self._was[-4000:]

    def check(self) -> None:
        page = self.read(self.id)
        need(not page.silent, self.id, "silent", page.silent[:3])
        for seq, (value, at) in list(self._acked.items()):
            if seq in page.records:
                need(page.records[seq]["data"]["v"] == value, self.id, seq, value)
                continue
            reason = page.reason_at(seq)
            need(reason, self.id, f"LOST {seq} {value} without a gap", page.gaps[-4:])
            weak = ("ephemeral",) if reason == "restart" else WEAK
            explained = any(then >= at and c in weak and self.may_lose(c, then) for then, c in self._was)
            need(
                explained,
                self.id,
                f"LOST {seq} {value}: {reason}, acknowledged at {at}, now {self.now}",
                self._was[-6:],
            )
            del self._acked[seq]
        if not self.now.restarts:
            twice = [value for value, count in Counter(page.values()).items() if count > 1]
            need(not twice, self.id, "twice", twice[:3])


class PrefixWriter(Actor):
    """Makes and deletes topics whose names begin with each other's, and lists them by each prefix."""

    NAMES: Final = ("p", "p.", "p.a", "p.a.b", "p.ab", "p:a", "p-a", "pa", "P", "p.a" + "x" * 240)

    def __init__(self, world: World) -> None:
        super().__init__(world, "prefixes")
        self._records: dict[str, int] = {}

    def step(self) -> None:
        name = self.rng.choice(self.NAMES)
        path = f"/v0/topics/{name}"
        if name in self._records and self.rng.random() < 0.2:
            self.sure("DELETE", path)
            del self._records[name]
        elif self.rng.random() < 0.7:
            if name not in self._records:
                self.sure("PUT", path, {"durability": "fsync"})
            value = self.value()
            self.sure("POST", path, {"records": [self.record(value)], "idempotency_key": value})
            self._records[name] = self._records.get(name, 0) + 1
        else:
            self._check_prefix(name)

    def check(self) -> None:
        for name in self.NAMES:
            self._check_prefix(name)

    def _check_prefix(self, prefix: str) -> None:
        found: list[str] = []
        cursor = ""
        while True:
            answer = self.sure("GET", f"/v0/topics?prefix={prefix}&page_size=3&touch=false{cursor}")
            found += [one["topic"] for one in answer["topics"]]
            for one in answer["topics"]:
                if one["topic"] in self._records:
                    need(one["count"] == self._records[one["topic"]], self.id, one, self._records)
            if "next_cursor" not in answer:
                break
            cursor = f"&cursor={answer['next_cursor']}"
        wanted = sorted(name for name in self._records if name.startswith(prefix))
        mine = [name for name in found if name in self.NAMES]
        need(mine == wanted, self.id, "prefix", prefix, "has", mine, "wanted", wanted)
        need(all(name.startswith(prefix) for name in found), self.id, "prefix", prefix, found)
