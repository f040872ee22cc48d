"""Requests whose shard has not answered yet, and who wants an answer also when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from topics.core.errors import TopicsError
from topics.shm.append_messages import AppendReply

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
