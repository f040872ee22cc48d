"""Heartbeats on the event loop: the comment that an idle event stream gets (api §7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics.core.clock import Clock
from topics.frontend.live.channels import Connection
from topics.frontend.live.pulse import Heartbeats
from topics.frontend.live.wording import EVENT_STREAM

BEATS_MAX: Final = 64
"""In one turn of the event loop, which has other things to do as well."""


class Beats:
    """Of one frontend's streams. `on_full(connection, now_ms)` is told of those whose clients take nothing."""

    def __init__(self, clock: Clock, on_full: Callable[[Connection, int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._on_full = on_full
        self._heartbeats: Heartbeats[Connection] = Heartbeats()
        self._timer: asyncio.TimerHandle | None = None
        self._at_ms = 0
        """When the timer is due."""

    def add(self, connection: Connection) -> None:
        """It begins, as one that was written to at `idle_since_ms`."""
        self._heartbeats.add(connection)
        self._arm()

    def end(self, connection: Connection) -> None:
        """It has ended; does nothing for one without heartbeats."""
        self._heartbeats.end(connection)

    def _arm(self) -> None:
        next_ms = self._heartbeats.next_ms
        if self._timer is not None:
            if next_ms is not None and self._at_ms <= next_ms:
                return
            self._timer.cancel()
            self._timer = None
        if next_ms is not None:
            self._at_ms = next_ms
            # Nothing at all for those who are due already: the loop does what else is ready, and goes on here.
            delay_ms = max(0, next_ms - self._clock.monotonic_ms())
            self._timer = self._loop.call_later(delay_ms / 1000, self._beat)

    def _beat(self) -> None:
        self._timer = None
        now_ms = self._clock.monotonic_ms()
        comment = EVENT_STREAM.heartbeat(self._clock.now_ms())
        for connection in self._heartbeats.take_due(now_ms, BEATS_MAX):
            if connection.push.writable:
                connection.push.write(comment)
            else:
                self._on_full(connection, now_ms)
        self._arm()
