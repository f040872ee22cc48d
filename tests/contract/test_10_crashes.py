"""api §10 over crashes: what a named cursor promises when processes are killed, and when a sealed record is damaged."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import ok, put, refused, write
from tests.contract.test_3_segments import fill, sealed, serving
from tests.contract.test_10_cursors import BOTH, look, make, read
from tests.harness import Service, poll

pytestmark = pytest.mark.long

BATCH = 500
READERS = 4


class Readers:
    """Threads that read one record at a time through one cursor, until they are told to stop, whatever happens."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.seen: Counter[int] = Counter()
        self.odd: list[str] = []
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            try:
                with httpx.Client(base_url=self._url, timeout=20) as http:
                    while not self._stop.is_set():
                        self._one(http)
            except httpx.TransportError:
                continue

    def _one(self, http: httpx.Client) -> None:
        answer = http.post("/v0/topics/t/cursors/c/read", json={"limit": 1})
        if answer.status_code == 200:
            with self._lock:
                self.seen.update(record["data"] for record in answer.json()["records"])
        elif answer.status_code not in (429, 503):
            self.odd.append(f"{answer.status_code}: {answer.text[:300]}")

    def progress(self) -> int:
        with self._lock:
            return sum(self.seen.values())

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@BOTH
def test_what_readers_of_one_cursor_get_while_processes_are_killed(consistency: str) -> None:
    """strictly_at_once: nothing twice. at_least_once: nothing left out; again comes what was under way, of which each
    reader may just have got one, and what was passed on since the position was logged.
    """
    every = 5
    kills = [("walshard", 0), ("frontend", 0), ("walshard", 0), ("frontend", 1)]
    records = BATCH * len(kills)
    with Service(shards=1, frontends=2) as service:
        put(service.client, "t")
        make(service.client, "t", consistency=consistency, persist_every=every)
        readers = Readers(service.url)
        for at, (role, index) in enumerate(kills):
            seen = readers.progress()  # before the write: they may have all of it before its answer is here
            write(service.client, "t", *range(BATCH * at, BATCH * (at + 1)))
            poll("some to be read", lambda: readers.progress() > seen, 30)
            service.wait_healed(service.kill(role, index))
        poll("all to be read", lambda: look(service.client, "t")["cursor_seq"] == records, 60)
        readers.stop()
        assert readers.odd == []
        twice = [n for n, times in readers.seen.items() if times > 1]
        if consistency == "strictly_at_once":
            assert twice == []
            # Answers that were lost on their way; a reader has one on its way at a time.
            assert records - len(readers.seen) <= len(kills) * READERS
        else:
            assert sorted(set(range(records)) - set(readers.seen)) == []
            again = sum(readers.seen.values()) - len(readers.seen)
            assert again <= sum(READERS + (every - 1 if role == "walshard" else 0) for role, _ in kills)


def test_at_least_once_is_persisted_with_exactly_every_nth_read() -> None:
    # Checkpoints write frames as well.
    with Service(shards=1, frontends=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "86400000"}) as service:
        write(service.client, "t", *range(40))
        make(service.client, "t", consistency="at_least_once", persist_every=3)
        before = frames(service)
        for at in range(1, 10):
            assert read(service.client, "t", limit=2) == [2 * at - 2, 2 * at - 1]
            # What was passed on is told to the shard behind the answer.
            wanted = 2 * (at - at % 3)
            poll("it to be persisted", lambda: look(service.client, "t")["persisted_seq"] == wanted)
        poll("the frames to be counted", lambda: frames(service) >= before + 3)
        assert frames(service) == before + 3
        assert read(service.client, "t", limit=2, checkpoint=False) == [18, 19]
        assert read(service.client, "t", limit=2) == [18, 19]
        for crash in (service.kill_group, lambda: None):
            crash()
            service.start() if crash == service.kill_group else service.restart()
            assert look(service.client, "t")["cursor_seq"] == 18
        assert read(service.client, "t", limit=2) == [18, 19]


def frames(service: Service) -> int:
    metrics = ok(service.client.get("/v0/metrics", headers={"Accept": "application/json"}))
    count: int = metrics["topics_wal_frames_total"]
    return count


def test_a_read_that_cannot_be_answered_moves_nothing() -> None:
    with Service(shards=1, frontends=1) as service:
        make_in = {"consistency": "strictly_at_once"}
        write(service.client, "t", *range(5))
        make(service.client, "t", **make_in)
        refused(service.client.post("/v0/topics/t/cursors/c/read", json={"limit": -1}), 400, "invalid_request")
        refused(service.client.post("/v0/topics/t/cursors/c/read", json={"max_bytes": 0.5}), 400, "invalid_request")
        assert look(service.client, "t")["cursor_seq"] == 0


@pytest.mark.parametrize("read_before", [False, True], ids=["unread", "read before"])
def test_a_damaged_sealed_record_is_an_error_with_topic_segment_and_offset(read_before: bool) -> None:
    with serving() as service:
        fill(service.client, "t")
        listing = sealed(service.client, "t")
        make(service.client, "t")
        if read_before:
            assert len(read(service.client, "t", checkpoint=False)) == 45
        segment: dict[str, Any] = listing["segments"][1]
        path = Path(service.data_dir, segment["data_path"])
        content = path.read_bytes()
        at = content.index(b'{"n":15,')
        with path.open("r+b") as file:
            file.seek(at + 6)
            file.write(b"6")
        assert [record["n"] for record in read(service.client, "t")] == list(range(15))
        answer = service.client.post("/v0/topics/t/cursors/c/read", json={})
        error = refused(answer, 503, "storage_unavailable")
        assert error["detail"]["topic"] == "t"
        assert error["detail"]["segment"].endswith(path.name)
        assert 0 <= at - error["detail"]["offset"] < 120
        assert look(service.client, "t")["cursor_seq"] == 15
        make(service.client, "t", from_seq=16)
        assert read(service.client, "t", limit=2) == [{"n": 16, "text": "x" * 50}, {"n": 17, "text": "x" * 50}]
