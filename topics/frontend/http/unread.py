"""Clients of Hypercorn's protocols that take nothing of what waits for them: cut, as ours are (`deadlines`).

    pause_writing ─▶ begin ─▶ a look now and then: standing still, or too slow ─▶ abort
    closing       ─▶           └─▶ taken: there is room again (resume_writing); lost: it is over
    a message on a stream of HTTP/2: begin, until there is room for the next one

Hypercorn waits for ever, also when it has closed a connection whose last bytes nobody takes.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from topics.frontend.attended import AttendedClock
from topics.frontend.http.deadlines import Awaited, Deadlines, Verdict
from topics.frontend.http.limits import HttpLimits


class Kept(Protocol):
    """What is kept for a client, as asyncio's transports have it."""

    def get_write_buffer_size(self) -> int: ...

    def is_closing(self) -> bool: ...

    def abort(self) -> None: ...


class Unread:
    """How the client of one connection, or of one stream, takes what is kept for it."""

    def __init__(self, limits: HttpLimits, clock: AttendedClock, loop: asyncio.AbstractEventLoop) -> None:
        self._deadlines = Deadlines(limits, clock)
        self._clock = clock
        self._loop = loop
        self._kept: Kept | None = None
        self._timer: asyncio.TimerHandle | None = None

    def made(self, kept: Kept) -> None:
        """It is open."""
        self._kept = kept

    def begin(self, coming_bytes: int = 0) -> None:
        """The client is to take what there is, and what is about to be kept for it; can be repeated."""
        if self._timer is None and self._kept is not None:
            self._deadlines.begin_taking(self._kept.get_write_buffer_size() + coming_bytes)
            self._look_later(self._kept)

    def taken(self) -> None:
        """There is room again; one that is closing has to take all of it."""
        if self._kept is not None and not self._kept.is_closing():
            self._stop()

    def lost(self) -> None:
        """It is gone."""
        self._kept = None
        self._stop()

    def _stop(self) -> None:
        self._deadlines.end_taking()
        self._deadlines.wait(Awaited.NOTHING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, kept: Kept) -> None:
        self._deadlines.wait(Awaited.READER)
        self._timer = self._loop.call_at(self._deadlines.at_s + self._clock.missed_s, self._look, kept)

    def _look(self, kept: Kept) -> None:
        self._timer = None
        if self._deadlines.overdue(kept.get_write_buffer_size()) is Verdict.CUT:
            kept.abort()
        else:
            self._look_later(kept)
