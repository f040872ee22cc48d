"""Bounds of what a frontend holds: how much there may be, how much there is, and who waits for room.

    take ─▶ True: counted until `release`
      └─▶ False: there is no room. A Hold may wait in line ─▶ let_in ─▶ it holds what it asked for

The rows that budgets are made from stand in `limits`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from topics.core.errors import TopicsError

RETRY_AFTER_MS: Final = 1000


class AtLimit(Enum):
    """The fate of one that finds no room. One that waits and is larger than the budget enters when nothing is held."""

    WAIT = "waits in line"
    REFUSE = "is refused"
    CUT = "is let in, others are cut"


class Limit(NamedTuple):
    """One bound, a row of the table in docs/operations.md. `name` stands in `detail.limit` of who is refused, 0 is no
    bound of this kind, and `wait_s` is how long one stands in line; None: as long as its request may take.
    """

    name: str
    at_limit: AtLimit
    what: str
    most_bytes: int = 0
    most_count: int = 0
    per: str = "frontend"
    wait_s: float | None = None

    def refused(self, message: str, most: int, retry_after_ms: int | None = RETRY_AFTER_MS) -> TopicsError:
        """The `429` for one that finds no room."""
        detail: dict[str, object] = {"limit": self.name, "max": most}
        if retry_after_ms is not None:
            detail["retry_after_ms"] = retry_after_ms
        return TopicsError("throttled", message, detail)


class Budget:
    """Counts the bytes that are held under one limit, and owns the line of those who wait: nobody overtakes them.

    Who holds what is there in any case adds it to `held_bytes`, beyond the limit if need be. All calls are on one loop.
    """

    __slots__ = ("_alone", "held_bytes", "limit", "most_bytes", "waiting")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.most_bytes = limit.most_bytes
        self.held_bytes = 0
        self.waiting: OrderedDict[Hold, int] = OrderedDict()
        """How much each waits for, first come, first served."""
        self._alone = limit.at_limit is AtLimit.WAIT

    def fits(self, size_bytes: int) -> bool:
        """Tell whether there is room, whoever waits for it."""
        held_bytes = self.held_bytes
        return held_bytes + size_bytes <= self.most_bytes or (self._alone and not held_bytes)

    def take(self, size_bytes: int) -> bool:
        """Count so much more until it is released; False: there is no room, or others wait for it."""
        if self.waiting or not self.fits(size_bytes):
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Count so much less, and let in who has room now."""
        self.held_bytes -= size_bytes
        if self.waiting:
            self.let_in()

    def let_in(self) -> None:
        """Give those in line what they wait for, as far as there is room."""
        while self.waiting:
            hold, size_bytes = next(iter(self.waiting.items()))
            if not self.fits(size_bytes):
                return
            del self.waiting[hold]
            self.held_bytes += size_bytes
            hold.enter(size_bytes)

    def close(self) -> None:
        """Close all that wait: nobody will take what they would make."""
        while self.waiting:
            next(reversed(self.waiting)).close()

    def refused(self, message: str) -> TopicsError:
        """The `429` for one that finds no room."""
        return self.limit.refused(message, self.most_bytes)


class Hold:
    """The part of a budget that one holder has, until it is closed. It may stand in line for one more part of it."""

    __slots__ = ("_budget", "_tell", "closed", "held_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._tell: Callable[[bool], None] | None = None
        self.held_bytes = 0
        self.closed = False

    def grow(self, size_bytes: int) -> bool:
        """Take so much more; False: there is no room now."""
        if self.closed or not self._budget.take(size_bytes):
            return False
        self.held_bytes += size_bytes
        return True

    def line_up(self, size_bytes: int, tell: Callable[[bool], None], first: bool = False) -> None:
        """Wait for so much more, last or `first` in line. `tell(True)`: it holds it; `tell(False)`: it was closed."""
        self._tell = tell
        self._budget.waiting[self] = size_bytes
        if first:
            self._budget.waiting.move_to_end(self, last=False)

    async def wait_for(self, size_bytes: int, wait_s: float | None = None) -> None:
        """Take so much more when it is its turn and there is room. Raises TimeoutError after `wait_s`, and
        ConnectionResetError once it is closed: nobody needs the room.
        """
        if self.grow(size_bytes):
            return
        entered = False
        if not self.closed:
            room: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self.line_up(size_bytes, lambda entered: None if room.done() else room.set_result(entered))
            try:
                async with asyncio.timeout(wait_s):
                    entered = await room
            except BaseException:
                if not self._leave():  # it was let in, and ended in the same moment
                    self.keep(self.held_bytes - size_bytes)
                raise
        if not entered:
            raise ConnectionResetError("the client is gone")

    async def take(self, size_bytes: int) -> None:
        """Wait for so much instead of what it holds, which it gives back first."""
        self.keep(0)
        await self.wait_for(size_bytes)

    def enter(self, size_bytes: int) -> None:
        """The budget has counted what it waits for."""
        self.held_bytes += size_bytes
        if self._tell is not None:
            self._tell(True)

    def keep(self, size_bytes: int) -> None:
        """Hold so much instead; one that holds nothing goes on holding nothing."""
        if self.held_bytes:
            less_bytes, self.held_bytes = self.held_bytes - size_bytes, size_bytes
            self._budget.release(less_bytes)

    def close(self) -> None:
        """Give back all, leave the line, and take nothing any more."""
        self.closed = True
        if self._leave() and self._tell is not None:
            self._tell(False)
        self.keep(0)

    def _leave(self) -> bool:
        """Leave the line, where it may have been in the way of others; False: it did not stand there."""
        if self._budget.waiting.pop(self, None) is None:
            return False
        self._budget.let_in()
        return True
