"""A disk under a page cache, as Linux has it when a sync fails: what it should have covered counts as written then.

Files are the cache: all processes see them at once. A sync that succeeds takes what was written since the last one,
succeeded or not, to the disk. `power_loss` leaves of each file what the disk has. Names are on the disk at once: what
a directory forgets is another test's subject.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import Bytes


class PageCache(OsFileSystem):
    """`fails` is asked before each sync, with the file's path (of `sync_all`, the directory): it fails if that is true.

    The test's own process is all there is, so a path is what a descriptor was opened by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[str], bool] = lambda _path: False
        self.failed = 0
        self._paths: dict[int, str] = {}
        self._dirty: dict[str, list[tuple[int, int]]] = {}
        """(offset, length) since the last sync"""
        self._disk: dict[str, bytearray] = {}

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        if flags & os.O_TRUNC:
            self._disk[path] = bytearray()
            self._dirty[path] = []
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        count = super().pwritev(fd, buffers, offset)
        self._dirty.setdefault(self._paths[fd], []).append((offset, count))
        return count

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        super().ftruncate(fd, size_bytes)
        disk = self._disk.get(self._paths[fd])
        if disk is not None:
            del disk[size_bytes:]

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        super().fallocate(fd, offset, length)
        disk = self._disk.setdefault(self._paths[fd], bytearray())
        disk.extend(bytes(max(0, offset + length - len(disk))))

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._disk[target] = self._disk.pop(source, bytearray())
        self._dirty[target] = self._dirty.pop(source, [])
        for fd, path in self._paths.items():
            if path == source:
                self._paths[fd] = target

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._disk.pop(path, None)
        self._dirty.pop(path, None)

    def fdatasync(self, fd: int) -> None:
        path = self._paths[fd]
        self._sync([path], self.fails(path))

    def sync_all(self, path: str) -> None:
        self._sync(list(self._dirty), self.fails(path))

    def fsync_dir(self, path: str) -> None:
        """Names are on the disk at once."""

    def _sync(self, paths: list[str], fails: bool) -> None:
        for path in paths:
            extents, self._dirty[path] = self._dirty.get(path, []), []
            if not fails and extents and os.path.exists(path):  # a directory may be removed beside this
                with open(path, "rb") as file:
                    content = file.read()
                disk = self._disk.setdefault(path, bytearray())
                disk.extend(bytes(max(0, len(content) - len(disk))))
                for offset, length in extents:
                    disk[offset : offset + length] = content[offset : offset + length]
        if fails:
            self.failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), paths[0] if paths else None)

    def power_loss(self) -> None:
        """Every file is what the disk has of it."""
        for path, content in self._disk.items():
            if os.path.exists(path):
                with open(path, "r+b") as file:
                    file.write(content)
                    file.truncate(len(content))
