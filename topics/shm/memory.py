"""One shared-memory object: made once by its creator, mapped by everyone.

Every numeric field in shared memory is an aligned native u64 reached through `memoryview.cast("Q")`:
CPython stores such an item with one 8-byte move, so a reader sees the old value or the new one,
never half of each. (`struct.pack_into("<Q")` writes byte by byte and must not be used for that.)
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import threading
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
        """Makes the object, zero-filled. `reserve_bytes` of it (default: all) are backed by memory at once, so that
        a full /dev/shm is an OSError here and not a SIGBUS at the first touch.
        """
        try:
            shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=size_bytes, mode=0o600)
        except ValueError as error:
            # It is how posix_ipc words EFBIG.
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
        """Maps an existing object; FileNotFoundError when there is none, or none with a size yet."""
        try:
            shm = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError:
            raise FileNotFoundError(f"shared memory {name} does not exist") from None
        if not shm.size:
            os.close(shm.fd)
            raise FileNotFoundError(f"shared memory {name} is being made")
        return cls(name, shm.fd, shm.size)

    def reserve(self, offset: int, length: int) -> None:
        """Backs a range with memory; OSError (ENOSPC) when /dev/shm is full."""
        os.posix_fallocate(self.fd, offset, length)

    def give_back(self, offset: int, length: int) -> None:
        """The pages of a range (multiples of the page size) are the system's again, and read as zeros; `reserve` them
        before they are used.
        """
        self._map.madvise(mmap.MADV_REMOVE, offset, length)

    def close(self) -> None:
        """Unmaps. Views handed out must be gone."""
        self.words.release()
        self.bytes.release()
        self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    # Views keep the map for as long as there are any; the descriptor would stay for ever.
    __del__ = _close_fd

    def unlink(self) -> None:
        """Removes the name; who has it mapped keeps it."""
        try:
            posix_ipc.unlink_shared_memory(self.name)
        except posix_ipc.ExistentialError:
            return


_fence = threading.Lock()
FENCE_IS_FULL: Final = platform.machine() in ("x86_64", "AMD64", "i686")
"""Elsewhere the lock's instructions may let a later load pass an earlier store."""


def fence() -> None:
    """A full memory barrier where `FENCE_IS_FULL`: taking a lock is a locked instruction, the only one Python offers.

    Needed where a process stores one word and then loads another that its peer stores (the sleep flag).
    """
    _fence.acquire()
    _fence.release()
