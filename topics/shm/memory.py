"""One shared-memory object: created by one process, mapped by others.

Every numeric field in shared memory is an aligned native u64 of a `memoryview.cast("Q")`: CPython stores such an item
with one 8-byte move, so a reader sees the old value or the new one, never half of each. (`struct.pack_into("<Q")`
writes byte by byte and must not be used for that.)
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import threading
from contextlib import suppress
from typing import Final

import posix_ipc


class SharedObject:
    """A mapped POSIX shared-memory object: `bytes` (a byte view) and `words` (the same as u64)."""

    def __init__(self, name: str, fd: int, size_bytes: int) -> None:
        assert size_bytes % 8 == 0
        self.name = name
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")

    @classmethod
    def create(cls, name: str, size_bytes: int, reserve_bytes: int | None = None) -> SharedObject:
        """Create the object, zeroed; back `reserve_bytes` (default: all) now: better an OSError than a SIGBUS later."""
        try:
            shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=size_bytes, mode=0o600)
        except ValueError as error:
            # posix_ipc reports EFBIG as a ValueError.
            why = f"shared memory of {size_bytes} bytes is above the file-size limit (ulimit -f, LimitFSIZE=)"
            raise OSError(errno.EFBIG, why) from error
        try:
            os.posix_fallocate(shm.fd, 0, size_bytes if reserve_bytes is None else reserve_bytes)
        except OSError:
            os.close(shm.fd)
            posix_ipc.unlink_shared_memory(name)
            raise
        return cls(name, shm.fd, size_bytes)

    @classmethod
    def attach(cls, name: str) -> SharedObject:
        """Map an existing object. FileNotFoundError when there is none, or it has no size yet."""
        try:
            shm = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError:
            raise FileNotFoundError(f"shared memory {name} does not exist") from None
        if not shm.size:
            os.close(shm.fd)
            raise FileNotFoundError(f"shared memory {name} is not ready yet")
        return cls(name, shm.fd, shm.size)

    def reserve(self, offset: int, length: int) -> None:
        """Back a range with memory. OSError (ENOSPC) when /dev/shm is full."""
        os.posix_fallocate(self.fd, offset, length)

    def give_back(self, offset: int, length: int) -> None:
        """Free the pages of a range (multiples of the page size); they read as zeros. `reserve` them before use."""
        self._map.madvise(mmap.MADV_REMOVE, offset, length)

    def close(self) -> None:
        """Unmap the object. No view of it may be left."""
        self.words.release()
        self.bytes.release()
        self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    # A view keeps the mapping after the end of this object; the descriptor is not needed for that.
    __del__ = _close_fd


def unlink(name: str) -> None:
    """Remove the name of an object, if there is one; mappings stay."""
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


_fence = threading.Lock()
FENCE_IS_FULL: Final = platform.machine() in ("x86_64", "AMD64", "i686")
"""On other machines the lock's instructions may let a later load pass an earlier store."""


def fence() -> None:
    """Issue a full memory barrier if `FENCE_IS_FULL`. It takes a lock, the only locked instruction that Python offers.

    Call it between a store of one word and a load of another word that the peer stores (the sleep flag).
    """
    _fence.acquire()
    _fence.release()
