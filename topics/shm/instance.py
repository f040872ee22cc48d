"""The shared memory of one running service: created by the supervisor before it forks, inherited by every process."""

from __future__ import annotations

import os
from itertools import permutations
from typing import NamedTuple

from topics.shm import shm_names
from topics.shm.control import ControlPage
from topics.shm.durations import Durations
from topics.shm.journal import Journal
from topics.shm.memory import SharedObject
from topics.shm.quotas import KeyCounts
from topics.shm.ring import HEADER_BYTES, Ring, Wake
from topics.shm.router_memory import BOARD_BYTES, BOARD_RESERVE_BYTES, TABLE_BYTES, TABLE_RESERVE_BYTES

JOURNAL_BYTES_PER_FRONTEND = 512 * 1024
"""A group has at most 1024 requests, and each takes about 100 bytes here. Each frontend may leave a group unanswered.
"""
COMPACTOR_RING_BYTES = 256 * 1024
"""The compactor sends few messages, and long ones by reference."""
ARENA_RESERVE_BYTES = 1024 * 1024
"""The first size of each shard's index arena; it grows with the tail that is not sealed."""
LINK_BUDGET_BYTES = 4 * 1024 * 1024
"""The size of all rings between shards together, as far as LINK_BYTES allows."""
LINK_BYTES = (16 * 1024, 256 * 1024)


class RingPair(NamedTuple):
    """The rings between one peer (a frontend or the compactor) and one shard."""

    requests: Ring
    replies: Ring


def _compactor_ring_bytes(ring_bytes: int) -> int:
    return min(ring_bytes, COMPACTOR_RING_BYTES)


def _pair_sizes(ring_bytes: int) -> tuple[int, int]:
    return _page(ring_bytes + HEADER_BYTES), _page(max(64 * 1024, ring_bytes // 4) + HEADER_BYTES)


def _ring_pair(shared: SharedObject, ring_bytes: int) -> RingPair:
    requests_size, _ = _pair_sizes(ring_bytes)
    return RingPair(Ring(shared.bytes[:requests_size]), Ring(shared.bytes[requests_size:]))


def journal_bytes(frontends: int) -> int:
    return JOURNAL_BYTES_PER_FRONTEND * (2 + frontends)  # the compactor is a peer as well


def _link_bytes(shards: int) -> int:
    """Return the size of one ring between two shards."""
    share = LINK_BUDGET_BYTES // max(1, shards * (shards - 1))
    return _page(max(LINK_BYTES[0], min(LINK_BYTES[1], share)) + HEADER_BYTES)


def _page(size_bytes: int) -> int:
    return (size_bytes + 4095) & ~4095


class SharedMemory:
    """Owns all shared objects of the service: control page, durations, counts of keys, rings[peer][shard],
    links[from shard][to shard], journals[shard], the table of routers, a router board for each shard, and an eventfd
    for each process. The peers of a shard are the frontends and, at `compactor_row`, the compactor.
    """

    def __init__(self, identity: str, shards: int, frontends: int, ring_bytes: int, archivers: int) -> None:
        self.identity = identity
        self.shards = shards
        self.frontends = frontends
        self.compactor_row = frontends
        self.ram_dir = shm_names.ram_dir(identity)
        self.control = ControlPage.create(shm_names.shm_name(identity, "control"), shards, frontends, archivers)

        def create(size_bytes: int, kind: str, *parts: int, reserve_bytes: int | None = None) -> SharedObject:
            return SharedObject.create(shm_names.shm_name(identity, kind, *parts), _page(size_bytes), reserve_bytes)

        durations_bytes = Durations.size_bytes(frontends)
        self.durations = Durations(create(durations_bytes, "durations").words[: durations_bytes // 8])
        self.key_counts = create(KeyCounts.size_bytes(frontends), "keys").words
        self.rings = [
            [_ring_pair(create(sum(_pair_sizes(ring)), "ring", peer, shard), ring) for shard in range(shards)]
            for peer, ring in enumerate([ring_bytes] * frontends + [_compactor_ring_bytes(ring_bytes)])
        ]
        self.journals = [Journal(create(journal_bytes(frontends), "journal", shard).bytes) for shard in range(shards)]
        self.links: list[list[Ring | None]] = [[None] * shards for _ in range(shards)]
        for sender, receiver in permutations(range(shards), 2):
            self.links[sender][receiver] = Ring(create(_link_bytes(shards), "link", sender, receiver).bytes)
        self.router_table = create(TABLE_BYTES, "routers", reserve_bytes=TABLE_RESERVE_BYTES)
        self.router_boards = [
            create(BOARD_BYTES, "routed", shard, reserve_bytes=BOARD_RESERVE_BYTES) for shard in range(shards)
        ]
        # One page of sleep flags, a cache line each.
        flags = create(64 * (shards + frontends + 1), "sleep").words
        self.shard_wakes = [Wake(flags, 8 * shard) for shard in range(shards)]
        self.frontend_wakes = [Wake(flags, 8 * (shards + frontend)) for frontend in range(frontends)]
        self.compactor_wake = Wake(flags, 8 * (shards + frontends))
        os.makedirs(self.ram_dir, mode=0o700, exist_ok=True)

    @classmethod
    def create(cls, identity: str, shards: int, frontends: int, ring_bytes: int, archivers: int = 0) -> SharedMemory:
        """Create everything or nothing; `archivers` is 0 or 1. OSError (ENOSPC) when /dev/shm is too small."""
        try:
            return cls(identity, shards, frontends, ring_bytes, archivers)
        except OSError:
            shm_names.unlink_all(identity)
            raise

    @staticmethod
    def needed_bytes(shards: int, frontends: int, ring_bytes: int) -> int:
        """Return the bytes of /dev/shm that `create` and the shards' first arenas take."""
        row = frontends * sum(_pair_sizes(ring_bytes)) + sum(_pair_sizes(_compactor_ring_bytes(ring_bytes)))
        control = _page(ControlPage.size_bytes(shards, frontends)) + _page(Durations.size_bytes(frontends))
        control += _page(KeyCounts.size_bytes(frontends))
        # A restarted shard builds its new arena beside the old one.
        per_shard = journal_bytes(frontends) + 2 * ARENA_RESERVE_BYTES + BOARD_RESERVE_BYTES
        control += TABLE_RESERVE_BYTES + shards * (shards - 1) * _link_bytes(shards)
        return control + (row + per_shard) * shards + 4096 * (1 + (shards + frontends + 1) // 64)

    @property
    def is_there(self) -> bool:
        """False once somebody has removed it; systemd-logind does so when a user logs out (RemoveIPC=)."""
        return os.path.exists(shm_names.SHM_ROOT + shm_names.shm_name(self.identity, "control"))

    def destroy(self) -> None:
        """Remove every name; the memory is freed when the last process ends."""
        shm_names.unlink_all(self.identity)
