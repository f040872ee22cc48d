"""api §3 where the records are in segments, in the data directory and in a cold one (storage.md Tiers)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, ok, put, state, write
from tests.contract.stream import Stream, watch
from tests.contract.timing import ATTEMPTS_DEADLINE_S
from tests.harness import Service, poll, tiered_service

pytestmark = pytest.mark.long

EVENTS = 50
"""Records in a segment."""
RECORDS = 500
TIMEOUT_MS = 400


def made(**settings: str) -> Service:
    """A service that makes small segments at once, and keeps two of them in the data directory."""
    return tiered_service(EVENTS, **settings)


@pytest.fixture(scope="module")
def tiered() -> Iterator[Service]:
    with made() as running:
        yield running


@pytest.fixture
def hasty() -> Iterator[Service]:
    """It soon gives up a read of the cold directory, also of one that is well when the machine is busy."""
    with made(TOPICS_COLD_READ_TIMEOUT_MS=str(TIMEOUT_MS)) as running:
        yield running


def payload(seq: int) -> dict[str, Any]:
    return {"n": seq, "text": "x" * (seq % 7)}


def fill(client: httpx.Client, topic: str, count: int = RECORDS) -> None:
    for first in range(1, count + 1, 100):
        write(client, topic, *[payload(seq) for seq in range(first, first + 100)])


def new_topic_dir(service: Service, count: int, topic: str) -> Path:
    """Fills a new topic; where its segments are in the data directory."""
    fill(service.client, topic, count)
    directory = service.data_dir / "topics" / state(service.client, topic)["epoch"]
    return poll("its first segment", lambda: directory if directory.exists() else None)


def old_topic(service: Service, topic: str) -> list[Path]:
    """A topic whose older segments are in the cold directory alone; their data there, in order."""
    hot = new_topic_dir(service, RECORDS, topic)
    cold = service.root / "cold" / "topics" / hot.name

    def relocated() -> list[Path] | None:
        found = sorted(cold.glob("*.data"))
        is_done = len(found) == RECORDS // EVENTS - 2 and not any((hot / path.name).exists() for path in found)
        return found if is_done else None

    return poll("the older segments to be cold", relocated, 20.0)


def everything(client: httpx.Client, topic: str, **body: Any) -> tuple[list[dict[str, Any]], int]:
    """All records, page by page, and the most segments of the cold tier that a page took."""
    records: list[dict[str, Any]] = []
    cursor = cold = 0
    while True:
        page = diff(client, topic, from_seq=cursor, **body)
        assert page["tombstone"] is None
        records += page["records"]
        cursor = page["next_from_seq"]
        cold = max(cold, page["performance"].get("cold_segments_read", 0))
        if page["caught_up"]:
            return records, cold


def follow(service: Service, topics: dict[str, Any]) -> Stream:
    return Stream(service.url, watch(service.client, topics)["wid"])


def test_pages_over_all_tiers(tiered: Service, topic: str) -> None:
    old_topic(tiered, topic)
    write(tiered.client, topic, payload(RECORDS + 1))
    for limit in (7, 100, 1000):
        records, cold = everything(tiered.client, topic, limit=limit)
        assert [(record["$seq"], record["data"]) for record in records] == [
            (seq, payload(seq)) for seq in range(1, RECORDS + 2)
        ]
        assert cold >= 1


def test_performance_says_when_the_cold_tier_was_read_and_only_then(tiered: Service, topic: str) -> None:
    old_topic(tiered, topic)
    client = tiered.client
    assert diff(client, topic, from_seq=0, limit=10)["performance"]["cold_segments_read"] == 1
    assert "cold_segments_read" not in diff(client, topic, from_seq=RECORDS - 10)["performance"]
    assert "cold_segments_read" not in diff(client, topic, from_seq=RECORDS - EVENTS - 10, limit=5)["performance"]
    assert "cold_segments_read" not in diff(client, topic, from_seq=RECORDS)["performance"]


def test_a_time_in_the_cold_tier_is_found(tiered: Service, topic: str) -> None:
    old_topic(tiered, topic)
    records, _ = everything(tiered.client, topic)
    for record in records[:: RECORDS // 8]:
        page = diff(tiered.client, topic, from_ts=record["$ts"], limit=1)
        assert page["records"] == [next(r for r in records if r["$ts"] >= record["$ts"])]


def test_what_is_deleted_in_any_tier_is_gone_at_once(tiered: Service, topic: str) -> None:
    client = tiered.client
    write(client, topic, "first")
    for first in range(2, 302, 100):
        records = [{"data": seq, "tag": "odd" if seq % 2 else "even"} for seq in range(first, first + 100)]
        ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    poll("cold segments", lambda: diff(client, topic)["performance"].get("cold_segments_read"))
    deleted = ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "odd"}))["deleted"]
    assert deleted == 150
    records, cold = everything(client, topic)
    assert [record["$seq"] for record in records] == [1, *range(2, 302, 2)]
    assert cold
    tiered.restart()
    client = tiered.client
    assert everything(client, topic)[0] == records
    ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 80}))
    page = diff(client, topic)
    assert (page["records"][0]["$seq"], page["earliest_seq"], page["tombstone"]) == (80, 80, None)


def test_a_watch_catches_up_through_all_tiers(tiered: Service, topic: str) -> None:
    old_topic(tiered, topic)
    with follow(tiered, {topic: {"from_seq": 0}}) as stream:
        seqs = [record["$seq"] for record in stream.records(RECORDS)]
    assert seqs == list(range(1, RECORDS + 1))


# -- a cold directory that hangs or fails: a FIFO does not open until somebody writes to it


class Hanging:
    """A file that hangs: every process that opens it waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = path.with_suffix(".kept")
        path.rename(self._kept)
        os.mkfifo(path)

    def end(self) -> None:
        """Let waiting processes go on, with an error; the file is there again."""
        opened = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        # First: who opened the FIFO after it was closed here would wait for ever, and with it all readers of its block.
        self._kept.rename(self._path)
        os.close(opened)


def refused(client: httpx.Client, topic: str, **body: Any) -> httpx.Response:
    answer = client.post(f"/v0/topics/{topic}/diff", json=body)
    assert answer.status_code == 503, answer.text
    return answer


def rounds_while_it_hangs(service: Service, topic: str, cold: list[Path], other: str, live: Stream) -> int:
    """Readers of the cold directory wait until they are refused; so often has everybody else been served meanwhile."""
    client = service.client
    first_seq = state(client, other)["head_seq"] + 1
    cursors = [n % len(cold) * EVENTS for n in range(24)]
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(cursors)))
        clients = [stack.enter_context(httpx.Client(base_url=service.url, timeout=30.0)) for _ in cursors]
        waiting = [
            threads.submit(refused, one, topic, from_seq=cursor) for one, cursor in zip(clients, cursors, strict=True)
        ]
        seq = first_seq
        while not all(answer.done() for answer in waiting):
            assert write(client, other, seq)["head_seq"] == seq
            assert diff(client, topic, from_seq=RECORDS - 5)["lag"] == 0
            assert [record["data"] for record in live.records(1)] == [seq]
            seq += 1
        for answer in waiting:
            error = answer.result().json()["error"]
            assert error["code"] == "storage_unavailable"
            assert f"{TIMEOUT_MS} ms" in error["message"]
            assert error["detail"]["segment"] in error["message"]
            assert answer.result().headers["retry-after"] == "1"
    return seq - first_seq


def test_a_hanging_cold_directory_costs_only_reads_from_it(hasty: Service, topic: str) -> None:
    """Nobody else waits: writes, reads of newer records and live delivery, on every frontend."""
    cold = old_topic(hasty, topic)
    client = hasty.client
    other = f"{topic}-other"
    put(client, other)
    hanging = [Hanging(path) for path in cold]
    try:
        with follow(hasty, {other: {}, topic: {"tail": True}}) as live:
            # Again and again: one in which a process was stopped for that long proves nothing.
            poll(
                "two rounds while reads of the cold tier wait",
                lambda: rounds_while_it_hangs(hasty, topic, cold, other, live) >= 2,
                ATTEMPTS_DEADLINE_S,
            )
    finally:
        for one_path in hanging:
            one_path.end()
    records: list[dict[str, Any]] = []
    while len(records) < RECORDS:
        page = poll("the cold directory to be read again", partial(page_if_read, client, topic, len(records)))
        records += page["records"]
        assert page["next_from_seq"] == len(records)
    assert [record["data"] for record in records] == [payload(n) for n in range(1, RECORDS + 1)]


def page_if_read(client: httpx.Client, topic: str, from_seq: int) -> dict[str, Any] | None:
    """Return the page; None for one that was given up."""
    answer = client.post(f"/v0/topics/{topic}/diff", json={"from_seq": from_seq})
    return ok(answer) if answer.status_code != 503 else None


def test_the_service_stops_though_the_cold_directory_hangs(hasty: Service, topic: str) -> None:
    cold = old_topic(hasty, topic)
    hanging = Hanging(cold[0])
    refused(hasty.client, topic)
    hasty.stop()
    hanging.end()
    del hasty.env["TOPICS_COLD_READ_TIMEOUT_MS"]
    hasty.start()
    assert len(everything(hasty.client, topic)[0]) == RECORDS


def test_a_cold_file_that_is_not_there_is_an_error_and_never_an_end(tiered: Service, topic: str) -> None:
    cold = old_topic(tiered, topic)
    kept = cold[1].with_suffix(".kept")
    cold[1].rename(kept)
    page = diff(tiered.client, topic, limit=1000)
    assert page["next_from_seq"] == EVENTS
    error = refused(tiered.client, topic, from_seq=EVENTS).json()["error"]
    assert error["code"] == "storage_unavailable"
    assert cold[1].name in error["message"]
    kept.rename(cold[1])
    assert len(everything(tiered.client, topic)[0]) == RECORDS


def test_a_damaged_segment_is_named_and_nothing_is_left_out(tiered: Service, topic: str) -> None:
    client = tiered.client
    bad_seq = 2 * EVENTS + 8
    path = new_topic_dir(tiered, 200, topic) / f"seg-{2 * EVENTS + 1:020d}.data"
    poll("a sealed segment", path.with_suffix(".tags").exists, 20.0)
    found = re.search(rb'"n": ?%d\b' % bad_seq, path.read_bytes())
    assert found is not None
    with path.open("r+b") as file:
        file.seek(found.start() + 1)
        file.write(b"m")
    tiered.restart()
    client = tiered.client
    got: list[int] = []
    cursor = 0
    while True:
        answer = client.post(f"/v0/topics/{topic}/diff", json={"from_seq": cursor})
        if answer.status_code != 200:
            break
        page = answer.json()
        got += [record["$seq"] for record in page["records"]]
        cursor = page["next_from_seq"]
        assert (page["tombstone"], page["caught_up"]) == (None, False)
    assert got == list(range(1, bad_seq))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "storage_unavailable")
    assert error["detail"]["segment"] == f"{path.parent.name}/{path.name}"
    assert 0 < found.start() - error["detail"]["offset"] < 60
    assert diff(client, topic, from_seq=bad_seq)["records"][0]["$seq"] == bad_seq + 1
