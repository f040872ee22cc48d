"""The progress of routers in shared memory: each shard writes a board for the routers into its topics.

    | slots_used u64 | 7 spare | slot 0 | slot 1 | …            BOARD_BYTES, backed as it is used

    slot   | router id | version | source topic id | source_seq | forwarded_total | 3 spare |     8 words

A slot's words change one by one, and only grow while its router is the same. `source_seq` grows after the copies are
readable: once it is at the head of the source, the dest has everything.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from topics.shm.memory import SharedObject

SLOT_WORDS: Final = 8
_SLOTS_MAX: Final = 1 << 17
BOARD_BYTES: Final = (1 + _SLOTS_MAX) * SLOT_WORDS * 8
BOARD_RESERVE_BYTES: Final = 4096
_GROW_SLOTS: Final = 64


class RouterProgress(NamedTuple):
    """The progress of a router, in the order of a slot's words; `source_topic_id` 0: its source does not exist yet."""

    router_id: int
    version: int
    source_topic_id: int
    source_seq: int
    forwarded_total: int


class RouterBoardWriter:
    """The shard's side of its board."""

    def __init__(self, shared: SharedObject) -> None:
        self._shared = shared
        self._words = shared.words
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._backed = 0
        self.former: dict[int, RouterProgress] = {}
        """The progress of each router at the end of the shard's former life, by router id."""
        for slot in range(self._words[0]):
            at = (1 + slot) * SLOT_WORDS
            progress = RouterProgress._make(self._words[at : at + 5].tolist())
            if progress.router_id:
                self.former[progress.router_id] = progress
            self._words[at] = 0
        self._words[0] = 0

    def show(self, progress: RouterProgress) -> None:
        """Show the progress of a router. OSError when shared memory has no room for one more."""
        words = self._words
        slot = self._slots.get(progress.router_id)
        if slot is None:
            slot = self._slots[progress.router_id] = self._new_slot()
            at = (1 + slot) * SLOT_WORDS
            words[at + 1], words[at + 2], words[at + 3], words[at + 4] = progress[1:]
            words[at] = progress.router_id
            words[0] = max(words[0], slot + 1)
            return
        at = (1 + slot) * SLOT_WORDS
        words[at + 4] = progress.forwarded_total
        words[at + 2] = progress.source_topic_id
        words[at + 1] = progress.version
        words[at + 3] = progress.source_seq

    def remove(self, router_id: int) -> None:
        slot = self._slots.pop(router_id, None)
        if slot is not None:
            self._words[(1 + slot) * SLOT_WORDS] = 0
            self._free.append(slot)

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        slot = len(self._slots)
        if slot >= _SLOTS_MAX:
            raise OSError(28, f"a shard holds at most {_SLOTS_MAX} routers")
        if slot >= self._backed:
            self._shared.reserve((1 + slot) * SLOT_WORDS * 8, _GROW_SLOTS * SLOT_WORDS * 8)
            self._backed = slot + _GROW_SLOTS
        return slot


class RouterBoard:
    """A reader's side of a board."""

    def __init__(self, shared: SharedObject) -> None:
        self._words = shared.words
        self._slots: dict[int, int] = {}

    def find(self, router_id: int) -> RouterProgress | None:
        """Return a router's progress, None while its shard does not forward for it."""
        words = self._words
        slot = self._slots.get(router_id)
        if slot is None or words[(1 + slot) * SLOT_WORDS] != router_id:
            slot = self._search(router_id)
            if slot is None:
                return None
        at = (1 + slot) * SLOT_WORDS
        progress = RouterProgress._make(words[at : at + 5].tolist())
        return progress if words[at] == router_id == progress.router_id else None

    def _search(self, router_id: int) -> int | None:
        used = self._words[0]
        ids = self._words[SLOT_WORDS : (1 + used) * SLOT_WORDS : SLOT_WORDS].tolist()
        self._slots = {found: slot for slot, found in enumerate(ids) if found}
        return self._slots.get(router_id)
