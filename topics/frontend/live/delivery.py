"""Delivery: new records of a topic go to every event stream that follows it, read once and framed once.

A connection is, for each of its topics, in one of two places. *Current*: it has read up to the head; when the shard
announces a change, one pass over the topic's channel writes to all of these. *Behind*: it stands in the channel's
backlog and reads on, a page at a time and in turn with others, until it is current. A connection whose client does not
read is behind, and nothing is read for it: the log is its queue (api §7). One with a pace is in neither place for a
while after each frame; then it reads on from the backlog.

The scheduler (`core/scheduler.py`) chooses the next channel by priority. Work is done in slices of SLICE_S, in which a
topic is looked up once (`StepCache`). A change during a slice is announced afterwards, so nothing is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final
from weakref import WeakValueDictionary

from topics.core.clock import Clock
from topics.core.scheduler import TICK_MS, Scheduler
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.entry.stalled_clients import STALL_MAX_MS, StalledClients
from topics.frontend.live.channels import COST_BYTES, Channel, HeartbeatSender, LargeFrames, Slice, StreamConnection
from topics.frontend.live.event_streams import Push
from topics.frontend.live.step_cache import KnownTopics, StepCache
from topics.frontend.live.stream import RETRY_AFTER_MS, StepOutcome, StreamSpec, StreamState, StreamStep, TopicPhase
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.reads.cold import ColdWaits
from topics.frontend.shards.gateway import Gateway, stopping
from topics.log import get_logger
from topics.shm.control import ProcessCell

SLICE_S: Final = 0.0005
FAN_OUT_STEP: Final = 64
"""A pass over a channel stops after this much cost, to serve the backlog and to look at the clock."""
JOIN_STEP: Final = 32
"""Topics that a new stream joins in one turn of the event loop."""
PAGE_COST: Final = 16
"""Cost of reading and framing a page, in writes of a small frame."""
log = get_logger()


class Hub:
    """All event streams of this frontend. Used on the event loop it was made on."""

    def __init__(self, gateway: Gateway, topics: KnownTopics, cell: ProcessCell, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._gateway = gateway
        self._topics = topics
        self._cell = cell
        self._clock = clock
        self._connections: dict[StreamConnection, None] = {}
        self._channels: dict[str, Channel] = {}
        self.ready: Scheduler[Channel] = Scheduler(lambda channel: topics.base_priority(channel.name))
        """The channels that have work. Other modules may look at it, not change it."""
        self.steps = StepCache(topics)
        self._failed: dict[tuple[StreamConnection, int], None] = {}
        self._kept = Budget(limits.KEPT_FRAMES)
        self._large_frames = LargeFrames[tuple[StreamConnection, int]](
            self._kept, lambda waiter: self._join_backlog(*waiter)
        )
        self._cold: ColdWaits[tuple[StreamConnection, int]] = ColdWaits(topics.reader.fetch, self._on_fetched)
        self._undurable: dict[Channel, None] = {}
        self._stalled = StalledClients[StreamConnection](
            self._kept, attrgetter("push.buffered_bytes"), attrgetter("push.progress_bytes")
        )
        self._heartbeats = HeartbeatSender(clock, self._stalled.add)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._specs: WeakValueDictionary[tuple[object, ...], StreamSpec] = WeakValueDictionary()
        self.coalesce_ms = 0.0
        """Least time between two passes over one topic. Records that arrive meanwhile go out together."""
        self.draining = False

    def share(self, spec: StreamSpec) -> StreamSpec:
        """Return the one spec of open streams that is equal to `spec`, so that they share steps."""
        return self._specs.setdefault((spec.names, spec.topic_ids, spec.options, spec.strong, spec.wording), spec)

    def open(self, push: Push, state: StreamState, heartbeat_ms: int, pace_ms: int = 0) -> StreamConnection:
        """Begin a stream, which ends with `close` or when the client goes away. `heartbeat_ms` 0: no heartbeats."""
        connection = StreamConnection(push, state, heartbeat_ms, self._clock.monotonic_ms(), pace_ms)
        push.on_writable = lambda: self._on_writable(connection)
        push.on_close = lambda: self._forget(connection)
        self._connections[connection] = None
        if state.spec.wording is EVENT_STREAM:
            self._cell.add("sse_connections", 1)
            push.write(EVENT_STREAM.opening)
        indexes = (index for index, phase in enumerate(state.phases) if phase != TopicPhase.ENDED)
        self._join_some(connection, indexes)
        if heartbeat_ms:
            self._heartbeats.start(connection)
        if self._tick_timer is None:
            self._tick_timer = self._loop.call_later(RETRY_AFTER_MS / 1000, self._tick)
        return connection

    def check_ready(self, names: Iterable[str]) -> None:
        """Raise `not_ready` if a stream of these topics cannot join one of them yet: later it could only be cut. A
        shard that was ready once stays known. Raise `shutting_down` while streams end.
        """
        if self.draining:
            raise stopping()
        for shard in {self._gateway.owner(name) for name in names}:
            self._gateway.arenas.require(shard)

    def close(self, connection: StreamConnection) -> None:
        """End the stream in order. Idempotent."""
        if not connection.closed:
            self._forget(connection)
            connection.push.close()

    def drain(self) -> None:
        """End all streams. Callers check `draining` before they open another."""
        self.draining = True
        for connection in list(self._connections):
            if connection.state.spec.wording is EVENT_STREAM:
                connection.push.write(EVENT_STREAM.shutting_down)
            self.close(connection)

    def waiting_ms(self, name: str) -> int:
        """Return how long new records of a topic have been waiting to be delivered here."""
        channel = self._channels.get(name)
        return 0 if channel is None else self.ready.waiting_ms(channel, self._clock.monotonic_ms())

    def pause(self, paused: bool) -> None:
        """Stop or resume the delivery of topics with negative priority. Those that wait long rise above zero."""
        if self.ready.paused != paused:
            self.ready.paused = paused
            self._schedule_rest()

    # -- joining and leaving channels

    def _join_some(self, connection: StreamConnection, indexes: Iterator[int]) -> None:
        """Have a stream join the channels of some of these topics, and of the others in the next turns."""
        joined = 0
        try:
            for index in islice(indexes, 0 if connection.closed else JOIN_STEP):
                self._join(connection.state.spec.names[index]).members[connection] = index
                self._join_backlog(connection, index)
                joined += 1
        except BaseException:
            self._forget(connection)
            raise
        if joined == JOIN_STEP:
            self._loop.call_soon(self._join_on, connection, indexes)

    def _join_on(self, connection: StreamConnection, indexes: Iterator[int]) -> None:
        """Go on with `_join_some`. A stream that cannot go on is cut: its client connects again."""
        try:
            self._join_some(connection, indexes)
        except Exception:  # other streams go on
            log.exception("a stream cannot follow its topics")
            connection.push.abort()

    def _join(self, name: str) -> Channel:
        channel, ref = self._channels.get(name), self._topics.find(name)
        view = None if ref is None else ref.view
        if channel is None:
            made, shard = Channel(name), self._gateway.owner(name)
            made.watch = self._gateway.watches.add(shard, name, view, partial(self._on_change, made))
            channel = self._channels[name] = made  # last: the watch may be refused
        elif view is not None and channel.watch is not None:
            # `view` may be a new topic of this name, while the members still wait for the end of the former one.
            channel.watch.found(view)
        return channel

    def _leave(self, connection: StreamConnection, index: int) -> None:
        name = connection.state.spec.names[index]
        channel = self._channels.get(name)
        if channel is None or channel.members.pop(connection, None) is None:
            return
        channel.current.pop(connection, None)
        self._failed.pop((connection, index), None)
        self._large_frames.cancel((connection, index))
        if not channel.members:
            assert channel.watch is not None
            channel.watch.cancel()
            channel.watch = None  # breaks a reference cycle, which would be left to the garbage collector
            self._undurable.pop(channel, None)
            self.ready.discard(channel)
            self._topics.forget(name)
            del self._channels[name]

    def _forget(self, connection: StreamConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        connection.push.on_writable = connection.push.on_close = None
        connection.behind.clear()
        for index in range(len(connection.state.spec.names)):
            self._leave(connection, index)
        self._stalled.remove(connection)
        self._kept.admit_waiting()
        del self._connections[connection]
        if connection.state.spec.wording is EVENT_STREAM:
            self._cell.add("sse_connections", -1)

    # -- marking work

    def _on_change(self, channel: Channel) -> None:
        if not channel.changed:
            channel.changed = True
            if not channel.todo:
                now_ms = self._clock.monotonic_ms()
                if not self._hold(channel, now_ms):
                    self._mark(channel, now_ms)

    def _hold(self, channel: Channel, now_ms: int) -> bool:
        """Return True if a change waits for the next ones, because the topic was served only just now."""
        wait_ms = channel.served_ms + self.coalesce_ms - now_ms
        if wait_ms <= 0:
            return False
        channel.held = True
        self._loop.call_later(wait_ms / 1000, self._end_hold, channel)
        return True

    def _end_hold(self, channel: Channel) -> None:
        channel.held = False
        if channel.has_work and channel.members:
            self._mark(channel, self._clock.monotonic_ms())

    def _on_writable(self, connection: StreamConnection) -> None:
        self._stalled.remove(connection)
        for index, in_backlog in connection.behind.items():
            if not in_backlog and (connection, index) not in self._large_frames:
                self._join_backlog(connection, index)
        self._kept.admit_waiting()

    def _join_backlog(self, connection: StreamConnection, index: int) -> None:
        connection.behind[index] = True
        channel = self._channels[connection.state.spec.names[index]]
        channel.backlog.append(connection)
        self._mark(channel, self._clock.monotonic_ms())

    def _mark(self, channel: Channel, now_ms: int) -> None:
        self.ready.mark(channel, now_ms)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _tick(self) -> None:
        """Do, every RETRY_AFTER_MS, what nothing announces: cut stalled clients, and try again what failed."""
        self._tick_timer = None
        now_ms = self._clock.monotonic_ms()
        for connection in self._stalled.timed_out(now_ms):
            message = f"the client has read nothing for {STALL_MAX_MS // 1000} s; resume from the last id"
            connection.push.write(connection.state.spec.wording.final("throttled", message))
            self.close(connection)
        for connection in self._stalled.to_cut(self._large_frames.shortfall_bytes(), now_ms):
            # Abort without a last frame, which would wait for the client and keep its memory.
            self._forget(connection)
            connection.push.abort()
        self._kept.admit_waiting()
        failed, self._failed = self._failed, {}
        for connection, index in failed:
            self._join_backlog(connection, index)
        # The shard does not announce a sync that ends before it has the watch, so look at undurable topics again.
        undurable, self._undurable = self._undurable, {}
        for channel in undurable:
            self._on_change(channel)
        self.steps.clear()
        if self._connections:
            self._tick_timer = self._loop.call_later(RETRY_AFTER_MS / 1000, self._tick)

    # -- doing work

    def _work(self) -> None:
        """Do one slice: serve the channels in the scheduler's order."""
        self._scheduled = False
        now_ms = self._clock.monotonic_ms()
        work = Slice(now_ms)
        self.steps.begin()
        until_s = self._loop.time() + SLICE_S
        try:
            while (channel := self.ready.take(now_ms)) is not None:
                self._serve(channel, work)
                if self._loop.time() >= until_s:
                    break
            self._kept.admit_waiting()
        finally:
            if work.frames:
                self._cell.add("sse_frames", work.frames)
                self._cell.add("records_out", work.records)
            self._schedule_rest()

    def _serve(self, channel: Channel, work: Slice) -> None:
        """Serve one channel: a part of a pass, and one page of the backlog."""
        cost = 0
        if not channel.todo and not channel.backlog_due:
            channel.backlog_due = len(channel.backlog)
        try:
            if channel.wants_pass:
                cost += self._fan_out(channel, work)
            if channel.backlog:
                cost += self._read_on(channel, work)
        finally:
            fresh = not channel.todo and not channel.backlog_due
            self.ready.served(cost, work.now_ms, more=channel.has_work, fresh=fresh)

    def _schedule_rest(self) -> None:
        if self.ready.eligible:
            self._schedule()
        elif len(self.ready) and self._age_timer is None:
            self._age_timer = self._loop.call_later(TICK_MS / 1000, self._age)

    def _age(self) -> None:
        """Age the waiting topics, none of which may be delivered yet."""
        self._age_timer = None
        self.ready.age(self._clock.monotonic_ms())
        self._schedule_rest()

    def _fan_out(self, channel: Channel, work: Slice) -> int:
        """Serve some of the current connections, and return the cost."""
        current = channel.current
        if not channel.todo:
            channel.changed = False
            channel.todo = list(current)
        todo = channel.todo
        steps = self.steps
        state: StreamState | None = None
        cost = 0
        while todo and cost < FAN_OUT_STEP:
            connection = todo.pop()
            index = current.get(connection)
            if index is None:
                continue
            cost += 1
            if not connection.push.writable:
                del current[connection]
                self._stall(connection, index, work.now_ms)
                continue
            if connection.state is not state:
                # Connections in one state mostly follow each other.
                state, made = connection.state, steps.made
                step = steps.step(state, index)
                cost += PAGE_COST * (steps.made - made)
                len_bytes = len(step.data)
                stays = step.outcome is StepOutcome.CURRENT
            if len_bytes >= COST_BYTES:
                cost += len_bytes // COST_BYTES
                if not self._large_frames.admit((connection, index), len_bytes):
                    del current[connection]
                    connection.behind[index] = False
                    continue
            if not work.send(connection, step):
                self._stalled.add(connection, work.now_ms)
            if not stays or connection.pace_ms:
                del current[connection]
                self._place(connection, index, step)
        if not todo:
            channel.served_ms = work.now_ms
            if channel.changed:
                self._hold(channel, work.now_ms)
        return cost

    def _read_on(self, channel: Channel, work: Slice) -> int:
        """Send one page to the first connection of the backlog, and return the cost."""
        connection = channel.backlog.popleft()
        channel.backlog_due = max(0, channel.backlog_due - 1)
        index = channel.members.get(connection)
        if index is None:  # it has left the channel
            return 1
        if not connection.push.writable:
            self._large_frames.cancel((connection, index))
            self._stall(connection, index, work.now_ms)
            return 1
        step = self.steps.step(connection.state, index)
        len_bytes = len(step.data)
        cost = 1 + PAGE_COST + len_bytes // COST_BYTES
        if not self._large_frames.admit((connection, index), len_bytes):
            connection.behind[index] = False
            return cost
        del connection.behind[index]
        if not work.send(connection, step):
            self._stalled.add(connection, work.now_ms)
        self._place(connection, index, step)
        return cost

    def _place(self, connection: StreamConnection, index: int, step: StreamStep) -> None:
        """Move a topic of a connection to its place after a step."""
        outcome = step.outcome
        if outcome is StepOutcome.CURRENT or outcome is StepOutcome.WAITING:
            channel = self._channels[connection.state.spec.names[index]]
            if connection.pace_ms and step.data:
                self._loop.call_later(connection.pace_ms / 1000, self.end_pace, connection, index)
                return
            channel.current[connection] = index
            if outcome is StepOutcome.WAITING:
                self._undurable[channel] = None
        elif outcome is StepOutcome.MORE:
            self._join_backlog(connection, index)
        elif outcome is StepOutcome.ENDED:
            self._leave(connection, index)
        elif step.miss is not None:
            self._cold.wait(step.miss, (connection, index))
        else:
            self._failed[connection, index] = None

    def end_pace(self, connection: StreamConnection, index: int) -> None:
        """Read on after the pause that a stream with a pace makes behind each frame."""
        if not connection.closed:
            self._join_backlog(connection, index)

    def _on_fetched(self, waiter: tuple[StreamConnection, int], failure: str | None) -> None:
        """Read on after a fetch from the cold tier, or tell the client of its failure."""
        connection, index = waiter
        if connection.closed:
            return
        if failure is None:
            self._join_backlog(connection, index)
            return
        step = connection.state.fail(index, "storage_unavailable", failure)
        if step.data and connection.push.writable:
            connection.push.write(step.data)
            connection.state = step.state
        self._failed[connection, index] = None

    def _stall(self, connection: StreamConnection, index: int, now_ms: int) -> None:
        """Stop reading for a client that does not read: `_on_writable` resumes, or `_tick` cuts it."""
        connection.behind[index] = False
        self._stalled.add(connection, now_ms)
