"""Clients that go at the same moment are acted on in turns, between which the event loop does other things."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.frontend.http1_server import Client, Server, until
from tests.frontend.test_http1_edges import PREFACE, UPGRADE
from topics.frontend.http.connections import ENDS_PER_TURN, Connections

CLIENTS = 3 * ENDS_PER_TURN + 1
HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.fixture(params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(loop=request.param) as running:
        yield running


def idle(client: Client) -> None:
    assert client.post("/echo", b"").answer().status == 200


def long_poll(client: Client) -> None:
    client.get("/hold")


def event_stream(client: Client) -> None:
    assert client.get("/push").head()[0] == 200


def websocket(client: Client) -> None:
    assert client.get("/websocket", *HANDSHAKE).head()[0] == 101


def crowd(server: Server, begin: Callable[[Client], None]) -> list[Client]:
    """CLIENTS clients with something open."""
    clients = [server.client() for _ in range(CLIENTS)]
    for client in clients:
        begin(client)
    until(lambda: len(server.connections.open) == CLIENTS, "all are connected")
    return clients


def end(server: Server, clients: list[Client], how: str) -> None:
    """Let all clients go while the server's loop stands still."""
    with server.held():
        for client in clients:
            getattr(client, how)()


@contextmanager
def each_turn(server: Server, read: Callable[[], int]) -> Iterator[list[int]]:
    """The values of `read` in all turns of the server's loop."""
    values: list[int] = []
    is_over = False

    def look() -> None:
        values.append(read())
        if not is_over:
            server.loop.call_soon(look)

    server.call(look)
    try:
        yield values
    finally:
        is_over = True
        server.call(lambda: None)


def largest_step(values: list[int]) -> int:
    return max(abs(after - before) for before, after in itertools.pairwise(values))


def test_idle_connections_are_closed_some_in_a_turn(server: Server) -> None:
    clients = crowd(server, idle)
    with each_turn(server, lambda: len(server.connections.open)) as still_open:
        end(server, clients, "close")
        until(lambda: not server.connections.open, "all are closed")
    assert largest_step(still_open) <= ENDS_PER_TURN


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("begin", [long_poll, event_stream, websocket])
def test_apps_hear_of_it_some_in_a_turn(server: Server, begin: Callable[[Client], None], how: str) -> None:
    clients = crowd(server, begin)
    until(lambda: server.app.running == CLIENTS, "all calls of the app wait")
    with each_turn(server, lambda: server.app.disconnects) as told:
        end(server, clients, how)
        until(lambda: server.app.disconnects == CLIENTS, "all are told")
    assert largest_step(told) <= ENDS_PER_TURN
    assert not server.app.errors
    until(lambda: not server.connections.open and not server.app.running, "nothing is left")


@pytest.mark.parametrize("how", ["close", "reset"])
def test_streams_are_written_to_until_it_is_their_turn(server: Server, how: str) -> None:
    clients = crowd(server, event_stream)
    until(lambda: len(server.app.pushes) == CLIENTS, "all streams are open")

    def write() -> int:
        return sum(stream.write(b"data: 1\n\n") for stream in server.app.pushes)

    with each_turn(server, write):
        end(server, clients, how)
        until(lambda: server.app.push_closed == CLIENTS, "each stream hears that its client is gone")
    assert all(stream.closed and not stream.writable for stream in server.app.pushes)


def test_what_is_asked_before_the_end_is_answered(server: Server) -> None:
    clients = crowd(server, idle)
    with server.held():
        for client in clients:
            client.post("/echo", b"one").post("/echo", b"two").half_close()
    for client in clients:
        assert [client.answer().body, client.answer().body] == [b"one", b"two"]
        assert client.is_closed()


def test_another_protocol_has_the_connection_by_then(server: Server) -> None:
    clients = crowd(server, lambda client: None)
    for client in clients:
        client.get("/wait").send(UPGRADE + PREFACE)
    until(lambda: server.app.running == CLIENTS, "all calls of the app wait")
    with server.held():
        for client in clients:
            client.half_close()
        server.loop.call_soon_threadsafe(server.app.go.set)
    for client in clients:
        assert client.answer().body == b"at last"
        assert client.read(10_000).startswith(b"HTTP/1.1 101 ")


def test_ends_keep_their_order_and_one_that_fails_stops_no_other() -> None:
    failed: list[dict[str, Any]] = []

    def fail() -> None:
        raise ValueError("as the test wants")

    async def main() -> tuple[list[int], list[int]]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        connections, called, counts = Connections(), list[int](), list[int]()
        for number in range(CLIENTS):
            connections.end_in_turn(partial(called.append, number))
            if number == CLIENTS // 2:
                connections.end_in_turn(fail)
        counts.append(len(called))
        while counts[-1] < CLIENTS:
            await asyncio.sleep(0)
            connections.end_in_turn(lambda: None)
            counts.append(len(called))
        return called, counts

    called, counts = asyncio.run(main())
    assert called == list(range(CLIENTS))
    assert counts[0] == ENDS_PER_TURN, "the first ones do not wait"
    assert largest_step(counts) <= ENDS_PER_TURN
    assert [str(context["exception"]) for context in failed] == ["as the test wants"]
