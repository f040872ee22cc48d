"""How long the body of an HTTP/2 request may take to arrive.

`http1` keeps these times for HTTP/1.1; Hypercorn has a time for idle connections only.
"""

from __future__ import annotations

import asyncio
from typing import Final

from topics.core.errors import TopicsError
from topics.frontend.asgi import AsgiApp, Message, Receive, Scope, Send
from topics.frontend.attended import AttendedClock
from topics.frontend.http.deadlines import BodyTime
from topics.frontend.http.limits import HttpLimits

DROP_S: Final = 5.0
"""How long the rest of a body is dropped as it comes after an early answer, before the connection is cut."""


async def run(
    app: AsgiApp, limits: HttpLimits, clock: AttendedClock, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app` with a `receive` that raises `408 request_timeout`, and drop what the app leaves of the body.

    It is dropped before the answer ends: Hypercorn breaks a connection on which a request goes on behind its answer,
    and blocks one whose messages nobody takes.
    """
    body = _Body(limits, clock, receive)

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await body.drop_rest()
        await send(message)

    try:
        await app(scope, body.receive, send_last)
    finally:
        await body.drop_rest()


class _Body:
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
