"""Memory for what clients have not taken yet: large frames wait while there is too little of it (api §7).

What a stream may keep anyhow is small: HIGH_WATER_BYTES, and one frame that is no longer than that. Larger frames are
sent only where they fit into what may be kept for all clients together. One that does not waits, and its client is
behind meanwhile: the log is its queue. Nobody else waits for it, but those whose frames are as large.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from topics.frontend.push import HIGH_WATER_BYTES

KEPT_BYTES_MAX: Final = 256 * 2**20
"""What may wait in this process for clients that have more waiting than HIGH_WATER_BYTES."""

WaiterT = TypeVar("WaiterT")


class Room(Generic[WaiterT]):
    """Who waits for how much, first come, first served. `held_bytes` is what is kept at the moment."""

    def __init__(self) -> None:
        self._waiting: dict[WaiterT, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiter: WaiterT) -> bool:
        return waiter in self._waiting

    def admits(self, len_bytes: int, held_bytes: int) -> bool:
        """Whether a frame may be sent now. One larger than all that may be kept goes when nothing is."""
        return len_bytes <= HIGH_WATER_BYTES or self.missing(len_bytes, held_bytes) <= 0

    def missing(self, len_bytes: int, held_bytes: int) -> int:
        """How many bytes have to go before it fits."""
        return min(held_bytes, held_bytes + len_bytes - KEPT_BYTES_MAX)

    def wait(self, waiter: WaiterT, len_bytes: int) -> None:
        """It has a frame of `len_bytes` to get."""
        self._waiting[waiter] = len_bytes

    def end(self, waiter: WaiterT) -> None:
        """It has left; does nothing when it did not wait."""
        self._waiting.pop(waiter, None)

    def first_missing(self, held_bytes: int) -> int:
        """What the first of those who wait is missing; 0 or less when it has room, or nobody waits."""
        return self.missing(next(iter(self._waiting.values())), held_bytes) if self._waiting else 0

    def take_admitted(self, held_bytes: int) -> list[WaiterT]:
        """Those that have room now: as if each of them were held from here on."""
        admitted = []
        while self._waiting and self.first_missing(held_bytes) <= 0:
            waiter, len_bytes = next(iter(self._waiting.items()))
            del self._waiting[waiter]
            admitted.append(waiter)
            held_bytes += len_bytes
        return admitted
