"""api §3 over HTTP/2: one client asks for many pages at once and takes none. What is kept for it is bounded, everything
else on its connection goes on, and it gets every page when it takes them.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.asking import diff, put, state, write
from tests.contract.stream import watch
from tests.frontend.http2_client import Streams
from tests.harness import Service, poll

pytestmark = pytest.mark.long

RECORDS = 160
RECORD_BYTES = 60_000
PAGE = json.dumps({"from_seq": 0, "limit": 1000, "max_batch_bytes": 8 << 20}).encode()
CLAIM_WAITS_S = 2.0
"""For room; then its jobs go back."""
PAGES = 40
"""320 MiB, were they all made."""
KEPT_BYTES_MAX = 48 << 20
"""Bytes that may be kept, 16 MiB, and as much again twice for everything else that a process does."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """One frontend, and a topic `t` of which a page is 8 MiB long."""
    with Service(shards=1, frontends=1, wal_file_bytes=None) as running:
        for _ in range(RECORDS // 40):
            write(running.client, "t", *["x" * RECORD_BYTES] * 40)
        diff(running.client, "t", limit=1000, max_batch_bytes=8 << 20)
        yield running


@contextmanager
def connected(service: Service) -> Iterator[Streams]:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
        yield Streams(connection)


def anonymous_bytes(pid: int) -> int:
    """A process's own memory, without files that it maps."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def requests(service: Service) -> int:
    metrics = service.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
    total: int = metrics["topics_requests_total"]
    return total


def ask_pages(service: Service, streams: Streams, count: int) -> list[int]:
    """Returns when all of these requests are there, and the first of them are answered."""
    before = requests(service)
    pages = [streams.ask("/v0/topics/t/diff", PAGE) for _ in range(count)]
    poll("the requests", lambda: requests(service) > before + count or None)
    answered = streams.ask("/v0/health")
    streams.take(answered)
    streams.read_to_the_end_of(answered)
    return pages


def json_of(streams: Streams, stream_id: int) -> Any:
    return json.loads(streams.bodies[stream_id])


def test_pages_that_nobody_takes_are_not_made_and_all_come_when_they_are_taken(service: Service) -> None:
    frontend = service.pid_of("frontend")
    before = anonymous_bytes(frontend)
    with connected(service) as streams:
        pages = ask_pages(service, streams, PAGES)
        for _ in range(20):
            service.client.get("/v0/health")
            assert anonymous_bytes(frontend) - before < KEPT_BYTES_MAX
        # Events of the same connection come all the same, and so do short answers.
        watched = put(service.client, "beside")["topic"]
        events = streams.ask(f"/v0/watch/{watch(service.client, {watched: {'tail': True}})['wid']}", accept="*/*")
        streams.take(events)
        write(service.client, watched, "now")
        while b'"data":"now"' not in streams.bodies.get(events, b""):
            streams.read()
        for stream_id in pages:
            streams.take(stream_id)
            streams.read_to_the_end_of(stream_id)
            assert [record["$seq"] for record in json_of(streams, stream_id)["records"]][:100] == list(range(1, 101))
            assert anonymous_bytes(frontend) - before < KEPT_BYTES_MAX
            del streams.bodies[stream_id]


def test_long_polls_take_no_room_while_they_wait(service: Service) -> None:
    """The longest possible number of streams wait on one connection, and one record answers all of them."""
    put(service.client, "polled")
    with connected(service) as streams:
        poll_body = json.dumps({"from_seq": 0, "wait_ms": 20_000, "max_batch_bytes": 8 << 20}).encode()
        polls = [streams.ask("/v0/topics/polled/diff", poll_body) for _ in range(60)]
        poll("them to wait", lambda: waiting_polls(service) == 60 or None)
        page = streams.ask("/v0/topics/t/diff", PAGE)
        streams.take(page)
        streams.read_to_the_end_of(page)
        write(service.client, "polled", "here it is")
        streams.take(*polls)
        streams.read_to_the_end_of(*polls)
        assert {len(json_of(streams, stream_id)["records"]) for stream_id in polls} == {1}


def waiting_polls(service: Service) -> int:
    metrics = service.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
    return sum(metrics["topics_frontend_long_polls"].values())


@pytest.mark.parametrize("end", ["reset", "close"])
def test_jobs_of_a_claim_that_waits_for_room_are_given_back_with_its_stream(service: Service, end: str) -> None:
    queue = f"jobs-{end}"
    put(service.client, queue, type="queue", lease_ms=3_600_000)
    write(service.client, queue, 1, 2, 3)
    with connected(service) as streams:
        ask_pages(service, streams, 3)
        claims: list[int] = []

        def are_leased() -> bool:
            """For as long as a claim waits; it may be over before it was looked, so there is another one then."""
            claims.append(streams.ask(f"/v0/topics/{queue}/claim", b'{"node": "n", "max": 2}'))
            asked_s = time.monotonic()
            while time.monotonic() - asked_s < CLAIM_WAITS_S:
                if state(service.client, queue)["queue"]["in_flight"] >= 2:
                    return True
            return False

        poll("the jobs to be leased", are_leased)
        if end == "reset":
            for claim in claims:
                streams.give_up(claim)
            poll("the jobs to be ready", lambda: state(service.client, queue)["queue"]["ready"] == 3 or None, 10.0)
    poll("the jobs to be ready", lambda: state(service.client, queue)["queue"]["ready"] == 3 or None, 10.0)
