"""What one HTTP/1.1 connection sends, and what of it is kept for a client that takes it slowly.

    write ─▶ the transport keeps more than `write_high_water_bytes` ─▶ full ─▶ emptied: all of it is the kernel's
                                                                        └▶ lost: nobody will take it

Whoever writes has to wait while it is full. How long that may take is `http1_deadlines`' to say, and how much of it all
clients together may leave there `kept_answers`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics.frontend.http.http1_deadlines import Deadlines
from topics.frontend.http.kept_answers import KeptAnswers

JOIN_MAX_BYTES: Final = 16 * 1024
"""Up to here, joining head and body for one write is cheaper than handing the transport two buffers."""


class Outflow:
    """The connection says when it is `full`, `emptied` or `lost`; the exchange and its push stream write."""

    __slots__ = ("_can_write", "_deadlines", "_high_water_bytes", "_kept", "_transport", "_written_bytes", "writable")

    def __init__(
        self, transport: asyncio.Transport, high_water_bytes: int, deadlines: Deadlines, kept: KeptAnswers
    ) -> None:
        self._transport = transport
        self._high_water_bytes = high_water_bytes
        self._deadlines = deadlines
        self._kept = kept
        self._can_write = asyncio.Event()
        """Meaningless while `writable`."""
        self._written_bytes = 0  # by the last call of `write` or `write_two`
        self.writable = True
        self._limit_buffer()

    # The exchange's calls.

    @property
    def closing(self) -> bool:
        """Nothing can be written any more."""
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes, or let the transport keep them."""
        self._written_bytes = len(data)
        self._transport.write(data)

    @property
    def write_now(self) -> Callable[[bytes], None]:
        """`write` without a frame of ours in between, for those who do nothing else."""
        return self._transport.write

    def write_two(self, first: bytes, second: bytes) -> None:
        """Send both in one write."""
        self._written_bytes = len(first) + len(second)
        if len(second) <= JOIN_MAX_BYTES:
            self._transport.write(first + second)
        else:
            self._transport.writelines((first, second))

    async def wait_writable(self) -> None:
        """Until the client has caught up, or is gone."""
        await self._can_write.wait()

    async def wait_emptied(self) -> None:
        """Until the transport keeps nothing for the client, or it is gone; it is to take that as all else."""
        self._transport.set_write_buffer_limits(high=0)
        try:
            if not self.writable:
                await self._can_write.wait()
        finally:
            if not self.closing:
                self._limit_buffer()

    def _limit_buffer(self) -> None:
        # The client has caught up when it has all: uvloop keeps the whole of an answer of which a byte is to be sent.
        self._transport.set_write_buffer_limits(high=self._high_water_bytes, low=0)

    # The calls of those who count what is kept, too.

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the transport keeps for the client."""
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Cut the connection: the client must not take what it has for a whole answer."""
        self._transport.abort()

    # The connection's calls.

    def full(self, counted_elsewhere: bool) -> None:
        """More than `write_high_water_bytes` are kept."""
        self.writable = False
        self._can_write.clear()
        self._deadlines.begin_taking(self.buffered_bytes)
        if not counted_elsewhere:
            self._kept.hold(self, self._written_bytes)

    def leave(self) -> None:
        """The answer is written, and not taken. That of a stream counts, too: the hub knows of it no more."""
        self._kept.hold(self)

    def emptied(self) -> None:
        """The client has caught up."""
        self.writable = True
        self._deadlines.end_taking()
        self._kept.let_go(self)
        self._can_write.set()

    def lost(self) -> None:
        """It is gone; nobody is to wait for it."""
        self._kept.let_go(self)
        self._can_write.set()
