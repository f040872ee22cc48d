"""Routers in shared memory: a table of all routers, and the progress of each router.

Shard 0 writes the table (`RouterTableWriter`), every process reads it:

     word 0     word 8       word 16
    +---------+------------+------------+ … 4 KiB +--------------+--------------+
    | epoch   | length 0   | length 1   |         | region 0     | region 1     |
    +---------+------------+------------+         +--------------+--------------+

    region   | len u32 | msgpack Change | len u32 | msgpack Change | …

Region `epoch & 1` is the current one. An entry counts once the region's length includes it, and a reader goes on where
it stopped. If a region is full, or in a new life, shard 0 writes the whole table to the other region and then lets
`epoch` grow by 1. A reader that finds another epoch after reading than before begins again.

Each shard writes a board (`RouterBoardWriter`) with the progress of the routers into its topics:

    | slots_used u64 | taken u64 | 6 spare | slot 0 | slot 1 | …            BOARD_BYTES, backed as it is used

    slot   | router id | version | source topic id | source_seq | forwarded_total | 3 spare |     8 words

`taken` counts how often a slot was given to a router: a reader that did not find a router looks again only when `taken`
has grown. A slot's words change one by one, and only grow while its router is the same. `source_seq` grows after the
copies are readable: once it is at the head of the source, the dest has everything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from topics.core.errors import storage_unavailable
from topics.core.routers import Router, RouterRegistry
from topics.shm.memory import SharedObject

REGION_BYTES: Final = 64 * 1024 * 1024
"""Address space, not memory: only used parts are backed by memory."""
_HEADER_BYTES: Final = 4096
GROW_BYTES: Final = 64 * 1024
TABLE_BYTES: Final = _HEADER_BYTES + 2 * REGION_BYTES
TABLE_RESERVE_BYTES: Final = _HEADER_BYTES
_EPOCH: Final = 0
_LENGTHS: Final = (8, 16)
_LEN: Final = struct.Struct("<I")


class Change(msgspec.Struct, array_like=True, frozen=True):
    """The router of this name as it is now, None when it was deleted."""

    name: str
    router: Router | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Change).decode


class RouterTableWriter:
    """Shard 0's side of the table."""

    def __init__(self, shared: SharedObject) -> None:
        self._shared = shared
        self._words = shared.words
        self._backed = [0, 0]

    def store_all(self, routers: Iterable[Router]) -> None:
        """Replace the table. Raise TopicsError when shared memory has no room."""
        epoch = self._words[_EPOCH] + 1
        self._words[_LENGTHS[epoch & 1]] = 0
        self._append(epoch & 1, b"".join(_entry(Change(router.name, router)) for router in routers))
        self._words[_EPOCH] = epoch

    def store(self, changes: Iterable[Change], routers: Iterable[Router]) -> None:
        """Append `changes`. `routers` is the whole table with them, for a region that has no room for more."""
        region = self._words[_EPOCH] & 1
        entries = b"".join(map(_entry, changes))
        if self._words[_LENGTHS[region]] + len(entries) > REGION_BYTES:
            self.store_all(routers)
        else:
            self._append(region, entries)

    def reserve(self) -> None:
        """Make room for the next change, so that `store` cannot fail after it was logged. Raise TopicsError."""
        region = self._words[_EPOCH] & 1
        self._back(region, min(REGION_BYTES, self._words[_LENGTHS[region]] + GROW_BYTES))

    def _append(self, region: int, entries: bytes) -> None:
        length = self._words[_LENGTHS[region]]
        self._back(region, length + len(entries))
        start = _HEADER_BYTES + region * REGION_BYTES + length
        self._shared.bytes[start : start + len(entries)] = entries
        self._words[_LENGTHS[region]] = length + len(entries)

    def _back(self, region: int, length: int) -> None:
        if length > REGION_BYTES:
            raise storage_unavailable(f"the table of routers has no room beyond {REGION_BYTES} bytes")
        if length <= self._backed[region]:
            return
        start, grow = self._backed[region], -(-(length - self._backed[region]) // GROW_BYTES) * GROW_BYTES
        grow = min(grow, REGION_BYTES - start)
        try:
            self._shared.reserve(_HEADER_BYTES + region * REGION_BYTES + start, grow)
        except OSError as error:
            reason = f"/dev/shm has no room for {grow} more bytes of the table of routers: {error.strerror}"
            raise storage_unavailable(reason) from error
        self._backed[region] += grow


class RouterTable:
    """A reader's side of the table: `registry` is the table as of the last `refresh`."""

    def __init__(self, shared: SharedObject) -> None:
        self._shared = shared
        self._words = shared.words
        self._epoch = 0
        self._length = 0
        self.registry = RouterRegistry()

    @property
    def known(self) -> bool:
        """False until shard 0 has recovered for the first time in the life of this service."""
        return bool(self._words[_EPOCH])

    @property
    def was_read(self) -> bool:
        """True once this process has read the table."""
        return bool(self._epoch)

    @property
    def stale(self) -> bool:
        words, epoch = self._words, self._epoch
        return words[_EPOCH] != epoch or (epoch > 0 and words[_LENGTHS[epoch & 1]] != self._length)

    def refresh(self) -> set[str]:
        """Apply the changes since the last call; return the names of the topics that they concern."""
        touched: set[str] = set()
        while self.stale:
            self._read_on(touched)
        return touched

    def _read_on(self, touched: set[str]) -> None:
        epoch = self._words[_EPOCH]
        length = self._words[_LENGTHS[epoch & 1]]
        again = epoch != self._epoch
        start = 0 if again else self._length
        at = _HEADER_BYTES + (epoch & 1) * REGION_BYTES
        content = bytes(self._shared.bytes[at + start : at + length])
        if self._words[_EPOCH] != epoch:
            return
        changes = _changes(content)
        if again:
            kept = {change.name for change in changes}
            changes = [Change(name, None) for name in self.registry.by_name if name not in kept] + changes
        for change in changes:
            self._apply(change, touched)
        self._epoch, self._length = epoch, length

    def _apply(self, change: Change, touched: set[str]) -> None:
        registry = self.registry
        old = registry.by_name.get(change.name)
        if old == change.router:
            return
        if change.router is None:
            registry.remove(change.name)
        else:
            registry.put(change.router)
        for router in (old, change.router):
            if router is not None:
                touched.update((router.spec.source, router.spec.dest))


def _entry(change: Change) -> bytes:
    body = _encode(change)
    return _LEN.pack(len(body)) + body


def _changes(content: bytes) -> list[Change]:
    changes = []
    at = 0
    while at < len(content):
        (length,) = _LEN.unpack_from(content, at)
        at += _LEN.size
        changes.append(_decode(content[at : at + length]))
        at += length
    return changes


SLOT_WORDS: Final = 8
_TAKEN: Final = 1
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
        words[at + 4] = progress.forwarded_total
        words[at + 2] = progress.source_topic_id
        words[at + 1] = progress.version
        words[at + 3] = progress.source_seq
        # Only now does a reader find a new slot.
        is_new = words[at] != progress.router_id
        words[at] = progress.router_id
        words[0] = max(words[0], slot + 1)
        if is_new:
            words[_TAKEN] += 1

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
        self._searched, self._used = 0, 0
        """The slots that were taken, and used, when `_slots` was made."""

    def find(self, router_id: int) -> RouterProgress | None:
        """Return a router's progress, None while its shard does not forward for it."""
        words = self._words
        slot = self._slots.get(router_id)
        if slot is None or words[(1 + slot) * SLOT_WORDS] != router_id:
            if (taken := words[_TAKEN]) != self._searched:
                self._search(taken)
            slot = self._slots.get(router_id)
            if slot is None:
                return None
        at = (1 + slot) * SLOT_WORDS
        progress = RouterProgress._make(words[at : at + 5].tolist())
        return progress if words[at] == router_id == progress.router_id else None

    def _search(self, taken: int) -> None:
        used = self._words[0]
        # As long as no slot was given to a second router, new routers are in the slots behind the others.
        if taken - self._searched == used - self._used:
            self._slots |= self.slots(self._used)
        else:
            self._slots = self.slots()
        self._searched, self._used = taken, used

    def slots(self, first: int = 0) -> dict[int, int]:
        """Return the slot of each router, from a slot on. With thousands of them this takes half a millisecond."""
        ids = self._words[(1 + first) * SLOT_WORDS : (1 + self._words[0]) * SLOT_WORDS : SLOT_WORDS].tolist()
        return {found: slot for slot, found in enumerate(ids, first) if found}
