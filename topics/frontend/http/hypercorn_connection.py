"""Connections that Hypercorn serves, HTTP/2 and WebSockets: each ends when its client is gone, and all at a stop.

Http1Protocol ─ hands over ─▶ HypercornConnections ─▶ WatchedProtocol ─▶ Connection, its app calls and streams
                                                           └ closed, or takes nothing ─▶ ConnectionContext
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import EventWrapper, WorkerContext
from hypercorn.config import Config

from topics.frontend.asgi import TRANSPORT, AsgiApp, Message, Receive, Scope, Send
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.http import hypercorn_deadlines
from topics.frontend.http.deadlines import AttendedClock, HttpLimits
from topics.frontend.http.http1 import Connections
from topics.frontend.http.hypercorn_deadlines import Unread
from topics.frontend.http.kept_answers import KeptAnswers
from topics.log import get_logger

GONE_S: Final = 2.0
"""How long app calls may go on whose client has closed its end of the connection."""
CLOSED_NAP_S: Final = 0.05
"""Between two looks of a pinger whose connection is already closed."""
WS_PING_INTERVAL_S: Final = 30.0
"""Proxies close what is silent; and a client that left without a word is found."""
_WS_EXTENSIONS: Final = re.compile(rb"(?i)\r\nsec-websocket-extensions:[^\r\n]*")

log = get_logger()


class _Flag(EventWrapper):
    def set_now(self) -> None:
        self._event.set()


class ConnectionContext(WorkerContext):
    """The state of one connection that Hypercorn does not keep.

    Who waits for the end of an idle connection, or sleeps between two pings of a WebSocket, wakes when the client has
    closed it. Otherwise Hypercorn would keep the socket until then.
    """

    def __init__(self, watched: Callable[[], Unread], kept: KeptAnswers) -> None:
        super().__init__(None)
        self.watched = watched
        self.kept = kept
        self.room = Budget(limits.CONNECTION_ANSWERS)
        self.unread = watched()
        self.terminated = self.end = _Flag()
        self.closed = asyncio.Event()
        self._apps: set[asyncio.Task[Any]] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._client_gone = False

    def enter(self, app: asyncio.Task[Any]) -> None:
        """An app call begins on this connection."""
        self._apps.add(app)
        app.add_done_callback(self._left)
        if self._client_gone:
            app.get_loop().call_later(GONE_S, app.cancel)

    def client_gone(self) -> None:
        """The client has closed its end.

        Hypercorn tells app calls, but not in all of its states. Those that go on all the same are cancelled; otherwise
        they and their socket would stay for ever.
        """
        self._client_gone = True
        self.end.set_now()
        for app in self._apps:
            app.get_loop().call_later(GONE_S, app.cancel)
        self._wake_if_over()

    def _left(self, app: asyncio.Task[Any]) -> None:
        self._apps.discard(app)
        self._wake_if_over()

    def _wake_if_over(self) -> None:
        """Wake the pingers when no app is left: the WebSockets of an HTTP/2 connection end one by one."""
        if self._client_gone and not self._apps:
            self.closed.set()

    def drop(self, receive: Receive) -> None:
        """Drop what still comes for a WebSocket whose app has ended.

        Hypercorn reads on only as long as somebody takes messages, and without reading it does not learn that the
        client is gone.
        """
        task = asyncio.get_running_loop().create_task(_drop(receive))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    def ended(self) -> None:
        """The connection is over, whatever was still to come."""
        for task in self._dropping:
            task.cancel()

    async def sleep(self, wait: float) -> None:  # type: ignore[override]
        if self.closed.is_set():
            await asyncio.sleep(CLOSED_NAP_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self.closed.wait()


async def _drop(receive: Receive) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass


class WatchedProtocol(asyncio.StreamReaderProtocol):
    """Tells the context when the connection is closed, and how its client takes what it is sent."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
        loop: asyncio.AbstractEventLoop,
        context: ConnectionContext,
    ) -> None:
        super().__init__(reader, connected, loop)
        self._context = context
        self._wire = cast(asyncio.Transport, None)  # until connection_made, before which nothing is called

    @property
    def buffered_bytes(self) -> int:
        return self._wire.get_write_buffer_size()

    def abort(self) -> None:
        self._wire.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._context.unread.made(self._wire)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        self._context.unread.begin()
        self._context.kept.hold(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._context.unread.taken()
        self._context.kept.let_go(self)
        super().resume_writing()

    def eof_received(self) -> bool | None:
        self._context.client_gone()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._context.unread.lost()
        self._context.kept.let_go(self)
        self._context.client_gone()
        self._context.closed.set()


class HypercornConnection(TCPServer):
    """Hypercorn's connection, except that it does not wait for ever for what is left when it closes."""

    def __init__(self, unread: Unread, limits: HttpLimits, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unread = unread
        self._high_bytes = limits.write_high_water_bytes

    async def wait_emptied(self) -> None:
        """Wait until nothing is kept for the client. Raises ConnectionResetError when that was lost."""
        transport = self.writer.transport
        async with self.send_lock:  # whoever writes already is first
            if not transport.is_closing():
                transport.set_write_buffer_limits(high=0)
                try:
                    await self.writer.drain()
                finally:
                    if not transport.is_closing():
                        transport.set_write_buffer_limits(high=self._high_bytes)
            if transport.is_closing():
                raise ConnectionResetError("the client is gone")

    async def _initiate_server_close(self) -> None:
        self._unread.begin()
        await super()._initiate_server_close()

    async def _close(self) -> None:
        self._unread.begin()
        await super()._close()


class HypercornConnections:
    """All connections of this process that Hypercorn serves.

    Each comes from our HTTP/1.1 and has its place already. Their tasks are among those of `connections`, which waits
    for them and cuts them.
    """

    def __init__(
        self,
        app: AsgiApp,
        limits: HttpLimits,
        connections: Connections,
        clock: AttendedClock,
    ) -> None:
        self._connections = connections
        self._app = app
        self._config = _config(limits)
        self._limits = limits
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.open: set[ConnectionContext] = set()

    def take(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over an open transport and the bytes that were read from it."""
        context = ConnectionContext(partial(Unread, self._limits, self._clock, self._loop), self._connections.kept)
        reader = asyncio.StreamReader(limit=self._limits.read_high_water_bytes, loop=self._loop)
        protocol = WatchedProtocol(reader, partial(self._start, context), self._loop, context)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(_without_compression(data))

    def _start(self, context: ConnectionContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=self._limits.write_high_water_bytes)
        self.open.add(context)
        self._connections.tasks.add(self._loop.create_task(self._serve(context, reader, writer)))
        if self._connections.draining:  # handed over in the midst of that
            context.end.set_now()

    async def _serve(
        self, context: ConnectionContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            state = {TRANSPORT: writer.transport}
            app = ASGIWrapper(cast(Any, partial(self._run, context)))
            await HypercornConnection(
                context.unread, self._limits, app, self._loop, self._config, context, state, reader, writer
            )
        except Exception:
            log.exception("connection failed")
        finally:
            context.ended()
            self.open.discard(context)
            self._connections.release_place()
            self._connections.task_done()

    async def _run(self, context: ConnectionContext, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        context.enter(task)
        if scope["type"] != "websocket":
            await hypercorn_deadlines.run(self._app, self._limits, self._clock, scope, receive, send)
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
        for context in self.open:
            context.end.set_now()


def _config(limits: HttpLimits) -> Config:
    config = Config()
    config.errorlog = logging.getLogger("topics.http")
    config.include_date_header = False
    config.include_server_header = False
    config.keep_alive_timeout = limits.keep_alive_timeout_ms / 1000
    config.keep_alive_max_requests = 2**62  # the default closes busy connections
    config.h11_max_incomplete_size = limits.max_header_bytes
    config.h2_max_header_list_size = limits.max_header_bytes
    config.websocket_max_message_size = limits.max_body_bytes
    config.websocket_ping_interval = WS_PING_INTERVAL_S
    return config


def _without_compression(data: bytes) -> bytes:
    """An upgrade without the client's offer to compress: a message of 8 MiB would hold up every other client while it
    is packed, and 64 KiB can unpack to 64 MiB."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _WS_EXTENSIONS.sub(b"", head) + end + rest
