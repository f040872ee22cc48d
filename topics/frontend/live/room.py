"""Large frames for clients that have not taken what they were sent: each waits until it fits into the budget (api §7).

What a stream may keep anyhow is small: HIGH_WATER_BYTES, and one frame that is no longer than that. A larger frame is
sent only where there is room for it. Its client is behind meanwhile: the log is its queue. Only those who have large
frames, too, wait for it.

    enter ─▶ sent                    what is sent and not taken is counted by `Stalls`
      └─▶ waiting ─ admit ─▶ admitted ─ enter ─▶ sent

Who is admitted has the room from then on: the frame is made in a later slice, of which there may be many until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from topics.frontend.budget import Budget, Hold
from topics.frontend.live.push import HIGH_WATER_BYTES

WaiterT = TypeVar("WaiterT")


class Room(Generic[WaiterT]):
    """Who waits for how much of `budget`, and who was told by `admit` to come and has not yet."""

    def __init__(self, budget: Budget, admit: Callable[[WaiterT], None]) -> None:
        self._budget = budget
        self._admit = admit
        self._holds: dict[WaiterT, Hold] = {}

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
        hold = self._holds[waiter] = Hold(budget)
        hold.line_up(len_bytes, lambda _: self._admit(waiter), first=admitted_bytes > 0)
        return False

    def end(self, waiter: WaiterT) -> int:
        """It comes, has left, or sends nothing for now; for how much it was admitted. Nobody is let in for that yet."""
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
