"""The memory of one frontend for its clients is bounded, however many they are (docs/limits.md)."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import AcceptConnection, Request, TextMessage

from tests.contract.asking import long_polls
from tests.contract.socket_client import Socket
from tests.contract.test_7_http2_window import Reader
from tests.harness import Service, poll

MIB = 1 << 20
KEPT_MIB = 256
"""`KEPT_FRAMES`, and the least of `LONG_BODIES`, of `topics.frontend.entry.limits`."""
AROUND_MIB = 120
"""MiB for the rest of a frontend: itself, and the page that is made just now in several forms."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
"""With it malloc gives blocks of 256 KiB and more back when they are freed. Otherwise it keeps holes between them, and
how many is chance: up to half of what is in use.
"""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(shards=1, frontends=1, wal_file_bytes=None, env=GIVEN_BACK) as one:
        yield one


@pytest.fixture
def frontend(service: Service) -> Path:
    """Return the folder in which the kernel describes the frontend."""
    return Path(f"/proc/{service.pid_of('frontend')}/status")


def own_mib(frontend: Path) -> float:
    """The frontend's own memory, without files that it maps."""
    status = frontend.read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def open_unread(service: Service, protocol: str, subscription: dict[str, object]) -> socket.socket | Reader:
    """A WebSocket with this subscription, of which nothing is read any more."""
    subscribe = TextMessage(data=json.dumps({"op": "subscribe", **subscription}))
    if protocol == "h2":
        websocket = [(":method", "CONNECT"), (":protocol", "websocket"), (":path", "/v0/ws")]
        stream = Reader(service, *websocket, ("sec-websocket-version", "13"))
        stream.wait_answer()
        stream.send(Connection(ConnectionType.CLIENT).send(subscribe))
        return stream
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    end.settimeout(30)
    end.connect(("127.0.0.1", service.port))
    client = WSConnection(ConnectionType.CLIENT)
    end.sendall(client.send(Request(host="localhost", target="/v0/ws")))
    while True:
        client.receive_data(end.recv(1024))
        if any(isinstance(event, AcceptConnection) for event in client.events()):
            break
    end.sendall(client.send(subscribe))
    return end


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
def test_websockets_that_are_not_read_keep_no_more_than_event_streams(
    service: Service, frontend: Path, protocol: str
) -> None:
    """48 of them ask for 8 MiB at a time each, no two for the same: 384 MiB. One that reads gets its records all the
    same: a client that has taken nothing for 2 s has to give way. When they have gone, others have the memory.
    """
    for _ in range(16):
        service.client.post("/v0/topics/t", json={"records": [{"data": "x" * 1_000_000}]}).raise_for_status()
    wish = {"topic": "t", "from_seq": 0, "limit": 1000, "max_batch_bytes": 8 * MIB}
    most_mib = []
    for _ in range(2):
        with ExitStack() as stack:
            seen_mib = []
            for n in range(48):
                stack.enter_context(open_unread(service, protocol, {**wish, "node": f"n{n}"}))
                seen_mib.append(own_mib(frontend))
            until_s = time.monotonic() + 4
            while time.monotonic() < until_s:
                seen_mib.append(own_mib(frontend))
                time.sleep(0.02)
            reader = stack.enter_context(Socket(service))
            reader.send("subscribe", request_id=1, **wish)
            assert [record["$seq"] for record in reader.records(16)] == list(range(1, 17))
            seen_mib.append(own_mib(frontend))
        most_mib.append(max(seen_mib))
    assert most_mib[0] < KEPT_MIB + AROUND_MIB
    assert most_mib[1] < most_mib[0] + KEPT_MIB / 4, "what was kept for those who have gone is kept still"


def test_long_polls_that_name_many_writers_are_refused_when_there_is_no_room(service: Service, frontend: Path) -> None:
    """100 of them with 10,000 names each, no two alike, would be 200 MiB; those that wait are answered."""
    service.client.put("/v0/topics/t", json={})
    polls = 100

    def poll_without(n: int) -> httpx.Response:
        nodes = [f"{n:04d}-{number:05d}-" + "n" * 90 for number in range(10_000)]
        url = f"{service.url}/v0/topics/t/diff"
        return httpx.post(url, json={"wait_ms": 30_000, "node": nodes}, timeout=60)

    def all_settled() -> bool:
        return sum(one.done() for one in asked) + long_polls(service) == polls

    with ThreadPoolExecutor(polls) as pool:
        asked = [pool.submit(poll_without, n) for n in range(polls)]
        poll("each to wait or be refused", all_settled, 60.0)
        assert own_mib(frontend) < 128 + AROUND_MIB / 2
        refused = [one.result() for one in asked if one.done()]
        service.client.post("/v0/topics/t", json={"records": [{"data": 1}]}).raise_for_status()
        answers = [one.result() for one in asked]
    assert 10 < len(refused) < 60
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["detail"]["limit"]) == (429, "node_bytes")
        assert "retry-after" in answer.headers
    assert [answer.status_code for answer in answers].count(200) == polls - len(refused)
    assert all(answer.json()["records"] for answer in answers if answer.status_code == 200)


def test_bodies_of_any_size_that_never_end_have_a_bound_together(service: Service, frontend: Path) -> None:
    """400 clients send all but one byte of a MiB: those beyond 256 are refused, and nobody with a short body is. When
    they have gone, others have the room, and the memory.
    """
    clients, fit = 400, KEPT_MIB
    headers = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {MIB}")
    request = "\r\n".join(("POST /v0/topics/t HTTP/1.1", *headers, "", "")).encode() + b" " * (MIB - 1)

    def send(end: socket.socket) -> None:
        end.settimeout(60)
        end.connect(("127.0.0.1", service.port))
        end.sendall(request)

    held_mib = []
    for _ in range(2):
        with ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
            ends = [stack.enter_context(socket.socket()) for _ in range(clients)]
            list(pool.map(send, ends))
            poll("those for whom there is no room to be told", lambda: len(answered(ends)) == clients - fit)
            held_mib.append(own_mib(frontend))
            for end in answered(ends):
                answer = end.recv(4096)
                assert answer.startswith(b"HTTP/1.1 429")
                assert b'"limit":"body_bytes"' in answer
            service.client.post("/v0/topics/t", json={"records": [{"data": 1}]}).raise_for_status()
    assert held_mib[0] < KEPT_MIB + AROUND_MIB
    assert held_mib[1] < held_mib[0] + KEPT_MIB / 4


def answered(ends: list[socket.socket]) -> list[socket.socket]:
    return select.select(ends, [], [], 0)[0]
