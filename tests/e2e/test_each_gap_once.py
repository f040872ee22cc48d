"""Caps pass readers of every kind, beside deletions that were asked for, while records move to segments and to the cold
tier and processes are killed: each reader is told of each loss once, and of nothing else.

TOPICS_GAPS_SEED=<seed> repeats the decisions.
"""

from __future__ import annotations

import os
import random
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import httpx

from tests.contract.asking import diff, ok, put, state
from tests.contract.socket_client import Socket
from tests.contract.stream import Stream, position_id, watch
from tests.e2e.load import PATIENT, REQUEST_TIMEOUT_S, DecidingClient
from tests.harness import Service, tiered_service

SEED: Final = int(os.environ.get("TOPICS_GAPS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
ROUNDS = 4
STEPS = 25
CAPS = {"small": 5, "large": 40}
KILLED = (("walshard", 0), ("compactor", 0), ("walshard", 1))
LAST = "the last one"
FRAMES_MAX = 12
PAUSE_S = 0.3


class Capped:
    """A topic and what became of each of its records. One thread alone changes it."""

    def __init__(self, name: str, cap_records: int) -> None:
        self.name = name
        self.head_seq = 0
        self.live: dict[int, tuple[str, str]] = {}
        """(tag, node) by seq."""
        self.nodes: dict[int, str] = {}
        self.lost: set[int] = set()
        self.deleted: set[int] = set()
        self._cap_records = cap_records

    def write(self, http: httpx.Client, rng: random.Random) -> None:
        made = [(rng.choice(("", "a:1", "a:2", "b")), rng.choice(("", "me"))) for _ in range(rng.choice((1, 1, 3, 20)))]
        self._write(http, [{"data": "x" * rng.choice((1, 3000)), "tag": tag, "node": node} for tag, node in made])

    def write_last(self, http: httpx.Client) -> None:
        """Write more than the topic may hold, at once: each reader is told of a gap, whatever the seed has deleted."""
        self._write(http, [{"data": data, "tag": "", "node": ""} for data in ["x"] * self._cap_records + [LAST]])

    def _write(self, http: httpx.Client, records: list[dict[str, str]]) -> None:
        answer = ok(http.post(f"/v0/topics/{self.name}", json={"records": records}))
        assert answer["first_seq"] == self.head_seq + 1
        for record in records:
            self._take(record["tag"], record["node"])

    def _take(self, tag: str, node: str) -> None:
        self.head_seq += 1
        self.live[self.head_seq], self.nodes[self.head_seq] = (tag, node), node
        if len(self.live) > self._cap_records:
            oldest = next(iter(self.live))
            del self.live[oldest]
            self.lost.add(oldest)

    def delete(self, http: httpx.Client, rng: random.Random) -> None:
        before_seq = rng.randint(max(1, self.head_seq - 10), self.head_seq + 1)
        match = rng.choice(("", "a:*", "b"))
        hit = [
            seq
            for seq, (tag, _) in self.live.items()
            if (seq < before_seq or match) and (not match or (tag.startswith("a:") if match == "a:*" else tag == match))
        ]
        body = {"match": match} if match else {"before_seq": before_seq}
        assert ok(http.post(f"/v0/topics/{self.name}/delete", json=body))["deleted"] == len(hit)
        for seq in hit:
            del self.live[seq]
        self.deleted.update(hit)

    def check(self, http: httpx.Client, rng: random.Random) -> None:
        """Check the state, and the one tombstone and the records of a read from anywhere."""
        now = state(http, self.name)
        earliest_seq = next(iter(self.live), self.head_seq + 1)
        assert (now["head_seq"], now["earliest_seq"], now["count"]) == (self.head_seq, earliest_seq, len(self.live))
        from_seq = rng.randint(0, self.head_seq)
        page = diff(http, self.name, from_seq=from_seq, limit=1000)
        gap = page["tombstone"]
        is_lost = from_seq < max(self.lost, default=0)
        assert (gap and (gap["gap_from"], gap["gap_to"])) == ((from_seq + 1, earliest_seq - 1) if is_lost else None)
        assert [record["$seq"] for record in page["records"]] == [seq for seq in self.live if seq > from_seq]


class Told(DecidingClient):
    """A reader of one topic, which keeps what it was told, and goes on where it was after each pause."""

    def __init__(self, service: Service, topic: Capped, node: str, number: int) -> None:
        super().__init__(service.url, f"{type(self).__name__} {number} of {topic.name} {node}", SEED)
        self.topic = topic
        self.seq = 0
        self.got: set[int] = set()
        self.gaps: list[tuple[int, int]] = []
        self._service = service
        self._node = node
        self._is_over = False

    def work(self, http: httpx.Client) -> None:
        self.set_up(http)
        while not self._is_over:
            for _ in self.pages(http):
                if self._is_over:
                    break
            self._stop_asked.wait(self.rng.random() * PAUSE_S)

    def set_up(self, http: httpx.Client) -> None:
        pass

    @abstractmethod
    def pages(self, http: httpx.Client) -> Iterator[None]:
        """Read on, and yield after each page."""

    @property
    def options(self) -> dict[str, Any]:
        return {"limit": self.rng.choice((1, 7, 0)), "node": [self._node] if self._node else []}

    def tell(self, page: dict[str, Any], gap: dict[str, Any] | None, to_seq: int) -> None:
        if gap is not None:
            assert self.seq < gap["gap_from"] <= gap["gap_to"], (self.seq, gap)
            self.gaps.append((gap["gap_from"], gap["gap_to"]))
            self.seq = gap["gap_to"]
        for record in page.get("records", ()):
            assert record["$seq"] > self.seq, (self.seq, record)
            self.seq = record["$seq"]
            self.got.add(self.seq)
            self._is_over |= record["data"] == LAST
        self.seq = max(self.seq, to_seq)

    def check(self) -> None:
        topic = self.topic
        gapped = [seq for first, last in self.gaps for seq in range(first, last + 1)]
        assert len(gapped) == len(set(gapped)), "told once"
        assert not self.got.intersection(gapped), "nothing of a gap comes"
        for first, last in self.gaps:
            assert topic.lost.intersection(range(first, last + 1)), f"nothing was lost from {first} to {last}"
        untold = set(range(1, topic.head_seq + 1)) - self.got - set(gapped) - topic.deleted
        silent = [seq for seq in sorted(untold) if not self._node or topic.nodes[seq] != self._node]
        assert not silent, "neither here nor in a gap"


class Poller(Told):
    def pages(self, http: httpx.Client) -> Iterator[None]:
        for _ in range(self.rng.randint(1, FRAMES_MAX)):
            page = diff(http, self.topic.name, from_seq=self.seq, wait_ms=self.rng.choice((0, 200)), **self.options)
            self.tell(page, page["tombstone"], page["next_from_seq"])
            yield


class CursorReader(Told):
    """A cursor that is strict: after a kill of its shard any other may read a page again."""

    def set_up(self, http: httpx.Client) -> None:
        self._path = f"/v0/topics/{self.topic.name}/cursors/c.{self._node}"
        ok(http.put(self._path, json={"consistency": "strictly_at_once"}))

    def pages(self, http: httpx.Client) -> Iterator[None]:
        for _ in range(self.rng.randint(1, FRAMES_MAX)):
            page = ok(http.post(f"{self._path}/read", json=self.options))
            self.tell(page, page["tombstone"], page["next_from_seq"])
            assert page["cursor_seq"] == page["next_from_seq"]
            yield


class Watcher(Told):
    def set_up(self, http: httpx.Client) -> None:
        body = {"heartbeat_ms": 100, **self.options}
        self._wid = watch(http, {self.topic.name: {"from_seq": 0}}, **body)["wid"]
        self._headers = {"Last-Event-ID": position_id({self.topic.name: 0})}

    def pages(self, http: httpx.Client) -> Iterator[None]:
        with Stream(self._service.url, self._wid, self._headers) as stream:
            for _ in range(self.rng.randint(1, FRAMES_MAX)):
                frame = stream.next()
                if frame.event in ("record", "tombstone", "caught-up"):
                    self._headers = {"Last-Event-ID": frame.id}
                    gap = frame.json if frame.event == "tombstone" else None
                    self.tell(frame.json, gap, frame.positions[self.topic.name])
                yield


class Subscriber(Told):
    def pages(self, http: httpx.Client) -> Iterator[None]:
        with Socket(self._service) as socket:
            socket.send("subscribe", request_id=1, topic=self.topic.name, from_seq=self.seq, **self.options)
            for _ in range(self.rng.randint(1, FRAMES_MAX)):
                try:
                    message = socket.next()
                except TimeoutError:
                    return
                assert message["op"] in ("subscribed", "record", "tombstone", "caught_up"), message
                is_page = message["op"] == "record"
                gap = message if message["op"] == "tombstone" else None
                self.tell(message if is_page else {}, gap, message["to_seq"] if is_page else 0)
                yield


def test_each_reader_is_told_of_each_loss_once() -> None:
    print(f"TOPICS_GAPS_SEED={SEED}")
    rng = random.Random(SEED)
    with tiered_service(20, **PATIENT, TOPICS_TEST_MIN_HEARTBEAT_MS="100") as service:
        topics = [Capped(name, cap_records) for name, cap_records in CAPS.items()]
        for topic in topics:
            put(service.client, topic.name, cap_records=CAPS[topic.name])
        kinds: tuple[type[Told], ...] = (Poller, Poller, CursorReader, Watcher, Watcher, Subscriber)
        readers = [
            kind(service, topic, node, number)
            for topic in topics
            for number, kind in enumerate(kinds)
            for node in (("", "me") if kind is not Poller else ("",))
        ]
        for reader in readers:
            reader.start()
        for turn in range(ROUNDS):
            for _ in range(STEPS):
                topic = rng.choice(topics)
                (topic.write if rng.random() < 0.75 or not topic.live else topic.delete)(service.client, rng)
                if rng.random() < 0.3:
                    topic.check(service.client, rng)
            if turn < len(KILLED):
                service.wait_healed(service.kill(*KILLED[turn]))
        for topic in topics:
            topic.write_last(service.client)
        for reader in readers:
            reader.join(REQUEST_TIMEOUT_S * 2)
            assert not reader.is_alive(), f"{reader.name} is at {reader.seq} of {reader.topic.head_seq}"
            reader.raise_failure()
        for reader in readers:
            reader.check()
        told = sum(len(reader.gaps) for reader in readers)
        print({topic.name: (topic.head_seq, len(topic.lost), len(topic.deleted)) for topic in topics}, told)
        assert all(reader.gaps for reader in readers)
