"""Where one state of a connection meets another: long heads in pieces, the end of file, blank lines, drain, budgets."""

from __future__ import annotations

import contextlib
import select
from functools import partial

import pytest

from tests.frontend.http1_server import Client, Server, until
from topics.frontend.http import kept_answers
from topics.frontend.http.http1 import HttpLimits
from topics.frontend.live import pulse

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
    return sum(len(connection._pending) for connection in server.connections.open)


def test_a_head_longer_than_what_may_wait_of_anything_else_comes_in_pieces(loop: str) -> None:
    limits = HttpLimits(max_header_bytes=200_000)
    head = b"GET /target HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 150_000 + b"\r\n\r\n"
    with Server(loop=loop, limits=limits) as server, server.client() as client:
        for end in (limits.read_high_water_bytes + 1, 100_000, 120_000):
            start = pending_bytes(server)
            client.send(head[start:end])
            until(lambda end=end: pending_bytes(server) == end, "the piece")  # type: ignore[misc]
        assert client.send(head[120_000:]).answer().status == 200


def test_a_head_that_is_too_long_is_not_waited_for(loop: str) -> None:
    with Server(loop=loop, limits=HttpLimits(max_header_bytes=200_000)) as server, server.client() as client:
        client.send(b"GET /target HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 200_000)
        assert client.answer().status == 431


def test_the_end_of_file_is_the_end_of_a_pipelined_request_that_is_not_whole(loop: str) -> None:
    with Server(loop=loop) as server, server.client() as client:
        client.get("/wait").send(POST % b"echo" + b"part").half_close()
        until(lambda: any(c._eof for c in server.connections.open), "the end of file")
        server.call(server.app.go.set)
        assert client.answer().body == b"at last"
        assert client.is_closed()
        until(lambda: server.app.disconnects == 1, "the app learns that the rest does not come")


def test_the_end_of_file_is_passed_on_to_every_pipelined_request(loop: str) -> None:
    """Each begins after it; a long poll is answered to nobody."""
    with Server(loop=loop) as server, server.client() as client:
        client.get("/wait").post("/echo", b"second").get("/hold").half_close()
        until(lambda: any(c._eof for c in server.connections.open), "the end of file")
        server.call(server.app.go.set)
        assert [client.answer().body for _ in range(2)] == [b"at last", b"second"]
        assert client.is_closed()
        assert server.app.disconnects == 1


def test_the_end_of_file_is_passed_on_to_another_protocol(loop: str) -> None:
    with Server(loop=loop) as server, server.client() as client:
        client.get("/wait").send(UPGRADE + PREFACE).half_close()
        until(lambda: any(c._eof for c in server.connections.open), "the end of file")
        server.call(server.app.go.set)
        assert client.answer().body == b"at last"
        assert client.read(10_000).startswith(b"HTTP/1.1 101 ")


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


def test_what_a_stream_leaves_behind_is_bounded_like_any_answer(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub counts what it keeps for a stream as long as it is open, and nobody would from then on."""
    monkeypatch.setattr(kept_answers, "KEPT_HIGH_BYTES", 40_000_000)
    monkeypatch.setattr(kept_answers, "LOOK_S", 0.05)
    monkeypatch.setattr(pulse, "STALL_CUT_MS", 200)

    def leave_behind(client: Client, count: int) -> None:
        client.get("/push").head()
        until(lambda: len(server.app.pushes) == count, "the stream")
        stream = server.app.pushes[-1]
        server.call(partial(stream.write, bytes(30_000_000)))
        until(lambda: server.settled(lambda: stream.buffered_bytes) > 0, "more than the kernel takes")
        server.call(stream.close)

    with Server(loop=loop) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(server.client(receive_buffer_bytes=4096)) for _ in range(2))
        leave_behind(first, 1)
        leave_behind(second, 2)
        until(lambda: len(server.connections.open) == 1, "the first one is cut")
        assert len(second.chunk()) == 30_000_000
        assert second.chunk() == b""
        assert second.post("/echo", b"next").answer().body == b"next"


def test_an_answer_counts_whole_until_its_client_has_all_of_it(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop keeps all of it as long as a byte is to be sent."""
    monkeypatch.setattr(kept_answers, "KEPT_HIGH_BYTES", 20_000_000)
    monkeypatch.setattr(pulse, "STALL_CUT_MS", 60_000)
    with Server(loop=loop) as server, server.client(receive_buffer_bytes=4096) as client:
        kept = server.connections.kept
        client.get("/big?30000000").head()
        until(lambda: kept.held_bytes, "its answer to be kept")
        (connection,) = server.connections.open
        left_bytes = 30_000_000
        while left_bytes > 10_000_000:
            left_bytes -= len(client.read(left_bytes - 10_000_000))
        assert server.settled(lambda: connection.buffered_bytes) < 10_000_000
        server.call(kept._look)
        assert kept.held_bytes >= 30_000_000
        assert connection._transport.get_write_buffer_limits()[0] == 0, "it is not let go before the last byte"
        while left_bytes:
            left_bytes -= len(client.read(left_bytes))
        until(lambda: not kept.held_bytes, "all of it to be taken")
