"""What the passing of time means to a connection: a heartbeat when it is idle, the end when its client stands still.

Pure: the monotonic clock is passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeVar

from topics.frontend.budget import Budget

STALL_MAX_MS: Final = 30_000
"""A client that takes nothing for so long is given up (api §7)."""
STALL_CUT_MS: Final = 2_000
"""For so long at least, when what is kept for it is wanted for others."""


class Beating(Protocol):
    """Something that wants a heartbeat `heartbeat_ms` after `idle_since_ms`."""

    heartbeat_ms: int
    idle_since_ms: int


BeatingT = TypeVar("BeatingT", bound=Beating)


class Heartbeats(Generic[BeatingT]):
    """Who is due when. A write costs nothing here: a connection is looked at when it would be due, and filed anew."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        """[due_ms, serial, connection, None when it is closed]"""
        self._filed: dict[BeatingT, list[Any]] = {}
        self._serials = count()

    def add(self, connection: BeatingT) -> None:
        due_ms = connection.idle_since_ms + connection.heartbeat_ms
        entry = self._filed[connection] = [due_ms, next(self._serials), connection]
        heapq.heappush(self._heap, entry)

    def end(self, connection: BeatingT) -> None:
        """It is closed, nothing is kept of it; does nothing when it was not added."""
        entry = self._filed.pop(connection, None)
        if entry is not None:
            entry[2] = None  # its place in the heap goes when it would have been due

    @property
    def next_ms(self) -> int | None:
        """When `take_due` is worth the next call; None when there is nobody."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int, most: int) -> list[BeatingT]:
        """Those that are idle for `heartbeat_ms`; each counts as written to now. Looks at `most` and leaves the rest
        due: streams that follow one topic were all written to in the same moment.
        """
        due = []
        while most and self._heap and self._heap[0][0] <= now_ms:
            most -= 1
            connection = heapq.heappop(self._heap)[2]
            if connection is None:
                continue
            if connection.idle_since_ms + connection.heartbeat_ms <= now_ms:
                connection.idle_since_ms = now_ms
                due.append(connection)
            self.add(connection)
        return due


class Stall:
    """A client that has more waiting for it than the connection may buffer. Any byte it takes is progress;
    `since_ms` is when it was seen to take the last one, `held_bytes` what was then kept for it.
    """

    __slots__ = ("held_bytes", "since_ms", "taken_bytes")

    def __init__(self, taken_bytes: int, now_ms: int, held_bytes: int = 0) -> None:
        self.taken_bytes = taken_bytes
        self.since_ms = now_ms
        self.held_bytes = held_bytes

    def over(self, taken_bytes: int, now_ms: int) -> bool:
        """True when it has taken nothing for STALL_MAX_MS; `taken_bytes` counts from anywhere."""
        if taken_bytes > self.taken_bytes:
            self.since_ms = now_ms
        self.taken_bytes = taken_bytes
        return now_ms - self.since_ms >= STALL_MAX_MS


StallingT = TypeVar("StallingT")


class Stalls(Generic[StallingT]):
    """All that stand still; what is kept for them counts in `budget`. `buffered_bytes(one)` is that of one, and
    `taken_bytes(one)` what its client has taken. Without the latter it has taken what is no longer kept: nothing is
    added meanwhile.
    """

    def __init__(
        self,
        budget: Budget,
        buffered_bytes: Callable[[StallingT], int],
        taken_bytes: Callable[[StallingT], int] | None = None,
    ) -> None:
        self._budget = budget
        self._buffered_bytes = buffered_bytes
        self._taken_bytes = taken_bytes or (lambda one: -buffered_bytes(one))
        self._stalls: dict[StallingT, Stall] = {}

    def note(self, one: StallingT, now_ms: int) -> None:
        """It has not taken what it was sent; does nothing when that is known."""
        if one not in self._stalls:
            held_bytes = self._buffered_bytes(one)
            self._stalls[one] = Stall(self._taken_bytes(one), now_ms, held_bytes)
            self._budget.held_bytes += held_bytes

    def end(self, one: StallingT) -> None:
        """There is room again, or it is gone; the owner of the budget lets others in."""
        stall = self._stalls.pop(one, None)
        if stall is not None:
            self._budget.held_bytes -= stall.held_bytes

    def over(self, now_ms: int) -> list[StallingT]:
        """Those who have taken nothing for STALL_MAX_MS. To be asked now and then: this is where progress is seen."""
        over = []
        for one, stall in self._stalls.items():
            held_bytes = self._buffered_bytes(one)
            self._budget.held_bytes += held_bytes - stall.held_bytes
            stall.held_bytes = held_bytes
            if stall.over(self._taken_bytes(one), now_ms):
                over.append(one)
        return over

    def holding(self, bytes_too_many: int, now_ms: int, still_ms: int | None = None) -> list[StallingT]:
        """Those whose end would free so much, longest without progress first; nobody who has made some within
        `still_ms` (STALL_CUT_MS), so it may be less.
        """
        last_ms = now_ms - (STALL_CUT_MS if still_ms is None else still_ms)
        still = [(stall.since_ms, one) for one, stall in self._stalls.items() if stall.held_bytes]
        holding = []
        for since_ms, one in sorted(still, key=itemgetter(0)):
            if bytes_too_many <= 0 or since_ms > last_ms:
                break
            holding.append(one)
            bytes_too_many -= self._stalls[one].held_bytes
        return holding
