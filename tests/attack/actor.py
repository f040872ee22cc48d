"""The base of all clients of the attack: a thread that does one step after the other, and reads by the contract."""

from __future__ import annotations

import itertools
import random
import threading
import time
import traceback
from typing import Final, NamedTuple

from tests.attack.asking import COUNTS, Connection, Facts, Finding, Json, Page, Refused, Unknown, need

RETRY_S: Final = 0.03
SURE_DEADLINE_S: Final = 120.0
LIMITS: Final = (1, 7, 100, 1000)


class Moment(NamedTuple):
    """Counts of what was done to the service so far: parts of it killed, all of it started again, the power lost."""

    kills: int = 0
    restarts: int = 0
    power_losses: int = 0


class World:
    """The clients, what they have found, and what was done to their service."""

    def __init__(self, seed: int, port: int) -> None:
        self.seed = seed
        self.port = port
        self.facts = Facts()
        self.moment = Moment()
        self.going = threading.Event()
        self.ended = threading.Event()
        self.findings: list[str] = []
        self.actors: list[Actor] = []
        self.going.set()


class Actor(threading.Thread):
    """One client, with a model of what the service owes it. `check` is called while nobody does a step."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.world = world
        self.id = name
        self.rng = random.Random(f"{world.seed} {name}")
        self.busy = threading.Lock()
        self.steps = 0
        self._connection = Connection(world.port)
        self._numbers = itertools.count()
        world.actors.append(self)

    def set_up(self) -> None:
        """Make what the steps need."""

    def step(self) -> None:
        """Do one thing."""

    def check(self) -> None:
        """Compare what is there with what was promised."""

    def drain(self) -> None:
        """Take what is left, at the end of the attack."""

    def run(self) -> None:
        while not self.world.ended.is_set():
            if not self.world.going.wait(0.5):
                continue
            try:
                with self.busy:
                    self.step()
                    self.steps += 1
            except (Refused, Unknown):
                time.sleep(RETRY_S)
            except Exception:  # noqa: BLE001 — whatever ends a client is a finding
                self.found("step", traceback.format_exc())
                break
        self._connection.close()

    def found(self, what: str, text: str) -> None:
        """Note a finding."""
        self.world.findings.append(f"{what} of {self.id}: {text[-1800:]}")

    # -- asking

    @property
    def now(self) -> Moment:
        return self.world.moment

    def value(self) -> str:
        """Return a value that nobody else writes."""
        return f"{self.id}#{next(self._numbers)}"

    def record(self, value: str, **more: Json) -> Json:
        """Return a record with this value, of any size."""
        pad = "x" * self.rng.choice([0, 0, 0, 10, 100, 1000, 3000])
        return {"data": {"v": value, "pad": pad}, **more}

    def once(self, method: str, path: str, body: Json = None, *codes: int) -> Json:
        """Ask once. Raise Refused, Unknown."""
        code, answer = self._connection.call(method, path, body)
        need(code in (codes or (200, 201)), self.id, method, path, str(body)[:300], code, answer)
        return answer

    def sure(self, method: str, path: str, body: Json = None, *codes: int) -> Json:
        """Ask until there is an answer; only for requests that may be repeated."""
        end = time.monotonic() + SURE_DEADLINE_S
        while True:
            try:
                return self.once(method, path, body, *codes)
            except (Refused, Unknown):
                if time.monotonic() > end:
                    raise Finding(f"refused for {SURE_DEADLINE_S} s: {method} {path}") from None
                time.sleep(RETRY_S)

    def known(self, method: str, path: str, body: Json = None, *codes: int) -> Json:
        """Ask until it was done. Raise Unknown when nobody knows."""
        while True:
            try:
                return self.once(method, path, body, *codes)
            except Refused:
                time.sleep(RETRY_S)

    # -- reading

    def diff(self, topic: str, seq: int, page: Page, **body: Json) -> Json:
        """Read on behind `seq` into `page`; return the answer, with all that routers owe the topic."""
        while True:
            given = {"from_seq": seq, "limit": self.rng.choice(LIMITS), **body}
            answer = self.sure("POST", f"/v0/topics/{topic}/diff", given)
            if not answer["performance"].get("copies_pending"):
                break
            COUNTS["copies_pending"] += 1
            time.sleep(RETRY_S)
        need(page.epoch in ("", answer["epoch"]), topic, "another epoch", page.epoch, answer["epoch"])
        page.epoch = answer["epoch"]
        page.head_seq, page.durable_seq = answer["head_seq"], answer["durable_seq"]
        need(page.durable_seq <= page.head_seq, topic, "durable above head")
        self.take(topic, seq, page, answer["records"], answer["tombstone"], answer["next_from_seq"])
        return answer

    def take(self, topic: str, seq: int, page: Page, records: Json, tombstone: Json, to_seq: int) -> None:
        """Take what a reader at `seq` was given, up to `to_seq`."""
        at = seq
        if tombstone:
            first, last = tombstone["gap_from"], tombstone["gap_to"]
            need(last >= first > at, topic, "tombstone", tombstone, "at", seq)
            if first > at + 1:
                page.silent.append((at + 1, first - 1))
            page.gaps.append((first, last, tombstone["reason"]))
            at = last
        for record in records:
            found = record["$seq"]
            need(found > at, topic, f"seq {found} after {at}", tombstone)
            if found > at + 1:
                page.silent.append((at + 1, found - 1))
            at = found
            self.world.facts.saw(topic, page.epoch, found, record["data"]["v"])
            page.records[found] = record
        need(to_seq >= at, topic, f"next_from_seq {to_seq} before {at}")
        if to_seq > at:
            page.silent.append((at + 1, to_seq))

    def read(self, topic: str, **body: Json) -> Page:
        """Read a topic from its beginning to its head."""
        page, seq, caught_up = Page(), 0, False
        while not caught_up:
            answer = self.diff(topic, seq, page, **body)
            seq, caught_up = answer["next_from_seq"], answer["caught_up"]
        return page

    def may_lose(self, durability: str, at: Moment) -> bool:
        """Return whether a record of this class that was acknowledged `at` this moment may be gone now."""
        return (
            (durability == "disk" and at.power_losses < self.now.power_losses)
            or (durability == "memory" and at.kills < self.now.kills)
            or (durability == "ephemeral" and at.restarts < self.now.restarts)
        )
