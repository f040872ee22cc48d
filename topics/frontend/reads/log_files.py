"""WAL files as this frontend has them mapped, read-only."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from typing import Final

from topics.storage import layout

MAPS_MAX: Final = 64


class LogFiles:
    """Maps the files of all shards, the least recently used going first when there are too many.

    Only bytes that a published location names are ever looked at, and those do not change any more.
    """

    def __init__(self, data_dir: str, ram_dir: str, shards: int, maps_max: int = MAPS_MAX) -> None:
        self.data_dir = data_dir
        self._directories = [
            (layout.group_dir(data_dir, shard, shards), layout.ram_group_dir(ram_dir, shard)) for shard in range(shards)
        ]
        self._maps: OrderedDict[tuple[int, bool, int], mmap.mmap] = OrderedDict()
        self._maps_max = maps_max

    def get(self, shard: int, in_ram: bool, file_no: int, end: int) -> mmap.mmap:
        """The file, mapped at least up to byte `end`; FileNotFoundError when it is gone, EOFError if shorter."""
        key = (shard, in_ram, file_no)
        mapped = self._maps.get(key)
        if mapped is not None and end <= len(mapped):
            self._maps.move_to_end(key)
            return mapped
        # Files of the RAM log grow while they are written.
        mapped = self._map(layout.log_path(self._directories[shard][in_ram], file_no))
        self._forget_removed(shard, in_ram)
        if end > len(mapped):
            raise EOFError(f"log file {file_no} of shard {shard} ends before byte {end}")
        self._maps[key] = mapped
        self._maps.move_to_end(key)
        if len(self._maps) > self._maps_max:
            self._maps.popitem(last=False)
        return mapped

    def sweep(self) -> None:
        """Lets go of files that their shards removed; to be called now and then."""
        for shard, in_ram in {key[:2] for key in self._maps}:
            self._forget_removed(shard, in_ram)

    def _forget_removed(self, shard: int, in_ram: bool) -> None:
        """A file that its shard removed takes space until the last map of it is gone."""
        directory = self._directories[shard][in_ram]
        for key in [key for key in self._maps if key[:2] == (shard, in_ram)]:
            if not os.path.exists(layout.log_path(directory, key[2])):
                del self._maps[key]

    def _map(self, path: str) -> mmap.mmap:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise EOFError(f"{path} is empty") from error
        finally:
            os.close(fd)
