"""Requests on their way to a shard: those waiting for room in its ring, unanswered ones, and those too long for it.

offer ──▶ [ throttled   ] ─┐                 ┌─▶ ring ──▶ the shard
      ──▶ [ unthrottled ] ─┼─ oldest first ──┤
      ──▶ [ posts       ] ─┘                 └─▶ given up: its time is over, and it has not reached the shard

A `SendQueue` stands in front of each ring. Each of its three queues is ordered by age, and has its own bound, so that
many of one kind take no room from another. All are sent in the order of `request_id`: nothing overtakes a post. A post
is never refused, since nobody would notice. While their queue is full no request is accepted, which might leave more.
A request that is too long for a ring waits in a file in shared memory (`Spills`), and the ring holds only its path.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
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
"""Time that a throttled request waits for room in a full ring before it is refused."""
PRESSED_WAIT_S: Final = 0.05
"""Time that a throttled request waits for room under the greatest pressure. It is not 0: clients that repeat a refused
request at once would use up the time of this process, and less would be done than there is room for."""
SPILL_INLINE_BYTES_MAX: Final = 1 << 20
"""Longest message that is written to shared memory, and removed from it, on the event loop; a thread does that with
longer ones."""


class QueuedMessage(msgspec.Struct):
    """A message for a ring. A post has no end (`expires_s`). Pressure cuts no time of an `unthrottled` request."""

    parts: list[Part]
    length_bytes: int
    request_id: int
    since_s: float
    expires_s: float | None
    unthrottled: bool = False


class SendOutcome(Enum):
    SENT = 0
    WAITS = 1
    REFUSED = 2


class _BoundedQueue:
    """The waiting messages of one kind, oldest first, and their budget."""

    __slots__ = ("budget", "messages")

    def __init__(self, limit: Limit) -> None:
        self.messages: deque[QueuedMessage] = deque()
        self.budget = Budget(limit)

    def has_room_for(self, size_bytes: int) -> bool:
        return len(self.messages) < self.budget.limit.most_count and self.budget.fits(size_bytes)

    def add(self, message: QueuedMessage) -> None:
        self.messages.append(message)
        self.budget.held_bytes += message.length_bytes

    def pop(self) -> QueuedMessage:
        message = self.messages.popleft()
        self.budget.release(message.length_bytes)
        return message


class SendQueue:
    """The messages for one shard. They are sent in the order of their `request_id`, which grows with every message."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.throttled = _BoundedQueue(limits.RING_WAITERS)
        self._unthrottled = _BoundedQueue(limits.RING_WAITERS)
        self.posts = _BoundedQueue(limits.RING_POSTS)
        self._queues = (self.throttled, self._unthrottled, self.posts)

    @property
    def message_max_bytes(self) -> int:
        return self._ring.message_max_bytes

    @property
    def waiting(self) -> int:
        return len(self.throttled.messages) + len(self._unthrottled.messages) + len(self.posts.messages)

    @property
    def posts_full(self) -> bool:
        """True while the queue of posts is full: a post that can be left out should be."""
        return not self.posts.has_room_for(1)

    @property
    def fullness(self) -> float:
        """The fullness of the ring, 0 to 1; 1 while a message waits."""
        return 1.0 if self.waiting else self._ring.pending_bytes / self._ring.capacity_bytes

    def offer(self, message: QueuedMessage) -> SendOutcome:
        """Send the message, or queue it if there is room in its queue."""
        if not self.waiting and self._ring.push(*message.parts):
            return SendOutcome.SENT
        if message.expires_s is None:
            self.posts.add(message)
            return SendOutcome.WAITS
        queue = self._unthrottled if message.unthrottled else self.throttled
        if self.posts_full or not queue.has_room_for(message.length_bytes):
            return SendOutcome.REFUSED
        queue.add(message)
        return SendOutcome.WAITS

    def retry(self, now_s: float, pressed: bool) -> tuple[list[QueuedMessage], list[QueuedMessage]]:
        """Send what the ring has room for now. Return (the messages sent, those whose time was over)."""
        sent: list[QueuedMessage] = []
        given_up: list[QueuedMessage] = []
        for queue in (self.throttled, self._unthrottled):
            while queue.messages:
                first = queue.messages[0]
                expires_s = first.expires_s
                assert expires_s is not None, "a message without an end is a post"
                if pressed and queue is self.throttled:
                    expires_s = min(expires_s, first.since_s + PRESSED_WAIT_S)
                if expires_s > now_s:
                    break
                given_up.append(queue.pop())
        while busy := [queue for queue in self._queues if queue.messages]:
            oldest = min(busy, key=lambda queue: queue.messages[0].request_id)
            if not self._ring.push(*oldest.messages[0].parts):
                break
            sent.append(oldest.pop())
        return sent, given_up


OnLate = Callable[[Any], None]
_UNKNOWN_OUTCOMES: Final = ("shard_unavailable", "shutting_down", "storage_unavailable", "internal")


class PendingRequest(msgspec.Struct, eq=False):
    """A request without an answer yet. An `unthrottled` one waits for room in the ring as long as for its answer."""

    future: asyncio.Future[Any]
    shard: int
    expires_s: float
    unthrottled: bool
    on_late: OnLate | None
    throttled_s: float = 0.0
    """The time for which it waited for room in the ring."""


class PendingRequests(dict[int, PendingRequest]):
    """The requests without an answer, by id. All are given the same time, so the first ones expire first."""

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, OnLate] = {}
        """Listeners of expired requests. A restarted shard answers every request in its ring, so none stays here."""

    def answer(self, request_id: int, message: memoryview, decode: Callable[[memoryview], object]) -> None:
        """Hand over the answer. `decode` makes a reply or a TopicsError of the message."""
        request = self.pop(request_id, None)
        if request is None or request.future.done():
            # The answer may be to an earlier incarnation, too late, or a second one, after the shard restarted.
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

    def withdraw(self, request_id: int) -> PendingRequest | None:
        """Remove a request that has reached no shard, and return it; None if its time is over."""
        self._late.pop(request_id, None)
        return self.pop(request_id, None)

    def expire(self, now_s: float, failure: Callable[[int], TopicsError]) -> None:
        """Fail the requests whose time is over. `failure` makes the error for a shard."""
        overdue = itertools.takewhile(lambda item: item[1].expires_s <= now_s, self.items())
        for request_id, request in list(overdue):
            del self[request_id]
            fail(request.future, failure(request.shard))
            if request.on_late is not None:
                self._late[request_id] = request.on_late

    def fail_all(self, error: Callable[[], TopicsError]) -> None:
        for request in self.values():
            fail(request.future, error())
        self.clear()


def is_outcome_unknown(error: BaseException) -> bool:
    """Tell whether a request that failed with this error may have been carried out, or may yet be."""
    return not isinstance(error, TopicsError) or error.code in _UNKNOWN_OUTCOMES


def fail(future: asyncio.Future[Any], error: TopicsError) -> None:
    if not future.done():
        future.set_exception(error)


class Spills:
    """The files of long requests. One is removed when its answer comes, however late: the shard may read it."""

    def __init__(self, identity: str, frontend: int) -> None:
        self._identity = identity
        self._prefix = f"topics-{identity}-spill-{frontend}-"
        self._sizes: dict[int, int] = {}
        self.budget = Budget(limits.SPILLS)

    def remove_leftovers(self) -> None:
        """Remove the files of earlier incarnations: nobody awaits those answers. A shard ignores a missing file."""
        for name in objects(self._identity):
            if name.startswith(self._prefix):
                os.unlink(f"{SHM_ROOT}/{name}")

    def put(self, kind: MessageKind, request_id: int, parts: list[Part], length_bytes: int) -> list[Part]:
        """Write the whole message to its file. Return the message for the ring. After OSError no file is left."""
        try:
            self.reserve(request_id, length_bytes)
            self.write(request_id, parts)
        except OSError:
            self.drop(request_id)
            raise
        return self.reference(kind, request_id)

    def reference(self, kind: MessageKind, request_id: int) -> list[Part]:
        return messages.encode_reference(kind, request_id, self.path(request_id))

    def path(self, request_id: int) -> str:
        return f"{SHM_ROOT}/{self._prefix}{request_id}"

    def reserve(self, request_id: int, size_bytes: int) -> None:
        """Take room for a request before `write`. OSError (ENOSPC) if there is none: indexes grow in /dev/shm, too."""
        if not self.budget.try_reserve(size_bytes):
            raise OSError(errno.ENOSPC, "too many long requests at once")
        self._sizes[request_id] = size_bytes

    def write(self, request_id: int, parts: list[Part]) -> None:
        """Write the whole message, or raise OSError. May run in a thread."""
        flags = os.O_EXCL | os.O_CLOEXEC
        with open(self.path(request_id), "wb", opener=lambda path, mode: os.open(path, mode | flags, 0o600)) as file:
            file.writelines(parts)

    def drop(self, request_id: int) -> None:
        """Remove the file of a request that was answered or never sent, if it has one."""
        size_bytes = self._sizes.pop(request_id, None)
        if size_bytes is None:
            return
        self.budget.release(size_bytes)
        remove = partial(Path(self.path(request_id)).unlink, missing_ok=True)
        if size_bytes <= SPILL_INLINE_BYTES_MAX:
            remove()
        else:  # 64 MB take 10 ms
            asyncio.get_running_loop().run_in_executor(None, remove)


def take_long_reply(path: str) -> memoryview | None:
    """Read and remove the file of a long reply. None: an earlier incarnation did, and died before it freed the ring."""
    try:
        with open(path, "rb") as file:
            reply = memoryview(file.read())
    except FileNotFoundError:
        return None
    os.unlink(path)
    return reply
