"""What all HTTP/1.1 connections of one process share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from topics.frontend.asgi import AsgiApp
from topics.frontend.attended import AttendedClock
from topics.frontend.http.http1 import Http1Protocol
from topics.frontend.http.http1_connections import Connections
from topics.frontend.http.http1_parser import HttpLimits
from topics.frontend.http.vanished import Lookout

HandOver = Callable[[asyncio.Transport, bytes], None]
"""Takes over a transport and the bytes read from it so far."""


class Http1Factory:
    """Makes the protocol of each accepted connection."""

    def __init__(
        self,
        app: AsgiApp,
        limits: HttpLimits,
        connections: Connections,
        hand_over: HandOver,
        state: dict[str, Any],
        clock: AttendedClock,
    ) -> None:
        self.app = app
        self.limits = limits
        self.connections = connections
        self.hand_over = hand_over
        self.state = state
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.lookout = Lookout(self.loop, connections.open, limits.vanished_after_ms, clock)
        self.unread_head_max_bytes = max(limits.read_high_water_bytes, limits.max_header_bytes)
        """A head waits in memory until it is whole: to stop reading in its midst would be to wait for ever."""

    def __call__(self) -> Http1Protocol:
        return Http1Protocol(self)
