"""Clients that keep a ledger: what was asked, what was answered, what was seen; compared with the log afterwards."""

from __future__ import annotations

import itertools
import random
import threading
import time
from abc import ABC, abstractmethod
from typing import Self

import httpx

from tests.harness import poll

REQUEST_TIMEOUT_S = 30.0
"""Longer than these services wait for a shard (`PATIENT`)."""
PATIENT = {"TOPICS_SHARD_WAIT_MS": "20000"}
"""Settings for a service that is killed in parts: what waits for a restart is answered by it, also on a machine that is
held up meanwhile.
"""


class Client(threading.Thread):
    """A thread that repeats one request until it is told to stop."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(REQUEST_TIMEOUT_S + 5)
        assert not self.is_alive(), f"{self.name} hangs"


class DecidingClient(Client, ABC):
    """A client with decisions of its own, which its name and `seed` repeat. It keeps its failure for the test."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        super().__init__(name)
        self.rng = random.Random(f"{seed} {name}")
        self._url = url
        self._failure: BaseException | None = None

    @abstractmethod
    def work(self, http: httpx.Client) -> None:
        """Do all that it does."""

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=REQUEST_TIMEOUT_S) as http:
                self.work(http)
        except BaseException as error:  # noqa: BLE001 - `raise_failure` raises it
            self._failure = error

    def raise_failure(self) -> None:
        """Raise what has ended it before its time, if anything."""
        if self._failure is not None:
            raise AssertionError(f"{self.name} failed: {self._failure!r}") from self._failure


def longest_gap_ms(times_s: list[float]) -> float:
    """The longest time between two successive ones."""
    return max((later - earlier for earlier, later in itertools.pairwise(times_s)), default=0.0) * 1000


class Writer(Client):
    """Writes unique values, one a request, never again: a request without an answer leaves its value in doubt."""

    def __init__(self, url: str, topic: str, name: str) -> None:
        super().__init__(name)
        self._url = url
        self._topic = topic
        self.acked: dict[str, int] = {}
        self.ack_times_s: list[float] = []
        self.in_doubt: list[str] = []
        self.refused: list[str] = []

    def run(self) -> None:
        client = httpx.Client(base_url=self._url, timeout=REQUEST_TIMEOUT_S)
        number = 0
        while not self._stop_asked.is_set():
            number += 1
            value = f"{self.name}.{number}"
            try:
                answer = client.post(f"/v0/topics/{self._topic}", json={"records": [{"data": value}]})
            except httpx.TransportError:
                self.in_doubt.append(value)
                continue
            if answer.status_code in (200, 201):
                self.acked[value] = int(answer.json()["first_seq"])
                self.ack_times_s.append(time.monotonic())
            else:
                self.refused.append(f"{value}: {answer.status_code} {answer.text}")
        client.close()


class Reader(Client):
    """Reads the same first page of a topic again and again, each time on a new connection.

    `answer_times_s` are the monotonic times of good answers, `wrong` whatever else was answered, `dropped` the
    connections that broke: only a killed frontend may break one.
    """

    def __init__(self, url: str, topic: str, expected: int) -> None:
        super().__init__(f"reader of {topic}")
        self._url = url
        self._topic = topic
        self._expected = expected
        self.answer_times_s: list[float] = []
        self.wrong: list[str] = []
        self.dropped = 0

    def run(self) -> None:
        body = {"limit": self._expected}
        no_keep_alive = httpx.Limits(max_keepalive_connections=0)
        client = httpx.Client(base_url=self._url, timeout=REQUEST_TIMEOUT_S, limits=no_keep_alive)
        while not self._stop_asked.is_set():
            try:
                answer = client.post(f"/v0/topics/{self._topic}/diff", json=body)
            except httpx.TransportError:
                self.dropped += 1
                continue
            if answer.status_code == 200 and len(answer.json()["records"]) == self._expected:
                self.answer_times_s.append(time.monotonic())
            else:
                self.wrong.append(f"{answer.status_code} {answer.text[:300]}")
        client.close()


class Load:
    """Writers and readers that run while something is killed."""

    def __init__(self, url: str, classes: dict[str, str], preloaded: int, read: list[str]) -> None:
        """`classes` maps each topic to its durability; every topic gets `preloaded` records before the load begins.

        One writer a topic, one reader for each topic of `read`.
        """
        with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
            for topic, durability in classes.items():
                client.put(f"/v0/topics/{topic}", json={"durability": durability}).raise_for_status()
                records = [{"data": f"{topic}.before.{n}"} for n in range(preloaded)]
                client.post(f"/v0/topics/{topic}", json={"records": records}).raise_for_status()
        self.writers = {topic: Writer(url, topic, f"{topic}.written") for topic in classes}
        self.readers = [Reader(url, topic, preloaded) for topic in read]
        self._clients: list[Client] = [*self.writers.values(), *self.readers]

    def __enter__(self) -> Self:
        for client in self._clients:
            client.start()
        self.wait_progress()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.stop()

    def wait_progress(self, acks: int = 10) -> None:
        """Until every writer has so many more acks than now, and every reader one more answer."""
        acked = {writer.name: len(writer.acked) + acks for writer in self.writers.values()}
        answered = {reader.name: len(reader.answer_times_s) + 1 for reader in self.readers}

        def moved_on() -> bool:
            return all(len(writer.acked) >= acked[writer.name] for writer in self.writers.values()) and all(
                len(reader.answer_times_s) >= answered[reader.name] for reader in self.readers
            )

        poll("every writer and reader to move on", moved_on, 30.0)
