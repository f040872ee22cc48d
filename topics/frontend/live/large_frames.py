"""Large frames wait until the budget for unread frames has room (api §7). Meanwhile the log is the client's queue.

    admit ─▶ sent                    `StalledClients` counts what is sent and not read
      └─▶ waiting ─ granted ─▶ admit ─▶ sent

Small frames, of up to HIGH_WATER_BYTES, never wait. A granted client keeps its room until its frame is made, which is
in a later slice of work; there may be many before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.live.event_streams import HIGH_WATER_BYTES

WaiterT = TypeVar("WaiterT")


class LargeFrames(Generic[WaiterT]):
    """The large frames that wait for `budget`, and the grants that are not used yet. `on_granted(waiter)` is told."""

    def __init__(self, budget: Budget, on_granted: Callable[[WaiterT], None]) -> None:
        self._budget = budget
        self._on_granted = on_granted
        self._reservations: dict[WaiterT, Reservation] = {}

    def __contains__(self, waiter: WaiterT) -> bool:
        """Return True if `waiter` waits for a grant, before which it must not send."""
        reservation = self._reservations.get(waiter)
        return reservation is not None and reservation in self._budget.waiting

    def admit(self, waiter: WaiterT, len_bytes: int) -> bool:
        """Return True if the waiter's next frame may be sent now. Else it waits, in front if its grant was too small.

        Uses up an earlier grant.
        """
        granted_bytes = self.cancel(waiter)
        if len_bytes <= max(HIGH_WATER_BYTES, granted_bytes):
            return True
        budget = self._budget
        if (granted_bytes or not budget.waiting) and budget.fits(len_bytes):
            return True
        reservation = self._reservations[waiter] = Reservation(budget)
        reservation.enqueue(len_bytes, lambda _: self._on_granted(waiter), first=granted_bytes > 0)
        return False

    def cancel(self, waiter: WaiterT) -> int:
        """End the wait or grant of a waiter, and return the granted bytes. Idempotent. Admits nobody else yet."""
        reservation = self._reservations.pop(waiter, None)
        if reservation is None:
            return 0
        self._budget.waiting.pop(reservation, None)
        self._budget.held_bytes -= reservation.held_bytes
        return reservation.held_bytes

    def shortfall_bytes(self) -> int:
        """Return how many unread bytes must go before the first waiter gets its grant; 0 or less if none.

        Grants do not count as unread: their room comes back, or becomes unread bytes.
        """
        if not self._budget.waiting:
            return 0
        granted_bytes = sum(reservation.held_bytes for reservation in self._reservations.values())
        unread_bytes = self._budget.held_bytes - granted_bytes
        first_bytes = next(iter(self._budget.waiting.values()))
        return min(unread_bytes, unread_bytes + first_bytes - self._budget.most_bytes)
