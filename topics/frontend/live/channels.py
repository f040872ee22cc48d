"""Open event streams and the topics they follow: what delivery (`delivery.py`) works on.

A `StreamConnection` is one stream, a `Channel` is one topic as the streams of this frontend follow it, and a `Slice` is
one slice of delivery's work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from topics.frontend.live.event_streams import Push
from topics.frontend.live.stream import StreamState, StreamStep
from topics.frontend.shards.notices import WatchHandle

COST_BYTES: Final = 4096
"""Serving a connection costs one unit, and one more for each of so many bytes written to it."""


@dataclass(eq=False, slots=True)
class StreamConnection:
    """One open event stream, or one topic of a WebSocket."""

    push: Push
    state: StreamState
    heartbeat_ms: int
    idle_since_ms: int
    behind: dict[int, bool] = field(default_factory=dict)
    """Topics (index in the spec) that it has not read to the head, each with True if it stands in the channel's
    backlog. It does not while it is stalled or waits for room."""
    closed: bool = False


@dataclass(eq=False, slots=True)
class Channel:
    """One topic, with the connections that follow it."""

    name: str
    watch: WatchHandle | None = None
    members: dict[StreamConnection, int] = field(default_factory=dict)
    """All connections that follow the topic, each with the topic's index in its spec."""
    current: dict[StreamConnection, int] = field(default_factory=dict)
    """The members that have read up to the head."""
    changed: bool = False
    """True if the topic has changed since the current pass began."""
    held: bool = False
    """True while a change waits a little for the next ones (`Hub.coalesce_ms`)."""
    served_ms: int = 0
    """Monotonic ms at which the last pass ended."""
    todo: list[StreamConnection] = field(default_factory=list)
    """The members of `current` that are still to be served in this pass."""
    backlog: deque[StreamConnection] = field(default_factory=deque)
    """The members that are to read on, in turn. Some may have left meanwhile."""
    backlog_due: int = 0
    """Number of connections at the front of `backlog` that stood there when this turn began. The scheduler ages the
    topic until they have had their page: it may get a turn only for its age."""

    @property
    def has_work(self) -> bool:
        return self.wants_pass or bool(self.backlog)

    @property
    def wants_pass(self) -> bool:
        return bool(self.todo) or (self.changed and not self.held)


@dataclass(eq=False, slots=True)
class Slice:
    """One slice of work, and the number of frames and records that it has sent."""

    now_ms: int
    frames: int = 0
    records: int = 0

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
