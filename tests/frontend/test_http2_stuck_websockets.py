"""A WebSocket over HTTP/2 that sends more than the service takes holds up nobody else, and takes its memory alone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from h2.errors import ErrorCodes
from wsproto import frame_protocol
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, TextMessage

from tests.frontend.http1_server import Server, until
from tests.frontend.http2_client import Streams
from topics.frontend.http import http2_websocket
from topics.frontend.http.deadlines import HttpLimits

WINDOW_BYTES = 65_535
"""The bytes that a client may send on a stream before the service gives it more."""
QUEUED = 10
"""Messages that wait for the app of a WebSocket."""
TEXT = "x" * 1000


def framed(*events: TextMessage | Ping | CloseConnection) -> bytes:
    client = Connection(ConnectionType.CLIENT)
    return b"".join(bytes(client.send(event)) for event in events)


MESSAGE = framed(TextMessage(data=TEXT))
BEGIN, PIECE = b"\x81\xff" + (1 << 20).to_bytes(8) + bytes(4), b"p"
"""The head of a frame that is longer than all that is sent, and a piece of it."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def opened(streams: Streams, path: str = "/ws") -> int:
    stream = streams.open_websocket(path)
    while stream not in streams.answered:
        streams.read()
    return stream


def stuck(server: Server, streams: Streams, path: str = "/ws") -> int:
    """Return a WebSocket whose client has sent all it may, and takes nothing."""
    stream = opened(streams, path)
    assert streams.fill(stream, MESSAGE, lambda: server.app.taken) > WINDOW_BYTES // len(MESSAGE) // 2
    return stream


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def kept_bytes() -> int:
    """Return the bytes of WebSockets' frames that the service keeps, of those that came since tracing began."""
    files = [tracemalloc.Filter(True, module.__file__ or "") for module in (http2_websocket, frame_protocol)]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(files).traces)


def is_served(streams: Streams) -> bool:
    """Return True if a request with a body of several windows is answered."""
    body = b'"' + b"y" * 200_000 + b'"'
    asked = streams.ask("/echo", body[:1], whole=False)
    streams.take(asked)
    streams.go_on(asked, body[1:], whole=True)
    streams.read_to_the_end_of(asked)
    return streams.bodies[asked] == body


def test_it_holds_up_no_other_stream_and_goes_on_when_it_takes_its_answers(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams)
        sent = streams.fill(stream, MESSAGE, lambda: server.app.taken)
        assert is_served(streams)
        assert server.app.taken < sent
        streams.take(stream)
        while streams.got_bytes(stream) < sent * len(TEXT):
            streams.read()
        streams.go_on(stream, framed(CloseConnection(1000)), whole=False)
        streams.read_to_the_end_of(stream)
        answers = Connection(ConnectionType.CLIENT)
        answers.receive_data(bytes(streams.bodies[stream]))
        texts = [event.data for event in answers.events() if isinstance(event, TextMessage)]
        assert texts == [TEXT.upper()] * sent
        until(lambda: not server.app.running, "its app to end")


def test_as_many_as_a_connection_may_have_leave_the_last_stream_its_window(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        for _ in range(99):
            stuck(server, streams, "/deaf")
        assert is_served(streams)
        server.call(server.app.go.set)


def test_the_window_of_a_connection_opens_when_websockets_close_it(server: Server) -> None:
    """It is given back in large parts: what is owed then may be a third of it."""
    with server.client() as client:
        streams = Streams(client.socket)
        for _ in range(75):
            stuck(server, streams, "/deaf")
        while streams.connection_room_bytes > 300_000:
            assert is_served(streams)
        while streams.connection_room_bytes:
            stream = opened(streams, "/deaf")
            streams.go_on(stream, (MESSAGE * 100)[: streams.room_bytes(stream)], whole=False)
        for _ in range(2):  # the first answer may come before the window
            streams.settle()
        assert streams.connection_room_bytes > 1_000_000
        assert is_served(streams)


@pytest.mark.parametrize("path", ["/unaccepted", "/deaf"], ids=["refused", "closed"])
def test_nothing_is_kept_of_what_comes_for_one_that_is_closed(server: Server, path: str) -> None:
    websockets = 20
    with server.client() as client:
        streams = Streams(client.socket)
        with traced():
            for _ in range(websockets):
                stream = streams.open_websocket(path, behind=b"" if path == "/deaf" else MESSAGE)
                while stream not in streams.answered:
                    streams.read()
                if path == "/deaf":
                    streams.go_on(stream, framed(CloseConnection(1000)), whole=False)
                    for _ in range(2):
                        streams.settle()
                streams.go_on(stream, MESSAGE * 60, whole=False)
            for _ in range(2):
                streams.settle()
            assert kept_bytes() < websockets * len(MESSAGE) * 10
        assert is_served(streams)
        server.call(server.app.go.set)


def test_what_waits_for_its_app_is_kept_once(server: Server) -> None:
    websockets = 10
    with server.client() as client:
        streams = Streams(client.socket)
        with traced():
            for _ in range(websockets):
                stream = opened(streams, "/deaf")
                with server.held():  # so that it comes at once
                    streams.go_on(stream, MESSAGE * 64, whole=False)
                for _ in range(2):
                    streams.settle()
            assert kept_bytes() < websockets * WINDOW_BYTES * 1.3
        server.call(server.app.go.set)


@pytest.mark.parametrize("message", [MESSAGE, framed(TextMessage(data="y")), PIECE], ids=["long", "short", "cut"])
def test_no_more_is_kept_of_it_than_its_window_and_what_waits_for_its_app(server: Server, message: bytes) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams, "/deaf")
        if message == PIECE:  # behind those that fill the queue
            for _ in range(QUEUED + 1):
                streams.go_on(stream, MESSAGE, whole=False)
            streams.go_on(stream, BEGIN, whole=False)
        streams.fill(stream, message * (2000 // len(message)), lambda: server.app.taken)
        assert streams.sent_bytes(stream) <= WINDOW_BYTES + (QUEUED + 2) * len(MESSAGE)
        server.call(server.app.go.set)


def test_its_connection_is_served_after_many_that_were_given_up(server: Server) -> None:
    """Their windows come back, also of what nobody took."""
    with server.client() as client:
        streams = Streams(client.socket)
        for _ in range(110):
            streams.give_up(stuck(server, streams))
        assert is_served(streams)
        until(lambda: server.app.disconnects == 110, "their apps to hear of it")


@pytest.mark.parametrize("end", ["reset", "close"])
def test_its_app_hears_that_its_client_is_gone(server: Server, end: str) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = stuck(server, streams)
        if end == "reset":
            streams.give_up(stream)
            until(lambda: server.app.disconnects == 1, "its app to hear of it")
            assert is_served(streams)
    until(lambda: server.app.disconnects == 1, "its app to hear of it")
    until(lambda: not server.connections.tasks, "the connection to end")


def test_what_came_before_the_end_of_its_connection_is_taken(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams)
        sent = 40
        for _ in range(sent):
            streams.go_on(stream, MESSAGE, whole=False)
    until(lambda: server.app.taken == sent, "all of it to be taken")
    until(lambda: server.app.disconnects == 1, "its app to hear of the end")


def test_frames_before_a_close_are_taken_also_if_all_come_at_once_and_those_behind_it_are_dropped(
    server: Server,
) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams)
        streams.take(stream)
        sent = 2 * QUEUED
        whole = framed(*[TextMessage(data="x")] * sent, CloseConnection(1000)) + framed(TextMessage(data="behind"))
        streams.go_on(stream, whole, whole=False)
        streams.read_to_the_end_of(stream)
        until(lambda: not server.app.running, "its app to end")
        assert (server.app.taken, server.app.disconnects) == (sent, 1)
        assert is_served(streams)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
def test_the_service_may_close_it(reads: bool) -> None:
    with Server(limits=HttpLimits(write_stall_timeout_ms=300, linger_ms=20)) as server, server.client() as client:
        streams = Streams(client.socket)
        stream = stuck(server, streams, "/closing")
        server.call(server.app.go.set)
        if reads:
            streams.take(stream)
            streams.go_on(stream, framed(CloseConnection(1012)), whole=False)
            streams.read_to_the_end_of(stream)
        else:
            while stream not in streams.reset:
                streams.read()
            assert streams.reset_codes == {stream: ErrorCodes.CANCEL}
        until(lambda: not server.app.running, "its app to end")
        assert is_served(streams)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("path", ["/ws", "/deaf"])
def test_it_holds_up_no_stop_beyond_the_grace(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(grace_ms=100) as server, server.client() as client:
        stuck(server, Streams(client.socket), path)
        server.begin_shutdown()
        server.wait_stopped()
        assert not server.connections.tasks
        assert not server.app.errors
    assert "connection failed" not in "".join(capsys.readouterr())


def test_too_many_pings_of_one_that_waits_cut_the_connection_with_a_reason(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams)
        streams.go_on(stream, framed(Ping()) * 10_000, whole=False)  # all that the window takes
        while streams.ended_by is None:
            streams.read()
        assert streams.ended_by == ErrorCodes.ENHANCE_YOUR_CALM
    until(lambda: server.app.disconnects == 1, "its app to hear of it")


def test_pongs_wait_for_the_client_as_messages_do(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams)
        pings = 400
        streams.go_on(stream, framed(Ping(b"p" * 100)) * pings, whole=False)
        assert is_served(streams)
        streams.take(stream)
        streams.go_on(stream, framed(CloseConnection(1000)), whole=False)
        streams.read_to_the_end_of(stream)
        assert streams.bodies[stream].count(b"p" * 100) == pings


@pytest.mark.parametrize("behind", [MESSAGE, b""], ids=["frames", "the end"])
def test_what_comes_right_behind_a_handshake_ends_its_app(server: Server, behind: bytes) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = streams.open_websocket("/unaccepted", behind=behind)
        if not behind:
            streams.go_on(stream, b"", whole=True)
        until(lambda: server.app.disconnects == 1, "its app to hear of it")
        streams.take(stream)
        streams.read_to_the_end_of(stream)
        assert b"invalid_request" in streams.bodies[stream]
        assert is_served(streams)


@pytest.mark.parametrize("path", ["/ws", "/closing", "/broken"])
def test_one_that_ends_without_a_close_is_no_open_stream_any_more(server: Server, path: str) -> None:
    """Its client ends the stream, or its app fails."""
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams, path)
        streams.take(stream)
        if path != "/broken":
            streams.go_on(stream, MESSAGE, whole=True)
        streams.read_to_the_end_of(stream)
        server.call(server.app.go.set)
        until(lambda: not server.app.running, "its app to end")
        assert server.app.disconnects == (path != "/broken")
        assert is_served(streams)
