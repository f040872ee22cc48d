"""What the passing of time means to a connection: a heartbeat when it is idle, the end when its client stands still.

Pure: the monotonic clock is passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final, Generic, Protocol, TypeVar

STALL_MAX_MS: Final = 30_000
"""A client that takes nothing for so long is given up (api §7)."""


class Beating(Protocol):
    """Something that wants a heartbeat `heartbeat_ms` after `idle_since_ms`, until it is closed."""

    heartbeat_ms: int
    idle_since_ms: int
    closed: bool


BeatingT = TypeVar("BeatingT", bound=Beating)


class Heartbeats(Generic[BeatingT]):
    """Who is due when. A write costs nothing here: a connection is looked at when it would be due, and filed anew."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, BeatingT]] = []
        self._serials = count()

    def add(self, connection: BeatingT) -> None:
        due_ms = connection.idle_since_ms + connection.heartbeat_ms
        heapq.heappush(self._heap, (due_ms, next(self._serials), connection))

    @property
    def next_ms(self) -> int | None:
        """When `take_due` is worth the next call; None when there is nobody."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int) -> list[BeatingT]:
        """Those that are idle for `heartbeat_ms`; each counts as written to now."""
        due = []
        while self._heap and self._heap[0][0] <= now_ms:
            connection = heapq.heappop(self._heap)[2]
            if connection.closed:
                continue
            if connection.idle_since_ms + connection.heartbeat_ms <= now_ms:
                connection.idle_since_ms = now_ms
                due.append(connection)
            self.add(connection)
        return due


class Stall:
    """A client that has more waiting for it than the connection may buffer. Any byte it takes is progress."""

    __slots__ = ("_since_ms", "buffered_bytes")

    def __init__(self, buffered_bytes: int, now_ms: int) -> None:
        self.buffered_bytes = buffered_bytes
        self._since_ms = now_ms

    def over(self, buffered_bytes: int, now_ms: int) -> bool:
        """True when it has taken nothing for STALL_MAX_MS; `buffered_bytes` is what waits for it now."""
        if buffered_bytes < self.buffered_bytes:
            self._since_ms = now_ms
        self.buffered_bytes = buffered_bytes
        return now_ms - self._since_ms >= STALL_MAX_MS


StallingT = TypeVar("StallingT")


class Stalls(Generic[StallingT]):
    """All that stand still, longest first, and what is kept for them; `buffered_bytes(one)` is that of one (negative:
    what it counts from has no beginning, and its memory is bounded elsewhere).
    """

    def __init__(self, buffered_bytes: Callable[[StallingT], int]) -> None:
        self._buffered_bytes = buffered_bytes
        self._stalls: dict[StallingT, Stall] = {}
        self.held_bytes = 0

    def note(self, one: StallingT, now_ms: int) -> None:
        """It has not taken what it was sent; does nothing when that is known."""
        if one not in self._stalls:
            buffered_bytes = self._buffered_bytes(one)
            self._stalls[one] = Stall(buffered_bytes, now_ms)
            self.held_bytes += max(0, buffered_bytes)

    def end(self, one: StallingT) -> None:
        """There is room again, or it is gone."""
        stall = self._stalls.pop(one, None)
        if stall is not None:
            self.held_bytes -= max(0, stall.buffered_bytes)

    def over(self, now_ms: int) -> list[StallingT]:
        """Those who have taken nothing for STALL_MAX_MS."""
        over = []
        for one, stall in self._stalls.items():
            self.held_bytes -= max(0, stall.buffered_bytes)
            if stall.over(self._buffered_bytes(one), now_ms):
                over.append(one)
            self.held_bytes += max(0, stall.buffered_bytes)
        return over

    def take_longest(self) -> StallingT:
        """The one that has stood still longest; it counts no more."""
        one = next(iter(self._stalls))
        self.end(one)
        return one
