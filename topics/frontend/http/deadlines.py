"""Deadlines for clients: the time that a connection waits for each thing, and its decision when that is over.

    wait(awaited) ─▶ at_s …  the connection's timer fires …  verdict(buffered_bytes) ─▶ Verdict

All times count only while this process runs. After a stop (SIGSTOP, a paused machine) the timers are overdue, and what
clients sent meanwhile is still unread: any other clock would cut clients that did all they had to.

    loop       │ ·  ·  ·  ·  │ (stopped) ………………………… │ ·  ·  ·        checked every CHECK_S
    running    0  .5  1  1.5 2                         2  .5  3        the gap counts as `suspended_s`

`Deadlines` is pure: the clock is passed in, and the timer is the connection's. Hypercorn limits only idle connections,
so `run_in_time` limits the time for a body there, and `SlowReaderTimer` the time to read:

    pause_writing, closing, or a message on a stream of HTTP/2 ─▶ start ─▶ check: stalled, or too slow ─▶ abort
                                                                    └─▶ caught_up (resume_writing), or close
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from topics.core.errors import TopicsError
from topics.frontend.asgi import AsgiApp, Message, Receive, Scope, Send, WriteBuffer

CHECK_S: Final = 0.5
GAP_S: Final = 1.5
"""A longer time between two checks counts as a suspension. So a process whose loop is always that slow cuts nobody."""


class RunningClock:
    """A monotonic clock that stops while this process is suspended, for client time-outs. `run` keeps it going.

    `time_s` is the event loop's monotonic time in seconds. Hot paths compute `time_s() - suspended_s`, which may be too
    late for a moment after a gap. Code that judges a client calls `now_s` or `monotonic_ms`.
    """

    def __init__(self, time_s: Callable[[], float]) -> None:
        self.time_s = time_s
        self.suspended_s = 0.0
        self._checked_s = time_s()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return the running time in ms. Finds a gap that ends here."""
        time_s = self.time_s()
        if time_s - self._checked_s > GAP_S:
            self.suspended_s += time_s - self._checked_s
        self._checked_s = time_s
        return int((time_s - self.suspended_s) * 1000)

    def now_s(self) -> float:
        """Return `monotonic_ms` in seconds, not rounded."""
        self.monotonic_ms()
        return self._checked_s - self.suspended_s

    async def run(self) -> None:
        while True:
            self.monotonic_ms()
            await asyncio.sleep(CHECK_S)


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a connection may ask for, in bytes and milliseconds."""

    max_header_bytes: int = 64 * 1024
    """A whole head with its request line. The framing of a chunked body may be as long, plus eight times the body."""
    max_headers: int = 128
    max_uri_bytes: int = 16 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    header_timeout_ms: int = 10_000
    """From a head's first byte to its last. A new connection may be silent as long."""
    body_idle_timeout_ms: int = 30_000
    body_timeout_ms: int = 60_000
    """For a body that arrives at less than `body_min_bytes_per_s` (`BodyTime`)."""
    body_min_bytes_per_s: int = 64 * 1024
    keep_alive_timeout_ms: int = 75_000
    write_stall_timeout_ms: int = 45_000
    """The time in which a client must read some of what waits for it: longer than an event stream's 30 s (api §7)."""
    read_min_bytes_per_s: int = 16 * 1024
    """A client may take the time that an answer needs at this rate, plus `write_stall_timeout_ms`."""
    vanished_after_ms: int = 45_000
    """The time in which the client's host must acknowledge some of what was sent (`vanished.py`)."""
    linger_ms: int = 1_000
    """The time for which input is read and dropped after a last answer, so that no reset overtakes the answer."""
    discard_max_bytes: int = 256 * 1024
    """The rest of a body that is dropped after an early answer, to keep the connection. A longer rest closes it."""
    discard_timeout_ms: int = 5_000
    """The time for which Hypercorn's connections read and drop such a rest before they are cut."""
    read_high_water_bytes: int = 64 * 1024
    """Unread body and pipelined requests that may wait in memory before reading pauses."""
    write_high_water_bytes: int = 64 * 1024
    """Bytes of an answer that may wait in memory before the app's `send` waits."""

    def write_time_s(self, waiting_bytes: int) -> float:
        """Return how long a client may take to read `waiting_bytes`."""
        return self.write_stall_timeout_ms / 1000 + waiting_bytes / self.read_min_bytes_per_s


class BodyTime:
    """The time that one request body has left: `body_timeout_ms` at most.

    Waiting for the client uses it up. Each `body_min_bytes_per_s` that arrive give one second back, but never more than
    was used: a fast start earns no time for a slow rest, so a nearly complete body cannot be held for hours.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._whole_s = self._left_s = limits.body_timeout_ms / 1000
        self._rate_bytes_per_s = limits.body_min_bytes_per_s
        self._received_bytes = 0
        self._checked_s = 0.0

    def left_s(self, now_s: float, received_bytes: int, waited: bool) -> float:
        """Return the time left. `waited`: the time since the last call was spent waiting for the client."""
        if waited:
            self._left_s -= now_s - self._checked_s
        more_bytes = received_bytes - self._received_bytes
        self._left_s = min(self._whole_s, self._left_s + more_bytes / self._rate_bytes_per_s)
        self._checked_s, self._received_bytes = now_s, received_bytes
        return self._left_s


def body_timed_out() -> TopicsError:
    return TopicsError("request_timeout", "the body arrived too slowly or not at all")


class Awaited(Enum):
    """The thing that a connection waits for from its client."""

    NOTHING = 0
    FIRST_REQUEST = 1
    REQUEST = 2
    REST_OF_HEAD = 3
    REST_OF_BODY = 4
    READER = 5  # the client is to read what is buffered for it
    END = 6  # the last answer is out: the client is to close its end


class Verdict(Enum):
    """The decision of a connection when its deadline is checked."""

    NOT_YET = 0  # the deadline has moved on to `at_s`
    CHECK_AGAIN = 1  # the client may be slow, but makes progress: `wait` says until when
    CLOSE = 2  # the client has read all that was buffered
    CUT = 3
    REFUSE_HEAD = 4
    REFUSE_BODY = 5


_FOR_THE_WHOLE: Final = frozenset(Awaited) - {Awaited.NOTHING, Awaited.REST_OF_BODY}
"""Waits whose time is for the whole thing: data that arrives meanwhile does not prolong it, such as a blank line."""


class Deadlines:
    """The deadlines of one connection. `at_s` is the time to ask for a `verdict`; infinite while nothing is awaited."""

    def __init__(self, limits: HttpLimits, clock: RunningClock) -> None:
        self._limits = limits
        self._clock = clock
        self._time_s = clock.time_s
        self._awaited = Awaited.NOTHING
        self._body_time = BodyTime(limits)
        self._stalled_at_bytes = 0
        self._stalled_since_s = 0.0
        self._read_by_s = math.inf
        self.at_s = math.inf

    def begin_body(self) -> None:
        """Give the next request's body its own time. Its head may have come in one read with the last body's end."""
        self._body_time = BodyTime(self._limits)
        self._awaited = Awaited.NOTHING

    def begin_reader(self, buffered_bytes: int) -> None:
        """Let the client read `buffered_bytes` from now on, at the least rate that is allowed."""
        self.note_progress(buffered_bytes)
        self._read_by_s = self._stalled_since_s + self._limits.write_time_s(buffered_bytes)

    def end_reader(self) -> None:
        self._read_by_s = math.inf

    def note_progress(self, buffered_bytes: int) -> None:
        """Measure from now on how long `buffered_bytes` does not fall."""
        self._stalled_at_bytes = buffered_bytes
        self._stalled_since_s = self._clock.now_s()

    def wait(self, awaited: Awaited, received_body_bytes: int = 0) -> None:
        """Set what is awaited, and with it `at_s`. Idempotent. `received_body_bytes`: of an incomplete body."""
        before, self._awaited = self._awaited, awaited
        if before is Awaited.REST_OF_BODY or awaited is Awaited.REST_OF_BODY:
            # This also runs when the body is no longer awaited, so that the time which it took is used up.
            now_s = self._clock.now_s()
            left_s = self._body_time.left_s(now_s, received_body_bytes, before is Awaited.REST_OF_BODY)
            if awaited is Awaited.REST_OF_BODY:
                self.at_s = now_s + min(left_s, self._timeout_ms(awaited) / 1000)
                return
        if awaited is Awaited.NOTHING:
            self.at_s = math.inf
        elif awaited is Awaited.REQUEST and before is Awaited.FIRST_REQUEST:
            self._awaited = before
        elif awaited is not before or awaited not in _FOR_THE_WHOLE:
            # Runs for every request, so it reads the time without `now_s`, which would be one more call.
            self.at_s = self._time_s() - self._clock.suspended_s + self._timeout_ms(awaited) / 1000

    def verdict(self, buffered_bytes: int) -> Verdict:
        """Decide what to do now. `buffered_bytes`: what the client has not read."""
        now_s = self._clock.now_s()
        if now_s < self.at_s:
            return Verdict.NOT_YET
        awaited, self._awaited = self._awaited, Awaited.NOTHING
        if awaited is Awaited.REQUEST or awaited is Awaited.FIRST_REQUEST:
            return Verdict.CUT
        if awaited is Awaited.REST_OF_HEAD:
            return Verdict.REFUSE_HEAD
        if awaited is Awaited.REST_OF_BODY:
            return Verdict.REFUSE_BODY
        if not buffered_bytes:
            return Verdict.CLOSE
        if buffered_bytes < self._stalled_at_bytes:
            self.note_progress(buffered_bytes)
        stalled_s = now_s - self._stalled_since_s
        if now_s >= self._read_by_s or stalled_s >= self._limits.write_stall_timeout_ms / 1000:
            return Verdict.CUT
        return Verdict.CHECK_AGAIN

    def _timeout_ms(self, awaited: Awaited) -> int:
        limits = self._limits
        if awaited is Awaited.REQUEST:
            return limits.keep_alive_timeout_ms
        if awaited is Awaited.REST_OF_BODY:
            return limits.body_idle_timeout_ms
        if awaited is Awaited.REST_OF_HEAD or awaited is Awaited.FIRST_REQUEST:
            return limits.header_timeout_ms
        return min(limits.linger_ms, limits.write_stall_timeout_ms)  # the next check


async def run_in_time(
    app: AsgiApp, limits: HttpLimits, clock: RunningClock, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app` with a `receive` that raises `408 request_timeout`. Drop what the app leaves of the body before the
    answer ends: Hypercorn breaks a connection on which a request continues behind its answer.
    """
    body = _TimedBody(limits, clock, receive)

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await body.drop_rest()
        await send(message)

    try:
        await app(scope, body.receive, send_last)
    finally:
        await body.drop_rest()


class _TimedBody:
    """The body of one request. It counts the bytes that arrive, and the time that this takes."""

    def __init__(self, limits: HttpLimits, clock: RunningClock, receive: Receive) -> None:
        self._limits = limits
        self._clock = clock
        self._receive = receive
        self._time = BodyTime(limits)
        self._bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        now_s = self._clock.time_s() - self._clock.suspended_s  # without `now_s`, one more call for every request
        whole_s = self._time.left_s(now_s, self._bytes, False)
        until_s = now_s + min(self._limits.body_idle_timeout_ms / 1000, whole_s)
        while True:
            try:
                async with asyncio.timeout(until_s - now_s):
                    message = self._note(await self._receive())
            except TimeoutError:
                # Data that arrived while the process was suspended is still in Hypercorn's queue.
                if (now_s := self._clock.now_s()) < until_s:
                    continue
                raise body_timed_out() from None
            if not self._complete:
                self._time.left_s(self._clock.now_s(), self._bytes, True)
            return message

    async def drop_rest(self) -> None:
        try:
            async with asyncio.timeout(self._limits.discard_timeout_ms / 1000):
                while not self._complete and self._bytes <= self._limits.max_body_bytes:
                    self._note(await self._receive())
        except TimeoutError:
            return

    def _note(self, message: Message) -> Message:
        self._bytes += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


class SlowReaderTimer:
    """Aborts one connection or stream whose client reads too little of `buffer`."""

    def __init__(
        self, limits: HttpLimits, clock: RunningClock, loop: asyncio.AbstractEventLoop, buffer: WriteBuffer
    ) -> None:
        self._deadlines = Deadlines(limits, clock)
        self._clock = clock
        self._loop = loop
        self._buffer = buffer
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, coming_bytes: int = 0) -> None:
        """Let the client read what is buffered, and `coming_bytes` that are about to be. Idempotent."""
        if self._timer is None and not self._closed:
            self._deadlines.begin_reader(self._buffer.get_write_buffer_size() + coming_bytes)
            self._arm()

    def caught_up(self) -> None:
        """Stop: there is room again. Has no effect on a closing buffer, which the client has to read to its end."""
        if not self._buffer.is_closing():
            self._stop()

    def close(self) -> None:
        """Stop for good: the connection or stream is over."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        self._deadlines.end_reader()
        self._deadlines.wait(Awaited.NOTHING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._deadlines.wait(Awaited.READER)
        self._timer = self._loop.call_at(self._deadlines.at_s + self._clock.suspended_s, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._deadlines.verdict(self._buffer.get_write_buffer_size()) is Verdict.CUT:
            self._buffer.abort()
        else:
            self._arm()
