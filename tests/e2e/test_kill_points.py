"""A crash at every named step of the compactor's work (`storage/kill_points.py`), enumerated: of the process that is at
it, and of the whole service. Then everything acknowledged is there, once, and `topics verify` finds nothing.

At every second one the process dies, at the others the whole service. With TOPICS_CRASH_ALL=1 (`make crash`) both do at
each.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.load import PATIENT
from tests.e2e.test_crash import everything
from tests.harness import Service, is_running, poll
from topics.core.clock import SystemClock
from topics.storage.kill_points import KILL_POINTS
from topics.supervisor.status import Status, StatusReader

REACH_DEADLINE_S = 60.0
CRASH_ALL = os.environ.get("TOPICS_CRASH_ALL") == "1"
CAP = 30
BATCH = 10
COPIED = ("disk", "capped", "tagged")
STEPS_PER_DELETE = 12
SEGMENT_EVENTS = 20
SETTINGS = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": "100",
    "TOPICS_CHECKPOINT_WAL_BYTES": "64KiB",
    "TOPICS_SEGMENT_MAX_EVENTS": str(SEGMENT_EVENTS),
    "TOPICS_SEGMENT_REWRITE_DEAD_RATIO": "0.2",
    "TOPICS_HOT_RETAIN_SEGMENTS": "3",
    **PATIENT,
}
FILLER = "x" * 2000
"""Makes log files full, so that there is something to trim."""


class Ledger:
    """One client that writes, deletes and evicts, and knows what must be there. `cold_first`: its first delete comes
    when some of that is in the cold directory, and it goes on when that is rewritten.
    """

    def __init__(self, cold_first: bool = False) -> None:
        self.cold_first = cold_first
        self.numbers = itertools.count()
        self.steps = 0
        self.logs: dict[str, list[str]] = {"disk": [], "fsync": [], "capped": [], "tagged": []}
        self.doubts: dict[str, list[str]] = {name: [] for name in self.logs}
        self.tags: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.maybe_deleted: set[str] = set()

    def set_up(self, client: httpx.Client) -> None:
        client.put("/v0/topics/disk", json={"durability": "disk"}).raise_for_status()
        client.put("/v0/topics/fsync", json={"durability": "fsync"}).raise_for_status()
        client.put("/v0/topics/capped", json={"cap_records": CAP}).raise_for_status()
        client.put("/v0/topics/tagged", json={"durability": "disk"}).raise_for_status()
        for source in COPIED:
            spec = {"source": source, "dest": f"copies-{source}"}
            client.put(f"/v0/routers/{source}", json=spec).raise_for_status()
        client.put("/v0/routers/again", json={"source": "copies-disk", "dest": "again"}).raise_for_status()

    def step(self, client: httpx.Client) -> None:
        """A few writes, a delete, a topic that comes and goes. httpx.TransportError when the service dies under it."""
        for topic in self.logs:
            values = [f"{topic}.{next(self.numbers)}" for _ in range(BATCH)]
            tags = ["drop" if at % 2 else "keep" for at in range(BATCH)]
            self.tags.update(zip(values, tags, strict=True))
            records = [{"data": value, "tag": tag} for value, tag in zip(values, tags, strict=True)]
            self.doubts[topic] = values
            answer = client.post(f"/v0/topics/{topic}", json={"records": records})
            assert answer.status_code == 200, answer.text
            self.logs[topic] += values
            self.doubts[topic] = []
        self.steps += 1
        if self.steps % STEPS_PER_DELETE == 0:
            self.delete(client)
        client.post("/v0/topics/passing", json={"records": [{"data": FILLER}] * 20}).raise_for_status()
        client.delete("/v0/topics/passing").raise_for_status()

    def delete(self, client: httpx.Client) -> None:
        """Delete when most of the topic is in sealed segments. Records that are deleted before a slow compactor has
        come to them are in none, and nothing in any would ever be dead.
        """
        open_from_seq = len(self.logs["tagged"]) - 2 * SEGMENT_EVENTS
        poll("segments to be sealed", lambda: sealed(client, "tagged", open_from_seq), REACH_DEADLINE_S)
        # Of the first delete alone: segments that are made behind one lack what it took, and are not rewritten for it.
        cold_first, self.cold_first = self.cold_first, False
        cold: set[int] = set()
        if cold_first:
            cold = poll(
                "sealed segments to be cold", lambda: untouched_cold(client, "tagged") or None, REACH_DEADLINE_S
            )
        dropped = {value for value in self.logs["tagged"] if self.tags[value] == "drop"}
        self.maybe_deleted = dropped
        answer = client.post("/v0/topics/tagged/delete", json={"match": "drop"})
        assert answer.status_code == 200, answer.text
        self.deleted, self.maybe_deleted = dropped, set()
        if cold_first:
            poll(f"{cold} to be rewritten", lambda: not cold & untouched_cold(client, "tagged"), REACH_DEADLINE_S)

    def check(self, client: httpx.Client) -> None:
        """Check that reads give what was acknowledged; an operation without an answer happened as a whole or not at
        all. Routers have copied each record once, also those that their source has no longer.
        """
        for source in COPIED:
            written = self.logs[source]
            copies = [unquoted(data) for _, data, _ in everything(client, f"copies-{source}")]
            assert copies in (written, written + self.doubts[source]), source
            # What is in doubt is in the source as it is in the copies.
            self.logs[source], self.doubts[source] = copies, []
        assert [unquoted(data) for _, data, _ in everything(client, "again")] == self.logs["disk"]
        for topic in ("disk", "fsync"):
            got = [unquoted(data) for _, data, _ in everything(client, topic)]
            assert got in (self.logs[topic], self.logs[topic] + self.doubts[topic]), topic
            self.logs[topic], self.doubts[topic] = got, []
        got = everything_left(client, "tagged")
        written = self.logs["tagged"]
        # Without a delete in doubt, what was deleted before is what may have been.
        maybe = self.maybe_deleted or self.deleted
        fates = [(written + self.doubts["tagged"], self.deleted), (written, self.deleted), (written, maybe)]
        expected = [[value for value in values if value not in gone] for values, gone in fates]
        assert got in expected
        self.logs["tagged"] = (written + self.doubts["tagged"]) if got == expected[0] else written
        self.deleted = {value for value in self.logs["tagged"] if value not in got}
        self.doubts["tagged"] = []
        got = everything_left(client, "capped")
        written = self.logs["capped"]
        assert got in (written[-CAP:], (written + self.doubts["capped"])[-CAP:])
        self.logs["capped"] = written + [value for value in self.doubts["capped"] if value in got]
        self.doubts["capped"] = []


def sealed(client: httpx.Client, topic: str, from_seq: int) -> bool:
    """Return whether a sealed segment has records behind this one."""
    return bool(client.get(f"/v0/topics/{topic}/segments", params={"from_seq": from_seq}).json()["segments"])


def untouched_cold(client: httpx.Client, topic: str) -> set[int]:
    """First seqs of cold segments that are as they were sealed."""
    rows = client.get(f"/v0/topics/{topic}/segments").json()["segments"]
    return {row["first_seq"] for row in rows if row["tier"] == "cold" and row["version"] == 0}


def unquoted(data: bytes) -> str:
    return data.decode().strip('"')


def everything_left(client: httpx.Client, topic: str) -> list[str]:
    """The data of a topic whose beginning may be gone."""
    cursor = client.get(f"/v0/topics/{topic}").json()["earliest_seq"] - 1
    found: list[str] = []
    while True:
        page: dict[str, Any] = client.post(f"/v0/topics/{topic}/diff", json={"from_seq": cursor, "limit": 1000}).json()
        assert page["tombstone"] is None, page["tombstone"]
        found += [record["data"] for record in page["records"]]
        cursor = page["next_from_seq"]
        if page["caught_up"]:
            return found


def verify(data_dir: Path, cold_dir: Path | None = None) -> None:
    places = [str(data_dir), *(["--cold-dir", str(cold_dir)] if cold_dir else [])]
    answer = subprocess.run(
        [Path(sys.executable).with_name("topics"), "verify", *places],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1].startswith("clean: ")


def reach(service: Service, ledger: Ledger, killed: Any) -> None:
    """Goes on until what was to be killed is dead; never far ahead of the compactor, or a cut would be without end."""
    end = time.monotonic() + REACH_DEADLINE_S
    try:
        ledger.set_up(service.client)
        while not killed():
            assert time.monotonic() < end, f"the kill point was not reached\n{service.log_tail()}"
            ledger.step(service.client)
            if ledger.steps % STEPS_PER_DELETE == 0:
                before = snapshots(service)
                poll("another snapshot", lambda: killed() or snapshots(service) > before, REACH_DEADLINE_S)
    except httpx.TransportError:
        poll("the end of the service", killed)


def came_up(service: Service) -> bool:
    """False when the first cut, which has nothing to do, was where it died: that may be before it is ready."""
    try:
        service.start()
    except AssertionError as error:
        if f"exit code -{signal.SIGKILL:d}" not in str(error):
            raise
        return False
    return True


def go_on(service: Service, ledger: Ledger) -> None:
    """Go on until the killed process has done its work twice more; never far ahead of it."""
    for _ in range(2):
        before = snapshots(service)
        for _ in range(3):
            ledger.step(service.client)
        poll("another snapshot", lambda: snapshots(service) > before, REACH_DEADLINE_S)


def snapshots(service: Service) -> int:
    compactor = status(service).compactor
    return compactor.snapshots if compactor is not None else 0


def status(service: Service) -> Status:
    return StatusReader(str(service.data_dir), SystemClock()).read()


@pytest.mark.parametrize("point", KILL_POINTS if CRASH_ALL else KILL_POINTS[::2])
def test_the_process_dies_and_the_others_go_on(point: str, tmp_path: Path) -> None:
    env = {"TOPICS_TEST_KILL_AT": f"process:{point}", "TOPICS_COLD_DIR": str(tmp_path)}
    with Service(shards=2, frontends=1, env=SETTINGS | env) as service:
        ledger = Ledger(point == "rewrite.fetched")
        reach(service, ledger, lambda: any(process.restarts for process in status(service).processes))
        go_on(service, ledger)
        ledger.check(service.client)
        service.kill_group()
        verify(service.data_dir, tmp_path)
        del service.env["TOPICS_TEST_KILL_AT"]
        service.start()
        ledger.check(service.client)
        service.stop()
        verify(service.data_dir, tmp_path)


@pytest.mark.parametrize("point", KILL_POINTS if CRASH_ALL else KILL_POINTS[1::2])
def test_the_whole_service_dies(point: str, tmp_path: Path) -> None:
    env = {"TOPICS_TEST_KILL_AT": f"service:{point}", "TOPICS_COLD_DIR": str(tmp_path)}
    with Service(shards=2, frontends=1, env=SETTINGS | env).unstarted() as service:
        ledger = Ledger(point == "rewrite.fetched")
        if came_up(service):
            family = service.family()
            reach(service, ledger, lambda: not any(is_running(pid) for pid in family))
        service.was_killed()
        verify(service.data_dir, tmp_path)
        del service.env["TOPICS_TEST_KILL_AT"]
        service.start()
        ledger.set_up(service.client)  # it may have died that early
        ledger.check(service.client)
        go_on(service, ledger)
        ledger.check(service.client)
        service.stop()
        verify(service.data_dir, tmp_path)
