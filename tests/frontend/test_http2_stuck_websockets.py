"""A WebSocket over HTTP/2 that sends more than the service takes holds up nobody else, and takes its memory alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from h2.errors import ErrorCodes
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, TextMessage

from tests.frontend.http1_server import Server, until
from tests.frontend.http2_client import Streams
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


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def opened(streams: Streams, path: str = "/ws") -> int:
    stream = streams.open_websocket(path)
    while stream not in streams.answered:
        streams.read()
    return stream


def stuck(streams: Streams, path: str = "/ws") -> int:
    """Return a WebSocket whose client has sent all it may, and takes nothing."""
    stream = opened(streams, path)
    assert streams.fill(stream, MESSAGE) > WINDOW_BYTES // len(MESSAGE) // 2
    return stream


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
        sent = streams.fill(stream, MESSAGE)
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
            stuck(streams, "/deaf")
        assert is_served(streams)
        server.call(server.app.go.set)


@pytest.mark.parametrize("message", [MESSAGE, framed(TextMessage(data="y")), MESSAGE[:1]], ids=["long", "short", "cut"])
def test_no_more_is_kept_of_it_than_its_window_and_what_waits_for_its_app(server: Server, message: bytes) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams, "/deaf")
        if message == MESSAGE[:1]:  # pieces of one that has no end, behind those that fill the queue
            for _ in range(QUEUED + 1):
                streams.go_on(stream, MESSAGE, whole=False)
            streams.go_on(stream, MESSAGE[:8], whole=False)
        streams.fill(stream, message * (2000 // len(message)))
        assert streams.sent_bytes(stream) <= WINDOW_BYTES + (QUEUED + 2) * len(MESSAGE)
        server.call(server.app.go.set)


def test_its_connection_is_served_after_many_that_were_given_up(server: Server) -> None:
    """Their windows come back, also of what nobody took."""
    with server.client() as client:
        streams = Streams(client.socket)
        for _ in range(110):
            streams.give_up(stuck(streams))
        assert is_served(streams)
        until(lambda: server.app.disconnects == 110, "their apps to hear of it")


@pytest.mark.parametrize("end", ["reset", "close"])
def test_its_app_hears_that_its_client_is_gone(server: Server, end: str) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = stuck(streams)
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


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
def test_the_service_may_close_it(reads: bool) -> None:
    with Server(limits=HttpLimits(write_stall_timeout_ms=300, linger_ms=20)) as server, server.client() as client:
        streams = Streams(client.socket)
        stream = stuck(streams, "/closing")
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
        stuck(Streams(client.socket), path)
        server.begin_shutdown()
        server.wait_stopped()
        assert not server.connections.tasks
        assert not server.app.errors
    assert "connection failed" not in "".join(capsys.readouterr())


def test_too_many_pings_of_one_that_waits_cut_the_connection_with_a_reason(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        stream = opened(streams)
        streams.go_on(stream, framed(Ping()) * 5000, whole=False)
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
            until(lambda: server.app.disconnects or path == "/closing", "its app to hear of it")
            server.call(server.app.go.set)
        streams.read_to_the_end_of(stream)
        until(lambda: not server.app.running, "its app to end")
        assert is_served(streams)
