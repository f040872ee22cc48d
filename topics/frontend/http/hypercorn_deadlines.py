"""Deadlines for clients of Hypercorn's protocols, which has a time for idle connections only; `http1` keeps its own.

A body has to arrive in time (`run`), and a client has to take what waits for it (`Unread`):

    pause_writing ─▶ begin ─▶ a look now and then: standing still, or too slow ─▶ abort
    closing       ─▶           └─▶ taken: there is room again (resume_writing); lost: it is over
    a message on a stream of HTTP/2: begin, until there is room for the next one

Hypercorn waits for ever, also when it has closed a connection whose last bytes nobody takes.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from topics.core.errors import TopicsError
from topics.frontend.asgi import AsgiApp, Message, Receive, Scope, Send
from topics.frontend.http.deadlines import AttendedClock, Awaited, BodyTime, Deadlines, HttpLimits, Verdict

DROP_S: Final = 5.0
"""How long the rest of a body is dropped as it comes after an early answer, before the connection is cut."""


async def run(
    app: AsgiApp, limits: HttpLimits, clock: AttendedClock, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app` with a `receive` that raises `408 request_timeout`, and drop what the app leaves of the body.

    It is dropped before the answer ends: Hypercorn breaks a connection on which a request goes on behind its answer,
    and blocks one whose messages nobody takes.
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
    """The body of one request: it counts what comes, and the time that this takes."""

    def __init__(self, limits: HttpLimits, clock: AttendedClock, receive: Receive) -> None:
        self._limits = limits
        self._clock = clock
        self._receive = receive
        self._time = BodyTime(limits)
        self._bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        now_s = self._clock.time_s() - self._clock.missed_s  # without `now_s`, one more call for every request
        whole_s = self._time.left_s(now_s, self._bytes, False)
        until_s = now_s + min(self._limits.body_idle_timeout_ms / 1000, whole_s)
        while True:
            try:
                async with asyncio.timeout(until_s - now_s):
                    message = self._note(await self._receive())
            except TimeoutError:
                # What came while the process was stopped is still in Hypercorn's queue.
                if (now_s := self._clock.now_s()) < until_s:
                    continue
                raise TopicsError("request_timeout", "the body came too slowly, or not at all") from None
            if not self._complete:
                self._time.left_s(self._clock.now_s(), self._bytes, True)
            return message

    async def drop_rest(self) -> None:
        try:
            async with asyncio.timeout(DROP_S):
                while not self._complete and self._bytes <= self._limits.max_body_bytes:
                    self._note(await self._receive())
        except TimeoutError:
            return

    def _note(self, message: Message) -> Message:
        self._bytes += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


class Kept(Protocol):
    """The bytes that are kept for a client, in the shape of asyncio's transports."""

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
