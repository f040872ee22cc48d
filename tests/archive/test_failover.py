"""Rounds of failover under load, with a ledger: leaders are killed or stand still, followers take over, writers go on.

What must hold after each round, at the new leader: every record that was acknowledged in a topic of class `archived` is
there under its seq. One of another class is there, or in a gap that readers are told of. No record is there twice.
`make failover ROUNDS=100` runs more of them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.archive.services import read, run
from tests.archive.test_archiver import archiver, shipping
from tests.archive.test_following import following, promoted
from tests.contract.asking import put
from tests.harness import OWN_URL, Service, poll
from topics.client import Client

ROUNDS: Final = int(os.environ.get("TOPICS_FAILOVER_ROUNDS", "2"))
CLASSES: Final = ("archived", "fsync", "disk")
WRITERS: Final = 2
"""Writers of each class."""


class Ledger:
    """Writers, and what was acknowledged to them: by topic, the seqs of (writer, number)."""

    def __init__(self, urls: list[str]) -> None:
        self.acknowledged: dict[str, dict[tuple[int, int], int]] = {durability: {} for durability in CLASSES}
        self.failed: list[BaseException] = []
        self._urls = urls
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(durability, writer))
            for durability in CLASSES
            for writer in range(WRITERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, topic: str, writer: int) -> None:
        known = self.acknowledged[topic]
        number = 0
        try:
            with Client(self._urls) as client:
                while not self._stop.is_set():
                    number += 1
                    answer = client.append(topic, [[writer, number]])
                    known[writer, number] = answer.first_seq
        except BaseException as error:
            self.failed.append(error)
            raise

    def is_beyond(self, counts: dict[str, int]) -> bool:
        """Return whether more writes were acknowledged than these, in each topic."""
        return all(len(self.acknowledged[topic]) > count for topic, count in counts.items())

    def check(self, leader: Service, before: dict[str, dict[tuple[int, int], int]]) -> dict[str, int]:
        """Compare what was acknowledged before a takeover with what is there; return how many are lost, by class."""
        lost: dict[str, int] = {}
        for topic, known in before.items():
            records, tombstones = read(leader.client, topic)
            found = [tuple(data) for data in records.values()]
            assert len(found) == len(set(found)), f"{topic} has records twice"
            gone = [(number, seq) for number, seq in known.items() if tuple(records.get(seq, ())) != number]
            for number, seq in gone:
                assert topic != "archived", f"{number} was acknowledged as archived, with seq {seq}"
                told = any(gap["gap_from"] <= seq <= gap["gap_to"] for gap in tombstones)
                assert told, f"{number} of {topic}, seq {seq}, is gone in silence: {tombstones}"
            lost[topic] = len(gone)
        return lost


@pytest.mark.long
def test_nothing_acknowledged_is_lost_in_silence(tmp_path: Path) -> None:
    draw = random.Random(time.time_ns())
    place = tmp_path / "archive"
    tells = {"TOPICS_ADVERTISE_URL": OWN_URL} if draw.random() < 0.5 else {}
    leader = Service(env=shipping(place) | tells)
    services = [leader]
    follower: Service | None = None
    try:
        leader.start()
        for durability in CLASSES:
            put(leader.client, durability, durability=durability)
        poll("a first base", lambda: archiver(leader)["bases"] > 0)
        for number in range(ROUNDS):
            follower = Service(env=following(place) | tells)
            services.append(follower)
            follower.start()
            ledger = Ledger([leader.url, follower.url])
            ledger.start()
            try:
                poll("writes of each class", partial(ledger.is_beyond, dict.fromkeys(CLASSES, 20)), 60)
                time.sleep(draw.random())  # the moment is drawn; nothing depends on it
                if draw.random() < 0.5:
                    how = "killed"
                    leader.kill_group()
                else:
                    how = "stands still"
                    for pid in leader.family():
                        os.kill(pid, signal.SIGSTOP)
                before = {topic: dict(known) for topic, known in ledger.acknowledged.items()}
                took_ms = promoted(follower)["took_ms"]
                if how == "stands still":
                    leader.kill_group()  # after the takeover: what it had in flight came too late
                behind = {topic: len(ledger.acknowledged[topic]) + 5 for topic in CLASSES}
                poll("writes at the new leader", partial(ledger.is_beyond, behind), 60)
            finally:
                ledger.stop()
            assert not ledger.failed
            lost = ledger.check(follower, before)
            print(f"round {number}: the leader {how}, takeover {took_ms} ms, lost and told {lost}", *tells, flush=True)
            services.remove(leader)
            leader.close()
            for durability in CLASSES:  # the writers of the next round count from 1 again
                follower.client.post(f"/v0/topics/{durability}/delete", json={"before_seq": 1 << 62})
            leader = follower
        run("archive", "verify", place)
    except BaseException as error:
        for service in services:
            error.add_note(service.log_tail())
        raise
    finally:
        for service in services:
            service.close()
