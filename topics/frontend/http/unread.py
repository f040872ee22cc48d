"""A connection of Hypercorn's whose client takes nothing of what waits for it: cut, as ours are (`http1_deadlines`).

    pause_writing ─▶ begin ─▶ a look now and then: standing still, or too slow ─▶ abort
    closing       ─▶           └─▶ end: it has taken enough (resume_writing), or the connection is gone

Hypercorn waits for ever, also when it has closed a connection whose last bytes nobody takes.
"""

from __future__ import annotations

import asyncio

from topics.frontend.attended import AttendedClock
from topics.frontend.http.http1_deadlines import Awaited, Deadlines, Verdict
from topics.frontend.http.http1_parser import HttpLimits


class Unread:
    """What one connection's transport keeps for its client."""

    def __init__(self, limits: HttpLimits, clock: AttendedClock, loop: asyncio.AbstractEventLoop) -> None:
        self._deadlines = Deadlines(limits, clock)
        self._clock = clock
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def made(self, transport: asyncio.Transport) -> None:
        """The connection is open."""
        self._transport = transport

    def begin(self) -> None:
        """The client is to take what there is; can be repeated."""
        if self._timer is None and self._transport is not None:
            self._deadlines.begin_taking(self._transport.get_write_buffer_size())
            self._look_later(self._transport)

    def taken(self) -> None:
        """There is room again; one that is closing has to take all of it."""
        if self._transport is not None and not self._transport.is_closing():
            self._stop()

    def lost(self) -> None:
        """The connection is gone."""
        self._transport = None
        self._stop()

    def _stop(self) -> None:
        self._deadlines.end_taking()
        self._deadlines.wait(Awaited.NOTHING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, transport: asyncio.Transport) -> None:
        self._deadlines.wait(Awaited.READER)
        self._timer = self._loop.call_at(self._deadlines.at_s + self._clock.missed_s, self._look, transport)

    def _look(self, transport: asyncio.Transport) -> None:
        self._timer = None
        if self._deadlines.overdue(transport.get_write_buffer_size()) is Verdict.CUT:
            transport.abort()
        else:
            self._look_later(transport)
