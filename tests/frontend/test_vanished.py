"""A client whose host has vanished: it sends no reset, and nothing that was sent to it is acknowledged."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from functools import partial

import pytest

from tests.frontend.http1_server import Server, until
from topics.core.clock import SystemClock
from topics.frontend.entry.stalled_clients import STALL_MAX_MS
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.vanished import VanishedClients, unacknowledged_ms
from topics.frontend.live.stream import RETRY_AFTER_MS

SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A socket filter that takes no packet (linux/filter.h)."""


def lose_power(client: socket.socket) -> None:
    """From now on whatever comes for the client is dropped before its end sees it: no answer, not even a reset."""
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_who_has_vanished_is_cut_and_its_stream_told(loop: str) -> None:
    with (
        Server(loop=loop, limits=HttpLimits(vanished_after_ms=300)) as server,
        server.client() as gone,
        server.client() as there,
    ):
        for client in (gone, there):
            client.get("/push").head()
        until(lambda: len(server.app.pushes) == 2, "the streams")
        lose_power(gone.socket)
        server.call(*[partial(stream.write, b": hb\n\n") for stream in server.app.pushes])
        until(lambda: server.app.push_closed == 1, "one of them to be told")
        assert len(server.connections.open) == 1
        assert there.chunk() == b": hb\n\n"


class Somebody:
    open_socket = None

    def abort(self) -> None: ...


def test_who_was_idle_for_long_and_is_sent_something_has_its_time_to_acknowledge_it() -> None:
    vanished, idle = VanishedClients([], 300, SystemClock()), Somebody()
    assert not vanished.has_vanished(idle, 100_000, 1000), "sent a moment ago"
    assert not vanished.has_vanished(idle, None, 1100), "and acknowledged"
    assert not vanished.has_vanished(idle, 150, 1250), "sent again"
    assert not vanished.has_vanished(idle, 100, 1549), "one acknowledgement of two"
    assert not vanished.has_vanished(idle, 399, 1848)
    assert vanished.has_vanished(idle, 400, 1849)
    vanished.check()
    assert not vanished.has_vanished(idle, 500, 1949), "another connection"


def test_who_merely_takes_nothing_has_not_vanished() -> None:
    """Its host says so, whenever it is asked whether there is room."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            accepted.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while accepted.send(b"x" * 65_536):
                    pass
            until(lambda: unacknowledged_ms(accepted) is None, "all that went out to be acknowledged")


def test_a_unix_socket_has_no_host_that_could_vanish() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"x")
        assert unacknowledged_ms(ours) is None


def test_who_reads_nothing_has_its_last_words_before_it_is_cut() -> None:
    """Each in its turn, and both looked at once a second: the hub's `error`, the connection's cut."""
    told_by_ms = STALL_MAX_MS + RETRY_AFTER_MS
    limits = HttpLimits()
    assert told_by_ms + 10_000 <= limits.write_stall_timeout_ms, "and has some time to read them"
    assert limits.write_time_s(0) * 1000 == limits.write_stall_timeout_ms
