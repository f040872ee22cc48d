"""Listeners, life span and drain of a frontend's HTTP; and what stays Hypercorn's: h2c, WebSocket, and the stock
server.

One path serves both settings of `http_protocol`: with `httptools` a connection starts as ours (`http1`) and is handed
to Hypercorn when it turns out to be another protocol; with `stock` it is Hypercorn's from its first byte.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Literal, cast

from h2.connection import H2Connection
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.lifespan import Lifespan
from hypercorn.config import Config

from topics.frontend.asgi import DELIVER, TRANSPORT, AsgiApp, Message, Receive, Scope, Send
from topics.frontend.attended import AttendedClock
from topics.frontend.http import delivery, http2_buffer, patience, websocket_stream
from topics.frontend.http.http1_connections import Connections
from topics.frontend.http.http1_factory import Http1Factory
from topics.frontend.http.http1_parser import HttpLimits
from topics.frontend.http.hypercorn_connection import Connection, ConnectionContext, WatchedProtocol
from topics.frontend.http.unread import Unread
from topics.log import get_logger

HttpProtocol = Literal["httptools", "stock"]
WS_PING_INTERVAL_S: Final = 30.0
"""Proxies close what is silent; a client that is gone without a word is found."""
_WS_EXTENSIONS: Final = re.compile(rb"(?i)\r\nsec-websocket-extensions:[^\r\n]*")

log = get_logger()


async def serve(
    app: AsgiApp,
    sockets: list[socket.socket],
    limits: HttpLimits,
    http_protocol: HttpProtocol,
    shutdown: asyncio.Event,
    *,
    grace_ms: int = 10_000,
    connections: Connections | None = None,
    clock: AttendedClock | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve `app` on bound sockets, which other processes may share, until `shutdown`; then drain and return.

    Draining has `grace_ms`; what is not done by then is cut, requests not yet answered get `503 shutting_down`.
    `connections` counts and holds the HTTP/1.1 connections (the caller may pass its own to read them); `clock` is the
    loop's, and attended until the end; `on_ready` is called once when the app has started and the sockets are being
    listened on. The sockets are closed at the end.
    Raises what the app's start raises.
    """
    loop = asyncio.get_running_loop()
    config = _hypercorn_config(limits)
    websocket_stream.install()
    http2_buffer.install()
    state: dict[str, Any] = {}
    lifespan = Lifespan(ASGIWrapper(cast(Any, app)), config, loop, state)
    lifespan_task = loop.create_task(lifespan.handle_lifespan())
    await lifespan.wait_for_startup()
    if lifespan_task.done():
        lifespan_task.result()  # an app without life span has ended without an error

    clock = clock if clock is not None else AttendedClock(loop.time)
    connections = connections if connections is not None else Connections(clock=clock)
    others = HypercornConnections(app, config, state, limits, connections, clock)
    factory: Callable[[], asyncio.BaseProtocol] = (
        others.protocol
        if http_protocol == "stock"
        else Http1Factory(app, limits, connections, others.take, state, clock)
    )
    attending = loop.create_task(clock.attend())
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
                await others.wait_closed()
        except TimeoutError:
            log.warning(
                "connections were cut at the end of the grace period",
                grace_ms=grace_ms,
                requests=len(connections.tasks),
                connections=len(connections.open) + len(others.tasks),
            )
        finally:
            await connections.abort()
            await others.abort()
            await lifespan.wait_for_shutdown()
            for task in (lifespan_task, attending):
                task.cancel()
            await asyncio.gather(lifespan_task, attending, return_exceptions=True)


class HypercornConnections:
    """Connections that Hypercorn's own protocols serve."""

    def __init__(
        self,
        app: AsgiApp,
        config: Config,
        state: dict[str, Any],
        limits: HttpLimits,
        connections: Connections,
        clock: AttendedClock,
    ) -> None:
        self._connections = connections
        self._places = connections.places
        self._app = app
        self._config = config
        self._state = state
        self._limits = limits
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._contexts: set[ConnectionContext] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def protocol(self, *, has_place: bool = False) -> asyncio.StreamReaderProtocol:
        """The protocol of a connection that is Hypercorn's; `has_place`: it counts among all connections already."""
        reader = asyncio.StreamReader(limit=self._limits.read_high_water_bytes, loop=self._loop)
        watched = partial(Unread, self._limits, self._clock, self._loop)
        context = ConnectionContext(watched, self._connections.kept)
        return WatchedProtocol(reader, partial(self._connected, context, has_place), self._loop, context)

    def take(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over an open transport and the bytes that were read from it."""
        data = _without_compression(data)
        protocol = self.protocol(has_place=True)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)

    def _connected(
        self, context: ConnectionContext, has_place: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._places is not None and not has_place and not self._places.claim():
            self._start(context, self._turn_away(reader, writer))
            return
        writer.transport.set_write_buffer_limits(high=self._limits.write_high_water_bytes)
        self._start(context, self._serve(context, reader, writer))

    def _start(self, context: ConnectionContext, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self.tasks.add(task)
        self._contexts.add(context)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: self._contexts.discard(context))
        if self._connections.draining:  # handed over in the midst of that
            context.end.set_now()

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer, stays = self._connections.turn_away()
        writer.write(answer)
        if stays:
            try:
                writer.write_eof()
                # As `Http1Protocol._end`: a reset must not overtake the answer.
                async with asyncio.timeout(self._limits.linger_ms / 1000):
                    while await reader.read(self._limits.read_high_water_bytes):
                        pass
            except (TimeoutError, OSError):
                pass
            finally:
                self._connections.turned_away -= 1
        writer.close()

    async def _serve(
        self, context: ConnectionContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            state = {**self._state, TRANSPORT: writer.transport}
            app = ASGIWrapper(cast(Any, partial(self._run, context)))
            await Connection(context, self._limits, app, self._loop, self._config, context, state, reader, writer)
        except Exception:
            log.exception("connection failed")
        finally:
            context.ended()
            if self._places is not None:
                self._places.release()

    async def _run(self, context: ConnectionContext, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        context.enter(task)
        if scope["type"] != "websocket":
            scope["extensions"].setdefault(DELIVER, partial(delivery.deliver, context.emptied))
            await patience.run(self._app, self._limits, self._clock, scope, receive, send)
            return
        disconnected = False

        async def receive_noting() -> Message:
            nonlocal disconnected
            message = await receive()
            disconnected = message["type"] == "websocket.disconnect"
            return message

        try:
            await self._app(scope, receive_noting, send)
        finally:
            if not disconnected:
                context.drop(receive)
            if scope["http_version"] == "1.1":
                context.closed.set()

    def begin_drain(self) -> None:
        """Close what is idle, and what is busy when it becomes so."""
        for context in list(self._contexts):
            context.end.set_now()

    async def wait_closed(self) -> None:
        """Until no connection is left."""
        while self.tasks:
            await asyncio.wait(self.tasks)

    async def abort(self) -> None:
        """Cut all that is left."""
        if tasks := list(self.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)


def _hypercorn_config(limits: HttpLimits) -> Config:
    config = Config()
    config.errorlog = logging.getLogger("topics.http")
    config.include_date_header = False
    config.include_server_header = False
    config.keep_alive_timeout = limits.keep_alive_timeout_ms / 1000
    config.keep_alive_max_requests = 2**62  # the default closes busy connections
    config.h11_max_incomplete_size = limits.max_header_bytes
    config.h2_max_header_list_size = limits.max_header_bytes
    # Hypercorn announces it, but its decoder goes by h2's own constant.
    H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE = limits.max_header_bytes
    config.websocket_max_message_size = limits.max_body_bytes
    config.websocket_ping_interval = WS_PING_INTERVAL_S
    return config


def _without_compression(data: bytes) -> bytes:
    """An upgrade without the client's offer to compress: a message of 8 MiB would hold up every other client while it
    is packed, and 64 KiB can unpack to 64 MiB."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _WS_EXTENSIONS.sub(b"", head) + end + rest
