"""Time and slow clients, as connections meet them. Pure: the monotonic clock is passed in.

- An idle connection gets a heartbeat (`Heartbeats`), and things wait until they are due (`Held`).
- A client that stands still is cut (`Stalls`).
- A large frame waits until the budget for what clients have not taken has room for it (`Room`, api §7). Small frames
  always go: HIGH_WATER_BYTES, and one frame that is no longer than that. Meanwhile the log is the client's queue.

    enter ─▶ sent                    `Stalls` counts what is sent and not taken
      └─▶ waiting ─ admit ─▶ admitted ─ enter ─▶ sent

An admitted client has its room from then on: its frame is made in a later slice, of which there may be many until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeVar

from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.live.push import HIGH_WATER_BYTES

Item = TypeVar("Item")


class DueItems(Generic[Item]):
    """Items by when they are due; an item may be due more than once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._serials = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: Item, due_ms: float) -> None:
        heapq.heappush(self._heap, (due_ms, next(self._serials), item))

    @property
    def next_ms(self) -> float | None:
        """The time from which `take_due` has something; None when nothing waits."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: float) -> list[Item]:
        """Return the items whose time has come, in that order."""
        due = []
        while self._heap and self._heap[0][0] <= now_ms:
            due.append(heapq.heappop(self._heap)[2])
        return due


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
    """The times at which connections are due.

    A write costs nothing: a connection is looked at when it would be due, and filed anew.
    """

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
        """The time from which `take_due` has something; None when there is nobody."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int, most: int) -> list[BeatingT]:
        """Return those that are idle for `heartbeat_ms`; each counts as written to now. Look at `most` and leave the
        rest due: streams that follow one topic were all written to in the same moment.
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
        """Note one that has not taken what it was sent; nothing happens when that is known."""
        if one not in self._stalls:
            held_bytes = self._buffered_bytes(one)
            self._stalls[one] = Stall(self._taken_bytes(one), now_ms, held_bytes)
            self._budget.held_bytes += held_bytes

    def end(self, one: StallingT) -> None:
        """Forget one that has room again, or is gone; the owner of the budget lets others in."""
        stall = self._stalls.pop(one, None)
        if stall is not None:
            self._budget.held_bytes -= stall.held_bytes

    def over(self, now_ms: int) -> list[StallingT]:
        """Return those who have taken nothing for STALL_MAX_MS. Ask now and then: progress is seen here."""
        over = []
        for one, stall in self._stalls.items():
            held_bytes = self._buffered_bytes(one)
            self._budget.held_bytes += held_bytes - stall.held_bytes
            stall.held_bytes = held_bytes
            if stall.over(self._taken_bytes(one), now_ms):
                over.append(one)
        return over

    def holding(self, bytes_too_many: int, now_ms: int, still_ms: int | None = None) -> list[StallingT]:
        """Return those whose end would free so much, longest without progress first; nobody who has made some within
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


WaiterT = TypeVar("WaiterT")


class Room(Generic[WaiterT]):
    """The line of large frames that wait for `budget`, and those that were admitted and have not come yet."""

    def __init__(self, budget: Budget, admit: Callable[[WaiterT], None]) -> None:
        self._budget = budget
        self._admit = admit
        self._holds: dict[WaiterT, Reservation] = {}

    def __contains__(self, waiter: WaiterT) -> bool:
        """Tell whether it waits: it is to do nothing until it is admitted."""
        hold = self._holds.get(waiter)
        return hold is not None and hold in self._budget.waiting

    def enter(self, waiter: WaiterT, len_bytes: int) -> bool:
        """Tell whether its next frame may be sent now. If not, it waits; in front, if it was admitted for less."""
        admitted_bytes = self.end(waiter)
        if len_bytes <= max(HIGH_WATER_BYTES, admitted_bytes):
            return True
        budget = self._budget
        if (admitted_bytes or not budget.waiting) and budget.fits(len_bytes):
            return True
        hold = self._holds[waiter] = Reservation(budget)
        hold.enqueue(len_bytes, lambda _: self._admit(waiter), first=admitted_bytes > 0)
        return False

    def end(self, waiter: WaiterT) -> int:
        """End the wait of one that comes, has left, or sends nothing for now. Return for how much it was admitted;
        nobody is let in for that yet.
        """
        hold = self._holds.pop(waiter, None)
        if hold is None:
            return 0
        self._budget.waiting.pop(hold, None)
        self._budget.held_bytes -= hold.held_bytes
        return hold.held_bytes

    def first_missing(self) -> int:
        """How much of what is kept has to go before the first of those who wait is admitted; 0 or less: nothing, or
        nobody waits. Those who are admitted do not count: they make room by themselves, or will be what is kept.
        """
        if not self._budget.waiting:
            return 0
        kept_bytes = self._budget.held_bytes - sum(hold.held_bytes for hold in self._holds.values())
        first_bytes = next(iter(self._budget.waiting.values()))
        return min(kept_bytes, kept_bytes + first_bytes - self._budget.most_bytes)
