"""The push stream: raw writes into an answer that stays open."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from tests.frontend.http1_server import Client, Server, until
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http1_exchange import PushStream

FRAME = b"x" * 65_536


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(loop: str) -> Iterator[Server]:
    with Server(loop=loop) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


def opened(server: Server, client: Client, target: str = "/push") -> PushStream:
    """A stream whose head the client has seen."""
    before = len(server.app.pushes)
    assert client.get(target).head() == (200, {b"content-type": b"text/event-stream", b"transfer-encoding": b"chunked"})
    until(lambda: len(server.app.pushes) == before + 1, "a push stream")
    return server.app.pushes[-1]


def test_every_write_is_a_chunk_and_the_head_comes_first(server: Server, client: Client) -> None:
    stream = opened(server, client)
    for data in (b"data: 1\n\n", b"data: 2\n\n"):
        server.call(partial(stream.write, data))
        assert client.chunk() == data
    server.call(partial(stream.write, b""))  # an empty chunk would end the answer
    server.call(partial(stream.write, b"data: 3\n\n"))
    assert client.chunk() == b"data: 3\n\n"


def test_stream_outlives_the_idle_timeout(loop: str) -> None:
    with Server(loop=loop, limits=HttpLimits(keep_alive_timeout_ms=60)) as server, server.client() as client:
        stream = opened(server, client)
        began_s = server.loop.time()
        until(lambda: server.loop.time() > began_s + 0.2, "three times the time-out")
        server.call(partial(stream.write, b"still here"))
        assert client.chunk() == b"still here"


def test_close_ends_the_answer_and_the_connection_goes_on(server: Server, client: Client) -> None:
    stream = opened(server, client)
    server.call(partial(stream.write, b"last"), stream.close, partial(stream.write, b"dropped"), stream.close)
    assert (client.chunk(), client.chunk()) == (b"last", b"")
    assert client.post("/echo", b"next").answer().body == b"next"
    assert stream.closed
    assert not stream.writable
    assert server.app.push_closed == 0


@pytest.mark.parametrize("end", ["by the app", "by the client"])
def test_nothing_of_a_stream_that_is_over_waits_for_the_collector(server: Server, end: str) -> None:
    gc.collect()
    gc.disable()
    try:
        with server.client() as client:
            gone = weakref.ref(opened(server, client))
            if end == "by the app":
                server.call(server.app.pushes[-1].close)
                assert client.chunk() == b""
            else:
                client.reset()
        server.call(server.app.pushes.clear, server.app.scopes.clear)
        until(lambda: gone() is None, "all of it is free")
    finally:
        gc.enable()


def test_one_frame_for_many_watchers(server: Server) -> None:
    """The same object goes to all of them, framed once; another of equal length in between must not be mixed up."""
    clients = [server.client() for _ in range(5)]
    streams = [opened(server, client) for client in clients]

    def fan_out() -> None:
        for frame in (b"first", b"other"):
            for stream in streams:
                stream.write(frame)
        for n, stream in enumerate(streams):
            stream.write(b"own %d" % n)

    server.call(fan_out)
    for n, client in enumerate(clients):
        assert [client.chunk() for _ in range(3)] == [b"first", b"other", b"own %d" % n]
        client.close()


def fill(server: Server, stream: PushStream) -> int:
    """FRAMEs until the client's buffers are full and the stream is not writable; how many."""
    written = 0

    def write_while_writable() -> None:
        nonlocal written
        while stream.writable:
            stream.write(FRAME)
            written += 1

    # uvloop counts what is written as buffered until its next turn: only what stays buffered is a slow reader.
    def full() -> bool:
        server.call(write_while_writable)
        return server.settled(lambda: stream.buffered_bytes) > HttpLimits().write_high_water_bytes

    until(full, "the client's buffers are full")
    return written


def test_slow_reader_is_seen_in_the_stream(server: Server) -> None:
    with server.client(receive_buffer_bytes=4096) as client:
        stream = opened(server, client)
        assert stream.writable
        written = fill(server, stream)
        writable_before = server.app.push_writable
        for _ in range(written):
            assert client.chunk() == FRAME
        until(lambda: server.app.push_writable > writable_before, "on_writable")
        assert stream.writable
        assert server.settled(lambda: stream.buffered_bytes) == 0


def test_a_stream_that_ends_while_its_client_is_behind_does_not_go_on(server: Server) -> None:
    with server.client(receive_buffer_bytes=4096) as client:
        stream = opened(server, client)
        written = fill(server, stream)
        told_before = server.app.push_writable
        server.call(stream.close)
        for _ in range(written):
            assert client.chunk() == FRAME
        assert client.chunk() == b""
        assert client.post("/echo", b"next").answer().body == b"next"
        assert not stream.writable
        assert server.app.push_writable == told_before


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
def test_client_goes_away(server: Server, client: Client, how: str) -> None:
    stream = opened(server, client)
    getattr(client, how)()
    until(lambda: server.app.push_closed == 1, "on_close")
    until(lambda: server.app.disconnects == 1, "http.disconnect")
    server.call(partial(stream.write, b"dropped"), stream.close)
    assert stream.closed
    until(lambda: not server.connections.open and not server.connections.tasks, "everything is let go")
    assert server.app.push_closed == 1


def test_http_1_0_gets_the_bare_bytes(server: Server, client: Client) -> None:
    client.send(b"GET /push HTTP/1.0\r\n\r\n")
    until(lambda: server.app.pushes, "a push stream")
    stream = server.app.pushes[0]
    server.call(partial(stream.write, b"data: 1\n\n"), partial(stream.write, b"data: 2\n\n"), stream.close)
    answer = client.answer()
    assert (answer.body, answer.headers[b"connection"]) == (b"data: 1\n\ndata: 2\n\n", b"close")


def test_not_on_head_requests(server: Server, client: Client) -> None:
    client.get("/push", method="HEAD")
    assert client.answer(bodyless=True).status == 500
    assert isinstance(server.app.errors[0], RuntimeError)


def test_not_with_a_length(server: Server, client: Client) -> None:
    assert client.get("/push?length").answer().code == "internal"
    assert isinstance(server.app.errors[0], RuntimeError)


def test_draining_cuts_a_stream_that_nobody_ends() -> None:
    with Server(grace_ms=50) as server, server.client() as client:
        opened(server, client)
        server.begin_shutdown()
        assert client.is_closed()
        server.wait_stopped()


def test_stream_that_is_closed_while_draining_ends_properly(server: Server, client: Client) -> None:
    stream = opened(server, client)
    server.begin_shutdown()
    server.call(partial(stream.write, b"bye"), stream.close)
    assert (client.chunk(), client.chunk()) == (b"bye", b"")
    assert client.is_closed()
