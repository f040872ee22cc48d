"""Plain sockets with something open on them: of crowds that close at the same moment (`bench.loop_holds`), and of
clients that come and go (`bench.churn`).
"""

from __future__ import annotations

import json
import re
import resource
import socket
import struct
from enum import Enum
from typing import Final, NamedTuple

from bench import wire

TOPIC: Final = "crowded"
CLOSE_FRAME: Final = b"\x88\x82\0\0\0\0\x03\xe8"
_BIND_ADDRESS_NO_PORT: Final = 24
"""linux/in.h: the port is chosen by `connect`, which may take one of a connection that was closed a second ago."""
_RESET: Final = struct.pack("ii", 1, 0)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HANDSHAKE: Final = (
    b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_crowd: list[socket.socket] = []


class Kind(Enum):
    """The thing that a client has open."""

    IDLE = "idle connections"
    STREAMS = "event streams"
    WEBSOCKETS = "WebSockets"


class CrowdPlan(NamedTuple):
    """A number of clients of one kind. `resets`: they cut their connections instead of closing them."""

    port: int
    kind: Kind
    clients: int
    resets: bool = False


def open_crowd(plan: CrowdPlan) -> None:
    """Open the crowd in this process, which keeps it until `close_crowd`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with connect(plan.port) as asking:
        for _ in range(plan.clients):
            client = opened(plan.port, plan.kind, asking)
            if plan.resets:
                resets(client)
            _crowd.append(client)


def close_crowd() -> None:
    """Close all of the crowd."""
    for client in _crowd:
        client.close()
    _crowd.clear()


def connect(port: int) -> socket.socket:
    """Connect from an address of our own: closed connections keep ports of it for a minute, and none of others."""
    client = socket.socket()
    client.settimeout(60)
    client.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
    client.bind(("127.0.0.2", 0))
    client.connect(("127.0.0.1", port))
    return client


def resets(client: socket.socket) -> None:
    """Have the connection cut when it is closed."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def opened(port: int, kind: Kind, asking: socket.socket) -> socket.socket:
    """Return a client with that open. Sessions of event streams are made over `asking`."""
    client = connect(port)
    if kind is Kind.IDLE:
        ask(client, b"GET /v0/topics/%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % TOPIC.encode())
    elif kind is Kind.STREAMS:
        watch: dict[str, object] = {"topics": {TOPIC: {"from_seq": 0}}}
        session = json.loads(ask(asking, wire.post("/v0/watch", json.dumps(watch).encode())))
        client.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % session["stream_url"].encode())
        read_until(client, b"event: caught-up")
    else:
        client.sendall(_HANDSHAKE)
        read_until(client, b"\r\n\r\n")
        subscribe = json.dumps({"op": "subscribe", "request_id": 1, "topic": TOPIC}).encode()
        client.sendall(bytes((0x81, 0x80 | len(subscribe))) + bytes(4) + subscribe)  # its mask is of zeros
        read_until(client, b'"subscribed"')
    return client


def ask(client: socket.socket, request: bytes) -> bytes:
    """Return the body of the answer, whatever its status is."""
    client.sendall(request)
    answer = read_until(client, b"\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert length is not None, head
    while len(body) < int(length[1]):
        body += _received(client)
    return body


def read_until(client: socket.socket, sign: bytes) -> bytes:
    """Read until `sign` has come."""
    answer = b""
    while sign not in answer:
        answer += _received(client)
    return answer


def _received(client: socket.socket) -> bytes:
    data = client.recv(65536)
    if not data:
        raise ConnectionError("the service closed a connection")
    return data
