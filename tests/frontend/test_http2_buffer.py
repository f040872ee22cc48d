"""The window of HTTP/2 holds up who sends, that stream only, and nothing is left of it when the client goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.events
import pytest
from hypercorn.asyncio.worker_context import EventWrapper
from hypercorn.protocol.h2 import BUFFER_LOW_WATER

from tests.frontend.http1_server import Client, Server, undisturbed, until
from topics.core.clock import SystemClock
from topics.frontend.http.connections import KeptAnswers
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http2_buffer import BoundedBuffer

PIECE_BYTES = 64 * 1024
"""Bytes of a piece of `App.large`."""
WINDOW_BYTES = 65_535
"""Window that every stream and every connection begins with."""
HEADERS = [(":method", "GET"), (":scheme", "http"), (":authority", "test")]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


class Connected:
    """A client that gives no window but that of the beginning."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.got_bytes: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()

    def ask(self, stream_id: int, path: str) -> None:
        self.h2.send_headers(stream_id, [*HEADERS, (":path", path)], end_stream=True)
        self.flush()

    def flush(self) -> None:
        self._client.send(self.h2.data_to_send())

    def read(self) -> None:
        data = self._client.socket.recv(1 << 20)
        assert data, "the connection was closed"
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.got_bytes[event.stream_id] = self.got_bytes.get(event.stream_id, 0) + len(event.data)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.reset.add(event.stream_id)
        self.flush()


def test_a_stream_without_a_window_is_sent_no_more_than_one_message(server: Server) -> None:
    with server.client() as client:
        connected = Connected(client)
        connected.ask(1, "/large")
        while connected.got_bytes.get(1, 0) < WINDOW_BYTES:
            connected.read()
        assert server.settled(lambda: server.app.sent_bytes) <= 2 * PIECE_BYTES
        for stream_id in (3, 5, 7):
            connected.ask(stream_id, "/status/204")
            while stream_id not in connected.ended:
                connected.read()
        assert server.settled(lambda: server.app.sent_bytes) <= 2 * PIECE_BYTES
        # A window that opens a little lets so much through.
        for which in (None, 1):
            connected.h2.increment_flow_control_window(10 * PIECE_BYTES, which)
        connected.flush()
        while connected.got_bytes[1] < WINDOW_BYTES + 10 * PIECE_BYTES:
            connected.read()
        assert server.settled(lambda: server.app.sent_bytes) <= connected.got_bytes[1] + PIECE_BYTES


def test_an_answer_that_is_cut_is_reset(server: Server) -> None:
    with server.client() as client:
        connected = Connected(client)
        connected.ask(1, "/fail_late")
        while 1 not in connected.reset:
            connected.read()
        assert connected.got_bytes.get(1, 0) <= len(b"begun")
        assert 1 not in connected.ended
        connected.ask(3, "/status/204")
        while 3 not in connected.ended:
            connected.read()


@pytest.mark.parametrize("path", ["/large", "/big?1000000"], ids=["more to come", "the whole answer"])
@pytest.mark.parametrize("end", ["reset", "close"])
def test_who_waits_for_a_window_goes_with_its_client(server: Server, end: str, path: str) -> None:
    with server.client() as client:
        connected = Connected(client)
        connected.ask(1, path)
        while connected.got_bytes.get(1, 0) < WINDOW_BYTES:
            connected.read()
        server.settled(lambda: server.app.sent_bytes)
        assert server.app.running == 1
        if end == "reset":
            connected.h2.reset_stream(1)
            connected.flush()
            until(lambda: not server.app.running, "the app call to end")
    until(lambda: not server.app.running, "the app call to end")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("path", ["/large", "/big?1000000", "/big?10000"])
def test_who_gives_no_window_is_not_waited_for_without_an_end(loop: str, path: str) -> None:
    """The last bytes of an answer are no exception: the first stream uses up the window of the connection."""
    limits = HttpLimits(write_stall_timeout_ms=300, linger_ms=20)
    with Server(loop=loop, limits=limits) as server, server.client() as client:
        connected = Connected(client)
        connected.ask(1, "/big?65000")
        while 1 not in connected.ended:
            connected.read()
        connected.ask(3, path)
        while 3 not in connected.reset:
            connected.read()
        until(lambda: not server.app.running, "the app call to end")
        connected.ask(5, "/status/204")
        while 5 not in connected.ended:
            connected.read()


def test_a_long_message_that_is_taken_slowly_is_taken_to_its_end() -> None:
    """It is kept as a whole: what is taken of it is progress, and its time is that of all of it."""
    stall_ms, piece_bytes = 600, 20_000

    def attempt() -> None:
        limits = HttpLimits(write_stall_timeout_ms=stall_ms, linger_ms=20)
        with Server(limits=limits) as server, server.client() as client:
            connected = Connected(client)
            whole_bytes = WINDOW_BYTES + 20 * piece_bytes
            connected.ask(1, f"/big?{whole_bytes}")
            while 1 not in connected.ended:
                connected.read()
                assert 1 not in connected.reset
                if WINDOW_BYTES <= connected.got_bytes.get(1, 0) < whole_bytes:
                    time.sleep(stall_ms / 6000)  # as slow as that: five times what one standstill may take, in all
                    for which in (None, 1):
                        connected.h2.increment_flow_control_window(piece_bytes, which)
                    connected.flush()
            assert connected.got_bytes[1] == whole_bytes

    undisturbed(stall_ms, attempt)


def test_an_answer_counts_whole_until_nobody_waits_for_its_rest_which_is_then_all_that_is_kept() -> None:
    async def test() -> None:
        buffer = BoundedBuffer(EventWrapper)
        kept = KeptAnswers(SystemClock())
        buffer.attach(kept, lambda: None)
        answer = b"x" * 4_000_000
        pushing = asyncio.create_task(buffer.push(answer))
        while not kept.budget.held_bytes:
            await asyncio.sleep(0)
        got = []
        while buffer.buffered_bytes >= BUFFER_LOW_WATER:
            assert (kept.budget.held_bytes, pushing.done()) == (4_000_000, False)
            got.append(await buffer.pop(12_345))
        await pushing
        assert kept.budget.held_bytes == 0
        assert 0 < sum(memoryview(part.obj).nbytes for part in buffer._parts) < BUFFER_LOW_WATER, (
            "and not the whole answer"
        )
        while buffer.buffered_bytes:
            got.append(await buffer.pop(1000))
        assert b"".join(got) == answer

    asyncio.run(test())


def test_an_answer_counts_until_its_last_message_waits_no_longer() -> None:
    """The app of a WebSocket waits with an answer, and its pinger with a ping."""

    async def test() -> None:
        buffer = BoundedBuffer(EventWrapper)
        kept = KeptAnswers(SystemClock())
        buffer.attach(kept, lambda: None)
        answer, ping = b"x" * 4_000_000, b"ping"
        pushing = [asyncio.create_task(buffer.push(message)) for message in (answer, ping)]
        while buffer.buffered_bytes < len(answer) + len(ping):
            await asyncio.sleep(0)
        pushing[1].cancel()
        await asyncio.wait(pushing[1:])
        assert kept.budget.held_bytes == len(answer)
        while buffer.buffered_bytes:
            await buffer.pop(100_000)
        await pushing[0]
        assert kept.budget.held_bytes == 0

    asyncio.run(test())
