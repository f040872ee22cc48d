"""Clients that read slowly, or not at all, what a connection has for them: when they are cut, and when not."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import pytest

from tests.frontend.http1_server import Client, Server, undisturbed, until
from topics.frontend.entry import stalled_clients
from topics.frontend.http import connections
from topics.frontend.http.deadlines import HttpLimits


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask_for_long_answers(server: Server, stack: contextlib.ExitStack, *lens_bytes: int) -> list[Client]:
    """Clients that take nothing of theirs; each was answered before the next one asked."""
    clients = []
    for count, len_bytes in enumerate(lens_bytes, start=len(server.app.scopes) + 1):
        client = stack.enter_context(server.client(receive_buffer_bytes=4096))
        client.get(f"/big?{len_bytes}")
        clients.append(client)
        until(lambda: len(server.app.scopes) == count, "the request")
        server.settled(lambda: len(server.connections.open))
    return clients


def test_slow_reader_that_does_read(loop: str) -> None:
    limits = HttpLimits(write_stall_timeout_ms=300, linger_ms=20)
    pause = threading.Event()

    def read_slowly() -> None:
        with Server(loop=loop, limits=limits) as server, server.client(receive_buffer_bytes=65_536) as client:
            client.get("/big?30000000", "Connection: close").head()
            size = 0
            while part := client.read(500_000):
                size += len(part)
                pause.wait(0.015)
            assert size == 30_000_000

    undisturbed(limits.write_stall_timeout_ms, read_slowly)


def test_reader_that_stands_still(loop: str) -> None:
    limits = HttpLimits(write_stall_timeout_ms=60, linger_ms=20)
    with Server(loop=loop, limits=limits) as server, server.client(receive_buffer_bytes=4096) as client:
        client.get("/endless")
        until(lambda: server.app.errors, "the app is told")
        assert isinstance(server.app.errors[0], ConnectionResetError)
        until(lambda: not server.connections.open, "the connection is cut")


@pytest.mark.long
def test_reader_that_takes_next_to_nothing(loop: str) -> None:
    """Never quite still, but its answer would be kept for hours."""
    limits = HttpLimits(write_stall_timeout_ms=1000, linger_ms=20, read_min_bytes_per_s=100_000_000)
    pause = threading.Event()
    with Server(loop=loop, limits=limits) as server, server.client(receive_buffer_bytes=4096) as client:
        client.get("/big?30000000")
        until(lambda: server.connections.open, "the connection")
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while part := client.socket.recv(100_000):
                taken += len(part)
                pause.wait(0.02)
        assert taken < 30_000_000
        until(lambda: not server.connections.open, "the connection is cut")


def test_answers_that_nobody_takes_have_a_bound_together(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection whose client has not read for longest is cut, and no other."""
    monkeypatch.setattr(connections, "CHECK_S", 0.05)
    monkeypatch.setattr(stalled_clients, "STALL_CUT_MS", 200)
    with Server(loop=loop) as server, contextlib.ExitStack() as stack:
        server.connections.kept.high_bytes = 70_000_000
        clients = ask_for_long_answers(server, stack, *[30_000_000] * 3)
        until(lambda: len(server.connections.open) == 2, "the first one is cut")
        with pytest.raises((ConnectionResetError, AssertionError)):
            clients[0].answer()
        for client in clients[1:]:
            assert len(client.answer().body) == 30_000_000
        again = stack.enter_context(server.client())
        assert len(again.get("/big?60000000").answer().body) == 60_000_000, "what was taken is not counted"
        assert len(server.connections.open) == 3


def test_answers_are_not_cut_while_they_are_taken(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the answers that are too much together is read on, if not quickly."""
    stall_ms = 1000
    monkeypatch.setattr(connections, "CHECK_S", 0.05)
    monkeypatch.setattr(stalled_clients, "STALL_CUT_MS", stall_ms)

    def read_on() -> None:
        with Server(loop=loop) as server, contextlib.ExitStack() as stack:
            server.connections.kept.high_bytes = 95_000_000
            reading, still = ask_for_long_answers(server, stack, 60_000_000, 30_000_000)
            reading.head()
            answer = bytearray()
            waiting_bytes = sum(connection.buffered_bytes for connection in server.http1)

            def progress_shows() -> bool:
                answer.extend(reading.read(30_000))
                return sum(connection.buffered_bytes for connection in server.http1) < waiting_bytes

            # Before the sum is too high: the first to be cut would else be the one that came first, if it is late.
            until(progress_shows, "the server sends on")
            (fresh,) = ask_for_long_answers(server, stack, 30_000_000)

            def second_is_cut() -> bool:
                if len(answer) < 20_000_000:  # the sum stays too high
                    answer.extend(reading.read(30_000))
                return len(server.connections.open) == 2

            until(second_is_cut, "the one that takes nothing is cut")
            with pytest.raises((ConnectionResetError, AssertionError)):
                still.answer()
            assert len(fresh.answer().body) == 30_000_000
            assert len(reading.read(60_000_000 - len(answer))) == 60_000_000 - len(answer)

    undisturbed(stall_ms, read_on)


def test_answers_have_a_bound_whoever_takes_them(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: so much may come within the time that a client has to take something."""
    monkeypatch.setattr(stalled_clients, "STALL_CUT_MS", 3_600_000)
    with Server(loop=loop) as server, contextlib.ExitStack() as stack:
        server.connections.kept.high_bytes = 30_000_000
        server.connections.kept.budget.most_bytes = 70_000_000
        _, *others = ask_for_long_answers(server, stack, *[30_000_000] * 3)
        until(lambda: len(server.connections.open) == 2, "the first one is cut")
        for client in others:
            assert len(client.answer().body) == 30_000_000


def test_what_a_stream_leaves_behind_is_bounded_like_any_answer(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub counts what it keeps for a stream as long as it is open, and nobody would from then on."""
    monkeypatch.setattr(connections, "CHECK_S", 0.05)
    monkeypatch.setattr(stalled_clients, "STALL_CUT_MS", 200)

    def leave_behind(client: Client, count: int) -> None:
        client.get("/push").head()
        until(lambda: len(server.app.pushes) == count, "the stream")
        stream = server.app.pushes[-1]
        server.call(partial(stream.write, bytes(30_000_000)))
        until(lambda: server.settled(lambda: stream.buffered_bytes) > 0, "more than the kernel takes")
        server.call(stream.close)

    with Server(loop=loop) as server, contextlib.ExitStack() as stack:
        server.connections.kept.high_bytes = 40_000_000
        first, second = (stack.enter_context(server.client(receive_buffer_bytes=4096)) for _ in range(2))
        leave_behind(first, 1)
        leave_behind(second, 2)
        until(lambda: len(server.connections.open) == 1, "the first one is cut")
        assert len(second.chunk()) == 30_000_000
        assert second.chunk() == b""
        assert second.post("/echo", b"next").answer().body == b"next"


def test_an_answer_counts_whole_until_its_client_has_all_of_it(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop keeps all of it as long as a byte is to be sent."""
    monkeypatch.setattr(stalled_clients, "STALL_CUT_MS", 60_000)
    with Server(loop=loop) as server, server.client(receive_buffer_bytes=4096) as client:
        server.connections.kept.high_bytes = 20_000_000
        kept = server.connections.kept
        client.get("/big?30000000").head()
        until(lambda: kept.budget.held_bytes, "its answer to be kept")
        (connection,) = server.http1
        left_bytes = 30_000_000
        while left_bytes > 10_000_000:
            left_bytes -= len(client.read(left_bytes - 10_000_000))
        assert server.settled(lambda: connection.buffered_bytes) < 10_000_000
        server.call(kept._check)
        assert kept.budget.held_bytes >= 30_000_000
        assert connection._transport.get_write_buffer_limits()[0] == 0, "it is not let go before the last byte"
        while left_bytes:
            left_bytes -= len(client.read(left_bytes))
        until(lambda: not kept.budget.held_bytes, "all of it to be taken")


def test_what_a_client_that_went_did_not_take_is_not_counted(loop: str) -> None:
    with Server(loop=loop) as server:
        with server.client(receive_buffer_bytes=4096) as client:
            client.get("/big?30000000").head()
            until(lambda: server.connections.kept.budget.held_bytes >= 30_000_000, "its answer to be kept")
        until(lambda: not server.connections.kept.budget.held_bytes, "it is let go")
