"""Streams and connections of HTTP/2 end as their clients mean it, and one request ends no other."""

from __future__ import annotations

import gc
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame, HeadersFrame
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection

from tests.frontend.http1_server import Client, Server, undisturbed, until
from tests.frontend.http2_client import HEADERS, Streams
from tests.frontend.test_vanished import lose_power
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http2_buffer import BoundedProtocol
from topics.frontend.http.http2_websocket import BoundedWebSocket
from topics.frontend.http.hypercorn_connection import ConnectionContext

IDLE_MS = 1500
HEADS = 10_000


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def waiting(server: Server, streams: Streams) -> int:
    """Return a stream that has no answer before `go` is set."""
    stream = streams.ask("/wait")
    until(lambda: server.app.running == 1, "the request")
    return stream


def is_answered(server: Server, streams: Streams, stream: int) -> bool:
    server.call(server.app.go.set)
    streams.take(stream)
    streams.read_to_the_end_of(stream)
    return bytes(streams.bodies[stream]) == b"at last"


def is_closed(client: Client) -> bool:
    while client.socket.recv(1 << 16):
        pass
    return True


def test_who_begins_nothing_more_gets_the_answers_it_waits_for(server: Server) -> None:
    """A GOAWAY without an error, as Node's `session.close()` sends it at once."""
    with server.client() as client:
        streams = Streams(client.socket)
        asked = waiting(server, streams)
        client.send(GoAwayFrame(last_stream_id=0).serialize())
        streams.settle()
        assert is_answered(server, streams, asked)


def test_who_goes_away_with_an_error_is_gone(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        waiting(server, streams)
        client.send(GoAwayFrame(last_stream_id=0, error_code=ErrorCodes.INTERNAL_ERROR).serialize())
        assert is_closed(client)
        server.call(server.app.go.set)


GET = (":method", "GET")
ECHO = (":path", "/echo")
HEAD = [GET, ECHO, *HEADERS]
MALFORMED = {
    "a method that is none": [(":method", "G\u00c9T"), ECHO, *HEADERS],
    "for a proxy": [(":method", "CONNECT"), (":authority", "localhost")],
    "no method": [ECHO, *HEADERS],
    "no path": [GET, *HEADERS],
    "an empty path": [GET, (":path", ""), *HEADERS],
    "no scheme": [GET, ECHO, (":authority", "localhost")],
    "no host": [GET, ECHO, (":scheme", "http")],
    "two hosts": [*HEAD, ("host", "elsewhere")],
    "two paths": [GET, ECHO, ECHO, *HEADERS],
    "a pseudo-header that is none": [*HEAD, (":odd", "1")],
    "a pseudo-header behind others": [GET, ECHO, ("x", "1"), *HEADERS],
    "a protocol without CONNECT": [*HEAD, (":protocol", "websocket")],
    "a status": [*HEAD, (":status", "200")],
    "capitals": [*HEAD, ("X-Odd", "1")],
    "a blank in a name": [*HEAD, ("x odd", "1")],
    "no name": [*HEAD, ("", "1")],
    "a colon in a name": [*HEAD, ("x:odd", "1")],
    "a line end in a value": [*HEAD, ("x", "1\r\ny: 2")],
    "blanks around a value": [*HEAD, ("x", " 1 ")],
    "two lengths": [*HEAD, ("content-length", "1"), ("content-length", "2")],
    "a length that is none": [*HEAD, ("content-length", "-1")],
    "a length of too many digits": [*HEAD, ("content-length", "1" * 5000)],
    "connection: close": [*HEAD, ("connection", "close")],
    "transfer-encoding: chunked": [*HEAD, ("transfer-encoding", "chunked")],
    "keep-alive": [*HEAD, ("keep-alive", "timeout=5")],
    "upgrade": [*HEAD, ("upgrade", "h2c")],
    "te: gzip": [*HEAD, ("te", "gzip")],
}
MALFORMED_TRAILERS = {
    "a pseudo-header": [ECHO],
    "a status": [(":status", "200")],
    "capitals": [("X-Odd", "1")],
    "a length that is none": [("content-length", "x")],
    "connection: close": [("connection", "close")],
}


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "with a body"])
@pytest.mark.parametrize("head", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_head_ends_no_other_request(server: Server, head: list[tuple[str, str]], ended: bool) -> None:
    """RFC 9113 §8.1.1: an error of the stream. Behind a proxy the other streams are other people's."""
    with server.client() as client:
        streams = Streams(client.socket)
        asked = waiting(server, streams)
        odd = streams.begin(*head, behind=b"" if ended else b"a body", ended=ended)
        streams.settle()
        assert streams.reset_codes == {odd: ErrorCodes.PROTOCOL_ERROR}
        assert is_answered(server, streams, asked)
        assert [scope["path"] for scope in server.app.scopes] == ["/wait"]


INTERIM = b"\0\x07:status\x03100"
"""A status of 100 by HPACK."""


@pytest.mark.parametrize("block", [b"", INTERIM, b"\x82\x84\x86" + INTERIM], ids=bytes.hex)
@pytest.mark.parametrize("of_trailers", [False, True])
def test_nor_does_one_that_no_client_library_sends(server: Server, block: bytes, of_trailers: bool) -> None:
    """h2 takes a status 1xx for that of an answer before it looks at anything else. Trailers may be empty."""
    with server.client() as client:
        streams = Streams(client.socket)
        asked = waiting(server, streams)
        odd = streams.begin(*HEAD) if of_trailers else streams.begin_unsent()
        client.send(HeadersFrame(odd, block, flags=["END_HEADERS", "END_STREAM"]).serialize())
        streams.settle()
        assert streams.reset_codes == ({} if of_trailers and not block else {odd: ErrorCodes.PROTOCOL_ERROR})
        assert is_answered(server, streams, asked)


@pytest.mark.parametrize("trailers", MALFORMED_TRAILERS.values(), ids=MALFORMED_TRAILERS.keys())
def test_malformed_trailers_end_their_own_request_alone(server: Server, trailers: list[tuple[str, str]]) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        asked = waiting(server, streams)
        odd = streams.begin(*HEAD, behind=b"a body")
        streams.trail(odd, *trailers)
        streams.settle()
        assert streams.reset_codes == {odd: ErrorCodes.PROTOCOL_ERROR}
        until(lambda: server.app.disconnects == 1, "its app to hear of it")
        assert is_answered(server, streams, asked)


def test_trailers_that_do_not_end_their_request_end_no_other(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        asked = waiting(server, streams)
        odd = streams.begin(*HEAD)
        client.send(HeadersFrame(odd, b"\x00\x01x\x011", flags=["END_HEADERS"]).serialize())
        streams.settle()
        assert streams.reset_codes == {odd: ErrorCodes.PROTOCOL_ERROR}
        assert is_answered(server, streams, asked)


@pytest.mark.parametrize("of_trailers", [False, True])
def test_a_header_block_that_cannot_be_read_ends_the_connection(server: Server, of_trailers: bool) -> None:
    """No later one could be read (RFC 9113 §4.3)."""
    with server.client() as client:
        streams = Streams(client.socket)
        asked = streams.begin(*HEAD)
        streams.settle()
        block = HeadersFrame(asked if of_trailers else asked + 2, b"\xff\xff\xff", flags=["END_HEADERS", "END_STREAM"])
        client.send(block.serialize())
        while streams.ended_by is None:
            streams.read()
        assert streams.ended_by == ErrorCodes.COMPRESSION_ERROR


def test_a_path_may_be_sent_as_it_is_read(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        asked = streams.ask("/target/\u00e9?\u00e9")
        streams.take(asked)
        streams.read_to_the_end_of(asked)
        (scope,) = server.app.scopes
        assert (scope["path"], scope["raw_path"], scope["query_string"]) == (
            "/target/\u00e9",
            b"/target/%C3%A9",
            b"%C3%A9",
        )


def test_a_list_may_come_in_several_headers(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        head = [(":method", "GET"), (":path", "/echo"), *HEADERS, ("accept", "a/b"), ("x", "1"), ("x", "2")]
        streams.begin(*head, ("accept", "text/html;q=0.5"))
        until(lambda: server.app.scopes, "the request")
        (scope,) = server.app.scopes
        assert dict(scope["headers"])[b"accept"] == b"a/b, text/html;q=0.5"
        assert [value for name, value in scope["headers"] if name == b"x"] == [b"1", b"2"]


@pytest.mark.parametrize("end", ["given up", "refused"])
def test_a_connection_without_a_stream_is_idle_however_the_last_one_ended(end: str) -> None:
    def attempt() -> None:
        with Server(limits=HttpLimits(keep_alive_timeout_ms=IDLE_MS)) as server, server.client() as client:
            streams = Streams(client.socket)
            if end == "given up":
                asked = streams.ask("/hold")
                until(lambda: server.app.running == 1, "the request")
                streams.give_up(asked)
            else:
                streams.open_websocket("/ws", version="12")
            assert is_closed(client)

    undisturbed(IDLE_MS, attempt)


def test_nothing_is_left_of_requests_that_come_with_their_reset(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        with server.held():  # so that they come in one piece
            for _ in range(20):
                streams.give_up(streams.begin((":method", "POST"), (":path", "/patient"), *HEADERS))
        streams.settle()
        until(lambda: not server.app.running, "their apps to end")
        address = client.socket.getsockname()
        protocols = [one for one in gc.get_objects() if isinstance(one, BoundedProtocol)]
        (http2,) = [one for one in protocols if vars(one).get("client") == address]
        until(lambda: not http2.stream_buffers, "what waited for their client to be free")


def test_a_websocket_that_its_client_closes_is_no_open_stream_any_more(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        opened = streams.open_websocket("/ws")
        while opened not in streams.answered:
            streams.read()
        streams.take(opened)
        streams.go_on(opened, bytes(Connection(ConnectionType.CLIENT).send(CloseConnection(1000))), whole=False)
        streams.read_to_the_end_of(opened)
        until(lambda: not server.app.running, "its app to end")


def test_nothing_is_left_of_websockets_that_were_refused(server: Server) -> None:
    gc.collect()
    with server.client() as client:
        streams = Streams(client.socket)
        refused = [streams.open_websocket("/ws", version="12") for _ in range(5)]
        streams.take(*refused)
        streams.read_to_the_end_of(*refused)
        until(lambda: not any(isinstance(one, BoundedWebSocket) for one in gc.get_objects()), "all of them to be free")


def test_what_comes_during_a_stop_is_refused_so_that_it_is_sent_again(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        asked = waiting(server, streams)
        server.begin_shutdown()
        late = streams.ask("/echo")
        while late not in streams.reset:
            streams.read()
        assert streams.reset_codes == {late: ErrorCodes.REFUSED_STREAM}
        assert not streams.last_begun, "Python's h2 reads no answer behind it"
        assert is_answered(server, streams, asked)
        streams.read_to_the_close()
        assert streams.last_begun == [late]
        server.wait_stopped()


def test_who_reads_nothing_of_what_a_stop_refuses_is_read_no_further(server: Server) -> None:
    """Heads cost nothing then, and each is refused with a frame."""
    gc.collect()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        streams = Streams(client)
        waiting(server, streams)
        streams.settle()
        (context,) = (one for one in gc.get_objects() if isinstance(one, ConnectionContext))
        assert context.open_socket is not None
        context.open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server.begin_shutdown()
        client.settimeout(0.5)  # a busy service that takes longer has less to refuse
        with suppress(TimeoutError):
            for _ in range(HEADS // 500):
                client.sendall(streams.heads(500))
        bound_bytes = HttpLimits().write_high_water_bytes
        until(lambda: context.buffered_bytes > bound_bytes, "as many refusals as may wait")
        assert server.settled(lambda: context.buffered_bytes) < bound_bytes + 4096
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("end", ["time-out", "stop"])
def test_who_is_idle_is_told_what_was_begun_before_the_connection_is_closed(loop: str, end: str) -> None:
    limits = HttpLimits(keep_alive_timeout_ms=IDLE_MS if end == "time-out" else 60_000)
    with Server(loop=loop, limits=limits) as server, server.client() as client:
        streams = Streams(client.socket)
        for _ in range(2):
            asked = streams.ask("/status/204")
            streams.read_to_the_end_of(asked)
        if end == "stop":
            server.begin_shutdown()
        streams.read_to_the_close()
        assert streams.last_begun == [asked]


def test_a_websocket_is_told_of_a_stop_and_closed_in_order(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        opened = streams.open_websocket("/closing")
        while opened not in streams.answered:
            streams.read()
        server.begin_shutdown()
        streams.take(opened)
        server.call(server.app.go.set)
        while not streams.got_bytes(opened):
            streams.read()
        streams.go_on(opened, bytes(Connection(ConnectionType.CLIENT).send(CloseConnection(1012))), whole=False)
        streams.read_to_the_end_of(opened)
        streams.read_to_the_close()
        assert streams.last_begun == [opened]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_who_has_vanished_is_cut(loop: str) -> None:
    with Server(loop=loop, limits=HttpLimits(vanished_after_ms=300)) as server, server.client() as gone:
        waiting(server, Streams(gone.socket))
        lose_power(gone.socket)
        server.call(server.app.go.set)
        until(lambda: not server.connections.tasks, "its connection to be cut")
