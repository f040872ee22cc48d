"""The surroundings of a shard: all that its process hands to `setup.set_up`."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import NamedTuple

from topics.core.clock import Clock
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.instance import SharedMemory
from topics.storage import layout
from topics.storage.filesystem import FileSystem, boot_id
from topics.storage.logfile import WalIdentity
from topics.storage.wal import room_left_bytes
from topics.walshard.commit.shard_rings import ShardRings


class Place(NamedTuple):
    """All that its process hands to a shard. Each executor has one thread: to lay out log files ahead, and to sync."""

    settings: Settings
    shared: SharedMemory
    shard: int
    rings: ShardRings
    cell: ProcessCell
    clock: Clock
    fs: FileSystem
    preallocating: Executor
    syncing: Executor

    @property
    def identity(self) -> WalIdentity:
        return WalIdentity(self.shard, self.settings.wal_shards, boot_id())

    @property
    def directory(self) -> str:
        """Directory of the durable log."""
        return layout.group_dir(self.settings.data_dir, self.shard, self.settings.wal_shards)

    def room_bytes(self) -> int:
        """Return the bytes on the disk that new records may take."""
        return room_left_bytes(self.fs, self.settings.data_dir, self.shared.control.cut_bytes)

    @property
    def ram_directory(self) -> str:
        """Directory of the RAM log."""
        return layout.ram_group_dir(self.shared.ram_dir, self.shard)
