"""Requests on their way to a shard: those that are not answered yet, and those too long for a ring.

A request that is too long waits in a file in shared memory, and the ring holds only its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from collections.abc import Callable
from typing import Any, Final

import msgspec

from topics.core.errors import TopicsError
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.shm import messages
from topics.shm.append_messages import AppendReply
from topics.shm.messages import Kind, Part
from topics.shm.names import SHM_ROOT, objects

OnLate = Callable[[Any], None]
_UNKNOWN_OUTCOMES: Final = ("shard_unavailable", "shutting_down", "storage_unavailable", "internal")


class Request(msgspec.Struct, eq=False):
    """On its way. `patient`: it waits for room in the ring as long as for its answer."""

    future: asyncio.Future[Any]
    shard: int
    expires_s: float
    patient: bool
    on_late: OnLate | None
    throttled_s: float = 0.0
    """How long it waited for room in the ring."""


class Unanswered:
    """By request id. All are given the same time, so those that expire first come first."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._late: dict[int, OnLate] = {}
        """Of requests that have expired. A shard that comes back answers all that is in its ring, so none stays."""

    def add(self, request_id: int, request: Request) -> None:
        self._requests[request_id] = request

    def get(self, request_id: int) -> Request | None:
        """None: its time is over."""
        return self._requests.get(request_id)

    def answer(self, request_id: int, message: memoryview, decode: Callable[[memoryview], object]) -> None:
        """What came for it: `decode` makes it a reply or a TopicsError."""
        request = self._requests.pop(request_id, None)
        if request is None or request.future.done():
            # Unknown: an earlier incarnation's, one that timed out, or a second answer after the shard's restart.
            on_late = self._late.pop(request_id, None) if request is None else request.on_late
            if on_late is not None and not isinstance(late := decode(message), TopicsError):
                on_late(late)
            return
        reply = decode(message)
        if request.throttled_s and isinstance(reply, AppendReply):
            reply = msgspec.structs.replace(reply, throttled_us=int(request.throttled_s * 1e6))
        if isinstance(reply, TopicsError):
            request.future.set_exception(reply)
        else:
            request.future.set_result(reply)

    def withdraw(self, request_id: int) -> Request | None:
        """It has reached no shard: there will be no answer. None: its time is over."""
        self._late.pop(request_id, None)
        return self._requests.pop(request_id, None)

    def expire(self, now_s: float, failure: Callable[[int], TopicsError]) -> None:
        """Ends the wait for those whose time is over; `failure` is that of a shard."""
        overdue = itertools.takewhile(lambda item: item[1].expires_s <= now_s, self._requests.items())
        for request_id, request in list(overdue):
            del self._requests[request_id]
            fail(request.future, failure(request.shard))
            if request.on_late is not None:
                self._late[request_id] = request.on_late

    def fail_all(self, error: Callable[[], TopicsError]) -> None:
        for request in self._requests.values():
            fail(request.future, error())
        self._requests.clear()


def is_outcome_unknown(error: BaseException) -> bool:
    """Whether what failed with this may be done all the same, or may yet be. If not, its shard has said so or has never
    seen it: there is nothing to take back, and a shard whose ring is full is not told of it.
    """
    return not isinstance(error, TopicsError) or error.code in _UNKNOWN_OUTCOMES


def fail(future: asyncio.Future[Any], error: TopicsError) -> None:
    """Does nothing when nobody waits any more."""
    if not future.done():
        future.set_exception(error)


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
