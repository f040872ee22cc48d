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
        if self._waiting or self.held_bytes + size_bytes > most_bytes:
            await self._room_for(size_bytes, most_bytes)
        else:
            self.held_bytes += size_bytes
        if task not in self._holding:
            task.add_done_callback(self._free_all_of)
        self._holding[task] = self._holding.get(task, 0) + size_bytes

    def let_go(self) -> None:
        """The current task keeps next to nothing of what it read."""
        task = asyncio.current_task()
        assert task is not None
        self._free_all_of(task)

    def _free_all_of(self, task: asyncio.Task[Any]) -> None:
        size_bytes = self._holding.pop(task, 0)
        if size_bytes:
            self._free(size_bytes)

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
                self._free(size_bytes)
            if not isinstance(error, TimeoutError):
                raise
            what = f"the bodies of requests hold all of the {most_bytes} bytes that they may; send it again later"
            detail = {"limit": "body_bytes", "max": most_bytes, "retry_after_ms": RETRY_AFTER_MS}
            raise TopicsError("throttled", what, detail) from None

    def _free(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.held_bytes + self._waiting[0].size_bytes <= self._waiting[0].most_bytes:
            waiter = self._waiting.popleft()
            if not waiter.room.cancelled():
                self.held_bytes += waiter.size_bytes
                waiter.room.set_result(None)


bodies: Final = BodyBudget()
"""The long ones of this process: there is one event loop, and all routes share it."""
medium_bodies: Final = BodyBudget()
"""Those from COUNTED_FROM_BYTES to LONG_BYTES."""
