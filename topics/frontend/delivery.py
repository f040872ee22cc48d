"""Delivery: what is new in a topic goes to every event stream that follows it, read once and put into words once.

A connection is, for each of its topics, in one of two places. *Current*: it stands at the head and waits in the
topic's channel; when the shard says that the topic changed, one pass over the channel writes to all of them. *Behind*:
it reads on at its own pace, a page at a time and in turn with everything else, until it is current. A connection that
does not take what it was sent is behind and is not read for: the log is its queue (api §7).

Work is done in slices of SLICE_S between which the event loop does everything else; within one slice a topic is looked
at once (`Snapshot`). What changes meanwhile is announced afterwards, so nothing is missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final
from weakref import WeakValueDictionary

from topics.core.clock import Clock
from topics.core.names import owner_shard
from topics.frontend.gateway import Gateway
from topics.frontend.pulse import STALL_MAX_MS, Heartbeats, Stall
from topics.frontend.push import Push
from topics.frontend.records import PageOptions
from topics.frontend.snapshot import Snapshot, TopicSight
from topics.frontend.stream import RETRY_AFTER_MS, Outcome, Phase, Plan, Step, Stream
from topics.frontend.watches import WatchHandle
from topics.frontend.wording import EVENT_STREAM, Wording
from topics.shm.control import ProcessCell

SLICE_S: Final = 0.0005
FAN_OUT_STEP: Final = 64
"""Connections of one channel that are written to before a backlog has its turn."""


class Connection:
    """One open event stream. `behind` are the topics (index in the plan) it has to read on in."""

    __slots__ = ("behind", "closed", "heartbeat_ms", "idle_since_ms", "push", "queued", "stall", "stream")

    def __init__(self, push: Push, stream: Stream, heartbeat_ms: int, now_ms: int) -> None:
        self.push = push
        self.stream = stream
        self.heartbeat_ms = heartbeat_ms
        self.idle_since_ms = now_ms
        self.behind: dict[int, None] = {}
        self.queued = False
        self.stall: Stall | None = None
        self.closed = False


class Channel:
    """A topic as this frontend's streams follow it."""

    __slots__ = ("changed", "current", "members", "name", "todo", "watch")

    def __init__(self, name: str) -> None:
        self.name = name
        self.watch: WatchHandle | None = None
        self.members: dict[Connection, int] = {}
        """All connections that follow it, and its index in their plans."""
        self.current: dict[Connection, int] = {}
        self.changed = False
        """Since the pass that is under way began."""
        self.todo: list[Connection] = []
        """Whom of `current` this pass has yet to look at."""


class Hub:
    """All event streams of this frontend. Everything is called on the event loop it was made on."""

    def __init__(self, gateway: Gateway, topics: TopicSight, cell: ProcessCell, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._gateway = gateway
        self._topics = topics
        self._cell = cell
        self._clock = clock
        self._plans: WeakValueDictionary[tuple[object, ...], Plan] = WeakValueDictionary()
        self._connections: dict[Connection, None] = {}
        self._channels: dict[str, Channel] = {}
        self._changed: deque[Channel] = deque()
        """Those with `changed` or `todo`."""
        self._behind: deque[Connection] = deque()
        self._failed: dict[tuple[Connection, int], None] = {}
        self._undurable: dict[Channel, None] = {}
        self._stalled: dict[Connection, None] = {}
        self._heartbeats: Heartbeats[Connection] = Heartbeats()
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._heartbeat_at_ms = 0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self.draining = False

    def plan(
        self,
        names: tuple[str, ...],
        topic_ids: tuple[int, ...],
        options: PageOptions,
        strong: bool,
        wording: Wording = EVENT_STREAM,
    ) -> Plan:
        """The one plan that says this: streams of equal plans share what is made for them."""
        key = (names, topic_ids, options, strong, wording)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan(names, topic_ids, options, strong, wording)
        return plan

    def open(self, push: Push, stream: Stream, heartbeat_ms: int) -> Connection:
        """A stream begins, with its backlog. It ends with `close`, or when the client goes away; then
        `connection.closed` is true and `connection.stream` is how far it came. `heartbeat_ms` 0: it needs none.
        """
        connection = Connection(push, stream, heartbeat_ms, self._clock.monotonic_ms())
        push.on_writable = lambda: self._on_writable(connection)
        push.on_close = lambda: self._forget(connection)
        self._connections[connection] = None
        if stream.plan.wording is EVENT_STREAM:
            self._cell.add("sse_connections", 1)
            push.write(EVENT_STREAM.opening)
        for index, name in enumerate(stream.plan.names):
            if stream.phases[index] != Phase.ENDED:
                self._join(name).members[connection] = index
                connection.behind[index] = None
        self._enqueue(connection)
        if heartbeat_ms:
            self._heartbeats.add(connection)
            self._arm_heartbeats()
        if self._tick_timer is None:
            self._tick_timer = self._loop.call_later(RETRY_AFTER_MS / 1000, self._tick)
        return connection

    def close(self, connection: Connection) -> None:
        """Ends the stream in order. Does nothing when it has ended."""
        if not connection.closed:
            self._forget(connection)
            connection.push.close()

    def drain(self) -> None:
        """Ends all streams, and whoever opens one asks `draining` first. Clients come back elsewhere, or later."""
        self.draining = True
        for connection in list(self._connections):
            self.close(connection)

    # -- who follows what

    def _join(self, name: str) -> Channel:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = made = Channel(name)
            seen = self._topics.see(name)
            shard = owner_shard(name, self._gateway.shards)
            channel.watch = self._gateway.watch(
                shard, name, None if seen is None else seen.view, lambda: self._on_change(made)
            )
        return channel

    def _leave(self, connection: Connection, index: int) -> None:
        name = connection.stream.plan.names[index]
        channel = self._channels.get(name)
        if channel is None or channel.members.pop(connection, None) is None:
            return
        channel.current.pop(connection, None)
        self._failed.pop((connection, index), None)
        if not channel.members:
            assert channel.watch is not None
            channel.watch.cancel()
            self._undurable.pop(channel, None)
            self._topics.forget(name)
            del self._channels[name]

    def _forget(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        connection.push.on_writable = connection.push.on_close = None
        connection.behind.clear()
        for index in range(len(connection.stream.plan.names)):
            self._leave(connection, index)
        self._stalled.pop(connection, None)
        del self._connections[connection]
        if connection.stream.plan.wording is EVENT_STREAM:
            self._cell.add("sse_connections", -1)

    # -- when there is something to do

    def _on_change(self, channel: Channel) -> None:
        if not channel.changed and not channel.todo:
            self._changed.append(channel)
            self._schedule()
        channel.changed = True

    def _on_writable(self, connection: Connection) -> None:
        connection.stall = None
        self._stalled.pop(connection, None)
        self._enqueue(connection)

    def _enqueue(self, connection: Connection) -> None:
        if connection.behind and not connection.queued:
            connection.queued = True
            self._behind.append(connection)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _tick(self) -> None:
        """Once in RETRY_AFTER_MS: whoever waits for something that may not be announced."""
        self._tick_timer = None
        now_ms = self._clock.monotonic_ms()
        for connection in list(self._stalled):
            assert connection.stall is not None
            if connection.stall.over(connection.push.buffered_bytes, now_ms):
                message = f"the client has read nothing for {STALL_MAX_MS // 1000} s; resume from the last id"
                connection.push.write(connection.stream.plan.wording.final("throttled", message))
                self.close(connection)
        failed, self._failed = self._failed, {}
        for connection, index in failed:
            connection.behind[index] = None
            self._enqueue(connection)
        # A sync that ended while the shard learned of the watch is not announced.
        undurable, self._undurable = self._undurable, {}
        for channel in undurable:
            self._on_change(channel)
        if self._connections:
            self._tick_timer = self._loop.call_later(RETRY_AFTER_MS / 1000, self._tick)

    # -- doing it

    def _work(self) -> None:
        """One slice: the channels that changed and, in turn with them, the connections that are behind."""
        self._scheduled = False
        work = _Slice(self._clock.monotonic_ms(), Snapshot(self._topics))
        until_s = self._loop.time() + SLICE_S
        while self._changed or self._behind:
            if self._changed:
                self._fan_out(self._changed[0], work)
            if self._behind:
                self._read_on(self._behind.popleft(), work)
            if self._loop.time() >= until_s:
                break
        if work.frames:
            self._cell.add("sse_frames", work.frames)
            self._cell.add("records_out", work.records)
        if self._changed or self._behind:
            self._schedule()

    def _fan_out(self, channel: Channel, work: _Slice) -> None:
        """Some of those who are current; the channel stays in front until all have had their turn."""
        current = channel.current
        if not channel.todo:
            channel.changed = False
            channel.todo = list(current)
        todo = channel.todo
        steps = work.snapshot.steps(channel.name)
        for _ in range(min(len(todo), FAN_OUT_STEP)):
            connection = todo.pop()
            index = current.get(connection)
            if index is None:
                continue
            if not connection.push.writable:
                del current[connection]
                connection.behind[index] = None
                self._stall(connection, work.now_ms)
                continue
            step = steps.get(connection.stream)
            if step is None:
                step = work.snapshot.step(connection.stream, index)
            work.send(connection, step)
            if step.outcome is not Outcome.CURRENT:
                del current[connection]
                self._settle(connection, index, step.outcome)
        if not todo:
            self._changed.popleft()
            if channel.changed:
                self._changed.append(channel)

    def _read_on(self, connection: Connection, work: _Slice) -> None:
        """One page of one of its topics, the one that has waited longest."""
        connection.queued = False
        if not connection.behind:  # closed meanwhile
            return
        if not connection.push.writable:
            self._stall(connection, work.now_ms)
            return
        index = next(iter(connection.behind))
        del connection.behind[index]
        step = work.snapshot.step(connection.stream, index)
        work.send(connection, step)
        self._settle(connection, index, step.outcome)
        self._enqueue(connection)

    def _settle(self, connection: Connection, index: int, outcome: Outcome) -> None:
        """Where a topic of a connection goes after a step."""
        if outcome is Outcome.CURRENT or outcome is Outcome.WAITING:
            channel = self._channels[connection.stream.plan.names[index]]
            channel.current[connection] = index
            if outcome is Outcome.WAITING:
                self._undurable[channel] = None
        elif outcome is Outcome.MORE:
            connection.behind[index] = None
            self._enqueue(connection)
        elif outcome is Outcome.ENDED:
            self._leave(connection, index)
        else:
            self._failed[connection, index] = None

    def _stall(self, connection: Connection, now_ms: int) -> None:
        """It has not taken what it was sent: `on_writable` will say when to go on, or `_tick` that it is over."""
        if connection.stall is None:
            connection.stall = Stall(connection.push.buffered_bytes, now_ms)
            self._stalled[connection] = None

    # -- heartbeats

    def _arm_heartbeats(self) -> None:
        next_ms = self._heartbeats.next_ms
        if self._heartbeat_timer is not None:
            if next_ms is not None and self._heartbeat_at_ms <= next_ms:
                return
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None
        if next_ms is not None:
            self._heartbeat_at_ms = next_ms
            delay_ms = max(1, next_ms - self._clock.monotonic_ms())
            self._heartbeat_timer = self._loop.call_later(delay_ms / 1000, self._beat)

    def _beat(self) -> None:
        self._heartbeat_timer = None
        now_ms = self._clock.monotonic_ms()
        comment = EVENT_STREAM.heartbeat(self._clock.now_ms())
        for connection in self._heartbeats.take_due(now_ms):
            if connection.push.writable:
                connection.push.write(comment)
            else:
                self._stall(connection, now_ms)
        self._arm_heartbeats()


class _Slice:
    """One slice of work, and what it has sent."""

    __slots__ = ("frames", "now_ms", "records", "snapshot")

    def __init__(self, now_ms: int, snapshot: Snapshot) -> None:
        self.now_ms = now_ms
        self.snapshot = snapshot
        self.frames = 0
        self.records = 0

    def send(self, connection: Connection, step: Step) -> None:
        if step.data:
            connection.push.write(step.data)
            connection.idle_since_ms = self.now_ms
            self.frames += step.frames
            self.records += step.records
        connection.stream = step.stream
