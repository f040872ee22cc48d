"""Everything at once for a long time: a service that repeats the same work must not grow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench import machine, wire
from bench.crowd import Client, Writer, put
from bench.follower import Follower

CLASSES = ("ephemeral", "memory", "disk", "fsync")
CONFIG = {"cap_records": 500, "idempotency_window_ms": 2_000}
SAMPLES = 240
FLOOR_OF = 6
"""Samples, of which the least is taken: a cut or a long page is over by then."""
ALLOWED = frozenset({200, 201})
"""After the 429s, which are waited for."""
RECEIVE_BYTES = 65536
"""Receive buffer of a client that is to stall: little enough to be full soon, and as much as a packet of the loopback
holds, or it would go on at a packet in each fifth of a second.
"""
BALLAST = b'{"records":[{"data":"%b"}]}' % (b"x" * 900_000)
BALLASTS = 10
"""Together more than the kernel and a frontend keep for a client that does not read."""
FLOODS = 48
FLOOD_BYTES = 15_000
FLOOD_S = 1.5
FLOOD_EVERY_S = 20.0
FINISH_S = 20.0
QUEUE_CONFIG = {"type": "queue", "lease_ms": 300, "max_deliveries": 3, "dead_letter": "soak.dead", "cap_records": 500}
QUEUES: dict[str, dict[str, Any]] = {"soak.queue": {}, "soak.queue.durable": {"leases_durable": True, "on_ack": "keep"}}
ENDS: list[tuple[str, dict[str, Any]]] = [
    ("ack", {}),
    ("ack", {}),
    ("nack", {"delay_ms": 20}),
    ("extend", {"lease_ms": 200}),
]
"""Requests that a worker may make about a job; it may also make none."""
_JOB = re.compile(rb'data: \{"\$seq":(\d+),.*?"lease_id":"(lease_[0-9a-f]+)"')


class Soak(NamedTuple):
    """The plan. `pids` and `shared_objects` (files and folders of /dev/shm) are those of the service."""

    port: int
    pids: list[int]
    shared_objects: list[Path]
    seconds: float


class State(NamedTuple):
    """Resources of the service at one moment. `descriptors` leaves out those of log files and segments: frontends keep
    these mapped, up to a bound of their own, and their number grows with what is written.
    """

    at_s: float
    anonymous_bytes: dict[int, int]
    """By pid: private memory."""
    shm_bytes: int
    descriptors: int
    threads: int
    segment_files: int = 0
    """Open ones."""


class SoakOutcome(NamedTuple):
    """The result. `statuses` are counted by request; `delivered` are the records that reached the followers, each of
    which got every record or a tombstone for it; `odd` is empty.
    """

    states: list[State]
    statuses: dict[str, dict[int, int]]
    delivered: int
    stalls: int
    """Number of times that one stopped reading for good, and read on."""
    stalled_over: int
    """Tombstones that it got for records that a topic evicted while its stream was not written to."""
    odd: list[str]


def growth_per_min(states: Sequence[State], value: Callable[[State], float]) -> float:
    """Return how much a value grows in a minute over the last two thirds. It takes the least of each few samples, which
    is what is left between two pages or two cuts, and of these the median of the slopes between any two. So neither a
    sawtooth nor a few outliers are taken for growth, and growth is not taken for either.
    """
    settled = states[len(states) // 3 :]
    floors = [min(settled[at : at + FLOOR_OF], key=value) for at in range(0, len(settled), FLOOR_OF)]
    return 60 * statistics.median(
        (value(later) - value(earlier)) / (later.at_s - earlier.at_s)
        for earlier, later in itertools.combinations(floors, 2)
    )


def soak(plan: Soak) -> SoakOutcome:
    """Run the plan in this process."""
    return uvloop.run(_Run(plan).run())


class _Run:
    def __init__(self, plan: Soak) -> None:
        self._plan = plan
        self._statuses: dict[str, Counter[int]] = {}
        self._odd: list[str] = []
        self._states: list[State] = []
        self._followers: list[Follower] = []
        self._stalls = 0
        self._dice = random.Random(6)
        self._end_s = 0.0

    async def run(self) -> SoakOutcome:
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
            actors += [self._follows(topic) for _ in range(3)]
        await put(setting_up, "soak.dead", cap_records=100)
        for queue, config in QUEUES.items():
            await put(setting_up, queue, **QUEUE_CONFIG, **config)
            actors += [self._produces(queue), self._claims(queue), self._claims(queue), self._works(queue)]
        for consistency in ("strictly_at_once", "at_least_once"):
            actors.append(self._reads_by_cursor("soak.disk", consistency))
        router = {"source": "soak.memory", "dest": "soak.copies"}
        await put(setting_up, "soak.copies", **CONFIG)
        answer = await setting_up.ask("PUT", "/v0/routers/soak", json.dumps(router).encode())
        assert answer.status in (200, 201), answer
        actors += [self._reads("soak.copies"), self._follows("soak.copies")]
        actors += [self._makes_brief_topics(n) for n in range(4)]
        actors += [self._makes_brief_watches(topic) for topic in topics]
        await put(setting_up, "soak.ballast", durability="memory", cap_records=20)
        stalling = Follower(self._plan.port, "soak.disk", "soak.ballast", receive_bytes=RECEIVE_BYTES)
        actors.append(self._stops_reading(stalling))
        for n in range(FLOODS):
            await put(setting_up, f"soak.flood.{n}", cap_records=20)
        actors += [self._floods(), self._scrapes(), self._sends_errors(), self._samples()]
        setting_up.close()
        await asyncio.gather(*actors)
        looking = Client(self._plan.port)
        for follower in self._followers:
            await follower.finish(looking, FINISH_S)
            self._odd += follower.odd
        for writer in writers:
            self._odd += writer.odd
            self._statuses.setdefault("write", Counter()).update(writer.statuses)
        statuses = {what: dict(counts) for what, counts in self._statuses.items()}
        delivered = sum(follower.records for follower in self._followers)
        return SoakOutcome(self._states, statuses, delivered, self._stalls, stalling.tombstones, self._odd)

    # -- the actors

    async def _ask(
        self, what: str, client: Client, method: str, path: str, body: Any = None, allowed: frozenset[int] = ALLOWED
    ) -> Any:
        raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            answer = await client.ask(method, path, raw)
            self._statuses.setdefault(what, Counter())[answer.status] += 1
            if answer.status != 429:
                break
            await asyncio.sleep(answer.json["error"]["detail"]["retry_after_ms"] / 1000)
        if answer.status not in allowed:
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

    async def _follows(self, topic: str) -> None:
        """Follow with one session whose stream is cut and opened again and again, and is not always read."""
        client, follower = Client(self._plan.port), Follower(self._plan.port, topic)
        self._followers.append(follower)
        await follower.begin(client)
        client.close()
        while await self._turns(0.1):
            await follower.open()
            await follower.read(self._dice.uniform(0.2, 2))
            await asyncio.sleep(self._dice.uniform(0, 0.5))
            await follower.read(0.2)
            follower.close()

    async def _stops_reading(self, follower: Follower) -> None:
        """Stop until its stream is not written to any more, and the topic has evicted the next record; read on."""
        client = Client(self._plan.port)
        self._followers.append(follower)
        await follower.begin(client)
        await follower.open()
        written = 0
        while await self._turns(1):
            await follower.read(1)
            for _ in range(BALLASTS):
                await self._ask("ballast", client, "POST", "/v0/topics/soak.ballast", BALLAST)
                written += 1
            await asyncio.sleep(3)
            await self._wait_until_behind(client, follower)
            self._stalls += 1
            await follower.read(FINISH_S, partial(follower.has_passed, "soak.ballast", written))
            if follower.next_seq["soak.ballast"] <= written:
                self._odd.append(f"not within {FINISH_S} s: ballast up to {written}, {follower.next_seq} comes next")
                break
        follower.close()
        client.close()

    async def _wait_until_behind(self, client: Client, follower: Follower) -> None:
        """Wait until the topic has evicted the records that the follower has not read, and those on the way to it,
        while it is written to.
        """
        far = 2 * CONFIG["cap_records"]
        while asyncio.get_running_loop().time() < self._end_s:
            head_seq = (await self._ask("state", client, "GET", "/v0/topics/soak.disk"))["head_seq"]
            if head_seq >= follower.next_seq["soak.disk"] + far:
                return
            await asyncio.sleep(0.1)

    async def _makes_brief_watches(self, topic: str) -> None:
        """Make sessions that are used once."""
        while await self._turns(1):
            client, follower = Client(self._plan.port), Follower(self._plan.port, topic)
            await follower.begin(client)
            await follower.open()
            await follower.read(5, partial(getattr, follower, "records"))
            follower.close()
            self._odd += follower.odd
            client.close()

    async def _floods(self) -> None:
        """Write more than fits into the rings, now and then."""
        loop = asyncio.get_running_loop()
        writers = [Writer(self._plan.port, f"soak.flood.{n}", pad=FLOOD_BYTES) for n in range(FLOODS)]
        while loop.time() < self._end_s:  # at once: its connections are there from then on
            await asyncio.gather(*[writer.run(loop.time() + FLOOD_S) for writer in writers])
            if not any(writer.statuses[429] for writer in writers):
                continue  # a writer that was held up brought too little
            await asyncio.sleep(max(0.0, min(FLOOD_EVERY_S, self._end_s - loop.time())))
        for writer in writers:
            self._odd += writer.odd
            self._statuses.setdefault("flood", Counter()).update(writer.statuses)

    async def _makes_brief_topics(self, n: int) -> None:
        """Make topics, write to them, delete from them and delete them; with connections of their own."""
        while await self._turns(0.2):
            client, topic = Client(self._plan.port), f"brief.{n}"
            await self._ask("put", client, "PUT", f"/v0/topics/{topic}", {"durability": self._dice.choice(CLASSES)})
            records = [{"data": "x" * self._dice.randint(1, 20_000), "tag": f"t{k % 3}"} for k in range(20)]
            await self._ask("append", client, "POST", f"/v0/topics/{topic}", {"records": records})
            await self._ask("delete records", client, "POST", f"/v0/topics/{topic}/delete", {"match": "t1"})
            await self._ask("state", client, "GET", f"/v0/topics/{topic}")
            await self._ask("delete topic", client, "DELETE", f"/v0/topics/{topic}")
            client.close()

    async def _produces(self, queue: str) -> None:
        """Write jobs that are due at once, jobs that are due later, and jobs in order."""
        client, number = Client(self._plan.port), 0
        while await self._turns(0.05):
            number += 1
            records: list[dict[str, Any]] = [{"data": n} for n in range(2)]
            records += [{"data": n, "delay_ms": 100 * n} for n in range(2)]
            records += [{"data": "in order", "order_key": f"k{number % 50}"} for _ in range(2)]
            await self._ask("produce", client, "POST", f"/v0/topics/{queue}", {"records": records})
        client.close()

    async def _claims(self, queue: str) -> None:
        """Claim jobs; finish some, give some back, keep some for a while, and forget some."""
        client, node = Client(self._plan.port), f"claims-{self._dice.random()}"
        while await self._turns(0.05):
            claimed = await self._ask(
                "claim", client, "POST", f"/v0/topics/{queue}/claim", {"node": node, "max": self._dice.randint(1, 10)}
            )
            seqs = [job["$seq"] for job in claimed.get("claimed", ())]
            while seqs and self._dice.random() < 0.9:
                verb, more = self._dice.choice(ENDS)
                part, seqs = seqs[:2], seqs[2:]
                body = {"node": node, "seqs": part, **more}
                await self._ask(verb, client, "POST", f"/v0/topics/{queue}/{verb}", body)
        client.close()

    async def _works(self, queue: str) -> None:
        """Open and cut a stream of jobs again and again."""
        client = Client(self._plan.port)
        while await self._turns(0.1):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._plan.port)
            writer.write(f"GET /v0/topics/{queue}/work?node=works&max=2 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._dice.uniform(0.2, 2)):
                    while line := await reader.readline():
                        if (job := _JOB.match(line)) is not None:
                            body = {"node": "works", "seqs": [int(job[1])], "lease_ids": [job[2].decode()]}
                            await self._ask("ack", client, "POST", f"/v0/topics/{queue}/ack", body)
            writer.close()
            # It may have been cut off in the middle of an ack.
            client.close()
            client = Client(self._plan.port)

    async def _reads_by_cursor(self, topic: str, consistency: str) -> None:
        client, path = Client(self._plan.port), f"/v0/topics/{topic}/cursors/{consistency}"
        await self._ask("put cursor", client, "PUT", path, {"consistency": consistency, "persist_every": 10})
        while await self._turns(0.05):
            await self._ask("read cursor", client, "POST", f"{path}/read", {"limit": 100})
        client.close()

    async def _scrapes(self) -> None:
        client = Client(self._plan.port)
        while await self._turns(0.5):
            await self._ask("metrics", client, "GET", "/v0/metrics")
            await self._ask("list", client, "GET", "/v0/topics")
        client.close()

    async def _sends_errors(self) -> None:
        while await self._turns(0.1):
            client = Client(self._plan.port)
            await self._ask("no such topic", client, "GET", "/v0/topics/nowhere", allowed=frozenset({404}))
            await self._ask("no JSON", client, "POST", "/v0/topics/soak.disk", b'{"records":[', frozenset({400}))
            client.close()
            _, half = await asyncio.open_connection("127.0.0.1", self._plan.port)
            half.write(wire.post("/v0/topics/soak.disk", b'{"records":[]}')[:-5])
            half.close()

    async def _samples(self) -> None:
        every_s = self._plan.seconds / SAMPLES
        while asyncio.get_running_loop().time() < self._end_s - every_s:
            await asyncio.sleep(every_s)
            anonymous = {pid: machine.memory_of([pid], []).anonymous for pid in self._plan.pids}
            shm = machine.memory_of([], self._plan.shared_objects).shared_objects
            files = [path for pid in self._plan.pids for path in _open_files(pid)]
            segments = sum("/topics/" in path for path in files)
            descriptors = len(files) - segments - sum(path.endswith(".log") for path in files)
            threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in self._plan.pids)
            self._states.append(State(time.monotonic(), anonymous, shm, descriptors, threads, segments))


def _open_files(pid: int) -> list[str]:
    paths = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            paths.append(os.readlink(entry.path))
    return paths
