"""A disk that knows what of it is in the page cache alone, and says in which order what was made to last."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from tests.storage.faults import FaultyFileSystem
from topics.storage.frame import Bytes

_NUMBER = re.compile(r"\d{20}|[0-9a-f]{16}")


class UnsyncedFileSystem(FaultyFileSystem):
    """`unsynced`: paths of files that were changed since they were synced last. `lasting`: each sync and rename so
    far, by the last parts of the names, seqs and ids left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unsynced: set[str] = set()
        self.lasting: list[str] = []
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.unsynced.add(self._paths[fd])
        return super().pwritev(fd, buffers, offset)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self.unsynced.add(self._paths[fd])
        super().ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.unsynced.discard(self._paths[fd])
        self._say("fdatasync", self._paths[fd])

    def fsync_dir(self, path: str) -> None:
        super().fsync_dir(path)
        self._say("fsync_dir", path)

    def sync_all(self, path: str) -> None:
        super().sync_all(path)
        self.unsynced.clear()
        self._say("sync_all", path)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if source in self.unsynced:
            self.unsynced.remove(source)
            self.unsynced.add(target)
        self._say("rename", target)

    def _say(self, call: str, path: str) -> None:
        self.lasting.append(f"{call} {_NUMBER.sub('#', os.path.basename(path))}")
