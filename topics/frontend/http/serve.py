"""The HTTP server of a frontend: its listeners, and its drain. Every connection starts as our HTTP/1.1 (`http1`), and
may become a WebSocket (`http1_websocket`), or is handed to Hypercorn if it turns out to be HTTP/2
(`hypercorn_connection`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from topics.frontend.asgi import AsgiApp
from topics.frontend.http import hypercorn_patches
from topics.frontend.http.connections import Connections
from topics.frontend.http.deadlines import HttpLimits, RunningClock
from topics.frontend.http.frame_budget import ClientAddresses
from topics.frontend.http.http1 import Http1Factory, ReadableBy
from topics.frontend.http.http1_websocket import Http1WebSockets
from topics.frontend.http.hypercorn_connection import HypercornConnections
from topics.log import LASTING_EVERY_S, SparseLines, get_logger

log = get_logger()


async def serve(
    app: AsgiApp,
    sockets: list[socket.socket],
    limits: HttpLimits,
    shutdown: asyncio.Event,
    *,
    grace_ms: int = 10_000,
    connections: Connections | None = None,
    clock: RunningClock | None = None,
    on_ready: Callable[[], None] | None = None,
    readable_by: ReadableBy = lambda _: b"",
) -> None:
    """Serve `app` on bound sockets, which other processes may share, until `shutdown`; then drain, close and return.
    After `grace_ms` of draining the rest is cut, and requests that are not answered yet get `503 shutting_down`.
    `clock` is the loop's; it runs until the end. `on_ready` is called once, when the sockets are being listened on.
    """
    loop = asyncio.get_running_loop()
    hypercorn_patches.install(limits.max_header_bytes)
    clock = clock if clock is not None else RunningClock(loop.time)
    connections = connections if connections is not None else Connections(clock=clock)
    cuts = SparseLines(LASTING_EVERY_S, loop.time)
    addresses = ClientAddresses(clock.time_s, lambda why: cuts.warning("a connection was cut", why=why))
    others = HypercornConnections(app, limits, connections, clock, addresses)
    websockets = Http1WebSockets(app, limits, connections, clock, addresses)
    factory = Http1Factory(app, limits, connections, websockets, others.take_over, clock, readable_by)
    clock_task = loop.create_task(clock.run())
    servers = [await loop.create_server(factory, sock=sock, backlog=1024) for sock in sockets]
    try:
        if on_ready is not None:
            on_ready()
        await shutdown.wait()
    finally:
        for server in servers:
            server.close()
        connections.begin_drain()
        others.begin_drain()
        try:
            async with asyncio.timeout(grace_ms / 1000):
                await connections.wait_closed()
        except TimeoutError:
            log.warning(
                "connections were cut at the end of the grace period",
                grace_ms=grace_ms,
                requests=len(connections.tasks) - len(others.open),
                connections=len(connections.open) + len(others.open),
            )
        finally:
            await connections.abort()
            clock_task.cancel()
