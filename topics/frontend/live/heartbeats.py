"""The comments that idle event streams get (api §7)."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from topics.core.clock import Clock
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.wording import EVENT_STREAM

PER_TURN_MAX: Final = 64
"""Heartbeats in one turn of the event loop, which has other things to do as well."""


class HeartbeatQueue:
    """Connections by the time of their next heartbeat. Pure: the monotonic time is passed in.

    A write to a connection costs nothing here: `pop_due` checks it at its old time and files it again.
    """

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        """Entries [due_ms, serial, connection; None if removed]."""
        self._entries: dict[StreamConnection, list[Any]] = {}
        self._serials = count()

    def add(self, connection: StreamConnection) -> None:
        due_ms = connection.idle_since_ms + connection.heartbeat_ms
        entry = self._entries[connection] = [due_ms, next(self._serials), connection]
        heapq.heappush(self._heap, entry)

    def remove(self, connection: StreamConnection) -> None:
        """Forget a connection. Idempotent. Its empty entry stays in the heap until it is due."""
        entry = self._entries.pop(connection, None)
        if entry is not None:
            entry[2] = None

    @property
    def next_ms(self) -> int | None:
        """The time of the next check; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int, most: int) -> list[StreamConnection]:
        """Return connections that have been idle for `heartbeat_ms`, and count them as written to now.

        Checks `most` and leaves the rest due: the streams of one topic were all written to at the same moment.
        """
        due = []
        while most and self._heap and self._heap[0][0] <= now_ms:
            most -= 1
            connection = heapq.heappop(self._heap)[2]
            if connection is None:
                continue
            if connection.idle_since_ms + connection.heartbeat_ms <= now_ms:
                connection.idle_since_ms = now_ms
                due.append(connection)
            self.add(connection)
        return due


class HeartbeatSender:
    """Sends the heartbeats of a frontend. Calls `on_stalled(connection, now_ms)` for clients that are not writable."""

    def __init__(self, clock: Clock, on_stalled: Callable[[StreamConnection, int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._on_stalled = on_stalled
        self._queue = HeartbeatQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0

    def add(self, connection: StreamConnection) -> None:
        """Begin the heartbeats of a connection that was written to at `idle_since_ms`."""
        self._queue.add(connection)
        self._arm()

    def remove(self, connection: StreamConnection) -> None:
        """End the heartbeats of a connection. Idempotent."""
        self._queue.remove(connection)

    def _arm(self) -> None:
        next_ms = self._queue.next_ms
        if next_ms is None or (self._timer is not None and self._timer_at_ms <= next_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = next_ms
        # 0 for those that are due already: the loop does what else is ready before it comes back.
        delay_ms = max(0, next_ms - self._clock.monotonic_ms())
        self._timer = self._loop.call_later(delay_ms / 1000, self._send)

    def _send(self) -> None:
        self._timer = None
        now_ms = self._clock.monotonic_ms()
        comment = EVENT_STREAM.heartbeat(self._clock.now_ms())
        for connection in self._queue.pop_due(now_ms, PER_TURN_MAX):
            if connection.push.writable:
                connection.push.write(comment)
            else:
                self._on_stalled(connection, now_ms)
        self._arm()
