"""Clients whose host has vanished: it lost its power, or the way to it, and sends no reset.

TCP by itself tries for a quarter of an hour. Meanwhile heartbeats, and jobs to a worker on it, fit into the kernel's
buffer, and each lease that ends is one more job dealt to nobody. The kernel knows better: something was sent, and for
`gone_ms` after that not one acknowledgement came, not even that of a client that has no room.

Not TCP_USER_TIMEOUT: with it (45 s, Linux 6.18), a reader with a small buffer that stalled for 3 s now and then was
reset after 90 s, each time; without it, never. Its time seems to run on from one full window to the next.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Collection
from typing import Final, Protocol

from topics.core.clock import Clock

AT_ONCE: Final = 256
"""Connections looked at in one turn of the event loop: some 0.3 ms."""
LOOKS: Final = 3
"""In the time after which a client is gone, which the first look that sees something unanswered begins."""
_TCP_INFO: Final = struct.Struct("=24xI28xI")
"""Of `struct tcp_info` (linux/tcp.h): tcpi_unacked, in segments; tcpi_last_ack_recv, in ms."""


class Connected(Protocol):
    """One connection, as its kernel end can be asked about it."""

    @property
    def end(self) -> socket.socket | None:
        """None when it is closing."""
        ...

    def abort(self) -> None: ...


def unanswered_ms(end: socket.socket) -> int | None:
    """How long ago the last acknowledgement came; None when there is nothing to acknowledge."""
    try:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None  # a Unix socket: its other end is here
    unacked: int
    last_ack_ms: int
    unacked, last_ack_ms = _TCP_INFO.unpack(info)
    return last_ack_ms if unacked else None


class Silences:
    """Who was sent something and has not acknowledged anything since. The time of the last acknowledgement does not say
    that: before something was sent there was nothing to acknowledge. `now_ms` is of a monotonic clock.
    """

    def __init__(self, gone_ms: int) -> None:
        self._gone_ms = gone_ms
        self._since_ms: dict[Connected, int] = {}
        """When they were first seen so."""

    def has_vanished(self, connection: Connected, unanswered_ms: int | None, now_ms: int) -> bool:
        """What a look at it says; of all connections once, before `forget_all_but`."""
        if unanswered_ms is None:
            self._since_ms.pop(connection, None)
            return False
        since_ms = self._since_ms.get(connection, now_ms)
        if unanswered_ms < now_ms - since_ms:
            since_ms = now_ms
        self._since_ms[connection] = since_ms
        return now_ms - since_ms >= self._gone_ms

    def forget_all_but(self, connections: Collection[Connected]) -> None:
        """The others are closed."""
        for connection in self._since_ms.keys() - set(connections):
            del self._since_ms[connection]


class Lookout:
    """Cuts those of `connections` whose clients have vanished."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connections: Collection[Connected], gone_ms: int, clock: Clock
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._connections = connections
        self._silences = Silences(gone_ms)
        self._every_s = gone_ms / 1000 / LOOKS
        self._todo: list[Connected] = []
        self._timer: asyncio.Handle | None = None

    def watch(self) -> None:
        """There is a connection. Can be repeated."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._every_s, self._look)

    def _look(self) -> None:
        self._silences.forget_all_but(self._connections)
        self._todo = list(self._connections)
        self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        now_ms = self._clock.monotonic_ms()
        for _ in range(min(AT_ONCE, len(self._todo))):
            connection = self._todo.pop()
            end = connection.end
            if end is not None and self._silences.has_vanished(connection, unanswered_ms(end), now_ms):
                connection.abort()
        if self._todo:
            self._timer = self._loop.call_soon(self._go_on)
        elif self._connections:
            self.watch()
