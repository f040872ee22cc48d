"""Clients whose host has vanished: it lost its power or its network, and sends no reset.

TCP by itself tries for a quarter of an hour. Meanwhile heartbeats, and jobs for a worker on that host, fit into the
kernel's buffer, and each lease that ends hands one more job to nobody. But the kernel knows that data was sent, and
that no acknowledgement came for `vanished_ms`, not even the one that a client without room sends.

TCP_USER_TIMEOUT is no way out: with it (45 s, Linux 6.18) a reader with a small buffer that stalled for 3 s now and
then was reset after 90 s each time, and never without it. Its time seems to run on from one full window to the next.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Collection
from typing import Final, Protocol

from topics.core.clock import Clock

CHECKED_PER_TURN: Final = 256
"""Connections checked in one turn of the event loop: some 0.3 ms."""
CHECKS_PER_TIMEOUT: Final = 3
"""Number of checks in `vanished_ms`, a time that begins with the first check that finds unacknowledged data."""
_TCP_INFO: Final = struct.Struct("=24xI28xI")
"""The fields of `struct tcp_info` (linux/tcp.h): tcpi_unacked, in segments; tcpi_last_ack_recv, in ms."""


class TcpConnection(Protocol):
    """A connection whose socket can be checked."""

    @property
    def open_socket(self) -> socket.socket | None: ...  # None while it is closing
    def abort(self) -> None: ...


def unacknowledged_ms(end: socket.socket) -> int | None:
    """Return the ms since the last acknowledgement; None if all that was sent is acknowledged."""
    try:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None  # a Unix socket: its other end is on this host
    unacked: int
    last_ack_ms: int
    unacked, last_ack_ms = _TCP_INFO.unpack(info)
    return last_ack_ms if unacked else None


class VanishedClients:
    """Checks `connections` regularly, and aborts those whose clients have vanished. It notes for each connection since
    which monotonic ms no data was acknowledged: the kernel's last acknowledgement may be older than the data.
    """

    def __init__(self, connections: Collection[TcpConnection], vanished_ms: int, clock: Clock) -> None:
        self._connections = connections
        self._vanished_ms = vanished_ms
        self._clock = clock
        self._since_ms: dict[TcpConnection, int] = {}
        self._todo: list[TcpConnection] = []
        self._timer: asyncio.Handle | None = None

    def start(self) -> None:
        """Check as long as there are connections. Idempotent."""
        if self._timer is None:
            every_s = self._vanished_ms / 1000 / CHECKS_PER_TIMEOUT
            self._timer = asyncio.get_running_loop().call_later(every_s, self.check)

    def has_vanished(self, connection: TcpConnection, unacknowledged_ms: int | None, now_ms: int) -> bool:
        """Note one check of a connection, and return True if its client has vanished."""
        if unacknowledged_ms is None:
            self._since_ms.pop(connection, None)
            return False
        since_ms = self._since_ms.get(connection, now_ms)
        if unacknowledged_ms < now_ms - since_ms:
            since_ms = now_ms
        self._since_ms[connection] = since_ms
        return now_ms - since_ms >= self._vanished_ms

    def check(self) -> None:
        """Check all connections, some of them in each turn of the event loop."""
        for closed in self._since_ms.keys() - set(self._connections):
            del self._since_ms[closed]
        self._todo = list(self._connections)
        self._check_some()

    def _check_some(self) -> None:
        self._timer = None
        now_ms = self._clock.monotonic_ms()
        for _ in range(min(CHECKED_PER_TURN, len(self._todo))):
            connection = self._todo.pop()
            end = connection.open_socket
            if end is not None and self.has_vanished(connection, unacknowledged_ms(end), now_ms):
                connection.abort()
        if self._todo:
            self._timer = asyncio.get_running_loop().call_soon(self._check_some)
        elif self._connections:
            self.start()
