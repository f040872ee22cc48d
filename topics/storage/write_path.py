"""How a group reaches its file: chosen once, when the service starts, by trying it where the log will be.

`pwritev` hands the kernel all pieces of a group in one call. Where a file system does not take it, the pieces are
joined and written by `pwrite`: one more copy in memory, nothing else changes. Both are followed by `fdatasync`
(decision 7 says why not by RWF_DSYNC).
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import IntEnum
from typing import Final

from topics.storage.filesystem import FileSystem, OsFileSystem, make_dirs

_PROBE_NAME: Final = ".write-path.tmp"
_PIECES: Final = (b"top", b"", b"ics")


class WritePath(IntEnum):
    """As it stands in the control page; 0 is not chosen yet."""

    PWRITEV = 1
    PWRITE = 2

    def file_system(self) -> OsFileSystem:
        """What writes that way."""
        return OsFileSystem(vectored=self is WritePath.PWRITEV)


def choose_write_path(directory: str, candidate: FileSystem | None = None) -> WritePath:
    """PWRITEV if `directory` takes it and reads back what was written. Raises OSError when it takes no writes."""
    fs = candidate or OsFileSystem()
    make_dirs(fs, directory)
    path = os.path.join(directory, _PROBE_NAME)
    fd = fs.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        whole = b"".join(_PIECES)
        written = 0
        # Whatever it fails with: the plain write that is used then reports what is really wrong.
        with suppress(OSError):
            written = fs.pwritev(fd, _PIECES, 0)
        vectored = written == len(whole) and fs.pread(fd, len(whole), 0) == whole
    finally:
        fs.close(fd)
        fs.unlink(path)
    return WritePath.PWRITEV if vectored else WritePath.PWRITE
