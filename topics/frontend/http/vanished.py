"""Clients whose host has vanished: it lost its power, or the way to it, and sends no reset.

TCP by itself tries for a quarter of an hour. Meanwhile heartbeats, and jobs to a worker on it, fit into the kernel's
buffer, and each lease that ends is one more job dealt to nobody. The kernel knows better: something was sent, and for
`gone_ms` not one acknowledgement came, not even that of a client that has no room.

Not TCP_USER_TIMEOUT: with it (45 s, Linux 6.18), a reader with a small buffer that stalled for 3 s now and then was
reset after 90 s, each time; without it, never. Its time seems to run on from one full window to the next.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Collection
from typing import Final, Protocol

AT_ONCE: Final = 256
"""Connections looked at in one turn of the event loop: some 0.3 ms."""
LOOKS: Final = 3
"""In the time after which a client is gone."""
_TCP_INFO: Final = struct.Struct("=24xI28xI")
"""Of `struct tcp_info` (linux/tcp.h): tcpi_unacked, in segments; tcpi_last_ack_recv, in ms."""


class Connected(Protocol):
    """One connection, as its kernel end can be asked about it."""

    @property
    def end(self) -> socket.socket | None:
        """None when it is closing."""
        ...

    def abort(self) -> None: ...


def has_vanished(end: socket.socket, gone_ms: int) -> bool:
    """Whether what was sent over a connection has been without any answer for so long."""
    try:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return False  # a Unix socket: its other end is here
    unacked: int
    unacked, last_ack_ms = _TCP_INFO.unpack(info)
    return unacked > 0 and last_ack_ms > gone_ms


class Lookout:
    """Cuts those of `connections` whose clients have vanished."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Collection[Connected], gone_ms: int) -> None:
        self._loop = loop
        self._connections = connections
        self._gone_ms = gone_ms
        self._todo: list[Connected] = []
        self._timer: asyncio.Handle | None = None

    def watch(self) -> None:
        """There is a connection. Can be repeated."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._gone_ms / 1000 / LOOKS, self._look)

    def _look(self) -> None:
        self._todo = list(self._connections)
        self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        for _ in range(min(AT_ONCE, len(self._todo))):
            connection = self._todo.pop()
            end = connection.end
            if end is not None and has_vanished(end, self._gone_ms):
                connection.abort()
        if self._todo:
            self._timer = self._loop.call_soon(self._go_on)
        elif self._connections:
            self.watch()
