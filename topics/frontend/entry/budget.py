"""Memory budgets of a frontend: the bound, the bytes that count now, and the queue for room.

    try_grow ─▶ True: counted until the reservation is resized or closed
       └─▶ False: no room.    grow ─▶ waits in the queue ─▶ granted

`limits` has a row for each budget.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from topics.core.errors import TopicsError, throttled

RETRY_AFTER_MS: Final = 1000


class AtLimit(Enum):
    """The fate of a request that finds no room. One that waits may exceed an empty budget."""

    WAIT = "waits in line"
    REFUSE = "is refused"
    CUT = "is let in, others are cut"


class Limit(NamedTuple):
    """One bound, a row of the table in docs/operations.md. `name` is the `detail.limit` of a refusal. 0 means no bound
    of this kind. `wait_s` is the longest wait; None waits as long as the request may take.
    """

    name: str
    at_limit: AtLimit
    what: str
    most_bytes: int = 0
    most_count: int = 0
    per: str = "frontend"
    wait_s: float | None = None

    def refused(self, message: str, most: int, retry_after_ms: int | None = RETRY_AFTER_MS) -> TopicsError:
        """Return the `429` for a request that finds no room."""
        detail: dict[str, object] = {"limit": self.name, "max": most}
        if retry_after_ms is not None:
            detail["retry_after_ms"] = retry_after_ms
        return throttled(message, **detail)


class Budget:
    """Counts bytes in memory under one limit, and owns the queue for room, in which nobody overtakes. A caller that has
    the bytes already adds them to `held_bytes`, beyond the limit if need be.
    """

    __slots__ = ("_empty_admits_any", "held_bytes", "limit", "most_bytes", "waiting")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.most_bytes = limit.most_bytes
        self.held_bytes = 0
        self.waiting: OrderedDict[Reservation, int] = OrderedDict()  # the queue: how many bytes each waits for
        self._empty_admits_any = limit.at_limit is AtLimit.WAIT

    def fits(self, size_bytes: int) -> bool:
        """Return True if there is room, whether or not others wait for it."""
        held_bytes = self.held_bytes
        return held_bytes + size_bytes <= self.most_bytes or (self._empty_admits_any and not held_bytes)

    def try_reserve(self, size_bytes: int) -> bool:
        """Count `size_bytes` until `release`; False if there is no room or others wait for it."""
        if self.waiting or not self.fits(size_bytes):
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Count `size_bytes` less, and admit from the queue."""
        self.held_bytes -= size_bytes
        if self.waiting:
            self.admit_waiting()

    def admit_waiting(self) -> None:
        """Grant what the first in the queue wait for, as far as there is room."""
        while self.waiting:
            reservation, size_bytes = next(iter(self.waiting.items()))
            if not self.fits(size_bytes):
                return
            del self.waiting[reservation]
            self.held_bytes += size_bytes
            reservation.granted(size_bytes)

    def close_waiting(self) -> None:
        """Close every reservation in the queue: the client is gone."""
        while self.waiting:
            next(reversed(self.waiting)).close()

    def refused(self, message: str) -> TopicsError:
        return self.limit.refused(message, self.most_bytes)


@dataclass(eq=False, slots=True)
class Reservation:
    """One holder's part of a budget, until it is closed. It can wait in the queue for one increase at a time."""

    _budget: Budget
    _tell: Callable[[bool], None] | None = None
    held_bytes: int = 0
    closed: bool = False

    def try_grow(self, size_bytes: int) -> bool:
        """Take `size_bytes` more; False if there is no room now."""
        if self.closed or not self._budget.try_reserve(size_bytes):
            return False
        self.held_bytes += size_bytes
        return True

    def enqueue(self, size_bytes: int, tell: Callable[[bool], None], first: bool = False) -> None:
        """Wait for `size_bytes` more. Calls `tell(True)` once they are granted, `tell(False)` if closed before."""
        self._tell = tell
        self._budget.waiting[self] = size_bytes
        if first:
            self._budget.waiting.move_to_end(self, last=False)

    async def grow(self, size_bytes: int, wait_s: float | None = None) -> None:
        """Take `size_bytes` more, waiting if need be. Raise TimeoutError; ConnectionResetError if it is closed."""
        if self.try_grow(size_bytes):
            return
        granted = False
        if not self.closed:
            room: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self.enqueue(size_bytes, lambda granted: None if room.done() else room.set_result(granted))
            try:
                async with asyncio.timeout(wait_s):
                    granted = await room
            except BaseException:
                if not self._leave_queue():  # it was granted and cancelled in the same turn of the loop
                    self.resize(self.held_bytes - size_bytes)
                raise
        if not granted:
            raise ConnectionResetError("the client is gone")

    async def replace(self, size_bytes: int) -> None:
        """Give back what it holds, then take `size_bytes` as `grow` does."""
        self.resize(0)
        await self.grow(size_bytes)

    def granted(self, size_bytes: int) -> None:
        """Hold `size_bytes` more, which the budget has counted."""
        self.held_bytes += size_bytes
        if self._tell is not None:
            self._tell(True)

    def resize(self, size_bytes: int) -> None:
        """Hold `size_bytes` instead. A reservation that holds nothing stays empty."""
        if self.held_bytes:
            less_bytes, self.held_bytes = self.held_bytes - size_bytes, size_bytes
            self._budget.release(less_bytes)

    def close(self) -> None:
        """Give back everything, leave the queue, and take nothing any more."""
        self.closed = True
        if self._leave_queue() and self._tell is not None:
            self._tell(False)
        self.resize(0)

    def _leave_queue(self) -> bool:
        """Leave the queue and admit those behind; False if it was not in the queue."""
        if self._budget.waiting.pop(self, None) is None:
            return False
        self._budget.admit_waiting()
        return True
