"""The committed bytes of one of a segment's files, as readers have them: read when they are wanted, never mapped.

Where a file was cut in place, or the disk has a bad sector, a read is an error that somebody can be told; under a map
it is the end of the process (SIGBUS), again at every start that comes to the same place. It costs half a microsecond
more than a slice of a map (docs/decisions/0008).
"""

from __future__ import annotations

import os
from typing import TypeAlias

from topics.storage.frame import Bytes
from topics.storage.segment import CorruptSegment


class CommittedFile:
    """The first bytes of a file that were committed; slices of it are `bytes`. The file may be unlinked meanwhile, and
    what is behind those bytes may change. It stays open as long as this is referred to.
    """

    __slots__ = ("_fd", "_identity", "_len_bytes", "path")

    def __init__(self, path: str, len_bytes: int) -> None:
        """Raises CorruptSegment when the file is shorter, OSError."""
        self._fd = -1
        self.path = path
        self._len_bytes = len_bytes
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if found.st_size < len_bytes:
            raise self._too_short(found.st_size)
        self._identity = (found.st_dev, found.st_ino)

    @classmethod
    def whole(cls, path: str) -> CommittedFile:
        """A file that is written once: all of it."""
        return cls(path, os.stat(path).st_size)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __len__(self) -> int:
        return self._len_bytes

    def __getitem__(self, part: slice) -> bytes:
        """Raises CorruptSegment when the bytes are not there any more, or the disk does not give them."""
        start, end, _ = part.indices(self._len_bytes)
        found = self._pread(end - start, start) if start < end else b""
        while start + len(found) < end:  # one call gives 2 GiB at most
            more = self._pread(end - start - len(found), start + len(found))
            if not more:
                raise self._too_short(os.fstat(self._fd).st_size)
            found += more
        return found

    @property
    def has_its_name(self) -> bool:
        """Whether the file is still the one of that name: neither removed nor replaced."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _pread(self, len_bytes: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, len_bytes, offset)
        except OSError as error:
            raise CorruptSegment(self.path, offset, f"{len_bytes} bytes cannot be read: {error}") from error

    def _too_short(self, size_bytes: int) -> CorruptSegment:
        return CorruptSegment(self.path, size_bytes, f"the file ends there, {self._len_bytes} bytes are committed")


Content: TypeAlias = Bytes | CommittedFile
"""Of a segment's file, for who takes slices of it."""
