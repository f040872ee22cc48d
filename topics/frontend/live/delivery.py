"""Delivery: what is new in a topic goes to every event stream that follows it, read once and put into words once.

A connection is, for each of its topics, in one of two places. *Current*: it stands at the head and waits in the
topic's channel; when the shard says that the topic changed, one pass over the channel writes to all of them. *Behind*:
it stands in the channel's backlog and reads on, a page at a time and in turn with the others there, until it is
current. A connection that does not take what it was sent is behind and is not read for: the log is its queue (api §7).

Which channel is next says the scheduler (`core/scheduler.py`), by the priority of its topic. Work is done in slices of
SLICE_S between which the event loop does everything else; within one slice a topic is looked at once (`Snapshot`). What
changes meanwhile is announced afterwards, so nothing is missed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from operator import attrgetter
from typing import Final

from topics.core.clock import Clock
from topics.core.names import owner_shard
from topics.core.scheduler import TICK_MS, Scheduler
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.live.channels import COST_BYTES, Beats, Channel, Slice, StreamConnection
from topics.frontend.live.pulse import STALL_MAX_MS, DueItems, Room, Stalls
from topics.frontend.live.push import Push
from topics.frontend.live.stream import RETRY_AFTER_MS, StepOutcome, Stream, StreamPhase, StreamPlans, StreamStep
from topics.frontend.live.topic_views import TopicSight, TopicViews
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.reads.cold import ColdWaits
from topics.frontend.shards.gateway import Gateway
from topics.shm.control import ProcessCell

SLICE_S: Final = 0.0005
FAN_OUT_STEP: Final = 64
"""What a pass over one channel may cost before its backlog has its turn, and the clock is looked at."""
PAGE_COST: Final = 16
"""What a page costs that is read and put into words, in writes of a small frame."""


class Hub:
    """All event streams of this frontend. Everything is called on the event loop it was made on."""

    def __init__(self, gateway: Gateway, topics: TopicSight, cell: ProcessCell, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._gateway = gateway
        self._topics = topics
        self._cell = cell
        self._clock = clock
        self._connections: dict[StreamConnection, None] = {}
        self._channels: dict[str, Channel] = {}
        self._ready: Scheduler[Channel] = Scheduler(lambda channel: topics.base_priority(channel.name))
        """Channels that have work."""
        self.snapshot = TopicViews(topics)
        self._failed: dict[tuple[StreamConnection, int], None] = {}
        self._kept = Budget(limits.KEPT_FRAMES)
        self._room: Room[tuple[StreamConnection, int]] = Room(self._kept, lambda waiter: self._line_up(*waiter))
        self._cold: ColdWaits[tuple[StreamConnection, int]] = ColdWaits(topics.reader.fetch, self._on_fetched)
        self._undurable: dict[Channel, None] = {}
        self._stalls = Stalls[StreamConnection](
            self._kept, attrgetter("push.buffered_bytes"), attrgetter("push.taken_bytes")
        )
        self._beats = Beats(clock, self._stalls.note)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._held: DueItems[Channel] = DueItems()
        self._held_timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self.plans = StreamPlans()
        self.coalesce_ms = 0.0
        """Passes over one topic are at least so far apart, so that what it says meanwhile goes out together."""
        self.draining = False

    def open(self, push: Push, stream: Stream, heartbeat_ms: int) -> StreamConnection:
        """A stream begins, with its backlog. It ends with `close`, or when the client goes away; then
        `connection.closed` is true and `connection.stream` is how far it came. `heartbeat_ms` 0: it needs none.
        """
        connection = StreamConnection(push, stream, heartbeat_ms, self._clock.monotonic_ms())
        push.on_writable = lambda: self._on_writable(connection)
        push.on_close = lambda: self._forget(connection)
        self._connections[connection] = None
        if stream.plan.wording is EVENT_STREAM:
            self._cell.add("sse_connections", 1)
            push.write(EVENT_STREAM.opening)
        try:
            for index, name in enumerate(stream.plan.names):
                if stream.phases[index] != StreamPhase.ENDED:
                    self._join(name).members[connection] = index
                    self._line_up(connection, index)
        except BaseException:
            self._forget(connection)
            raise
        if heartbeat_ms:
            self._beats.add(connection)
        if self._tick_timer is None:
            self._tick_timer = self._loop.call_later(RETRY_AFTER_MS / 1000, self._tick)
        return connection

    def close(self, connection: StreamConnection) -> None:
        """Ends the stream in order. Does nothing when it has ended."""
        if not connection.closed:
            self._forget(connection)
            connection.push.close()

    def drain(self) -> None:
        """Ends all streams, and whoever opens one asks `draining` first. Clients come back elsewhere, or later."""
        self.draining = True
        for connection in list(self._connections):
            self.close(connection)

    @property
    def ready(self) -> Scheduler[Channel]:
        """Topics that wait to be delivered, to be looked at."""
        return self._ready

    def waiting_ms(self, name: str) -> int:
        """How long what is new in a topic has been waiting to be delivered here."""
        channel = self._channels.get(name)
        return 0 if channel is None else self._ready.waiting_ms(channel, self._clock.monotonic_ms())

    def pause(self, paused: bool) -> None:
        """Topics of negative priority are not delivered, but for those that have waited long enough to be above zero;
        or are again.
        """
        if self._ready.paused != paused:
            self._ready.paused = paused
            self._go_on()

    # -- who follows what

    def _join(self, name: str) -> Channel:
        channel, seen = self._channels.get(name), self._topics.see(name)
        view = None if seen is None else seen.view
        if channel is None:
            made, shard = Channel(name), owner_shard(name, self._gateway.shards)
            made.watch = self._gateway.watch(shard, name, view, partial(self._on_change, made))
            channel = self._channels[name] = made  # last: whoever follows it later joins it for the watch
        elif view is not None and channel.watch is not None:
            # Another topic, it may be, than the members' own, who have yet to be served the end of the former one.
            channel.watch.found(view)
        return channel

    def _leave(self, connection: StreamConnection, index: int) -> None:
        name = connection.stream.plan.names[index]
        channel = self._channels.get(name)
        if channel is None or channel.members.pop(connection, None) is None:
            return
        channel.current.pop(connection, None)
        self._failed.pop((connection, index), None)
        self._room.end((connection, index))
        if not channel.members:
            assert channel.watch is not None
            channel.watch.cancel()
            self._undurable.pop(channel, None)
            self._ready.discard(channel)
            self._topics.forget(name)
            del self._channels[name]

    def _forget(self, connection: StreamConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        connection.push.on_writable = connection.push.on_close = None
        connection.behind.clear()
        for index in range(len(connection.stream.plan.names)):
            self._leave(connection, index)
        self._stalls.end(connection)
        self._kept.let_in()
        self._beats.end(connection)
        del self._connections[connection]
        if connection.stream.plan.wording is EVENT_STREAM:
            self._cell.add("sse_connections", -1)

    # -- when there is something to do

    def _on_change(self, channel: Channel) -> None:
        if not channel.changed:
            channel.changed = True
            if not channel.todo:
                now_ms = self._clock.monotonic_ms()
                if not self._hold(channel, now_ms):
                    self._mark(channel, now_ms)

    def _hold(self, channel: Channel, now_ms: int) -> bool:
        """Whether what changed is to wait because the topic was served only just now."""
        due_ms = channel.served_ms + self.coalesce_ms
        if now_ms >= due_ms:
            return False
        channel.held = True
        self._held.add(channel, due_ms)
        if self._held_timer is None:
            self._held_timer = self._loop.call_later((due_ms - now_ms) / 1000, self._release)
        return True

    def _release(self) -> None:
        self._held_timer = None
        now_ms = self._clock.monotonic_ms()
        for channel in self._held.take_due(now_ms):
            channel.held = False
            if channel.has_work and channel.members:
                self._mark(channel, now_ms)
        if self._held.next_ms is not None:
            delay_ms = max(1.0, self._held.next_ms - now_ms)
            self._held_timer = self._loop.call_later(delay_ms / 1000, self._release)

    def _on_writable(self, connection: StreamConnection) -> None:
        self._stalls.end(connection)
        for index, in_line in connection.behind.items():
            if not in_line and (connection, index) not in self._room:
                self._line_up(connection, index)
        self._kept.let_in()

    def _line_up(self, connection: StreamConnection, index: int) -> None:
        connection.behind[index] = True
        channel = self._channels[connection.stream.plan.names[index]]
        channel.backlog.append(connection)
        self._mark(channel, self._clock.monotonic_ms())

    def _mark(self, channel: Channel, now_ms: int) -> None:
        self._ready.mark(channel, now_ms)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _tick(self) -> None:
        """Once in RETRY_AFTER_MS: whoever waits for something that may not be announced."""
        self._tick_timer = None
        now_ms = self._clock.monotonic_ms()
        for connection in self._stalls.over(now_ms):
            message = f"the client has read nothing for {STALL_MAX_MS // 1000} s; resume from the last id"
            connection.push.write(connection.stream.plan.wording.final("throttled", message))
            self.close(connection)
        for connection in self._stalls.holding(self._room.first_missing(), now_ms):
            # Not told: what is kept for it goes only if nobody waits for it to be taken.
            self._forget(connection)
            connection.push.abort()
        self._kept.let_in()
        failed, self._failed = self._failed, {}
        for connection, index in failed:
            self._line_up(connection, index)
        # A sync that ended while the shard learned of the watch is not announced.
        undurable, self._undurable = self._undurable, {}
        for channel in undurable:
            self._on_change(channel)
        self.snapshot.clear()
        if self._connections:
            self._tick_timer = self._loop.call_later(RETRY_AFTER_MS / 1000, self._tick)

    # -- doing it

    def _work(self) -> None:
        """One slice: channel after channel, as the scheduler says."""
        self._scheduled = False
        now_ms = self._clock.monotonic_ms()
        work = Slice(now_ms)
        self.snapshot.begin()
        until_s = self._loop.time() + SLICE_S
        try:
            while (channel := self._ready.take(now_ms)) is not None:
                self._serve(channel, work)
                if self._loop.time() >= until_s:
                    break
            self._kept.let_in()
        finally:
            if work.frames:
                self._cell.add("sse_frames", work.frames)
                self._cell.add("records_out", work.records)
            self._go_on()

    def _serve(self, channel: Channel, work: Slice) -> None:
        """What one channel gets at a time."""
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
            self._ready.served(cost, work.now_ms, more=channel.has_work, fresh=fresh)

    def _go_on(self) -> None:
        if self._ready.eligible:
            self._schedule()
        elif len(self._ready) and self._age_timer is None:
            self._age_timer = self._loop.call_later(TICK_MS / 1000, self._age)

    def _age(self) -> None:
        """Nothing is to be served but what has to become more urgent first."""
        self._age_timer = None
        self._ready.age(self._clock.monotonic_ms())
        self._go_on()

    def _fan_out(self, channel: Channel, work: Slice) -> int:
        """Some of those who are current; what it cost."""
        current = channel.current
        if not channel.todo:
            channel.changed = False
            channel.todo = list(current)
        todo = channel.todo
        snapshot = self.snapshot
        stream: Stream | None = None
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
            if connection.stream is not stream:
                # Those who stand at one place mostly come one after the other.
                stream, made = connection.stream, snapshot.made
                step = snapshot.step(stream, index)
                cost += PAGE_COST * (snapshot.made - made)
                len_bytes = len(step.data)
                stays = step.outcome is StepOutcome.CURRENT
            if len_bytes >= COST_BYTES:
                cost += len_bytes // COST_BYTES
                if not self._room.enter((connection, index), len_bytes):
                    del current[connection]
                    connection.behind[index] = False  # until it is admitted
                    continue
            if not work.send(connection, step):
                self._stalls.note(connection, work.now_ms)
            if not stays:
                del current[connection]
                self._settle(connection, index, step)
        if not todo:
            channel.served_ms = work.now_ms
            if channel.changed:
                self._hold(channel, work.now_ms)
        return cost

    def _read_on(self, channel: Channel, work: Slice) -> int:
        """One page for the one of the backlog that has waited longest; what it cost."""
        connection = channel.backlog.popleft()
        channel.backlog_due = max(0, channel.backlog_due - 1)
        index = channel.members.get(connection)
        if index is None:  # it has left meanwhile
            return 1
        if not connection.push.writable:
            self._room.end((connection, index))
            self._stall(connection, index, work.now_ms)
            return 1
        step = self.snapshot.step(connection.stream, index)
        len_bytes = len(step.data)
        cost = 1 + PAGE_COST + len_bytes // COST_BYTES
        if not self._room.enter((connection, index), len_bytes):
            connection.behind[index] = False  # until it is admitted
            return cost
        del connection.behind[index]
        if not work.send(connection, step):
            self._stalls.note(connection, work.now_ms)
        self._settle(connection, index, step)
        return cost

    def _settle(self, connection: StreamConnection, index: int, step: StreamStep) -> None:
        """Where a topic of a connection goes after a step."""
        outcome = step.outcome
        if outcome is StepOutcome.CURRENT or outcome is StepOutcome.WAITING:
            channel = self._channels[connection.stream.plan.names[index]]
            channel.current[connection] = index
            if outcome is StepOutcome.WAITING:
                self._undurable[channel] = None
        elif outcome is StepOutcome.MORE:
            self._line_up(connection, index)
        elif outcome is StepOutcome.ENDED:
            self._leave(connection, index)
        elif step.miss is not None:
            self._cold.wait(step.miss, (connection, index))
        else:
            self._failed[connection, index] = None

    def _on_fetched(self, waiter: tuple[StreamConnection, int], failure: str | None) -> None:
        """What a connection lacked is there; or is not, for this reason."""
        connection, index = waiter
        if connection.closed:
            return
        if failure is None:
            self._line_up(connection, index)
            return
        step = connection.stream.fail(index, "storage_unavailable", failure)
        if step.data and connection.push.writable:
            connection.push.write(step.data)
            connection.stream = step.stream
        self._failed[connection, index] = None

    def _stall(self, connection: StreamConnection, index: int, now_ms: int) -> None:
        """It has not taken what it was sent: `on_writable` will say when to go on there, or `_tick` that it is over."""
        connection.behind[index] = False
        self._stalls.note(connection, now_ms)
