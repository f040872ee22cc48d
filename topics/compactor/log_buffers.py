"""Log files of one shard as a cut reads them: mapped when the first record asks, and only while the cut lasts."""

from __future__ import annotations

import mmap
import os

from topics.compactor.segments import LogFileKey
from topics.storage import layout


class LogBuffers:
    """Maps whole files, read-only; only bytes that published locations name are looked at."""

    def __init__(self, directory: str, ram_directory: str) -> None:
        self._directories = (directory, ram_directory)
        self._maps: dict[LogFileKey, mmap.mmap] = {}

    def get(self, key: LogFileKey, end: int) -> mmap.mmap:
        """The file, mapped at least up to byte `end`. Raises FileNotFoundError when it is gone, EOFError if shorter."""
        mapped = self._maps.get(key)
        if mapped is not None and end <= len(mapped):
            return mapped
        path = layout.log_path(self._directories[key.in_ram], key.file_no)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if end > os.fstat(fd).st_size:
                raise EOFError(f"{path} ends before byte {end}")
            mapped = self._maps[key] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return mapped

    def close(self) -> None:
        """Unmaps all."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
