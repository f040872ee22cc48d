"""Edges between the states of a connection: long heads in pieces, the end of file, blank lines, drain."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable

import pytest

from tests.frontend.http1_server import Server, until
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.http.connections import Connections
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http1 import CHUNKED_BYTES_PER_TURN, TINY_CHUNKS_BYTES_PER_TURN
from topics.frontend.http.http1_parser import RequestParser

POST = b"POST /%b HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
UPGRADE = (
    b"GET /big?20 HTTP/1.1\r\nHost: test\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: \r\n\r\n"
)


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pending_bytes(server: Server) -> int:
    return sum(len(connection.pending) for connection in server.http1)


def test_a_head_longer_than_what_may_wait_of_anything_else_comes_in_pieces(loop: str) -> None:
    limits = HttpLimits(max_header_bytes=200_000)
    head = b"GET /target HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 150_000 + b"\r\n\r\n"
    with Server(loop=loop, limits=limits) as server, server.client() as client:
        for end in (limits.read_high_water_bytes + 1, 100_000, 120_000):
            start = pending_bytes(server)
            client.send(head[start:end])
            until(lambda: pending_bytes(server) == end, "the piece")
        assert client.send(head[120_000:]).answer().status == 200


def test_a_head_that_is_too_long_is_not_waited_for(loop: str) -> None:
    with Server(loop=loop, limits=HttpLimits(max_header_bytes=200_000)) as server, server.client() as client:
        client.send(b"GET /target HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 200_000)
        assert client.answer().status == 431


def test_the_end_of_file_is_the_end_of_a_pipelined_request_that_is_not_whole(loop: str) -> None:
    with Server(loop=loop) as server, server.client() as client:
        client.get("/wait").send(POST % b"echo" + b"part").half_close()
        until(lambda: any(c.eof for c in server.http1), "the end of file")
        server.call(server.app.go.set)
        assert client.answer().body == b"at last"
        assert client.is_closed()
        until(lambda: server.app.disconnects == 1, "the app learns that the rest does not come")


def test_a_body_of_tiny_chunks_is_read_in_turns(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last part waits for its turn when the end of file comes; a request behind it is served."""
    lengths = []
    read_body = RequestParser.read_body

    def counted(parser: RequestParser, data: bytes, position: int, sink: Callable[[bytes], None]) -> int:
        lengths.append(len(data) - position)
        return read_body(parser, data, position, sink)

    monkeypatch.setattr(RequestParser, "read_body", counted)
    body = b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n"
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Server(loop=loop) as server, server.client() as client:
        client.send(head + body).post("/echo", b"second").half_close()
        assert client.answer().body == b"x" * 60_000
        assert client.answer().body == b"second"
        assert client.is_closed()
    assert max(lengths) <= CHUNKED_BYTES_PER_TURN
    # The first long part shows that the chunks are tiny. The parts behind it are short, each after a pause.
    assert len([length for length in lengths if length > TINY_CHUNKS_BYTES_PER_TURN]) <= 2


def test_requests_that_come_together_count_before_the_first_begins(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that looked for its answer alone would hold up those beside it, and part them from their group."""
    seen: list[int] = []

    async def note(_scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(server.connections.arrived)
        await server.app.answer(send, b"")

    with Server(loop=loop) as server, contextlib.ExitStack() as stack:
        monkeypatch.setattr(server.app, "note", note, raising=False)
        clients = [stack.enter_context(server.client()) for _ in range(3)]
        for client in clients:
            assert client.get("/note").answer().status == 200
        with server.held():
            for client in clients:
                client.get("/note")
        assert all(client.answer().status == 200 for client in clients)
        assert seen == [1, 2, 3, 6, 6, 6]


def test_pauses_of_all_connections_follow_each_other() -> None:
    async def pauses() -> None:
        connections = Connections()
        first_s, second_s = (connections.pause_until_s(0.5) for _ in range(2))
        assert second_s == pytest.approx(first_s + 0.5)
        assert connections.pause_until_s(0) <= first_s, "without a pause there is no wait"

    asyncio.run(pauses())


def test_an_app_call_that_is_cut_before_its_first_step_ends_as_any_other() -> None:
    """It would not answer its client, and a drain would wait for it for ever."""
    ended: list[str] = []

    async def run() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("told")

    async def cut() -> None:
        connections = Connections()
        connections.start_task(run)
        await connections.abort()
        assert not connections.tasks
        await connections.wait_closed()

    asyncio.run(cut())
    assert ended == ["told"]


def test_the_end_of_file_is_passed_on_to_every_pipelined_request(loop: str) -> None:
    """Each begins after it; a long poll is answered to nobody."""
    with Server(loop=loop) as server, server.client() as client:
        client.get("/wait").post("/echo", b"second").get("/hold").half_close()
        until(lambda: any(c.eof for c in server.http1), "the end of file")
        server.call(server.app.go.set)
        assert [client.answer().body for _ in range(2)] == [b"at last", b"second"]
        assert client.is_closed()
        assert server.app.disconnects == 1


def test_the_end_of_file_is_passed_on_to_another_protocol(loop: str) -> None:
    with Server(loop=loop) as server, server.client() as client:
        client.get("/wait").send(UPGRADE + PREFACE).half_close()
        until(lambda: any(c.eof for c in server.http1), "the end of file")
        server.call(server.app.go.set)
        assert client.answer().body == b"at last"
        assert client.read(10_000).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("path", ["/echo", "/fail", "/nothing"])
def test_a_page_may_read_what_the_app_does_not_answer(path: str) -> None:
    """Its body is late, its app fails, or gives no answer."""
    limits = HttpLimits(body_idle_timeout_ms=50)
    with Server(limits=limits, readable_by=lambda origin: b"x-origin: %b\r\n" % origin) as server:
        with server.client() as client:
            client.send(
                b"POST %b HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\nContent-Length: 2\r\n\r\n_" % path.encode()
            )
            answer = client.answer()
            assert answer.status == (408 if path == "/echo" else 500)
            assert answer.headers[b"x-origin"] == b"http://b"
            assert client.is_closed()
        with server.client() as client:
            client.send(b"HEAD /fail HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.answer(bodyless=True).status == 500
            assert client.is_closed()


def test_a_page_may_read_that_the_rest_of_its_head_did_not_come() -> None:
    with (
        Server(
            limits=HttpLimits(header_timeout_ms=50), readable_by=lambda origin: b"x-origin: %b\r\n" % origin
        ) as server,
        server.client() as client,
    ):
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\n")
        assert client.answer().headers[b"x-origin"] == b"http://b"


@pytest.mark.parametrize("after_a_request", [False, True])
def test_blank_lines_keep_no_connection_open(loop: str, after_a_request: bool) -> None:
    short = {"keep_alive_timeout_ms": 300} if after_a_request else {"header_timeout_ms": 300}
    with Server(loop=loop, limits=HttpLimits(**short)) as server, server.client() as client:
        if after_a_request:
            assert client.post("/echo", b"hi").answer().body == b"hi"
        for _ in range(100):
            with contextlib.suppress(OSError):
                client.send(b"\r\n")
            if select.select([client.socket], [], [], 0.05)[0]:
                break
        else:
            raise AssertionError("it may send them for as long as it likes")
        assert client.is_closed()
        until(lambda: not server.connections.open, "it is let go")


class TestDrain:
    GRACE_MS = 60_000
    """Nobody may need it."""

    def test_nobody_waits_for_the_rest_of_a_body_that_is_dropped(self, loop: str) -> None:
        with Server(loop=loop, grace_ms=self.GRACE_MS) as server, server.client() as client:
            assert client.send(POST % b"early" + b"part").answer().status == 415
            server.begin_shutdown()
            assert client.is_closed()
            server.wait_stopped()

    @pytest.mark.parametrize("part", [b"", b"part"])
    def test_the_rest_of_a_body_may_come_in_the_same_moment(self, loop: str, part: bytes) -> None:
        with Server(loop=loop, grace_ms=self.GRACE_MS) as server, server.client() as client:
            assert client.send(POST % b"early" + part).answer().status == 415
            client.send(b"0123456789"[len(part) :])
            server.begin_shutdown()
            assert client.is_closed()
            server.wait_stopped()

    def test_an_idle_http2_that_came_in_that_moment_holds_nothing_up(self, loop: str) -> None:
        with Server(loop=loop, grace_ms=self.GRACE_MS) as server, server.client() as client:
            client.send(PREFACE[:10])
            until(lambda: pending_bytes(server) == 10, "part of the preface")
            server.begin_shutdown()
            client.send(PREFACE[10:]).read(10_000)
            server.wait_stopped()

    def test_an_upgrade_that_came_in_that_moment_is_answered_and_holds_nothing_up(self, loop: str) -> None:
        with Server(loop=loop, grace_ms=self.GRACE_MS) as server, server.client() as client:
            client.send(UPGRADE[:50])
            until(lambda: pending_bytes(server) == 50, "part of the head")
            server.begin_shutdown()
            client.send(UPGRADE[50:] + PREFACE)
            assert b"x" * 20 in client.read(10_000)
            server.wait_stopped()


def test_an_http2_connection_that_asks_for_nothing_is_idle(loop: str) -> None:
    with Server(loop=loop, limits=HttpLimits(keep_alive_timeout_ms=100)) as server, server.client() as client:
        client.send(PREFACE).read(10_000)
        assert not server.app.scopes
