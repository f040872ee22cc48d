"""api §3, §7: nothing goes away under a reader. Logs rotate and are trimmed, segments are sealed, rewritten, relocated,
rewritten in the cold directory and dropped, while diffs and event streams go over all of it, again and again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, ok, put
from tests.contract.stream import follow
from tests.harness import Service, poll
from topics.core.clock import SystemClock
from topics.supervisor.status import StatusReader

pytestmark = pytest.mark.long

EVENTS = 50
BATCH = 100
CAP = 3000
HOT_MAX = 16
STRESS_S = 6.0
"""At least so long, and until there was enough of each."""
ENOUGH = 5
"""Times that each event has to happen while readers read."""
PATIENCE_S = 60.0
"""A machine may be slow; one that does not get there in this time does not get there."""
COUNTED = ("segments_sealed", "segments_rewritten", "segments_relocated", "segments_dropped")
ENV = {
    "TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS),
    "TOPICS_CHECKPOINT_INTERVAL_MS": "20",
    "TOPICS_HOT_RETAIN_SEGMENTS": "4",
    "TOPICS_SEGMENT_REWRITE_DEAD_RATIO": "0.3",
}


def payload(seq: int) -> dict[str, Any]:
    return {"n": seq, "text": "x" * (400 + seq % 7)}


def may_go(seq: int) -> bool:
    """Every other record gets a tag that is deleted now and then."""
    return seq % 2 == 1


class Expected:
    """The position of one reader. A record that it is not given was deleted, or it was told that it was lost."""

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def gap(self, gap_from: int, gap_to: int) -> None:
        assert gap_from == self.seq + 1, f"a gap from {gap_from} for a reader at {self.seq}"
        assert gap_to >= gap_from
        self.seq = gap_to

    def records(self, records: list[dict[str, Any]], to_seq: int) -> None:
        """All that there is behind where it was, up to `to_seq`."""
        missing = set(range(self.seq + 1, to_seq + 1))
        for record in records:
            assert record["data"] == payload(record["$seq"])
            missing.remove(record["$seq"])  # KeyError: not in order, or twice
        assert all(may_go(seq) for seq in missing), (self.seq, sorted(missing)[:20])
        assert [record["$seq"] for record in records] == sorted(record["$seq"] for record in records)
        self.seq = to_seq


def scan(service: Service, topic: str, done: Event, seed: int) -> int:
    """Pages from the beginning or from anywhere to the head, until it is done; how often."""
    chance = random.Random(seed)
    scans = 0
    with httpx.Client(base_url=service.url, timeout=30.0) as client:
        while not done.is_set():
            head_seq = diff(client, topic, limit=1)["head_seq"]
            reader = Expected(chance.choice([0, chance.randrange(head_seq + 1)]))
            limit = chance.choice([7, 90, 1000])
            while not done.is_set():
                page = diff(client, topic, from_seq=reader.seq, limit=limit)
                if page["tombstone"]:
                    reader.gap(page["tombstone"]["gap_from"], page["tombstone"]["gap_to"])
                reader.records(page["records"], page["next_from_seq"])
                if page["caught_up"]:
                    break
            scans += 1
    return scans


def stream(service: Service, topic: str, done: Event, until_seq: Callable[[], int], ends: bool) -> int:
    """Follows from the beginning: again and again up to the head, or once for good; how often."""
    streams = 0
    while not done.is_set():
        reader = Expected(0)
        with follow(service, {topic: {"from_seq": 0}}, limit=200) as source:
            while True:
                frame = source.event()
                body = frame.json
                if frame.event == "tombstone":
                    reader.gap(body["gap_from"], body["gap_to"])
                elif frame.event == "record":
                    assert body["from_seq"] >= reader.seq
                    reader.records(body["records"], body["to_seq"])
                elif frame.event == "caught-up":
                    if ends or done.is_set():
                        break
                else:
                    raise AssertionError(frame.raw)
                if done.is_set() and reader.seq >= until_seq():
                    break
        streams += 1
    return streams


def counters(service: Service) -> dict[str, int]:
    compactor = StatusReader(str(service.data_dir), SystemClock()).read().compactor
    assert compactor is not None
    return {what: getattr(compactor, what) for what in COUNTED}


def keeps_up(client: httpx.Client, topic: str, head_seq: int) -> bool:
    """Return whether the compactor is not far behind: otherwise it would never come to work that can wait."""
    rows = ok(client.get(f"/v0/topics/{topic}/segments"))["segments"]
    hot = [row for row in rows if row["tier"] == "hot"]
    return bool(rows) and rows[-1]["last_seq"] > head_seq - 2 * BATCH and len(hot) <= HOT_MAX


def first_log_file(service: Service) -> str:
    return min(path.name for path in (service.data_dir / "wal").glob("**/wal-*.log"))


def cold_versions(service: Service) -> set[str]:
    """Names of rewritten segments that are in the cold directory."""
    return {path.name for path in Path(service.env["TOPICS_COLD_DIR"]).glob("topics/*/seg-*.[0-9]*.data")}


def test_nothing_goes_away_under_a_reader(topic: str) -> None:
    service = Service(shards=1, frontends=2, env=ENV)
    service.env["TOPICS_COLD_DIR"] = str(service.root / "cold")
    with service, ThreadPoolExecutor(5) as threads:
        client = service.client
        put(client, topic, cap_records=CAP)
        head_seq = 0

        def write() -> None:
            nonlocal head_seq
            seqs = range(head_seq + 1, head_seq + BATCH + 1)
            records = [{"data": payload(seq), "tag": "gone" if may_go(seq) else "kept"} for seq in seqs]
            ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
            head_seq = seqs[-1]

        write()
        before, first_file = counters(service), first_log_file(service)
        done = Event()
        readers = [threads.submit(scan, service, topic, done, seed) for seed in range(2)]
        readers += [
            threads.submit(stream, service, topic, done, lambda: head_seq, ends) for ends in (True, True, False)
        ]
        began_s = time.monotonic()
        rewritten_cold: set[str] = set()
        rounds = 0
        missing = "everything"
        try:
            while missing or time.monotonic() - began_s < STRESS_S:
                assert time.monotonic() - began_s < PATIENCE_S, missing
                rounds += 1
                write()
                if rounds % 12 == 0:
                    ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "gone"}))
                if rounds % 5 == 0:
                    poll("the compactor to keep up", lambda: keeps_up(client, topic, head_seq), PATIENCE_S)
                    rewritten_cold |= cold_versions(service)
                    after = counters(service)
                    happened = {what: after[what] - before[what] for what in COUNTED}
                    happened["log files removed"] = ENOUGH * (first_log_file(service) > first_file)
                    happened["rewritten and relocated"] = ENOUGH * bool(rewritten_cold)
                    missing = ", ".join(f"{what}: {times}" for what, times in happened.items() if times < ENOUGH)
                assert not any(reader.done() for reader in readers), "a reader failed"
        finally:
            done.set()
            write()  # readers that wait at the head hear of it
        scans = [reader.result() for reader in readers]
        assert all(scans), scans
        # A reader that comes now finds the same.
        reader = Expected(0)
        while reader.seq < head_seq:
            page = diff(client, topic, from_seq=reader.seq, limit=1000)
            if page["tombstone"]:
                reader.gap(page["tombstone"]["gap_from"], page["tombstone"]["gap_to"])
            reader.records(page["records"], page["next_from_seq"])
        assert service.status()["compactor"]["failures"] == 0
