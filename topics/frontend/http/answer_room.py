"""Where a connection has many answers at once, as in HTTP/2: a long one is not made before it may be kept.

    take ─▶ made ─▶ keeps ─▶ its stream closes: taken by the client, reset by either, or the connection is gone
      └─▶ waits, first come, first served, for those before it; or until its own stream closes

A page that has been made is in memory, whatever is done with it then. So who makes it takes room first, for as long as
it may become. Room comes back by itself: a client that takes nothing of a stream has it reset (`unread`). Event streams
and short answers take none, and wait for nobody.
"""

from __future__ import annotations

import asyncio
from typing import Final

KEPT_MAX_BYTES: Final = 16 * 2**20
"""For one connection: two of the longest pages there are, so that one is ready while the other is taken."""


class AnswerRoom:
    """Of one connection, or of whatever else has `most_bytes` for the answers of many."""

    def __init__(self, most_bytes: int = KEPT_MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0
        self.waiting: dict[Place, None] = {}
        """In the order in which they came."""

    def fits(self, size_bytes: int) -> bool:
        """Whether it may be made now. One that is longer than all of the room is made when nothing else is kept."""
        return not self.held_bytes or self.held_bytes + size_bytes <= self._most_bytes

    def let_in(self) -> None:
        """Those for whom there is room now."""
        while self.waiting and (first := next(iter(self.waiting))).may_enter():
            del self.waiting[first]

    def close(self) -> None:
        """The connection is gone: no room that comes back now is a reason to make what nobody will take."""
        waiting, self.waiting = self.waiting, {}
        for place in waiting:
            place.close()


class Place:
    """What the answer of one stream holds of the room of its connection."""

    def __init__(self, room: AnswerRoom) -> None:
        self._room = room
        self._held_bytes = 0
        self._wanted_bytes = 0
        self._entry: asyncio.Future[bool] | None = None
        """While it waits: whether it has entered, and is not closed."""
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether its stream is: what is sent to it goes nowhere."""
        return self._closed

    async def take(self, most_bytes: int) -> None:
        """Waits until an answer of at most so many bytes may be made. What it held before it gives back.

        Raises ConnectionResetError when the stream is closed: nobody would take the answer.
        """
        if self.takes(most_bytes):
            return
        if self._closed or not await self._enter(most_bytes):
            raise ConnectionResetError("the client is gone")

    def takes(self, most_bytes: int) -> bool:
        """As `take`, and without waiting; False: there is no room now."""
        self.give_back()
        room = self._room
        if self._closed or room.waiting or not room.fits(most_bytes):
            return False
        self._keep(most_bytes)
        return True

    async def _enter(self, most_bytes: int) -> bool:
        self._wanted_bytes = most_bytes
        self._entry = asyncio.get_running_loop().create_future()
        self._room.waiting[self] = None
        try:
            return await self._entry
        finally:
            self._leave()

    def _leave(self) -> None:
        if self in self._room.waiting:
            del self._room.waiting[self]
            self._room.let_in()  # it may have been in the way of others

    def may_enter(self) -> bool:
        """The room's question to the first of those who wait; True: it has entered."""
        if not self._room.fits(self._wanted_bytes):
            return False
        self._keep(self._wanted_bytes)
        self._tell(True)
        return True

    def made(self, len_bytes: int) -> None:
        """So much is kept for the client, if it has taken room at all: what it took beyond that is for others."""
        if self._held_bytes:
            self._keep(len_bytes)
            self._room.let_in()

    def give_back(self) -> None:
        """Nothing is made, or not yet."""
        self.made(0)

    def close(self) -> None:
        """Its stream is closed, and nothing is kept any more."""
        self._closed = True
        self._leave()
        self._tell(False)
        self.give_back()

    def _keep(self, size_bytes: int) -> None:
        self._room.held_bytes += size_bytes - self._held_bytes
        self._held_bytes = size_bytes

    def _tell(self, entered: bool) -> None:
        if self._entry is not None and not self._entry.done():
            self._entry.set_result(entered)
