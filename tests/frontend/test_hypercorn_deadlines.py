"""Clients of Hypercorn's protocols that take nothing of what waits for them are given up, as ours are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import h2.config
import h2.connection
import pytest

from tests.frontend.http1_server import Server, until
from tests.frontend.test_turned_away import one_place
from topics.frontend.http.deadlines import HttpLimits, RunningClock, SlowReaderTimer

LIMITS = HttpLimits(write_stall_timeout_ms=200, linger_ms=20)
SLOW = HttpLimits(write_stall_timeout_ms=200, linger_ms=20, read_min_bytes_per_s=1 << 30)
GENEROUS = 1 << 30
DEADLINE_S = 60.0


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_client_of_http2_that_takes_nothing_is_cut(loop: str) -> None:
    """It has given all the window there is."""
    with Server(loop=loop, limits=LIMITS) as server, server.client(receive_buffer_bytes=4096) as client:
        h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        h2c.initiate_connection()
        head = [(":method", "GET"), (":path", "/large"), (":scheme", "http"), (":authority", "test")]
        h2c.send_headers(1, head, end_stream=True)
        h2c.increment_flow_control_window(GENEROUS)
        h2c.increment_flow_control_window(GENEROUS, 1)
        client.send(h2c.data_to_send())
        until(lambda: server.app.sent_bytes, "it answers")
        until(lambda: not server.app.running, "the app learns that its client is given up")


def test_a_closed_connection_does_not_wait_for_ever_for_its_last_bytes_to_be_taken() -> None:
    """Fewer than those at which writing pauses: nobody waits for them but the transport."""
    limits = HttpLimits(write_stall_timeout_ms=200, linger_ms=20, keep_alive_timeout_ms=50)
    with Server(limits=limits, places=one_place()) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with server.client(receive_buffer_bytes=4096) as client:
            h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
            h2c.initiate_connection()
            head = [(":method", "GET"), (":path", "/big?60000"), (":scheme", "http"), (":authority", "test")]
            h2c.send_headers(1, head, end_stream=True)
            client.send(h2c.data_to_send())
            until(lambda: server.app.scopes and not server.app.running, "it has answered, and is idle")

            def room() -> bool:
                try:
                    with server.client() as another:
                        return another.get("/echo").answer().status == 200
                except (AssertionError, OSError):  # it was idle for longer than an idle one is kept
                    return False

            until(room, "its place is free")


class Transport(asyncio.Transport):
    """One that keeps so much."""

    def __init__(self, kept_bytes: int) -> None:
        super().__init__()
        self.kept_bytes = kept_bytes
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.kept_bytes

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


def on_loop(test: Callable[[Callable[[HttpLimits, Transport], SlowReaderTimer]], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = RunningClock(loop.time)

        def watched(limits: HttpLimits, transport: Transport) -> SlowReaderTimer:
            timer = SlowReaderTimer(limits, clock, loop, transport)
            timer.start()
            return timer

        async with asyncio.timeout(DEADLINE_S):
            await test(watched)

    asyncio.run(main())


async def until_cut(transport: Transport) -> None:
    while not transport.aborted:
        await asyncio.sleep(0.005)


def test_what_is_left_when_it_closes_has_to_be_taken() -> None:
    """The rest is less than the mark at which writing pauses, so nothing else waits for it."""

    async def test(watched: Callable[[HttpLimits, Transport], SlowReaderTimer]) -> None:
        transport = Transport(60_000)
        transport.closing = True
        timer = watched(LIMITS, transport)
        transport.kept_bytes = 100
        timer.caught_up()  # below the mark at which writing goes on
        await until_cut(transport)
        timer.close()

    on_loop(test)


def test_a_trickle_is_not_enough() -> None:
    async def test(watched: Callable[[HttpLimits, Transport], SlowReaderTimer]) -> None:
        transport = Transport(60_000)
        timer = watched(SLOW, transport)
        while not transport.aborted:
            transport.kept_bytes -= 1
            await asyncio.sleep(0.005)
        timer.close()

    on_loop(test)


def test_who_has_taken_it_is_watched_no_more() -> None:
    async def test(watched: Callable[[HttpLimits, Transport], SlowReaderTimer]) -> None:
        stalled, good = Transport(60_000), Transport(60_000)
        timer = watched(LIMITS, good)
        timer.caught_up()
        lost = watched(LIMITS, Transport(60_000))
        lost.close()
        watched(LIMITS, stalled)
        await until_cut(stalled)
        assert not good.aborted
        timer.start()
        await until_cut(good)

    on_loop(test)
