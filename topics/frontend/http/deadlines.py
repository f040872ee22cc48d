"""How long a connection waits for its client, and what follows when that time is over.

    wait(awaited) ─▶ at_s …  the connection's timer fires …  overdue(buffered_bytes) ─▶ Verdict

All times are attended ones: time in which this process was there for its clients. A process that was stopped (SIGSTOP,
a paused machine), or whose event loop was held up, finds its timers overdue when it wakes, and what clients sent
meanwhile still unread behind them. By any other clock it would cut clients that did all they had to.

    loop       │ ·  ·  ·  ·  │ (stopped) ………………………… │ ·  ·  ·        looked at every LOOK_S
    attended   0  .5  1  1.5 2                         2  .5  3        the gap is left out: `missed_s`

`Deadlines` is pure: the clock is passed in, and the timer is the connection's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

LOOK_S: Final = 0.5
GAP_S: Final = 1.5
"""So long between two looks: nobody was there. A loop that is always that slow gives nobody up."""


class AttendedClock:
    """A `Clock` whose monotonic time stands still while nobody looks at it; `attend` does, for as long as it runs.

    `time_s` is a monotonic time in seconds, the event loop's. Who reads it anyhow, and often, takes `missed_s` from it:
    that is the attended time, or for a moment after a gap a later one. Whoever judges asks `now_s` or `monotonic_ms`.
    """

    def __init__(self, time_s: Callable[[], float]) -> None:
        self.time_s = time_s
        self.missed_s = 0.0
        self._looked_s = time_s()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """A look: a gap that ends here is found."""
        time_s = self.time_s()
        if time_s - self._looked_s > GAP_S:
            self.missed_s += time_s - self._looked_s
        self._looked_s = time_s
        return int((time_s - self.missed_s) * 1000)

    def now_s(self) -> float:
        """`monotonic_ms`, not rounded."""
        self.monotonic_ms()
        return self._looked_s - self.missed_s

    async def attend(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self.monotonic_ms()
            await asyncio.sleep(LOOK_S)


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a connection may ask for, in bytes and milliseconds."""

    max_header_bytes: int = 64 * 1024
    """A whole head with its request line. The framing and trailers of a chunked body may be as long, plus eight times
    the body."""
    max_headers: int = 128
    max_uri_bytes: int = 16 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    header_timeout_ms: int = 10_000
    """From a head's first byte to its last. A new connection may be silent as long."""
    body_idle_timeout_ms: int = 30_000
    body_timeout_ms: int = 60_000
    """For a body that comes at less than `body_min_bytes_per_s`; `deadlines.BodyTime` counts it."""
    body_min_bytes_per_s: int = 64 * 1024
    keep_alive_timeout_ms: int = 75_000
    write_stall_timeout_ms: int = 45_000
    """How long a client may take nothing of what waits for it. This is longer than the 30 s (31 s at most) that an
    event stream waits for its client: the stream then has last words for it (api §7), and they need time to arrive."""
    read_min_bytes_per_s: int = 16 * 1024
    """A client may take the time that an answer needs at this rate, and `write_stall_timeout_ms` on top."""
    vanished_after_ms: int = 45_000
    """How long the client's host may acknowledge nothing of what was sent (`vanished.py`)."""
    linger_ms: int = 1_000
    """How long input is read and dropped after a last answer, so that no reset overtakes the answer."""
    read_high_water_bytes: int = 64 * 1024
    """Unread body, or pipelined requests, that may wait in memory before reading pauses."""
    write_high_water_bytes: int = 64 * 1024
    """Answer that may wait in memory before the app's `send` waits."""
    discard_max_bytes: int = 256 * 1024
    """The rest of a body that is read and dropped after an early answer, to keep the connection. With a longer rest the
    connection is closed."""

    def write_time_s(self, waiting_bytes: int) -> float:
        """How long a client may take to read `waiting_bytes`."""
        return self.write_stall_timeout_ms / 1000 + waiting_bytes / self.read_min_bytes_per_s


class BodyTime:
    """The time that one request body has: `body_timeout_ms` at most, at any moment.

    Waiting for the client uses it up. Each `body_min_bytes_per_s` that arrive give one second back, but never more than
    was used: a fast start earns no time for a slow rest, so a nearly complete body is not held for hours.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._whole_s = self._left_s = limits.body_timeout_ms / 1000
        self._rate_bytes_per_s = limits.body_min_bytes_per_s
        self._came_bytes = 0
        self._looked_s = 0.0

    def left_s(self, now_s: float, came_bytes: int, waited: bool) -> float:
        """The time left when `came_bytes` have arrived in all. `waited`: for the client, ever since the last call."""
        if waited:
            self._left_s -= now_s - self._looked_s
        came = came_bytes - self._came_bytes
        self._left_s = min(self._whole_s, self._left_s + came / self._rate_bytes_per_s)
        self._looked_s, self._came_bytes = now_s, came_bytes
        return self._left_s


class Awaited(Enum):
    """The things that a connection waits for from its client."""

    NOTHING = 0
    FIRST_REQUEST = 1
    REQUEST = 2
    REST_OF_HEAD = 3
    REST_OF_BODY = 4
    READER = 5  # the client is to take what is buffered for it
    END = 6  # the last answer is out: the client is to close its end


class Verdict(Enum):
    """The thing to do when a deadline is looked at."""

    NOTHING_YET = 0  # the deadline has moved on to `at_s`
    LOOK_AGAIN = 1  # the client may be slow, but does not stand still: `wait` says until when
    CLOSE = 2  # all that was buffered is taken
    CUT = 3
    REFUSE_HEAD = 4
    REFUSE_BODY = 5


_FOR_THE_WHOLE: Final = frozenset(Awaited) - {Awaited.NOTHING, Awaited.REST_OF_BODY}
"""Their time is for the whole of it: what arrives meanwhile does not prolong it. A blank line is no request."""


class Deadlines:
    """The deadlines of one connection. `at_s` is when to call `overdue`; infinite while nothing is awaited."""

    def __init__(self, limits: HttpLimits, clock: AttendedClock) -> None:
        self._limits = limits
        self._clock = clock
        self._time_s = clock.time_s
        self._awaited = Awaited.NOTHING
        self._body_time = BodyTime(limits)
        self._stalled_at_bytes = 0
        self._stalled_since_s = 0.0
        self._taken_by_s = math.inf
        self.at_s = math.inf

    def begin_body(self) -> None:
        """The body of another request begins and has its own time. Its head may have come with the last body's end."""
        self._body_time = BodyTime(self._limits)
        self._awaited = Awaited.NOTHING

    def begin_taking(self, buffered_bytes: int) -> None:
        """The client is to take `buffered_bytes`, at the least rate that is allowed."""
        self.watch_reader(buffered_bytes)
        self._taken_by_s = self._stalled_since_s + self._limits.write_time_s(buffered_bytes)

    def end_taking(self) -> None:
        """The client has taken all of it."""
        self._taken_by_s = math.inf

    def watch_reader(self, buffered_bytes: int) -> None:
        """From now on a client that takes nothing of `buffered_bytes` stands still."""
        self._stalled_at_bytes = buffered_bytes
        self._stalled_since_s = self._clock.now_s()

    def wait(self, awaited: Awaited, body_came_bytes: int = 0) -> None:
        """Set what is awaited; can be repeated. `body_came_bytes`: what has come of a body that is not complete."""
        before, self._awaited = self._awaited, awaited
        if before is Awaited.REST_OF_BODY or awaited is Awaited.REST_OF_BODY:
            # Also when the body is no longer awaited: the time that it took is used up.
            now_s = self._clock.now_s()
            left_s = self._body_time.left_s(now_s, body_came_bytes, before is Awaited.REST_OF_BODY)
            if awaited is Awaited.REST_OF_BODY:
                self.at_s = now_s + min(left_s, self._timeout_ms(awaited) / 1000)
                return
        if awaited is Awaited.NOTHING:
            self.at_s = math.inf
        elif awaited is Awaited.REQUEST and before is Awaited.FIRST_REQUEST:
            self._awaited = before
        elif awaited is not before or awaited not in _FOR_THE_WHOLE:
            # Runs for every request, so it reads the time without `now_s`, which would be one more call.
            self.at_s = self._time_s() - self._clock.missed_s + self._timeout_ms(awaited) / 1000

    def overdue(self, buffered_bytes: int) -> Verdict:
        """Decide what is to be done now. `buffered_bytes`: what the client has not taken."""
        now_s = self._clock.now_s()
        if now_s < self.at_s:
            return Verdict.NOTHING_YET
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
            self.watch_reader(buffered_bytes)
        still_s = now_s - self._stalled_since_s
        if now_s >= self._taken_by_s or still_s >= self._limits.write_stall_timeout_ms / 1000:
            return Verdict.CUT
        return Verdict.LOOK_AGAIN

    def _timeout_ms(self, awaited: Awaited) -> int:
        limits = self._limits
        if awaited is Awaited.REQUEST:
            return limits.keep_alive_timeout_ms
        if awaited is Awaited.REST_OF_BODY:
            return limits.body_idle_timeout_ms
        if awaited is Awaited.REST_OF_HEAD or awaited is Awaited.FIRST_REQUEST:
            return limits.header_timeout_ms
        return min(limits.linger_ms, limits.write_stall_timeout_ms)  # the next look
