"""Open event streams and the topics they follow: what delivery (`delivery.py`) works on.

A `StreamConnection` is one stream, a `Channel` is one topic as the streams of this frontend follow it, and a `Slice` is
one slice of delivery's work.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from topics.frontend.live.push import Push
from topics.frontend.live.stream import StreamState, StreamStep
from topics.frontend.shards.watches import WatchHandle

COST_BYTES: Final = 4096
"""Serving a connection costs one unit, and one more for each of so many bytes written to it."""


class StreamConnection:
    """One open event stream, or one topic of a WebSocket."""

    __slots__ = ("behind", "closed", "heartbeat_ms", "idle_since_ms", "push", "state")

    def __init__(self, push: Push, state: StreamState, heartbeat_ms: int, now_ms: int) -> None:
        self.push = push
        self.state = state
        self.heartbeat_ms = heartbeat_ms
        self.idle_since_ms = now_ms
        self.behind: dict[int, bool] = {}
        """Topics (index in the spec) that it has not read to the head, each with True if it stands in the channel's
        backlog. It does not while it is stalled or waits for room.
        """
        self.closed = False


class Channel:
    """One topic, with the connections that follow it."""

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
        """All connections that follow the topic, each with the topic's index in its spec."""
        self.current: dict[StreamConnection, int] = {}
        """The members that have read up to the head."""
        self.changed = False
        """True if the topic has changed since the current pass began."""
        self.held = False
        """True while a change waits a little for the next ones (`Hub.coalesce_ms`)."""
        self.served_ms = 0
        """Monotonic ms at which the last pass ended."""
        self.todo: list[StreamConnection] = []
        """The members of `current` that are still to be served in this pass."""
        self.backlog: deque[StreamConnection] = deque()
        """The members that are to read on, in turn. Some may have left meanwhile."""
        self.backlog_due = 0
        """Number of connections at the front of `backlog` that stood there when this turn began. The scheduler ages the
        topic until they have had their page: it may get a turn only for its age.
        """

    @property
    def has_work(self) -> bool:
        return self.wants_pass or bool(self.backlog)

    @property
    def wants_pass(self) -> bool:
        return bool(self.todo) or (self.changed and not self.held)


class Slice:
    """One slice of work, and the number of frames and records that it has sent."""

    __slots__ = ("frames", "now_ms", "records")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.frames = 0
        self.records = 0

    def send(self, connection: StreamConnection, step: StreamStep) -> bool:
        """Write the step. False: more waits for the client now than may."""
        connection.state = step.state
        data = step.data
        if not data:
            return True
        connection.idle_since_ms = self.now_ms
        self.frames += step.frames
        self.records += step.records
        return connection.push.write(data)
