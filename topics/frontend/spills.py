"""Requests too long for a ring: each waits in a file in shared memory, the ring holds only its path."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from topics.shm.messages import Part
from topics.shm.names import SHM_ROOT, objects

SPILLED_BYTES_MAX: Final = 256 * 2**20
"""What the files of one frontend may hold together: /dev/shm is also where the shards' indexes grow."""


class Spills:
    """The files of one frontend, by request. A file goes with the answer, however late: until then the shard may read
    it.
    """

    def __init__(self, identity: str, frontend: int) -> None:
        self._identity = identity
        self._prefix = f"topics-{identity}-spill-{frontend}-"
        self._sizes: dict[int, int] = {}
        self._bytes = 0

    def remove_leftovers(self) -> None:
        """Files of a former life: nobody waits for those answers, and a shard that finds no file does nothing."""
        for name in objects(self._identity):
            if name.startswith(self._prefix):
                os.unlink(f"{SHM_ROOT}/{name}")

    def path(self, request_id: int) -> str:
        return f"{SHM_ROOT}/{self._prefix}{request_id}"

    def reserve(self, request_id: int, size_bytes: int) -> None:
        """Room for a request, before `write`; OSError (ENOSPC) beyond SPILLED_BYTES_MAX."""
        if self._bytes + size_bytes > SPILLED_BYTES_MAX:
            raise OSError(errno.ENOSPC, "too many long requests at once")
        self._sizes[request_id] = size_bytes
        self._bytes += size_bytes

    def write(self, request_id: int, parts: list[Part]) -> None:
        """The whole message, or OSError; may run in a thread."""
        flags = os.O_EXCL | os.O_CLOEXEC
        with open(self.path(request_id), "wb", opener=lambda path, mode: os.open(path, mode | flags, 0o600)) as file:
            file.writelines(parts)

    def drop(self, request_id: int) -> None:
        """The request is answered, or never went out; nothing happens when it has no file."""
        size_bytes = self._sizes.pop(request_id, None)
        if size_bytes is not None:
            self._bytes -= size_bytes
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(request_id))
