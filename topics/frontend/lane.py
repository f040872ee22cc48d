"""The way to one shard: its request ring, and in front of it, bounded, those who found the ring full.

offer ──▶ [ waiting, first come first ] ──▶ ring ──▶ the shard
               │ ROOM_WAIT_S is over, or too many wait, or the service refuses
               └─▶ given up: nothing of it has reached the shard
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

import msgspec

from topics.shm.messages import Part
from topics.shm.ring import Ring

ROOM_WAIT_S: Final = 0.25
"""How long a request waits for room in a full ring before it is told to come back later."""
WAITERS_MAX: Final = 1024
WAITING_BYTES_MAX: Final = 64 * 2**20
"""What all requests that wait for room in one ring may hold in memory."""


class Waiter(msgspec.Struct):
    """A message on its way. Without an end (`expires_s` None) it is kept until there is room: nobody awaits it. A
    `patient` one is not refused for the ring being full, only when too many wait or its time is over.
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


class Lane:
    """One per shard. `request_id` grows with every message: it is the order among those who wait."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        # Apart, so that those whose time is over are in front of their queue.
        self._hasty: deque[Waiter] = deque()
        self._patient: deque[Waiter] = deque()
        self._waiting_bytes = 0

    @property
    def message_max_bytes(self) -> int:
        return self._ring.message_max_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._hasty) + len(self._patient)

    @property
    def fullness(self) -> float:
        """Of the ring, 0 to 1; 1 as long as somebody waits."""
        return 1.0 if self.waiting else self._ring.pending_bytes / self._ring.capacity_bytes

    def offer(self, waiter: Waiter, refusing: bool) -> Fate:
        """Sends it, or lets it wait; when `refusing` who is not patient does not."""
        if not self.waiting and self._ring.push(*waiter.parts):
            return Fate.SENT
        if waiter.expires_s is not None:
            too_many = self.waiting >= WAITERS_MAX or self._waiting_bytes + waiter.length_bytes > WAITING_BYTES_MAX
            if too_many or (refusing and not waiter.patient):
                return Fate.REFUSED
        patient = waiter.patient or waiter.expires_s is None
        (self._patient if patient else self._hasty).append(waiter)
        self._waiting_bytes += waiter.length_bytes
        return Fate.WAITS

    def retry(self, now_s: float) -> tuple[list[Waiter], list[Waiter]]:
        """Room may have come: (those who are sent, those whose time was over)."""
        sent: list[Waiter] = []
        given_up: list[Waiter] = []
        for queue in (self._hasty, self._patient):
            while queue and queue[0].expires_s is not None and queue[0].expires_s <= now_s:
                given_up.append(self._pop(queue))
        while self.waiting:
            queue = self._first()
            if not self._ring.push(*queue[0].parts):
                break
            sent.append(self._pop(queue))
        return sent, given_up

    def _first(self) -> deque[Waiter]:
        if self._hasty and self._patient:
            return min(self._hasty, self._patient, key=lambda queue: queue[0].request_id)
        return self._hasty or self._patient

    def _pop(self, queue: deque[Waiter]) -> Waiter:
        waiter = queue.popleft()
        self._waiting_bytes -= waiter.length_bytes
        return waiter
