"""api §7: a client that floods its connection with frames is cut, and holds nobody up; a busy one is not cut."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from websockets.exceptions import ConnectionClosed

from tests.contract.asking import ok
from tests.contract.socket_client import Socket
from tests.contract.test_7_http2_window import anonymous_bytes
from tests.frontend.http2_client import Streams
from tests.harness import Service, poll
from topics.frontend.http.frame_budget import FRAMES_BURST

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = b"\x82\x86\x84\x01\x09localhost"  # GET http / by HPACK's static table
FRAME_BYTES_MAX = 16_384
GOAWAY = 7
CUT_AFTER = FRAMES_BURST + 4000
"""Frames that are cut on any machine: it takes these in less than the 4 s in which as many are allowed."""


@pytest.fixture(scope="module")
def flooded() -> Iterator[Service]:
    with Service(shards=1, frontends=1) as running:
        yield running


def frame(kind: int, flags: int = 0, stream_id: int = 0, body: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + body


def resets(count: int) -> bytes:
    streams = range(1, 2 * count, 2)
    return b"".join(frame(1, 5, stream, HEAD) + frame(3, 0, stream, b"\0\0\0\x08") for stream in streams)


END = frame(0, 1, 1)
"""An empty piece of a body, which ends it."""
MANY_FIELDS = b"\x90" * 2000
STATES_A_BODY = HEAD + b"\x0f\x0d\x015"
CAPITALS = b"\0\x01X\x011"
WIDEST = b"\x7f\xff\xff\xff"
"""A step by which a window becomes wider than any may be."""


def each(count: int, *frames: tuple[int, int, bytes]) -> bytes:
    """Return so many streams with these frames."""
    return b"".join(frame(kind, flags, n, body) for n in range(1, 2 * count, 2) for kind, flags, body in frames)


FLOODS = {
    "SETTINGS": frame(4) * CUT_AFTER,
    "long SETTINGS": frame(4, body=b"\x00\x05\x00\x00\x40\x00" * 2700) * 100,
    "PING": frame(6, body=b"12345678") * CUT_AFTER,
    "PING answers": frame(6, 1, body=b"12345678") * CUT_AFTER,
    "PRIORITY": b"".join(frame(2, 0, n, b"\0\0\0\0\5") for n in range(1, 2 * CUT_AFTER, 2)),
    "unknown": frame(0x42) * CUT_AFTER,
    "WINDOW_UPDATE": frame(8, body=b"\0\0\0\1") * CUT_AFTER,
    "RST_STREAM": resets(CUT_AFTER),
    "bodies that do not come": each(CUT_AFTER, (1, 5, STATES_A_BODY)),
    "malformed heads": each(CUT_AFTER, (1, 5, HEAD + CAPITALS)),
    "malformed trailers": each(CUT_AFTER, (1, 4, HEAD), (1, 5, CAPITALS)),
    "bodies behind the end": each(CUT_AFTER, (1, 5, HEAD), (0, 1, b"")),
    "heads behind the end": each(CUT_AFTER, (1, 5, HEAD), (1, 5, HEAD)),
    "windows that are too wide": each(400, (1, 5, HEAD), (8, 0, WIDEST)),
    "heads for a stream that was reset": resets(1) + frame(1, 5, 1, HEAD) * CUT_AFTER,
    "ends of a stream that was reset": resets(1) + END * CUT_AFTER,
    "header fields": each(10, (1, 5, HEAD + MANY_FIELDS)),
    "header fields where no body comes": each(10, (1, 5, STATES_A_BODY + MANY_FIELDS)),
    "header fields for a stream that was reset": resets(1) + frame(1, 5, 1, MANY_FIELDS) * 10,
    "header fields behind a body": each(10, (1, 4, HEAD), (1, 5, MANY_FIELDS)),
    "a long header block": frame(1, 1, 1, HEAD) + frame(9, 0, 1, b"\x90" * FRAME_BYTES_MAX) * 40,
}


ADDRESSES = (f"127.0.{net}.{n}" for net in (1, 3) for n in range(1, 255))
"""An address that is cut again and again waits: tests of one cut have one each."""


def connect(service: Service, address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=15, source_address=(address, 0))


def goodbye(service: Service, flood: bytes) -> tuple[int, socket.socket]:
    """The error of the GOAWAY that a client gets which sends this and reads meanwhile, and its open connection."""
    connected = connect(service, next(ADDRESSES))
    connected.sendall(PREFACE + frame(4))
    connected.setblocking(False)
    unsent, unread = memoryview(flood), b""

    def read() -> int | None:
        nonlocal unsent, unread
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            unsent = unsent[connected.send(unsent) :]
        with contextlib.suppress(BlockingIOError):
            unread += connected.recv(1 << 20)
        while len(unread) >= 9 and len(unread) >= (length := 9 + int.from_bytes(unread[:3], "big")):
            if unread[3] == GOAWAY:
                return int.from_bytes(unread[13:17], "big") + 1
            unread = unread[length:]
        return None

    try:
        return poll("a GOAWAY", read) - 1, connected
    except BaseException:
        connected.close()
        raise


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_of_frames_ends_in_enhance_your_calm(flooded: Service, flood: bytes) -> None:
    code, connected = goodbye(flooded, flood)
    connected.close()
    assert code == ErrorCodes.ENHANCE_YOUR_CALM
    ok(flooded.client.get("/v0/topics"))


def test_an_address_that_is_cut_again_and_again_gets_no_http2_for_a_while(flooded: Service) -> None:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(flooded, "127.0.2.1")) for _ in range(40)]
        for connected in opened:  # all are there before the first is cut
            connected.sendall(PREFACE + frame(4))
            connected.recv(1)
        for connected in opened:
            connected.sendall(frame(4) * CUT_AFTER)
            with contextlib.suppress(ConnectionResetError):
                deque(iter(partial(connected.recv, 1 << 16), b""), maxlen=0)
        late = stack.enter_context(connect(flooded, "127.0.2.1"))
        late.sendall(PREFACE + frame(4))
        assert late.recv(1) == b""
        plain = stack.enter_context(connect(flooded, "127.0.2.1"))
        plain.sendall(b"GET /v0/topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert plain.recv(12) == b"HTTP/1.1 200"
        other = stack.enter_context(connect(flooded, "127.0.2.2"))
        other.sendall(PREFACE + frame(4))
        assert other.recv(1)


def test_a_frame_is_refused_at_its_announced_length(flooded: Service) -> None:
    code, connected = goodbye(flooded, frame(0, 0, 1, length=FRAME_BYTES_MAX + 1))
    connected.close()
    assert code == ErrorCodes.FRAME_SIZE_ERROR


@pytest.mark.long
def test_long_frames_on_many_connections_take_no_memory(flooded: Service) -> None:
    before_bytes = anonymous_bytes(flooded)
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            _, connected = goodbye(flooded, frame(0x42, length=(1 << 24) - 1) + b"x" * (2 << 20))
            stack.enter_context(connected)
        assert anonymous_bytes(flooded) - before_bytes < 80 << 20  # what was read before the refusal
    ok(flooded.client.get("/v0/topics"))


@pytest.mark.long
def test_memory_of_closed_connections_is_used_again(flooded: Service) -> None:
    held_bytes = []
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for _ in range(80):
                _, connected = goodbye(flooded, frame(1, 1, 1, HEAD) + frame(9, 0, 1, b"\x90" * FRAME_BYTES_MAX) * 40)
                stack.enter_context(connected)
        held_bytes.append(anonymous_bytes(flooded))
    assert held_bytes[1] - held_bytes[0] < 24 << 20


@pytest.mark.long
def test_parts_of_heads_count_together_and_the_oldest_are_cut(flooded: Service) -> None:
    before_bytes = anonymous_bytes(flooded)
    part = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 150_000
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(500):
            connected = stack.enter_context(socket.create_connection(("127.0.0.1", flooded.port), timeout=15))
            connected.sendall(part)
            opened.append(connected)
        assert opened[0].recv(1) == b""
        opened[-1].sendall(b"\r\n\r\n")
        assert opened[-1].recv(12).startswith(b"HTTP/1.1 ")
        assert anonymous_bytes(flooded) - before_bytes < 100 << 20


@pytest.mark.parametrize(
    "flood",
    [
        b"\x01\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * CUT_AFTER,
        b"\x89\x80\0\0\0\0" * CUT_AFTER,
        b"\x8a\x80\0\0\0\0" * CUT_AFTER,
        (b"\x89\xfd\0\0\0\0" + b"x" * 125) * CUT_AFTER,
        b"\x81\x80\0\0\0\0" * CUT_AFTER,
    ],
    ids=["fragments", "pings", "pongs", "long pings", "empty messages"],
)
def test_a_flood_of_a_websocket_is_closed_with_1008(flooded: Service, flood: bytes) -> None:
    with Socket(flooded) as opened:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            opened.wire.socket.sendall(flood)
        with pytest.raises(ConnectionClosed) as closed:
            deque(iter(partial(opened.wire.recv, 15), None), maxlen=0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


@pytest.mark.long
def test_many_pings_and_many_short_requests_are_served(flooded: Service) -> None:
    with Socket(flooded) as opened:
        for n in range(3 * FRAMES_BURST):
            opened.wire.send(
                json.dumps({"op": "publish", "topic": "busy", "records": [{"data": n}], "request_id": str(n)})
            )
            if n % 10 == 0:
                opened.wire.ping().wait(15)
            assert opened.next()["request_id"] == str(n)


@pytest.mark.long
def test_a_client_that_acknowledges_each_answer_over_http2_is_served(flooded: Service) -> None:
    with socket.create_connection(("127.0.0.1", flooded.port), timeout=15) as connected:
        client = Streams(connected)
        for _ in range(2 * FRAMES_BURST):
            stream_id = client.ask("/v0/topics")
            client.take(stream_id)  # a WINDOW_UPDATE each
            client.read_to_the_end_of(stream_id)


@pytest.mark.long
def test_a_body_that_goes_on_behind_its_answer_over_http2_ends_no_other_request(flooded: Service) -> None:
    with socket.create_connection(("127.0.0.1", flooded.port), timeout=15) as connected:
        client = Streams(connected)
        refused = client.ask("/v0/nothing", b"x", whole=False)
        client.take(refused)
        client.read_to_the_end_of(refused)
        for _ in range(20):  # more than its window, and than that of the connection
            client.go_on(refused, b"x" * FRAME_BYTES_MAX, whole=False)
        client.go_on(refused, b"x", whole=True)
        other = client.ask("/v0/topics/nothing/diff", b"{", whole=False)
        client.take(other)
        client.go_on(other, b'"limit": 1}', whole=True)
        client.read_to_the_end_of(other)
        assert b"topic_not_found" in client.bodies[other]
        assert not client.reset


@pytest.mark.long
def test_a_client_that_never_ends_a_refused_body_over_http2_is_told_to(flooded: Service) -> None:
    with socket.create_connection(("127.0.0.1", flooded.port), timeout=15) as connected:
        client = Streams(connected)
        refused = client.ask("/v0/nothing", b"x", whole=False)
        client.take(refused)
        client.read_to_the_end_of(refused)
        with contextlib.suppress(ProtocolError):  # the stream is closed
            while refused not in client.reset:
                client.go_on(refused, b"x" * FRAME_BYTES_MAX, whole=False)
        assert client.reset == {refused}
        other = client.ask("/v0/topics")
        client.take(other)
        client.read_to_the_end_of(other)


def test_a_body_that_comes_byte_by_byte_over_http2_is_taken(flooded: Service) -> None:
    body = json.dumps({"records": [{"data": "x" * 1500}]}).encode()
    with httpx.Client(http1=False, http2=True, timeout=30) as client:
        answer = client.post(
            f"{flooded.url}/v0/topics/slow",
            content=(bytes([one]) for one in body),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code in (200, 201)


def test_what_floods_cause_is_logged_once_a_minute(flooded: Service) -> None:
    lines = [line for line in flooded.said() if line["event"] == "a connection was cut"]
    assert 1 <= len(lines) <= 5  # these tests take a few minutes at most
    assert not [line for line in flooded.said() if "exception" in line and "connection" not in line["event"]]
