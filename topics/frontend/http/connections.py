"""The connections of one process: counted, drained at a stop, cut at its end. Also bounds on the bytes they hold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from topics.core.clock import Clock, SystemClock
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.entry.stalled_clients import StalledClients
from topics.frontend.http.vanished import TcpConnection
from topics.shm.quotas import Quota

COUNTED_FROM_BYTES: Final = 128 * 1024
"""Shorter answers are not counted: they are little more than the 64 KiB that may wait for any client."""
CHECK_S: Final = 1.0
GONE_S: Final = 2.0  # the time that an app call has after its client has closed its end of the connection
ENDS_PER_TURN: Final = 32
"""Clients that are gone and are acted on in one turn of the event loop. The end of an event stream is some 100 µs."""


class AnswerHolder(Protocol):
    """A connection, or stream of HTTP/2, that keeps an answer for its client."""

    @property
    def buffered_bytes(self) -> int: ...
    def abort(self) -> None: ...


class KeptAnswers:
    """The answers that the clients of one process have not read to the end. Used on its event loop.

        add ─▶ too many bytes: cut the client that has read nothing for longest ─▶ check again every CHECK_S
          └─▶ remove: it is read, or its client is gone

    An answer counts with its whole length until its last byte is sent: transports and frames refer to the bytes as a
    whole, so all of them stay in memory. These answers exist already, so nobody can be made to wait for room. Handlers
    of long answers on HTTP/2 (`responses.reserve_room`) and event streams wait earlier.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.budget = Budget(limits.KEPT_ANSWERS)
        self.high_bytes = self.budget.most_bytes // 2
        self._len_bytes: dict[AnswerHolder, int] = {}
        self._stalled = StalledClients[AnswerHolder](
            self.budget, self._len_bytes.__getitem__, lambda holder: -holder.buffered_bytes
        )
        self._timer: asyncio.TimerHandle | None = None

    def add(self, holder: AnswerHolder, written_bytes: int = 0) -> None:
        """Count the answer of a client that is behind. `written_bytes` is the length of the last write, partly read."""
        len_bytes = max(holder.buffered_bytes, written_bytes)
        if len_bytes >= COUNTED_FROM_BYTES and holder not in self._len_bytes:
            self._len_bytes[holder] = len_bytes
            self._stalled.add(holder, self._clock.monotonic_ms())
            self._bound()

    def remove(self, holder: AnswerHolder) -> None:
        """Forget an answer (read to its end, or its client is gone). Idempotent."""
        self._stalled.remove(holder)
        self._len_bytes.pop(holder, None)

    def _bound(self) -> None:
        """Above `high_bytes` cut clients that have read nothing for STALL_CUT_MS, above the whole budget others too."""
        budget = self.budget
        most_bytes, high_bytes = budget.most_bytes, self.high_bytes
        # A check looks at all answers, maybe thousands: below the whole budget there is one check in CHECK_S.
        if budget.held_bytes > most_bytes or (budget.held_bytes > high_bytes and self._timer is None):
            now_ms = self._clock.monotonic_ms()
            self._stalled.timed_out(now_ms)  # notices who has made progress
            self._cut(self._stalled.to_cut(budget.held_bytes - high_bytes, now_ms))
            if budget.held_bytes > most_bytes:
                # A little more than needed, so that the next answer does not cause the next check.
                self._cut(self._stalled.to_cut(budget.held_bytes - most_bytes // 16 * 15, now_ms, stalled_ms=0))
        if budget.held_bytes > high_bytes and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer = None
        self._bound()

    def _cut(self, holders: list[AnswerHolder]) -> None:
        for holder in holders:
            self.remove(holder)
            holder.abort()


class UnadmittedInput:
    """Incomplete heads and frames of clients without an admitted request. Beyond a bound the oldest are cut first."""

    def __init__(self) -> None:
        self.budget = Budget(limits.UNADMITTED_INPUT)
        self._held_bytes: dict[asyncio.Transport, int] = {}  # ordered by the time at which they began to hold some

    def resize(self, transport: asyncio.Transport, size_bytes: int) -> None:
        """Count `size_bytes` for this connection from now on. Idempotent."""
        self.budget.held_bytes += size_bytes - self._held_bytes.get(transport, 0)
        if size_bytes:
            self._held_bytes[transport] = size_bytes
        else:
            self._held_bytes.pop(transport, None)
        while self.budget.held_bytes > self.budget.most_bytes:
            oldest = next(iter(self._held_bytes))
            self.budget.held_bytes -= self._held_bytes.pop(oldest)
            oldest.abort()


class OpenConnection(TcpConnection, Protocol):
    """A connection of HTTP/1.1, or a WebSocket that began as one."""

    def drain(self) -> None: ...  # close if idle; else the running request is the last one
    def close_now(self) -> None: ...  # without waiting for the client


class Connections:
    """Every HTTP/1.1 connection of this process, also those that became WebSockets: counted, drained, and waited for.
    For all protocols `places` caps the connections of the service, `kept` bounds unread answers, and `unadmitted`
    bounds input without a known key.
    """

    def __init__(self, places: Quota | None = None, clock: Clock | None = None) -> None:
        self.places = places
        self.draining = False
        self.open: set[OpenConnection] = set()
        self.turned_away = 0
        self.arrived = 0
        """Requests so far, over all protocols. Those of HTTP/1.1 count before the first of a burst begins."""
        self.kept = KeptAnswers(clock or SystemClock())
        self.unadmitted = UnadmittedInput()
        self.tasks: dict[Callable[[], Awaitable[None]], asyncio.Task[None]] = {}
        """App calls of HTTP/1.1, and connections that Hypercorn serves, by what they run."""
        self._loop = asyncio.get_running_loop()
        self._ends: deque[Callable[[], None]] = deque()
        self._ends_in_turn = 0
        self._paused_until_s = 0.0
        self._changed = asyncio.Event()

    def add(self, connection: OpenConnection) -> bool:
        """Count an accepted connection; False if it is one too many, and not counted."""
        if self.places is not None and not self.places.claim():
            return False
        self.open.add(connection)
        return True

    def adopt(self, connection: OpenConnection) -> None:
        """Take a connection that another protocol handed over, and which has its place already."""
        self.open.add(connection)

    def pause_until_s(self, pause_s: float) -> float:
        """Return the loop time until which a connection pauses. The pauses of all connections follow each other."""
        now_s = asyncio.get_running_loop().time()
        if not pause_s:
            return now_s
        self._paused_until_s = max(self._paused_until_s, now_s) + pause_s
        return self._paused_until_s

    def end_in_turn(self, end: Callable[[], None]) -> None:
        """Call `end` at once; or later and in order, if more than ENDS_PER_TURN come in one turn of the event loop."""
        if not self._ends_in_turn:
            self._loop.call_soon(self._begin_turn)
        if self._ends_in_turn < ENDS_PER_TURN:
            self._ends_in_turn += 1
            end()
        else:
            self._ends.append(end)

    def _begin_turn(self) -> None:
        self._ends_in_turn = min(len(self._ends), ENDS_PER_TURN)
        if self._ends_in_turn:
            self._loop.call_soon(self._begin_turn)
        for _ in range(self._ends_in_turn):
            self._ends.popleft()()

    def release_place(self) -> None:
        """Stop counting a closed connection, whichever protocol it spoke."""
        if self.places is not None:
            self.places.release()

    def begin_drain(self) -> None:
        """Close idle connections. Busy ones finish their request with `connection: close`. Idempotent."""
        self.draining = True
        for connection in list(self.open):
            connection.drain()

    async def wait_closed(self) -> None:
        """Wait until no connection and no request is left. Does not begin a drain."""
        while self.open or self.tasks:
            self._changed.clear()
            await self._changed.wait()

    async def abort(self) -> None:
        """Cut what is left. Requests that are not answered yet get `503 shutting_down`."""
        if tasks := list(self.tasks.values()):
            for task in tasks:
                # Cancel after the task's first step: without that step it would neither answer nor leave `tasks`.
                self._loop.call_soon(task.cancel)
            await asyncio.wait(tasks, timeout=1.0)
        for connection in list(self.open):
            connection.close_now()

    def forget(self, connection: OpenConnection, handed_over: bool = False) -> None:
        """Forget a connection that is closed, or `handed_over`: then it keeps its place. Idempotent."""
        if connection in self.open:
            self.open.remove(connection)
            if not handed_over:
                self.release_place()
        self._changed.set()

    def start_task(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run `run()` as one of `tasks`. A drain waits for its end."""
        self.tasks[run] = self._loop.create_task(self._run(run))

    async def _run(self, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        finally:
            del self.tasks[run]
            if self.draining:
                self._changed.set()
