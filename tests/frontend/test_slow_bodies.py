"""A body has a time for the whole of it, not only between two pieces: over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

from tests.frontend.http1_server import Client, Server, undisturbed
from topics.core.errors import TopicsError
from topics.frontend.http.deadlines import BodyTime, HttpLimits, RunningClock, run_in_time

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
SLOW = HttpLimits(body_timeout_ms=200, body_idle_timeout_ms=5_000, body_min_bytes_per_s=100_000, linger_ms=10_000)


def given_up(client: Client) -> None:
    """Send a byte in 10 ms until the answer comes, which is 408."""
    answer, sent = b"", 0
    while not answer and sent < 500:
        client.send(b"x")
        sent += 1
        client.socket.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            answer += client.socket.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_trickles_is_given_up() -> None:
    """A byte in 10 ms would keep the time between two pieces for ever."""
    with Server(limits=SLOW) as server, server.client() as client:
        client.send(HEAD)
        given_up(client)


def test_what_comes_gives_time_back_and_is_no_credit() -> None:
    time = BodyTime(HttpLimits(body_timeout_ms=60_000, body_min_bytes_per_s=1000))
    assert time.left_s(100.0, 0, False) == 60
    assert time.left_s(110.0, 63_000_000, True) == 60, "however much came: never more than at the beginning"
    assert time.left_s(130.0, 63_010_000, True) == 50
    assert time.left_s(500.0, 63_010_000, False) == 50, "we did not wait for the client"
    assert time.left_s(549.0, 63_011_000, True) == 2
    assert time.left_s(552.0, 63_011_000, True) == -1


def test_at_the_least_rate_a_body_may_go_on_for_ever() -> None:
    time = BodyTime(HttpLimits(body_timeout_ms=60_000, body_min_bytes_per_s=1000))
    assert [time.left_s(float(at), at * 1000, True) for at in (0, 100, 5000)] == [60, 60, 60]
    trickle = BodyTime(HttpLimits(body_timeout_ms=60_000, body_min_bytes_per_s=1000))
    lefts = [trickle.left_s(float(at), at * 500, True) for at in range(130)]
    assert next(at for at, left in enumerate(lefts) if left <= 0) == 120, "half the rate: twice the time"


def test_a_burst_is_no_credit_for_a_trickle() -> None:
    """All but the last KB at once, then a byte in 10 ms: a thousand of them would have been 10 s."""
    with Server(limits=SLOW) as server, server.client() as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001000\r\n\r\n" + b"x" * 1_000_000)
        given_up(client)


def test_a_large_body_has_time_for_what_comes() -> None:
    limits = HttpLimits(body_timeout_ms=1000, body_min_bytes_per_s=1000)

    def send_slowly() -> None:
        with Server(limits=limits) as server, server.client() as client:
            client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n")
            for _ in range(10):
                client.socket.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.socket.recv(1)
                client.send(b"x" * 2000)
            client.socket.settimeout(10)
            assert client.answer().body == b"x" * 20_000, "twice the time, a second's worth in each fifth of one"

    undisturbed(limits.body_timeout_ms, send_slowly)


class Stalling:
    """A client of HTTP/2 that sends so many pieces and then nothing."""

    def __init__(self, pieces: int, ends: bool = False) -> None:
        self.left = pieces
        self.ends = ends
        self.received = 0

    async def receive(self) -> Any:
        if self.left:
            self.left -= 1
            self.received += 1
            return {"type": "http.request", "body": b"x", "more_body": not (self.ends and not self.left)}
        await asyncio.Event().wait()
        raise AssertionError


async def sink(message: Any) -> None:
    assert message


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_http2_waits_no_longer(pieces: int) -> None:
    client = Stalling(pieces)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            assert (await receive())["more_body"]

    async def main() -> None:
        limits = HttpLimits(body_idle_timeout_ms=20, discard_timeout_ms=20)
        with pytest.raises(TopicsError) as raised:
            await run_in_time(app, limits, RunningClock(time.monotonic), {}, client.receive, sink)
        assert raised.value.code == "request_timeout"

    asyncio.run(main())


def test_http2_takes_what_came_while_the_process_was_stopped() -> None:
    time_s = 0.0

    class Stopped:
        stopped = False

        async def receive(self) -> Any:
            nonlocal time_s
            if not self.stopped:
                self.stopped = True
                time_s += 3600
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"x", "more_body": False}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"x"

    async def main() -> None:
        limits = HttpLimits(body_idle_timeout_ms=20)
        await run_in_time(app, limits, RunningClock(lambda: time_s), {}, Stopped().receive, sink)

    asyncio.run(main())


def test_what_the_app_does_not_read_is_dropped() -> None:
    client = Stalling(50, ends=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    asyncio.run(run_in_time(app, HttpLimits(), RunningClock(time.monotonic), {}, client.receive, sink))
    assert client.received == 50


@pytest.mark.long
def test_h2c_streams_that_stall_do_not_hold_up_others() -> None:
    with Server(limits=HttpLimits(body_idle_timeout_ms=100)) as server, server.client() as client:
        h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        h2c.initiate_connection()
        headers = [(":method", "POST"), (":path", "/echo"), (":scheme", "http"), (":authority", "test")]
        h2c.send_headers(1, headers)
        h2c.send_data(1, b"never ends")
        h2c.send_headers(3, headers)
        h2c.send_data(3, b"whole", end_stream=True)
        client.send(h2c.data_to_send())
        ended: dict[int, bytes] = {}
        while len(ended) < 2:
            data = client.socket.recv(65_536)
            assert data, "the connection was closed"
            for event in h2c.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    ended[event.stream_id] = ended.get(event.stream_id, b"") + event.data
                elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    ended.setdefault(event.stream_id, b"")
            client.send(h2c.data_to_send())
        assert ended[3] == b"whole"
        server.app.errors.clear()
