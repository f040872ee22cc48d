"""api §10 `at_least_once`: nothing is left out that the service still had when a client or a frontend went away."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

import h2.config
import h2.connection
import httpx
import pytest

from tests.contract.asking import write
from tests.contract.test_10_cursors import look, make, read
from tests.harness import Service, poll

RECORD_BYTES: Final = 900 * 1024
LONG_PAGE: Final = 9
"""So many of them are 8 MiB: more than the kernel takes off a frontend whose client reads nothing."""
RECEIVE_BUFFER_BYTES: Final = 4096


@pytest.fixture(scope="module")
def full() -> Iterator[Service]:
    """One frontend; topic `long` has a page of 8 MiB and one record more, `short` a thousand of 2 kB."""
    with Service(shards=1, frontends=1, wal_file_bytes=None) as service:
        for _ in range(LONG_PAGE + 1):
            write(service.client, "long", "x" * RECORD_BYTES)
        write(service.client, "short", *["x" * 2000] * 1000)
        yield service


def connected(service: Service) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    client.settimeout(15)
    client.connect(("127.0.0.1", service.port))
    return client


def ask(service: Service) -> socket.socket:
    """A reader of cursor `c` of `long` that reads nothing of its answer."""
    client = connected(service)
    body = b'{"max_bytes":8388608}'
    client.sendall(
        b"POST /v0/topics/long/cursors/c/read HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    poll("the cursor to move", lambda: look(service.client, "long")["cursor_seq"] == LONG_PAGE)
    return client


def kill(service: Service, client: socket.socket) -> None:
    """What the kernel had of the answer still comes."""
    pid = service.pid_of("frontend")
    os.kill(pid, signal.SIGKILL)
    got = 0
    try:
        while data := client.recv(1 << 20):
            got += len(data)
    except ConnectionResetError:
        pass
    assert got < LONG_PAGE * RECORD_BYTES
    client.close()
    service.wait_healed(pid)


def close(service: Service, client: socket.socket) -> None:
    assert client.recv(4096)
    client.close()


def reset(service: Service, client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("end", [kill, close, reset])
def test_at_least_once_what_the_frontend_still_had_comes_again(
    full: Service, end: Callable[[Service, socket.socket], None]
) -> None:
    make(full.client, "long", from_seq=0)
    end(full, ask(full))
    poll("it to be given back", lambda: look(full.client, "long")["cursor_seq"] == 0)
    assert len(read(full.client, "long", max_bytes=8 << 20)) == LONG_PAGE
    poll("it to be passed on", lambda: look(full.client, "long")["persisted_seq"] == LONG_PAGE)
    assert len(read(full.client, "long")) == 1


def test_strictly_at_once_nothing_of_it_comes_again(full: Service) -> None:
    make(full.client, "long", from_seq=0, consistency="strictly_at_once")
    close(full, ask(full))
    assert len(read(full.client, "long")) == 1
    make(full.client, "long", from_seq=0, consistency="at_least_once")


@pytest.mark.parametrize("end", ["a reset stream", "a closed connection"])
def test_at_least_once_what_waited_for_a_window_comes_again(full: Service, end: str) -> None:
    make(full.client, "short", from_seq=0)
    body = b'{"limit":500,"max_bytes":8388608}'
    with connected(full) as client:
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        http2.initiate_connection()
        head = {
            ":method": "POST",
            ":scheme": "http",
            ":authority": "test",
            ":path": "/v0/topics/short/cursors/c/read",
            "content-type": "application/json",
        }
        http2.send_headers(1, list(head.items()))
        http2.send_data(1, body, end_stream=True)
        client.sendall(http2.data_to_send())
        poll("the cursor to move", lambda: look(full.client, "short")["cursor_seq"] == 500)
        if end == "a reset stream":
            http2.reset_stream(1)
            client.sendall(http2.data_to_send())
            poll("it to be given back", lambda: look(full.client, "short")["cursor_seq"] == 0)
    poll("it to be given back", lambda: look(full.client, "short")["cursor_seq"] == 0)
    assert first_seq(full.client) == 1


def first_seq(client: httpx.Client) -> int:
    answer = client.post("/v0/topics/short/cursors/c/read", json={"limit": 1})
    seq: int = json.loads(answer.content)["records"][0]["$seq"]
    return seq
