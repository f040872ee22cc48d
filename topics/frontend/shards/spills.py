"""Requests too long for a ring: each waits in a file in shared memory, the ring holds only its path."""

from __future__ import annotations

import contextlib
import errno
import os

from topics.frontend import limits
from topics.frontend.budget import Budget
from topics.shm import messages
from topics.shm.messages import Kind, Part
from topics.shm.names import SHM_ROOT, objects


class Spills:
    """The files of one frontend, by request. A file goes with the answer, however late: until then the shard may read
    it.
    """

    def __init__(self, identity: str, frontend: int) -> None:
        self._identity = identity
        self._prefix = f"topics-{identity}-spill-{frontend}-"
        self._sizes: dict[int, int] = {}
        self.budget = Budget(limits.SPILLS)

    def remove_leftovers(self) -> None:
        """Files of a former life: nobody waits for those answers, and a shard that finds no file does nothing."""
        for name in objects(self._identity):
            if name.startswith(self._prefix):
                os.unlink(f"{SHM_ROOT}/{name}")

    def put(self, kind: Kind, request_id: int, parts: list[Part], length_bytes: int) -> list[Part]:
        """The whole message in its file, at once; what the ring is to hold. OSError: nothing of it is there."""
        try:
            self.reserve(request_id, length_bytes)
            self.write(request_id, parts)
        except OSError:
            self.drop(request_id)
            raise
        return self.reference(kind, request_id)

    def reference(self, kind: Kind, request_id: int) -> list[Part]:
        """What the ring is to hold of a request that is in its file."""
        return messages.encode_reference(kind, request_id, self.path(request_id))

    def path(self, request_id: int) -> str:
        return f"{SHM_ROOT}/{self._prefix}{request_id}"

    def reserve(self, request_id: int, size_bytes: int) -> None:
        """Room for a request, before `write`; OSError (ENOSPC) where there is none: indexes grow in /dev/shm, too."""
        if not self.budget.take(size_bytes):
            raise OSError(errno.ENOSPC, "too many long requests at once")
        self._sizes[request_id] = size_bytes

    def write(self, request_id: int, parts: list[Part]) -> None:
        """The whole message, or OSError; may run in a thread."""
        flags = os.O_EXCL | os.O_CLOEXEC
        with open(self.path(request_id), "wb", opener=lambda path, mode: os.open(path, mode | flags, 0o600)) as file:
            file.writelines(parts)

    def drop(self, request_id: int) -> None:
        """The request is answered, or never went out; nothing happens when it has no file."""
        size_bytes = self._sizes.pop(request_id, None)
        if size_bytes is not None:
            self.budget.release(size_bytes)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(request_id))


def take_long_reply(path: str) -> memoryview | None:
    """An answer too long for the ring: the shard made the file, it is ours to remove. None: we had it in a former
    life, which ended before it could free the ring.
    """
    try:
        with open(path, "rb") as file:
            reply = memoryview(file.read())
    except FileNotFoundError:
        return None
    os.unlink(path)
    return reply
