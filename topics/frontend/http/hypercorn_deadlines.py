"""Deadlines for clients of Hypercorn's protocols. Hypercorn itself limits idle connections only; `http1` has its own.

A body has to arrive in time (`run`), and a client has to read what waits for it (`SlowReaderTimer`):

    pause_writing, closing, or a message on a stream of HTTP/2 ─▶ start ─▶ check: stalled, or too slow ─▶ abort
                                                                    └─▶ caught_up (resume_writing), or close

Without them Hypercorn waits for ever, even on a connection that it has closed and whose last bytes nobody reads.
"""

from __future__ import annotations

import asyncio

from topics.frontend.asgi import AsgiApp, Message, Receive, Scope, Send, WriteBuffer
from topics.frontend.http.deadlines import (
    Awaited,
    BodyTime,
    Deadlines,
    HttpLimits,
    RunningClock,
    Verdict,
    body_timed_out,
)


async def run(
    app: AsgiApp, limits: HttpLimits, clock: RunningClock, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app` with a `receive` that raises `408 request_timeout`, and drop what the app leaves of the body.

    The rest is dropped before the answer ends: Hypercorn breaks a connection on which a request continues behind its
    answer, and blocks one whose messages nobody receives.
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
