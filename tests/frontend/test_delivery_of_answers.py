"""An answer that counts only when it is out of this process: when that is said, and that it is not said otherwise."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Final

import h2.errors
import h2.settings
import pytest

from tests.frontend.http1_server import Client, Server, until
from tests.frontend.test_http2_buffer import WINDOW_BYTES, Connected
from topics.frontend.http.deadlines import HttpLimits

BODY_BYTES: Final = 8 * 2**20
"""More than the kernel takes off a process."""
FEW_BYTES: Final = 60_000
"""Fewer than those at which writing pauses, and more than a kernel takes that may keep SEND_BUFFER_BYTES."""
SEND_BUFFER_BYTES: Final = 4096
RECEIVE_BUFFER_BYTES: Final = 4096
GENEROUS: Final = 1 << 30


def leave_by_reset(client: Client) -> None:
    client.reset()


def leave_in_order(client: Client) -> None:
    client.close()


LEAVING = pytest.mark.parametrize("leave", [leave_by_reset, leave_in_order], ids=["reset", "close"])


@pytest.fixture(params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param, limits=HttpLimits(write_stall_timeout_ms=60_000)) as running:
        yield running


def stalled(server: Server, size_bytes: int = BODY_BYTES) -> Client:
    """A client of HTTP/1.1 that has asked and reads nothing: the kernel takes no more off the server."""
    if size_bytes == FEW_BYTES:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    client = server.client(receive_buffer_bytes=RECEIVE_BUFFER_BYTES)
    client.get(f"/deliver?{size_bytes}")
    until(lambda: server.app.running, "it answers")
    assert not server.settled(lambda: server.app.delivered)
    return client


def test_it_is_said_when_the_client_has_taken_all_but_what_the_kernel_has(server: Server) -> None:
    with stalled(server) as client:
        assert len(client.answer().body) == BODY_BYTES
        until(lambda: server.app.delivered == 1, "it is delivered")
        # The connection goes on, and with its own high-water mark.
        assert client.get("/deliver?100000").answer().body == b"x" * 100_000
        until(lambda: server.app.delivered == 2, "the next is")
    assert server.app.errors == []


@LEAVING
@pytest.mark.parametrize("size_bytes", [BODY_BYTES, FEW_BYTES])
def test_it_is_not_said_when_the_client_has_gone_before(
    server: Server, leave: Callable[[Client], None], size_bytes: int
) -> None:
    client = stalled(server, size_bytes)
    client.read(1000)
    leave(client)
    until(lambda: not server.app.running, "the app learns of it")
    assert server.app.delivered == 0


def test_what_is_pipelined_behind_it_waits(server: Server) -> None:
    with stalled(server) as client:
        client.get("/status/204")
        assert server.settled(lambda: len(server.app.scopes)) == 1
        assert len(client.answer().body) == BODY_BYTES
        assert client.answer().status == 204
        assert server.app.delivered == 1


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_who_takes_nothing_is_not_waited_for_without_an_end(loop: str) -> None:
    """Though writing does not pause."""
    limits = HttpLimits(write_stall_timeout_ms=200, linger_ms=20, write_high_water_bytes=BODY_BYTES)
    with Server(loop, limits=limits) as server, server.client(receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as client:
        client.get(f"/deliver?{BODY_BYTES - 1000}")
        until(lambda: server.app.scopes and not server.app.running, "it is given up")
        assert server.app.delivered == 0


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
class TestHttp2:
    """A stream may end before its connection, and its data waits for two windows before it waits for the kernel."""

    def test_it_is_said_at_the_end(self, loop: str) -> None:
        with Server(loop=loop) as server, server.client() as client:
            connected = Connected(client)
            connected.ask(1, "/deliver?500000")
            while connected.got_bytes.get(1, 0) < WINDOW_BYTES:
                connected.read()
            assert not server.settled(lambda: server.app.delivered)
            for which in (None, 1):
                connected.h2.increment_flow_control_window(GENEROUS, which)
            connected.flush()
            while 1 not in connected.ended:
                connected.read()
            until(lambda: server.app.delivered == 1, "it is delivered")
            assert connected.got_bytes[1] == 500_000
        assert server.app.errors == []

    @pytest.mark.parametrize("size_bytes", [BODY_BYTES, WINDOW_BYTES + 10])
    def test_it_is_not_said_of_a_stream_that_is_reset(self, loop: str, size_bytes: int) -> None:
        with Server(loop=loop) as server, server.client() as client:
            connected = Connected(client)
            connected.ask(1, f"/deliver?{size_bytes}")
            while connected.got_bytes.get(1, 0) < WINDOW_BYTES:
                connected.read()
            connected.h2.reset_stream(1, h2.errors.ErrorCodes.CANCEL)
            connected.flush()
            until(lambda: not server.app.running, "the app learns of it")
            assert server.app.delivered == 0
            connected.h2.increment_flow_control_window(GENEROUS)
            connected.ask(3, "/deliver?1000")
            while 3 not in connected.ended:
                connected.read()
            until(lambda: server.app.delivered == 1, "the next is delivered")

    @LEAVING
    @pytest.mark.parametrize("window", [0, GENEROUS], ids=["no window", "window"])
    def test_it_is_not_said_when_the_client_has_gone_before(
        self, loop: str, leave: Callable[[Client], None], window: int
    ) -> None:
        with Server(loop=loop) as server:
            client = server.client(receive_buffer_bytes=RECEIVE_BUFFER_BYTES)
            connected = Connected(client)
            if window:
                connected.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
                connected.h2.increment_flow_control_window(window)
            connected.ask(1, f"/deliver?{BODY_BYTES}")
            until(lambda: server.app.running, "it answers")
            assert not server.settled(lambda: server.app.delivered)
            connected.read()
            leave(client)
            until(lambda: not server.app.running, "the app learns of it")
            assert server.app.delivered == 0
