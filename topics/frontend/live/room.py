"""Memory for what clients have not taken yet: large frames wait while there is too little of it (api §7).

What a stream may keep anyhow is small: HIGH_WATER_BYTES, and one frame that is no longer than that. Larger frames are
sent only where they fit into what may be kept for all clients together. One that does not waits, and its client is
behind meanwhile: the log is its queue. Nobody else waits for it, but those who have large frames, too.

    enter ─▶ sent                    what is sent and not taken is kept: `held_bytes`
      └─▶ waiting ─ take_admitted ─▶ admitted ─ enter ─▶ sent

Who is admitted has the room from then on: the frame is made in a later slice, of which there may be many until then.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from topics.frontend.live.push import HIGH_WATER_BYTES

KEPT_BYTES_MAX: Final = 256 * 2**20
"""What may wait in this process for clients that have more waiting than HIGH_WATER_BYTES."""

WaiterT = TypeVar("WaiterT")


class Room(Generic[WaiterT]):
    """Who waits for how much, first come, first served. `held_bytes` is what is kept at the moment."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[WaiterT, int] = OrderedDict()
        self._admitted: dict[WaiterT, int] = {}
        """Those who were told to come, and have not yet."""
        self._admitted_bytes = 0

    def __contains__(self, waiter: WaiterT) -> bool:
        """Whether it waits: it is to do nothing until `take_admitted` names it."""
        return waiter in self._waiting

    def enter(self, waiter: WaiterT, len_bytes: int, held_bytes: int) -> bool:
        """Whether its next frame may be sent now. If not, it waits; in front, if it was admitted for less than that."""
        admitted_bytes = self._end_admitted(waiter)
        if len_bytes <= max(HIGH_WATER_BYTES, admitted_bytes):
            return True
        may_go = admitted_bytes > 0 or not self._waiting
        if may_go and _missing(len_bytes, held_bytes + self._admitted_bytes) <= 0:
            return True
        self._waiting[waiter] = len_bytes
        if admitted_bytes:
            self._waiting.move_to_end(waiter, last=False)
        return False

    def end(self, waiter: WaiterT) -> None:
        """It has left, or sends nothing for now; does nothing when it neither waits nor was admitted."""
        self._waiting.pop(waiter, None)
        self._end_admitted(waiter)

    def first_missing(self, held_bytes: int) -> int:
        """How much of what is kept has to go before the first of those who wait is admitted; 0 or less: nothing, or
        nobody waits. Those who are admitted do not count: they make room by themselves, or will be what is kept.
        """
        return _missing(next(iter(self._waiting.values())), held_bytes) if self._waiting else 0

    def take_admitted(self, held_bytes: int) -> list[WaiterT]:
        """Those that have room now, each as if all before it were kept; each is to `enter`, or to `end`."""
        admitted = []
        while self._waiting and self.first_missing(held_bytes + self._admitted_bytes) <= 0:
            waiter, len_bytes = self._waiting.popitem(last=False)
            self._admitted[waiter] = len_bytes
            self._admitted_bytes += len_bytes
            admitted.append(waiter)
        return admitted

    def _end_admitted(self, waiter: WaiterT) -> int:
        len_bytes = self._admitted.pop(waiter, 0)
        self._admitted_bytes -= len_bytes
        return len_bytes


def _missing(len_bytes: int, held_bytes: int) -> int:
    """How many bytes have to go before it fits. One larger than all that may be kept goes when nothing is."""
    return min(held_bytes, held_bytes + len_bytes - KEPT_BYTES_MAX)
