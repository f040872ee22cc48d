"""Requests on their way to a shard: those that wait for room in its ring, those not answered, those too long for it.

offer ──▶ [ hasty   ] ─┐                 ┌─▶ ring ──▶ the shard
      ──▶ [ patient ] ─┼─ oldest first ──┤
      ──▶ [ posts   ] ─┘                 └─▶ given up, its time is over: nothing of it has reached the shard

A `Lane` stands in front of each ring. Its three queues go by age, so that requests whose time is over stand in front.
Each has a bound of its own, so that a crowd of one kind takes no place of another. They are sent in one order, that of
`request_id`: a post never overtakes the request that it follows, nor the other way round.

A post is never refused, since nobody would know of one that was lost. Its bound holds for what leaves posts behind:
while the queue of posts is full no request is let in, and a request that was refused leaves no post.

A request that is too long for a ring waits in a file in shared memory (`Spills`), and the ring holds only its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import msgspec

from topics.core.errors import TopicsError
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget, Limit
from topics.shm import messages
from topics.shm.append_messages import AppendReply
from topics.shm.messages import MessageKind, Part
from topics.shm.ring import Ring
from topics.shm.shm_names import SHM_ROOT, objects

ROOM_WAIT_S: Final = 0.25
"""How long a request waits for room in a full ring before it is told to come back later."""
PRESSED_WAIT_S: Final = 0.05
"""And how long when the service is pressed as hard as can be: early, but not at once. To refuse takes the time of this
process as well, and whoever comes again at once would take all of it, so that less is done than there is room for."""


class Waiter(msgspec.Struct):
    """A message on its way. Without an end (`expires_s` None) it is kept until there is room: nobody awaits it. A
    `patient` one waits for as long under pressure, too.
    """

    parts: list[Part]
    length_bytes: int
    request_id: int
    since_s: float
    expires_s: float | None
    patient: bool = False


class Fate(Enum):
    SENT = 0
    WAITS = 1
    REFUSED = 2


class _Queue:
    """The waiters of one kind, oldest first, and their budget."""

    __slots__ = ("budget", "waiters")

    def __init__(self, limit: Limit) -> None:
        self.waiters: deque[Waiter] = deque()
        self.budget = Budget(limit)

    def has_room_for(self, size_bytes: int) -> bool:
        return len(self.waiters) < self.budget.limit.most_count and self.budget.fits(size_bytes)

    def add(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        self.budget.held_bytes += waiter.length_bytes

    def pop(self) -> Waiter:
        waiter = self.waiters.popleft()
        self.budget.release(waiter.length_bytes)
        return waiter


class Lane:
    """One per shard. `request_id` grows with every message: it is the order among those who wait."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.hasty = _Queue(limits.RING_WAITERS)
        self._patient = _Queue(limits.RING_WAITERS)
        self.posts = _Queue(limits.RING_POSTS)
        self._queues = (self.hasty, self._patient, self.posts)

    @property
    def message_max_bytes(self) -> int:
        return self._ring.message_max_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self.hasty.waiters) + len(self._patient.waiters) + len(self.posts.waiters)

    @property
    def crowded(self) -> bool:
        """True while as many posts wait as may: whoever can do without another one should."""
        return not self.posts.has_room_for(1)

    @property
    def fullness(self) -> float:
        """The fullness of the ring, 0 to 1; 1 as long as somebody waits."""
        return 1.0 if self.waiting else self._ring.pending_bytes / self._ring.capacity_bytes

    def offer(self, waiter: Waiter) -> Fate:
        """Sends it, or lets it wait if there is room for those who wait."""
        if not self.waiting and self._ring.push(*waiter.parts):
            return Fate.SENT
        if waiter.expires_s is None:
            self.posts.add(waiter)
            return Fate.WAITS
        queue = self._patient if waiter.patient else self.hasty
        if self.crowded or not queue.has_room_for(waiter.length_bytes):
            return Fate.REFUSED
        queue.add(waiter)
        return Fate.WAITS

    def retry(self, now_s: float, pressed: bool) -> tuple[list[Waiter], list[Waiter]]:
        """Room may have come: (those who are sent, those whose time was over)."""
        sent: list[Waiter] = []
        given_up: list[Waiter] = []
        for queue in (self.hasty, self._patient):
            while queue.waiters:
                first = queue.waiters[0]
                expires_s = first.expires_s
                assert expires_s is not None, "who waits without an end is a post"
                if pressed and queue is self.hasty:
                    expires_s = min(expires_s, first.since_s + PRESSED_WAIT_S)
                if expires_s > now_s:
                    break
                given_up.append(queue.pop())
        while busy := [queue for queue in self._queues if queue.waiters]:
            oldest = min(busy, key=lambda queue: queue.waiters[0].request_id)
            if not self._ring.push(*oldest.waiters[0].parts):
                break
            sent.append(oldest.pop())
        return sent, given_up


OnLate = Callable[[Any], None]
_UNKNOWN_OUTCOMES: Final = ("shard_unavailable", "shutting_down", "storage_unavailable", "internal")


class PendingCall(msgspec.Struct, eq=False):
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
        self._requests: dict[int, PendingCall] = {}
        self._late: dict[int, OnLate] = {}
        """Listeners of expired requests. A shard that comes back answers all that is in its ring, so none stays."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: int, request: PendingCall) -> None:
        self._requests[request_id] = request

    def get(self, request_id: int) -> PendingCall | None:
        """None: its time is over."""
        return self._requests.get(request_id)

    def answer(self, request_id: int, message: memoryview, decode: Callable[[memoryview], object]) -> None:
        """Hand over the answer, which `decode` makes a reply or a TopicsError."""
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

    def withdraw(self, request_id: int) -> PendingCall | None:
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
    """Tell whether a request that failed with this may be done all the same, or may yet be. If not, its shard has said
    so or has never seen it: there is nothing to take back, and a shard whose ring is full is not told of it.
    """
    return not isinstance(error, TopicsError) or error.code in _UNKNOWN_OUTCOMES


def fail(future: asyncio.Future[Any], error: TopicsError) -> None:
    """Fail the future; nothing happens when nobody waits any more."""
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

    def put(self, kind: MessageKind, request_id: int, parts: list[Part], length_bytes: int) -> list[Part]:
        """The whole message in its file, at once; what the ring is to hold. OSError: nothing of it is there."""
        try:
            self.reserve(request_id, length_bytes)
            self.write(request_id, parts)
        except OSError:
            self.drop(request_id)
            raise
        return self.reference(kind, request_id)

    def reference(self, kind: MessageKind, request_id: int) -> list[Part]:
        """Return what the ring is to hold of a request that is in its file."""
        return messages.encode_reference(kind, request_id, self.path(request_id))

    def path(self, request_id: int) -> str:
        return f"{SHM_ROOT}/{self._prefix}{request_id}"

    def reserve(self, request_id: int, size_bytes: int) -> None:
        """Room for a request, before `write`; OSError (ENOSPC) where there is none: indexes grow in /dev/shm, too."""
        if not self.budget.try_reserve(size_bytes):
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
