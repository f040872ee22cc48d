"""A process that was stopped (SIGSTOP, a paused machine) for longer than any time-out cuts nobody for that."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.frontend.http1_server import DEADLINE_S, Server, until
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.entry.stalled_clients import STALL_MAX_MS, StalledClients
from topics.frontend.http.deadlines import GAP_S, HttpLimits, RunningClock

TIMEOUT_MS = 3_000
LIMITS = HttpLimits(
    header_timeout_ms=TIMEOUT_MS,
    body_idle_timeout_ms=TIMEOUT_MS,
    body_timeout_ms=TIMEOUT_MS,
    keep_alive_timeout_ms=TIMEOUT_MS,
    write_stall_timeout_ms=TIMEOUT_MS,
    read_min_bytes_per_s=2**40,
)
POST = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n"
LONG_BYTES = 10_000_000


class Stop:
    """The process stands still from `begin` to `end`, while it reads: libuv runs the timers that are overdue then
    before it looks what else has come. A signal hits a busy process there, and an idle one hardly ever."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stopped = threading.Event()
        self._goes_on = threading.Event()
        self._ours, self._theirs = socket.socketpair()

    def begin(self) -> None:
        self._server.call(lambda: self._server.loop.add_reader(self._theirs, self._stand_still))
        self._ours.send(b"x")
        assert self._stopped.wait(DEADLINE_S)

    def end(self) -> None:
        self._goes_on.set()

    def _stand_still(self) -> None:
        self._stopped.set()
        assert self._goes_on.wait(2 * DEADLINE_S)
        self._server.loop.remove_reader(self._theirs)
        self._ours.close()
        self._theirs.close()


@pytest.mark.long
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_what_came_during_a_stop_is_read_before_anybody_is_judged(loop: str) -> None:
    with (
        Server(loop=loop, limits=LIMITS) as server,
        server.client() as kept,
        server.client() as fresh,
        server.client() as head,
        server.client() as body,
        server.client(receive_buffer_bytes=4096) as reader,
    ):
        stop = Stop(server)
        assert kept.send(POST + b"0123456789").answer().status == 200
        head.send(POST[:30])
        body.send(POST + b"01234")
        reader.get(f"/big?{LONG_BYTES}").head()
        until(lambda: len(server.app.scopes) == 3 and len(server.connections.open) == 5, "all of them")
        server.settled(lambda: sum(len(one.pending) for one in server.http1))
        stop.begin()
        began_s = time.monotonic()
        kept.send(POST + b"0123456789")
        fresh.send(POST + b"0123456789")
        head.send(POST[30:] + b"0123456789")
        body.send(b"56789")
        until(lambda: time.monotonic() > began_s + TIMEOUT_MS / 1000, "more than the time that each has")
        stop.end()
        for client in (kept, fresh, head, body):
            assert client.answer().body == b"0123456789"
        assert len(reader.read(LONG_BYTES)) == LONG_BYTES


class Looking:
    def __init__(self) -> None:
        self.time_s = 1000.0
        self.clock = RunningClock(lambda: self.time_s)

    def pass_by(self, time_s: float, every_s: float) -> None:
        until_s = self.time_s + time_s
        while self.time_s + every_s < until_s:
            self.time_s += every_s
            self.clock.monotonic_ms()
        self.time_s = until_s


def test_time_passes_while_somebody_looks() -> None:
    looking = Looking()
    looking.pass_by(100, GAP_S)
    assert looking.clock.now_s() == 1100
    assert looking.clock.monotonic_ms() == 1_100_000
    looking.pass_by(100, 0.25)
    assert looking.clock.monotonic_ms() == 1_200_000


def test_who_pushes_gives_nobody_up_for_a_stop() -> None:
    """No client that is behind is given up: bytes that they take afterwards are progress, and others
    count.
    """
    looking = Looking()
    kept = Budget(limits.KEPT_FRAMES)
    stalls: StalledClients[str] = StalledClients(kept, {"behind": 1000}.__getitem__, lambda _: -1000)
    stalls.add("behind", looking.clock.monotonic_ms())
    looking.time_s += 10 * STALL_MAX_MS
    assert stalls.timed_out(looking.clock.monotonic_ms()) == []
    assert stalls.to_cut(1, looking.clock.monotonic_ms()) == []
    looking.pass_by(STALL_MAX_MS / 1000, 1)
    assert stalls.timed_out(looking.clock.monotonic_ms()) == ["behind"]


def test_what_nobody_saw_has_not_passed() -> None:
    looking = Looking()
    looking.time_s += 1
    assert looking.clock.now_s() == 1001
    looking.time_s += 3600
    assert looking.clock.now_s() == 1001
    assert looking.clock.suspended_s == 3600
    looking.time_s += 1
    assert looking.clock.monotonic_ms() == 1_002_000
    looking.time_s += 60
    assert looking.clock.monotonic_ms() == 1_002_000
    assert looking.time_s - looking.clock.suspended_s == looking.clock.now_s()
