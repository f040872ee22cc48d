"""What clients can make one frontend keep for them is bounded, however many they are (docs/architecture.md)."""

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
from wsproto.events import AcceptConnection, Request, TextMessage

from tests.contract.asking import long_polls
from tests.contract.socket_client import Socket
from tests.harness import Service, poll

MIB = 1 << 20
KEPT_MIB = 256
"""`room.KEPT_BYTES_MAX`, and the least of `body_budget.BODIES_MAX_BYTES`."""
AROUND_MIB = 192
"""What else a frontend has: itself, the page that is made just now in several forms, and what malloc does not give back
at once."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(shards=1, frontends=1, wal_file_bytes=None) as one:
        yield one


def own_mib(service: Service) -> float:
    """The frontend's own memory, without files that it maps."""
    status = Path(f"/proc/{service.pid_of('frontend')}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def open_unread(service: Service, subscription: dict[str, object]) -> socket.socket:
    """A WebSocket with this subscription, of which nothing is read any more."""
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    end.settimeout(30)
    end.connect(("127.0.0.1", service.port))
    client = WSConnection(ConnectionType.CLIENT)
    end.sendall(client.send(Request(host="test", target="/v0/ws")))
    while True:
        client.receive_data(end.recv(1024))
        if any(isinstance(event, AcceptConnection) for event in client.events()):
            break
    end.sendall(client.send(TextMessage(data=json.dumps({"op": "subscribe", **subscription}))))
    return end


def test_websockets_that_are_not_read_keep_no_more_than_event_streams(service: Service) -> None:
    """60 of them ask for 8 MiB at a time each, no two for the same. One that reads gets its records all the same:
    who has taken nothing for 2 s has to give way.
    """
    for _ in range(16):
        service.client.post("/v0/topics/t", json={"records": [{"data": "x" * 1_000_000}]}).raise_for_status()
    wish = {"topic": "t", "from_seq": 0, "limit": 1000, "max_batch_bytes": 8 * MIB}
    most_mib = 0.0
    with ExitStack() as stack:
        for n in range(60):
            stack.enter_context(open_unread(service, {**wish, "node": f"n{n}"}))
            most_mib = max(most_mib, own_mib(service))
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            most_mib = max(most_mib, own_mib(service))
            time.sleep(0.05)
        reader = stack.enter_context(Socket(service))
        reader.send("subscribe", request_id=1, **wish)
        assert [record["$seq"] for record in reader.records(16)] == list(range(1, 17))
        most_mib = max(most_mib, own_mib(service))
    assert most_mib < KEPT_MIB + AROUND_MIB
    poll("what was kept to be free", lambda: print(own_mib(service)) or own_mib(service) < AROUND_MIB)


def test_long_polls_that_name_many_writers_are_refused_when_there_is_no_room(service: Service) -> None:
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
        assert own_mib(service) < 128 + AROUND_MIB / 4
        refused = [one.result() for one in asked if one.done()]
        service.client.post("/v0/topics/t", json={"records": [{"data": 1}]}).raise_for_status()
        answers = [one.result() for one in asked]
    assert 10 < len(refused) < 60
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["detail"]["limit"]) == (429, "node_bytes")
        assert "retry-after" in answer.headers
    assert [answer.status_code for answer in answers].count(200) == polls - len(refused)
    assert all(answer.json()["records"] for answer in answers if answer.status_code == 200)


def test_bodies_of_any_size_that_never_end_have_a_bound_together(service: Service) -> None:
    """400 clients send all but one byte of a MiB: those beyond 256 are refused, and nobody with a short body is. When
    they have gone, others have the room, and the memory.
    """
    clients, fit = 400, KEPT_MIB
    headers = ("Host: test", "Content-Type: application/json", f"Content-Length: {MIB}")
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
            poll("those for whom there is no room to be told", lambda: len(answered(ends)) == clients - fit)  # noqa: B023
            held_mib.append(own_mib(service))
            for end in answered(ends):
                answer = end.recv(4096)
                assert answer.startswith(b"HTTP/1.1 429")
                assert b'"limit":"body_bytes"' in answer
            service.client.post("/v0/topics/t", json={"records": [{"data": 1}]}).raise_for_status()
    assert held_mib[0] < KEPT_MIB + AROUND_MIB
    assert held_mib[1] < held_mib[0] + 32


def answered(ends: list[socket.socket]) -> list[socket.socket]:
    return select.select(ends, [], [], 0)[0]
