"""Everything at once for a long time: a service that does the same work again and again may not grow by it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench import machine, wire
from bench.crowd import Client, Watcher, Writer, put

CLASSES = ("ephemeral", "memory", "disk", "fsync")
CONFIG = {"cap_records": 500, "idempotency_window_ms": 2_000}
SAMPLES = 60
ALLOWED = {200, 201, 400, 404, 409, 415, 429}


class Soak(NamedTuple):
    """`pids` and `shared_objects` (files and folders of /dev/shm) are what the service consists of."""

    port: int
    pids: list[int]
    shared_objects: list[Path]
    seconds: float


class State(NamedTuple):
    """What the service held at one moment; `descriptors` without those of log files: frontends keep these mapped, up to
    a bound of their own, and there are the more of them the more is written.
    """

    at_s: float
    anonymous_bytes: int
    shm_bytes: int
    descriptors: int
    threads: int


class Soaked(NamedTuple):
    """`statuses` of all requests by what was asked; `odd` is empty."""

    states: list[State]
    statuses: dict[str, dict[int, int]]
    delivered: int
    odd: list[str]


def soak(plan: Soak) -> Soaked:
    """Runs the plan in this process."""
    return uvloop.run(_Run(plan).run())


class _Run:
    def __init__(self, plan: Soak) -> None:
        self._plan = plan
        self._statuses: dict[str, Counter[int]] = {}
        self._odd: list[str] = []
        self._states: list[State] = []
        self._delivered = 0
        self._dice = random.Random(6)
        self._end_s = 0.0

    async def run(self) -> Soaked:
        loop = asyncio.get_running_loop()
        setting_up = Client(self._plan.port)
        topics = [f"soak.{durability}" for durability in CLASSES]
        for topic, durability in zip(topics, CLASSES, strict=True):
            await put(setting_up, topic, durability=durability, **CONFIG)
        self._end_s = loop.time() + self._plan.seconds
        writers = [Writer(self._plan.port, topic, pad=200, every_s=0.01) for topic in topics]
        actors: list[Coroutine[Any, Any, None]] = [writer.run(self._end_s) for writer in writers]
        for topic in topics:
            actors += [self._batches(topic), self._reads(topic), self._waits(topic)]
            actors += [self._follows(topic, slow) for slow in (False, False, True)]
        actors += [self._comes_and_goes(n) for n in range(4)]
        actors += [self._scrapes(), self._errs(), self._samples()]
        await asyncio.gather(*actors)
        for writer in writers:
            self._odd += writer.odd
            self._statuses.setdefault("write", Counter()).update(writer.statuses)
        statuses = {what: dict(counts) for what, counts in self._statuses.items()}
        return Soaked(self._states, statuses, self._delivered, self._odd)

    # -- the actors

    async def _ask(self, what: str, client: Client, method: str, path: str, body: Any = None) -> Any:
        raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.ask(method, path, raw)
        self._statuses.setdefault(what, Counter())[answer.status] += 1
        if answer.status not in ALLOWED:
            self._odd.append(f"{what}: {answer.status} {answer.body[:300]!r}")
        return answer.json

    async def _turns(self, every_s: float) -> bool:
        await asyncio.sleep(every_s * self._dice.uniform(0.5, 1.5))
        return asyncio.get_running_loop().time() < self._end_s

    async def _batches(self, topic: str) -> None:
        client, number = Client(self._plan.port), 0
        while await self._turns(0.1):
            number += 1
            records = [{"data": n, "tag": f"t{n % 7}"} for n in range(50)]
            body = {"records": records, "idempotency_key": f"{topic} {number // 2}"}
            await self._ask("batch", client, "POST", f"/v0/topics/{topic}", body)
        client.close()

    async def _reads(self, topic: str) -> None:
        client = Client(self._plan.port)
        from_seq = 0
        while await self._turns(0.05):
            page = await self._ask("diff", client, "POST", f"/v0/topics/{topic}/diff", {"from_seq": from_seq})
            from_seq = 0 if page["caught_up"] else page["next_from_seq"]
        client.close()

    async def _waits(self, topic: str) -> None:
        client = Client(self._plan.port)
        from_seq = 0
        while await self._turns(0.01):
            body = {"from_seq": from_seq, "wait_ms": 300}
            page = await self._ask("long poll", client, "POST", f"/v0/topics/{topic}/diff", body)
            from_seq = page["next_from_seq"]
        client.close()

    async def _follows(self, topic: str, slow: bool) -> None:
        """One session whose stream is cut and opened again and again; a slow one does not always read."""
        client = Client(self._plan.port)
        answer = await client.ask("POST", "/v0/watch", json.dumps({"topics": {topic: {"tail": True}}}).encode())
        loop = asyncio.get_running_loop()
        while await self._turns(0.1):
            _, watcher = await loop.create_connection(lambda: Watcher(topic), "127.0.0.1", self._plan.port)
            watcher.open(answer.json["stream_url"])
            await asyncio.sleep(self._dice.uniform(0.2, 2))
            if slow:
                watcher.stop_reading()
                await asyncio.sleep(self._dice.uniform(0.2, 2))
                watcher.read_on()
                await asyncio.sleep(0.2)
            self._delivered += len(watcher.seqs)
            seqs = list(watcher.seqs)
            if any(later <= earlier for earlier, later in itertools.pairwise(seqs)):
                self._odd.append(f"{topic}: a stream went back")
            watcher.close()
        client.close()

    async def _comes_and_goes(self, n: int) -> None:
        """Topics that are made, written, deleted from, and deleted; connections, too."""
        while await self._turns(0.2):
            client, topic = Client(self._plan.port), f"brief.{n}"
            await self._ask("put", client, "PUT", f"/v0/topics/{topic}", {"durability": self._dice.choice(CLASSES)})
            records = [{"data": "x" * self._dice.randint(1, 20_000), "tag": f"t{k % 3}"} for k in range(20)]
            await self._ask("append", client, "POST", f"/v0/topics/{topic}", {"records": records})
            await self._ask("delete records", client, "POST", f"/v0/topics/{topic}/delete", {"match": "t1"})
            await self._ask("state", client, "GET", f"/v0/topics/{topic}")
            await self._ask("delete topic", client, "DELETE", f"/v0/topics/{topic}")
            client.close()

    async def _scrapes(self) -> None:
        client = Client(self._plan.port)
        while await self._turns(0.5):
            await self._ask("metrics", client, "GET", "/v0/metrics")
            await self._ask("list", client, "GET", "/v0/topics")
        client.close()

    async def _errs(self) -> None:
        while await self._turns(0.1):
            client = Client(self._plan.port)
            await self._ask("no such topic", client, "GET", "/v0/topics/nowhere")
            await self._ask("no JSON", client, "POST", "/v0/topics/soak.disk", b'{"records":[')
            client.close()
            _, half = await asyncio.open_connection("127.0.0.1", self._plan.port)
            half.write(wire.post("/v0/topics/soak.disk", b'{"records":[]}')[:-5])
            half.close()

    async def _samples(self) -> None:
        every_s = self._plan.seconds / SAMPLES
        while asyncio.get_running_loop().time() < self._end_s - every_s:
            await asyncio.sleep(every_s)
            memory = machine.memory_of(self._plan.pids, self._plan.shared_objects)
            descriptors = sum(map(_descriptors, self._plan.pids))
            threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in self._plan.pids)
            self._states.append(State(time.monotonic(), memory.anonymous, memory.shared_objects, descriptors, threads))


def _descriptors(pid: int) -> int:
    count = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            count += not os.readlink(entry.path).endswith(".log")
    return count
