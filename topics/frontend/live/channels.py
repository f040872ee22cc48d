"""Open event streams and the topics they follow: what delivery (`delivery.py`) works on.

A `Connection` is one stream, a `Channel` is one topic as the streams of this frontend follow it. A `Slice` sends what
goes out at one moment, and `Beats` sends the comment that an idle stream gets (api §7).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from topics.core.clock import Clock
from topics.frontend.live.pulse import Heartbeats
from topics.frontend.live.push import Push
from topics.frontend.live.stream import Stream, StreamStep
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.shards.watches import WatchHandle


class StreamConnection:
    """One open event stream."""

    __slots__ = ("behind", "closed", "heartbeat_ms", "idle_since_ms", "push", "stream")

    def __init__(self, push: Push, stream: Stream, heartbeat_ms: int, now_ms: int) -> None:
        self.push = push
        self.stream = stream
        self.heartbeat_ms = heartbeat_ms
        self.idle_since_ms = now_ms
        self.behind: dict[int, bool] = {}
        """Topics (index in the plan) it has to read on in, and whether it stands in that channel's backlog: it does
        not while it is stalled, or waits for room.
        """
        self.closed = False


class Channel:
    """A topic as this frontend's streams follow it."""

    __slots__ = (
        "backlog",
        "backlog_due",
        "changed",
        "current",
        "held",
        "members",
        "name",
        "served_ms",
        "todo",
        "watch",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.watch: WatchHandle | None = None
        self.members: dict[StreamConnection, int] = {}
        """All connections that follow it, and its index in their plans."""
        self.current: dict[StreamConnection, int] = {}
        self.changed = False
        """The topic has changed since the pass that is under way began."""
        self.held = False
        """Changes wait a little for the next ones (`Hub.coalesce_ms`)."""
        self.served_ms = 0
        """When the last pass ended."""
        self.todo: list[StreamConnection] = []
        """Whom of `current` this pass has yet to look at."""
        self.backlog: deque[StreamConnection] = deque()
        """Who reads on; some may have left meanwhile."""

        self.backlog_due = 0
        """How many in front of it stood there when this turn began. Until they have had their page the topic is as old
        as the turn is: it may be that it gets one only for its age.
        """

    @property
    def has_work(self) -> bool:
        return self.wants_pass or bool(self.backlog)

    @property
    def wants_pass(self) -> bool:
        return bool(self.todo) or (self.changed and not self.held)


COST_BYTES: Final = 4096
"""One look at a connection costs one unit, and one more for each of so many bytes written to it."""


class Slice:
    """One slice of work, and what it has sent."""

    __slots__ = ("frames", "now_ms", "records")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.frames = 0
        self.records = 0

    def send(self, connection: StreamConnection, step: StreamStep) -> bool:
        """Write the step. False: more waits for the client now than may."""
        connection.stream = step.stream
        data = step.data
        if not data:
            return True
        connection.idle_since_ms = self.now_ms
        self.frames += step.frames
        self.records += step.records
        return connection.push.write(data)


BEATS_MAX: Final = 64
"""Heartbeats in one turn of the event loop, which has other things to do as well."""


class Beats:
    """The heartbeats of one frontend's streams. `on_full(connection, now_ms)` is told of clients that take nothing."""

    def __init__(self, clock: Clock, on_full: Callable[[StreamConnection, int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._on_full = on_full
        self._heartbeats: Heartbeats[StreamConnection] = Heartbeats()
        self._timer: asyncio.TimerHandle | None = None
        self._at_ms = 0
        """The time at which the timer is due."""

    def add(self, connection: StreamConnection) -> None:
        """Add a connection that was written to at `idle_since_ms`."""
        self._heartbeats.add(connection)
        self._arm()

    def end(self, connection: StreamConnection) -> None:
        """Remove a connection; one without heartbeats is ignored."""
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
