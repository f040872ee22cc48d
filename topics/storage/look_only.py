"""A file system that reads and never changes a thing: recovery can be asked what it would do, without doing it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import Bytes

_ACCESS_MODE: Final = os.O_RDONLY | os.O_WRONLY | os.O_RDWR


class LookOnlyFileSystem(OsFileSystem):
    """Changes succeed and have no effect; a file that would be made reads as empty."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_CREAT:
            return super().open(os.devnull, os.O_RDONLY)
        return super().open(path, flags & ~_ACCESS_MODE & ~os.O_TRUNC)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return sum(map(len, buffers))

    def fdatasync(self, fd: int) -> None: ...

    def fsync_dir(self, path: str) -> None: ...

    def sync_all(self, path: str) -> None: ...

    def ftruncate(self, fd: int, size_bytes: int) -> None: ...

    def fallocate(self, fd: int, offset: int, length: int) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...
