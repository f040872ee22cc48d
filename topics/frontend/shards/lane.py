"""The way to one shard: its request ring, and in front of it, bounded, those who found the ring full.

offer ──▶ [ hasty   ] ─┐                 ┌─▶ ring ──▶ the shard
      ──▶ [ patient ] ─┼─ oldest first ──┤
      ──▶ [ posts   ] ─┘                 └─▶ given up, its time is over: nothing of it has reached the shard

Three queues, each by age, so that those whose time is over stand in front; each with a bound of its own, so that a
crowd of one kind takes no place of another. They are sent in one order, that of `request_id`: a post never overtakes
the request that it follows, nor the other way round.

A post is never refused, since nobody would know of one that was lost. Its bound is at what leaves posts behind: while
there are as many as may be no request is let in, and a request that was refused leaves none.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

import msgspec

from topics.frontend import limits
from topics.frontend.budget import Budget, Limit
from topics.shm.messages import Part
from topics.shm.ring import Ring

ROOM_WAIT_S: Final = 0.25
"""How long a request waits for room in a full ring before it is told to come back later."""
PRESSED_WAIT_S: Final = 0.05
"""And how long when the service is pressed as hard as can be: early, but not at once. To refuse takes the time of this
process as well, and whoever comes again at once would take all of it, so that less is done than there is room for."""


class Waiter(msgspec.Struct):
    """A message on its way. Without an end (`expires_s` None) it is kept until there is room: nobody awaits it. A
    `patient` one waits for as long under pressure, too.
    """

    parts: list[Part]
    length_bytes: int
    request_id: int
    since_s: float
    expires_s: float | None
    patient: bool = False


class Fate(Enum):
    SENT = 0
    WAITS = 1
    REFUSED = 2


class _Queue:
    """The waiters of one kind, oldest first, and their budget."""

    __slots__ = ("budget", "waiters")

    def __init__(self, limit: Limit) -> None:
        self.waiters: deque[Waiter] = deque()
        self.budget = Budget(limit)

    def has_room_for(self, size_bytes: int) -> bool:
        return len(self.waiters) < self.budget.limit.most_count and self.budget.fits(size_bytes)

    def add(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        self.budget.held_bytes += waiter.length_bytes

    def pop(self) -> Waiter:
        waiter = self.waiters.popleft()
        self.budget.release(waiter.length_bytes)
        return waiter


class Lane:
    """One per shard. `request_id` grows with every message: it is the order among those who wait."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._hasty = _Queue(limits.RING_WAITERS)
        self._patient = _Queue(limits.RING_WAITERS)
        self._posts = _Queue(limits.RING_POSTS)
        self._queues = (self._hasty, self._patient, self._posts)

    @property
    def message_max_bytes(self) -> int:
        return self._ring.message_max_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._hasty.waiters) + len(self._patient.waiters) + len(self._posts.waiters)

    @property
    def crowded(self) -> bool:
        """As many posts wait as may: whatever can do without another one should."""
        return not self._posts.has_room_for(1)

    @property
    def fullness(self) -> float:
        """Of the ring, 0 to 1; 1 as long as somebody waits."""
        return 1.0 if self.waiting else self._ring.pending_bytes / self._ring.capacity_bytes

    def offer(self, waiter: Waiter) -> Fate:
        """Sends it, or lets it wait if there is room for those who wait."""
        if not self.waiting and self._ring.push(*waiter.parts):
            return Fate.SENT
        if waiter.expires_s is None:
            self._posts.add(waiter)
            return Fate.WAITS
        queue = self._patient if waiter.patient else self._hasty
        if self.crowded or not queue.has_room_for(waiter.length_bytes):
            return Fate.REFUSED
        queue.add(waiter)
        return Fate.WAITS

    def retry(self, now_s: float, pressed: bool) -> tuple[list[Waiter], list[Waiter]]:
        """Room may have come: (those who are sent, those whose time was over)."""
        sent: list[Waiter] = []
        given_up: list[Waiter] = []
        for queue in (self._hasty, self._patient):
            while queue.waiters:
                first = queue.waiters[0]
                expires_s = first.expires_s
                assert expires_s is not None, "who waits without an end is a post"
                if pressed and queue is self._hasty:
                    expires_s = min(expires_s, first.since_s + PRESSED_WAIT_S)
                if expires_s > now_s:
                    break
                given_up.append(queue.pop())
        while busy := [queue for queue in self._queues if queue.waiters]:
            oldest = min(busy, key=lambda queue: queue.waiters[0].request_id)
            if not self._ring.push(*oldest.waiters[0].parts):
                break
            sent.append(oldest.pop())
        return sent, given_up
