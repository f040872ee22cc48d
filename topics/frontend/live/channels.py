"""Open event streams, and the topics they follow: what delivery (`delivery.py`) works on."""

from __future__ import annotations

from collections import deque

from topics.frontend.live.push import Push
from topics.frontend.live.stream import Stream
from topics.frontend.shards.watches import WatchHandle


class Connection:
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
        self.members: dict[Connection, int] = {}
        """All connections that follow it, and its index in their plans."""
        self.current: dict[Connection, int] = {}
        self.changed = False
        """Since the pass that is under way began."""
        self.held = False
        """What changed is to wait a little for what changes next (`Hub.coalesce_ms`)."""
        self.served_ms = 0
        """When the last pass ended."""
        self.todo: list[Connection] = []
        """Whom of `current` this pass has yet to look at."""
        self.backlog: deque[Connection] = deque()
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
