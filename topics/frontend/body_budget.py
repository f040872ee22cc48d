"""What the bodies of requests hold in the memory of one frontend, all together; short ones are not counted.

    read_body ──▶ hold(what is to come) ──▶ … unpacked, decoded ──▶ laid out, answered: the request's task ends ──▶ free
                     │ no room: first come, first served, for ROOM_WAIT_S    └─▶ let_go: little of it is kept ──▶ free
                     └─▶ 429 throttled

A body waits for room before it is read on, so that its client is held up by TCP, and holds what it got until its
request is over, or needs it no more. Of two that have a part each and wait for the rest one is refused in the end: room
for the other. Bodies of up to a MiB have a budget of their own: four clients that send theirs slowly fill that of the
long ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, Final

import msgspec

from topics.core.errors import TopicsError

BODIES_MAX_BYTES: Final = 256 * 2**20
"""Bytes of all bodies of a budget, packed and unpacked; or four of the longest there may be, if that is more. What is
made of long ones while they are laid out is about twice as much again."""
COUNTED_FROM_BYTES: Final = 64 << 10
"""What is shorter is not counted: a connection, or stream of HTTP/2, has one of those at most."""
LONG_BYTES: Final = 1 << 20
"""What is longer is counted apart."""
ROOM_WAIT_S: Final = 2.0
RETRY_AFTER_MS: Final = 1000


class _Waiter(msgspec.Struct, eq=False):
    room: asyncio.Future[None]
    size_bytes: int
    most_bytes: int


class BodyBudget:
    """Of one process and one kind of bodies. Called on its event loop, by the tasks of the requests themselves."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._holding: dict[asyncio.Task[Any], int] = {}
        self._waiting: deque[_Waiter] = deque()

    async def hold(self, size_bytes: int, body_max_bytes: int) -> None:
        """So much more, until the current task ends or lets go; `body_max_bytes` is what one body may have at most.

        Raises `throttled` when there is no room for ROOM_WAIT_S.
        """
        task = asyncio.current_task()
        assert task is not None
        most_bytes = max(BODIES_MAX_BYTES, 4 * body_max_bytes)
        if not self.take(size_bytes, body_max_bytes):
            await self._room_for(size_bytes, most_bytes)
        if task not in self._holding:
            task.add_done_callback(self._free_all_of)
        self._holding[task] = self._holding.get(task, 0) + size_bytes

    def take(self, size_bytes: int, body_max_bytes: int) -> bool:
        """So much more, until it is given back; False: there is no room now."""
        if self._waiting or self.held_bytes + size_bytes > max(BODIES_MAX_BYTES, 4 * body_max_bytes):
            return False
        self.held_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """What was taken."""
        self.held_bytes -= size_bytes
        self._let_in()

    def let_go(self) -> None:
        """The current task keeps next to nothing of what it read."""
        task = asyncio.current_task()
        assert task is not None
        self._free_all_of(task)

    def _free_all_of(self, task: asyncio.Task[Any]) -> None:
        size_bytes = self._holding.pop(task, 0)
        if size_bytes:
            self.give_back(size_bytes)

    async def _room_for(self, size_bytes: int, most_bytes: int) -> None:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), size_bytes, most_bytes)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                await waiter.room
        except BaseException as error:
            if waiter.room.cancelled():
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self._let_in()
            else:  # it was let in, and ended in the same moment
                self.give_back(size_bytes)
            if not isinstance(error, TimeoutError):
                raise
            raise no_room(most_bytes) from None

    def _let_in(self) -> None:
        while self._waiting and self.held_bytes + self._waiting[0].size_bytes <= self._waiting[0].most_bytes:
            waiter = self._waiting.popleft()
            if not waiter.room.cancelled():
                self.held_bytes += waiter.size_bytes
                waiter.room.set_result(None)


class Share:
    """Of both budgets, for a message of a WebSocket that comes in pieces: until nobody has it any more, nor the message
    that it is kept with.
    """

    def __init__(self, body_max_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._body_max_bytes = body_max_bytes
        self._medium_bytes = self._long_bytes = 0

    def reach(self, size_bytes: int) -> bool:
        """It is so long now; False: there is no room for that."""
        while self._medium_bytes + self._long_bytes < size_bytes:
            if self._medium_bytes < LONG_BYTES:
                if not medium_bodies.take(COUNTED_FROM_BYTES, LONG_BYTES):
                    return False
                self._medium_bytes += COUNTED_FROM_BYTES
            else:
                if not bodies.take(LONG_BYTES, self._body_max_bytes):
                    return False
                self._long_bytes += LONG_BYTES
        return True

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            # Not here: this may be any moment of any thread.
            self._loop.call_soon_threadsafe(medium_bodies.give_back, self._medium_bytes)
            self._loop.call_soon_threadsafe(bodies.give_back, self._long_bytes)


def no_room(most_bytes: int) -> TopicsError:
    """429: the budget is used up."""
    what = f"the bodies of requests hold all of the {most_bytes} bytes that they may; send it again later"
    detail = {"limit": "body_bytes", "max": most_bytes, "retry_after_ms": RETRY_AFTER_MS}
    return TopicsError("throttled", what, detail)


bodies: Final = BodyBudget()
"""The long ones of this process: there is one event loop, and all routes share it."""
medium_bodies: Final = BodyBudget()
"""Those from COUNTED_FROM_BYTES to LONG_BYTES."""
