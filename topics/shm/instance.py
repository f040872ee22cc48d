"""All shared memory of one running service: made by the supervisor before it forks, inherited by everyone."""

from __future__ import annotations

import os
from typing import NamedTuple

from topics.shm import names
from topics.shm.control import ControlPage
from topics.shm.durations import Durations
from topics.shm.journal import Journal
from topics.shm.key_counts import KeyCounts
from topics.shm.memory import SharedObject
from topics.shm.ring import HEADER_BYTES, Ring
from topics.shm.wake import Wake

JOURNAL_BYTES_PER_FRONTEND = 512 * 1024
"""A group is at most 1024 requests of some 100 bytes each here, and every frontend may leave one unanswered."""
ARENA_RESERVE_BYTES = 1024 * 1024
"""What each shard's index arena takes at first; it grows with the un-sealed tail."""


class RingPair(NamedTuple):
    """Between one frontend and one shard."""

    requests: Ring
    replies: Ring


def _reply_bytes(ring_bytes: int) -> int:
    return max(64 * 1024, ring_bytes // 4)


def journal_bytes(frontends: int) -> int:
    return JOURNAL_BYTES_PER_FRONTEND * (1 + frontends)


def _page(size_bytes: int) -> int:
    return (size_bytes + 4095) & ~4095


class SharedMemory:
    """Control page, durations, counts of keys, rings[frontend][shard], journals[shard], an eventfd for each process."""

    def __init__(self, identity: str, shards: int, frontends: int, ring_bytes: int) -> None:
        self.identity = identity
        self.shards = shards
        self.frontends = frontends
        self.ram_dir = names.ram_dir(identity)
        self.control = ControlPage.create(names.shm_name(identity, "control"), shards, frontends)
        durations = SharedObject.create(names.shm_name(identity, "durations"), _page(Durations.size_bytes(frontends)))
        self.durations = Durations(durations.words[: Durations.size_bytes(frontends) // 8])
        keys = SharedObject.create(names.shm_name(identity, "keys"), _page(KeyCounts.size_bytes(frontends)))
        self.key_counts = keys.words
        requests_size = _page(ring_bytes + HEADER_BYTES)
        replies_size = _page(_reply_bytes(ring_bytes) + HEADER_BYTES)
        self.rings: list[list[RingPair]] = []
        for frontend in range(frontends):
            row = []
            for shard in range(shards):
                shared = SharedObject.create(
                    names.shm_name(identity, "ring", frontend, shard), requests_size + replies_size
                )
                row.append(RingPair(Ring(shared.bytes[:requests_size]), Ring(shared.bytes[requests_size:])))
            self.rings.append(row)
        self.journals = [
            Journal(SharedObject.create(names.shm_name(identity, "journal", shard), journal_bytes(frontends)).bytes)
            for shard in range(shards)
        ]
        # One page of sleep flags, a cache line each.
        flags = SharedObject.create(names.shm_name(identity, "sleep"), _page(64 * (shards + frontends))).words
        self.shard_wakes = [Wake(flags, 8 * shard) for shard in range(shards)]
        self.frontend_wakes = [Wake(flags, 8 * (shards + frontend)) for frontend in range(frontends)]
        os.makedirs(self.ram_dir, mode=0o700, exist_ok=True)

    @classmethod
    def create(cls, identity: str, shards: int, frontends: int, ring_bytes: int) -> SharedMemory:
        """Makes everything or nothing: OSError (ENOSPC) when /dev/shm is too small."""
        try:
            return cls(identity, shards, frontends, ring_bytes)
        except OSError:
            names.unlink_all(identity)
            raise

    @staticmethod
    def needed_bytes(shards: int, frontends: int, ring_bytes: int) -> int:
        """What `create` and the shards' first arenas take of /dev/shm."""
        pair = _page(ring_bytes + HEADER_BYTES) + _page(_reply_bytes(ring_bytes) + HEADER_BYTES)
        control = _page(ControlPage.size_bytes(shards, frontends)) + _page(Durations.size_bytes(frontends))
        control += _page(KeyCounts.size_bytes(frontends))
        # A restarted shard builds its new arena beside the old one.
        per_shard = journal_bytes(frontends) + 2 * ARENA_RESERVE_BYTES
        return control + pair * shards * frontends + per_shard * shards + 4096 * (1 + (shards + frontends) // 64)

    def destroy(self) -> None:
        """Removes every name; the memory goes when the last process ends."""
        names.unlink_all(self.identity)
