"""Open event streams, the topics that they follow, their heartbeats and large frames: the parts of `delivery.py`.

A `StreamConnection` is one stream, a `Channel` is one topic as the streams of this frontend follow it, and a `Slice` is
one slice of delivery's work.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, TypeVar
from weakref import ref

from topics.core.clock import Clock
from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.live.event_streams import HIGH_WATER_BYTES, Push
from topics.frontend.live.stream import StreamState, StreamStep
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.shards.notices import WatchHandle

COST_BYTES: Final = 4096
"""Serving a connection costs one unit, and one more for each of so many bytes written to it."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamConnection:
    """One open event stream, or one topic of a WebSocket."""

    push: Push
    state: StreamState
    heartbeat_ms: int
    idle_since_ms: int
    pace_ms: int = 0
    """Least time between two steps that send something of one topic."""
    behind: dict[int, bool] = field(default_factory=dict)
    """Topics (index in the spec) not read to the head; False for those that wait for the client or for room."""
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
    """Connections at the front of `backlog` since this turn began. The topic is aged until they are served."""

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


PER_TURN_MAX: Final = 64
"""Heartbeats in one turn of the event loop, which has other things to do as well."""


class HeartbeatQueue:
    """Connections by the time of their next heartbeat. Pure: the monotonic time is passed in.

    A write to a connection costs nothing here: `pop_due` checks it at its old time and files it again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ref[StreamConnection]]] = []  # (due_ms, serial, connection)
        self._serials = count()

    def add(self, connection: StreamConnection) -> None:
        """Count a connection until it is closed. Its entry does not keep it, and stays until it is due."""
        due_ms = connection.idle_since_ms + connection.heartbeat_ms
        heapq.heappush(self._heap, (due_ms, next(self._serials), ref(connection)))

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
            connection = heapq.heappop(self._heap)[2]()
            if connection is None or connection.closed:
                continue
            if connection.idle_since_ms + connection.heartbeat_ms <= now_ms:
                connection.idle_since_ms = now_ms
                due.append(connection)
            self.add(connection)
        return due


class HeartbeatSender(HeartbeatQueue):
    """Sends the heartbeats of a frontend. Calls `on_stalled(connection, now_ms)` for clients that are not writable."""

    def __init__(self, clock: Clock, on_stalled: Callable[[StreamConnection, int], None]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._on_stalled = on_stalled
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0

    def start(self, connection: StreamConnection) -> None:
        """Begin the heartbeats of a connection that was written to at `idle_since_ms`."""
        self.add(connection)
        self._arm()

    def _arm(self) -> None:
        next_ms = self.next_ms
        if next_ms is None or (self._timer is not None and self._timer_at_ms <= next_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = next_ms
        # A delay of 0 for overdue ones still lets the loop do other work first.
        delay_ms = max(0, next_ms - self._clock.monotonic_ms())
        self._timer = self._loop.call_later(delay_ms / 1000, self._send)

    def _send(self) -> None:
        self._timer = None
        now_ms = self._clock.monotonic_ms()
        comment = EVENT_STREAM.heartbeat(self._clock.now_ms())
        for connection in self.pop_due(now_ms, PER_TURN_MAX):
            if connection.push.writable:
                connection.push.write(comment)
            else:
                self._on_stalled(connection, now_ms)
        self._arm()


WaiterT = TypeVar("WaiterT")


class LargeFrames(Generic[WaiterT]):
    """The large frames that wait for room in `budget` (api §7), and the grants that are not used yet.

        admit ─▶ sent                    `StalledClients` counts what is sent and not read
          └─▶ waiting ─ granted ─▶ admit ─▶ sent

    Meanwhile the log is the client's queue. Small frames, of up to HIGH_WATER_BYTES, never wait. A waiter that is
    granted room (`on_granted(waiter)`) keeps it until its frame is made, in a later slice of work.
    """

    def __init__(self, budget: Budget, on_granted: Callable[[WaiterT], None]) -> None:
        self._budget = budget
        self._on_granted = on_granted
        self._reservations: dict[WaiterT, Reservation] = {}

    def __contains__(self, waiter: WaiterT) -> bool:
        """Return True if `waiter` waits for a grant, before which it must not send."""
        reservation = self._reservations.get(waiter)
        return reservation is not None and reservation in self._budget.waiting

    def admit(self, waiter: WaiterT, len_bytes: int) -> bool:
        """Return True if the waiter's next frame may be sent now. Else the waiter waits for room, in front if it had a
        grant that was too small. The call uses up an earlier grant.
        """
        granted_bytes = self.cancel(waiter)
        if len_bytes <= max(HIGH_WATER_BYTES, granted_bytes):
            return True
        budget = self._budget
        if (granted_bytes or not budget.waiting) and budget.fits(len_bytes):
            return True
        reservation = self._reservations[waiter] = Reservation(budget)
        reservation.enqueue(len_bytes, lambda _: self._on_granted(waiter), first=granted_bytes > 0)
        return False

    def cancel(self, waiter: WaiterT) -> int:
        """End the wait or grant of a waiter, and return the granted bytes. Idempotent. Admits nobody else yet."""
        reservation = self._reservations.pop(waiter, None)
        if reservation is None:
            return 0
        self._budget.waiting.pop(reservation, None)
        self._budget.held_bytes -= reservation.held_bytes
        return reservation.held_bytes

    def shortfall_bytes(self) -> int:
        """Return how many unread bytes must go before the first waiter gets its grant; 0 or less if none. Grants do not
        count as unread: their room comes back, or becomes unread bytes.
        """
        if not self._budget.waiting:
            return 0
        granted_bytes = sum(reservation.held_bytes for reservation in self._reservations.values())
        unread_bytes = self._budget.held_bytes - granted_bytes
        first_bytes = next(iter(self._budget.waiting.values()))
        return min(unread_bytes, unread_bytes + first_bytes - self._budget.most_bytes)
