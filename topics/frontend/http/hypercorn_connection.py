"""Connections of HTTP/2, which Hypercorn serves: each ends when its client is gone, and all at a stop.

Http1Protocol ─ hands over ─▶ HypercornConnections ─▶ WatchedProtocol ─▶ HypercornConnection, its apps and streams
                                                           └ closed, or not read ─▶ ConnectionContext
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import EventWrapper, WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.events import Event as ConnectionEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import WSStream
from hyperframe.frame import GoAwayFrame

from topics.frontend.asgi import (
    ADMITTED,
    REFUSAL,
    AsgiApp,
    Message,
    Receive,
    Scope,
    Send,
    WriteBuffer,
    until_disconnect,
)
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.http.connections import GONE_S, Connections
from topics.frontend.http.deadlines import HttpLimits, RunningClock, SlowReaderTimer, run_in_time
from topics.frontend.http.frame_budget import CheckedFrames, ClientAddresses, FrameBudget
from topics.frontend.http.http1_parser import uri_too_long
from topics.frontend.http.vanished import VanishedClients
from topics.frontend.http.websocket_input import PING_INTERVAL_S
from topics.log import LASTING_EVERY_S, SparseLines

CLOSED_NAP_S: Final = 0.05  # a pinger's sleep on a connection that is already closed
RECEIVE: Final = "topics.receive"  # extension of a scope: its stream's `receive`, until the app is called


class _Flag(EventWrapper):
    def set_now(self) -> None:
        self._event.set()


class ConnectionContext(WorkerContext):
    """Our state of one connection, which Hypercorn hands to every part of it. `closed` and `end` wake Hypercorn's waits
    for the end of an idle connection and between two pings, so that the socket does not stay.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        watch: Callable[[WriteBuffer], SlowReaderTimer],
        connections: Connections,
        frames: FrameBudget,
    ) -> None:
        super().__init__(None)
        self.transport = transport
        self.watch = watch
        self.frames = frames
        self.kept = connections.kept
        self._unadmitted = connections.unadmitted
        self._admitted = False
        self.unread_bytes = 0  # bytes that have arrived and that Hypercorn has not read
        self.answers = Budget(limits.CONNECTION_ANSWERS)
        self.reader_timer = watch(transport)
        self.server: HypercornConnection | None = None
        self.http2: H2Protocol | None = None
        self.http2_frames: CheckedFrames | None = None
        self.terminated = self.end = _Flag()
        self.closed = asyncio.Event()
        self._apps: set[asyncio.Task[Any]] = set()
        self._client_gone = self._is_leaving = False

    @property
    def open_socket(self) -> socket.socket | None:
        return None if self.transport.is_closing() else self.transport.get_extra_info("socket")

    @property
    def buffered_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        self.transport.abort()

    def admit(self) -> None:
        """Note that the client has shown a valid key. From now on its input does not count."""
        self._admitted = True
        self.count_input()

    def count_input(self) -> None:
        """Count what is held of the client's input. Call it after each change."""
        held_bytes = 0 if self.http2_frames is None else self.http2_frames.held_bytes
        self._unadmitted.resize(self.transport, 0 if self._admitted else self.unread_bytes + held_bytes)

    def add_app(self, app: asyncio.Task[Any]) -> None:
        self._apps.add(app)
        app.add_done_callback(self._app_done)
        if self._client_gone:
            app.get_loop().call_later(GONE_S, app.cancel)

    def client_gone(self) -> None:
        """Note that the client has closed its end, and cancel app calls that go on: Hypercorn may not tell the apps."""
        self._client_gone = True
        self.end.set_now()
        for app in self._apps:
            app.get_loop().call_later(GONE_S, app.cancel)
        self._close_if_over()

    def _app_done(self, app: asyncio.Task[Any]) -> None:
        self._apps.discard(app)
        self._close_if_over()

    def _close_if_over(self) -> None:
        """Wake the pingers when no app is left: the WebSockets of an HTTP/2 connection end one by one."""
        if self._client_gone and not self._apps:
            self.closed.set()

    def drop(self, receive: Receive) -> None:
        """Drop further messages of a WebSocket whose app has ended: Hypercorn reads only if somebody receives."""
        self.add_app(asyncio.get_running_loop().create_task(until_disconnect(receive)))

    def cancel_drops(self) -> None:
        """End what `drop` began: the connection is over."""
        for task in self._apps:
            task.cancel()

    def write(self, frames: bytes) -> None:
        """Send frames at once, behind all that were made before."""
        if frames and not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):  # our end is closed
                self.transport.write(frames)

    def go_away(self) -> None:
        """Tell a client of HTTP/2, once, that nothing more is begun. Not while a stream is open: clients that are made
        with Python's h2 read no answer behind it.
        """
        if self.http2 is not None and not self._is_leaving:
            self._is_leaving = True
            self.write(GoAwayFrame(last_stream_id=self.http2.connection.highest_inbound_stream_id).serialize())

    async def ends_within(self, wait_s: float) -> bool:
        """Wait for `wait_s`. Return True if the client goes or a drain begins within that time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.end.wait(), wait_s)
        return self.end.is_set()

    async def sleep(self, wait: float) -> None:  # type: ignore[override]
        if self.closed.is_set():
            await asyncio.sleep(CLOSED_NAP_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self.closed.wait()


def context_of(part: TCPServer | H2Protocol | HTTPStream | WSStream) -> ConnectionContext:
    """Return the connection's context, which Hypercorn knows by its base class."""
    return cast(ConnectionContext, part.context)


class WatchedProtocol(asyncio.StreamReaderProtocol):
    """Tells the context when the connection is closed, and when its client falls behind and catches up."""

    def __init__(self, context: ConnectionContext, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context = context

    def pause_writing(self) -> None:
        self._context.reader_timer.start()
        self._context.kept.add(self._context)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._context.reader_timer.caught_up()
        self._context.kept.remove(self._context)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._context.unread_bytes += len(data)
        self._context.count_input()

    def eof_received(self) -> bool | None:
        self._context.client_gone()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._context.admit()
        self._context.reader_timer.close()
        self._context.kept.remove(self._context)
        self._context.client_gone()
        self._context.closed.set()


class HypercornConnection(TCPServer):
    """Hypercorn's connection. It limits the time that a client has to read its end, and counts what is read from it."""

    def __init__(self, limits: HttpLimits, *arguments: Any) -> None:
        super().__init__(*arguments)
        context_of(self).server = self
        self._high_water_bytes = limits.write_high_water_bytes
        self._linger_s = limits.linger_ms / 1000
        self._is_read = True

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # Breaks reference cycles, also those of libraries: the garbage collector may come late (`FullLooks`).
            context = context_of(self)
            http2, error = context.http2, self.reader.exception()
            if http2 is not None:
                for part in (*vars(http2.priority).get("_streams", {}).values(), http2.connection, http2):
                    vars(part).clear()
            if error is not None:
                error.__traceback__ = None
            context.server = context.http2 = context.http2_frames = None
            vars(self).pop("protocol", None)
            del self.reader

    async def protocol_send(self, event: ConnectionEvent) -> None:
        if isinstance(event, RawData):  # written in the order of its frames, also if its sender is cancelled meanwhile
            with contextlib.suppress(ConnectionError, RuntimeError):  # Hypercorn's own write fails as well
                self.writer.write(event.data)
            event = RawData(data=b"")
        if self._is_read or not isinstance(event, Updated):  # else its tasks end: none may begin
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        context = context_of(self)
        try:
            while not self.reader.at_eof() and not context.frames.refused:
                try:
                    data = await self.reader.read(MAX_RECV)
                except OSError:
                    break
                context.unread_bytes -= len(data)
                await self.protocol.handle(RawData(data))
                context.count_input()
        finally:
            self._is_read = False
        await self.protocol.handle(Closed())

    async def wait_emptied(self) -> None:
        """Wait until the transport keeps nothing for the client. Raise ConnectionResetError if that is lost."""
        transport = self.writer.transport
        async with self.send_lock:  # after those that are writing
            if not transport.is_closing():
                transport.set_write_buffer_limits(high=0)
                try:
                    await self.writer.drain()
                finally:
                    if not transport.is_closing():
                        transport.set_write_buffer_limits(high=self._high_water_bytes)
            if transport.is_closing():
                raise ConnectionResetError("the client is gone")

    async def _initiate_server_close(self) -> None:
        context = context_of(self)
        context.reader_timer.start()
        context.go_away()
        await super()._initiate_server_close()

    async def _close(self) -> None:
        context = context_of(self)
        context.reader_timer.start()
        if context.frames.refused and not context.transport.is_closing():
            # A close with unread input sends a reset, which may destroy the last answer. Reading on would be work.
            context.transport.pause_reading()
            context.transport.write_eof()
            await asyncio.sleep(self._linger_s)
        await super()._close()


class HypercornConnections:
    """All connections of this process that Hypercorn serves. Our HTTP/1.1 has given each its place already."""

    def __init__(
        self,
        app: AsgiApp,
        limits: HttpLimits,
        connections: Connections,
        clock: RunningClock,
        addresses: ClientAddresses,
    ) -> None:
        self._connections = connections
        self._app = app
        self._config = _config(limits)
        self._limits = limits
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.open: set[ConnectionContext] = set()
        self._vanished = VanishedClients(self.open, limits.vanished_after_ms, clock)
        self._addresses = addresses
        self._failures = SparseLines(LASTING_EVERY_S, self._loop.time)

    def take_over(self, transport: asyncio.Transport, data: bytes) -> None:
        """Serve an open transport from now on, beginning with the bytes that were read from it."""
        watch = partial(SlowReaderTimer, self._limits, self._clock, self._loop)
        frames = self._addresses.budget(transport.get_extra_info("peername"))
        context = ConnectionContext(transport, watch, self._connections, frames)
        reader = asyncio.StreamReader(limit=self._limits.read_high_water_bytes, loop=self._loop)
        protocol = WatchedProtocol(context, reader, partial(self._start, context), self._loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)

    def _start(self, context: ConnectionContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=self._limits.write_high_water_bytes)
        self.open.add(context)
        self._vanished.start()
        self._connections.start_task(partial(self._serve, context, reader, writer))
        if self._connections.draining:  # taken over during a drain
            context.end.set_now()

    async def _serve(
        self, context: ConnectionContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            app = ASGIWrapper(cast(Any, partial(self._run, context)))
            wait_s = context.frames.address.claim_turn_s()
            if wait_s > 0 and (wait_s == math.inf or await context.ends_within(wait_s)):
                context.transport.abort()
                return
            await HypercornConnection(self._limits, app, self._loop, self._config, context, {}, reader, writer)
        except Exception:  # noqa: BLE001 — logged, but less often than clients can cause it
            self._failures.warning("a connection was cut", why="connection failed", exc_info=True)
        finally:
            context.cancel_drops()
            self.open.discard(context)
            self._connections.release_place()

    async def _run(self, context: ConnectionContext, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        context.add_app(task)
        del task  # a cancelled task keeps its stack, and the stack must not keep the task
        self._connections.arrived += 1
        scope[ADMITTED] = context.admit
        if scope["type"] != "websocket":
            if len(scope["raw_path"]) + len(scope["query_string"]) > self._limits.max_uri_bytes:
                scope[REFUSAL] = uri_too_long(self._limits)
            receive = scope["extensions"].pop(RECEIVE)  # breaks a reference cycle
            await run_in_time(self._app, self._limits, self._clock, scope, receive, send)
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

    def begin_drain(self) -> None:
        """Close idle connections now, and busy ones when they become idle."""
        for context in self.open:
            context.end.set_now()


def _config(limits: HttpLimits) -> Config:
    config = Config()
    config.errorlog = logging.getLogger("topics.http")
    config.include_date_header = False
    config.include_server_header = False
    config.keep_alive_timeout = limits.keep_alive_timeout_ms / 1000
    config.keep_alive_max_requests = 2**62  # Hypercorn's default closes busy connections
    config.h11_max_incomplete_size = limits.max_header_bytes
    config.h2_max_header_list_size = limits.max_header_bytes
    config.websocket_max_message_size = limits.max_body_bytes
    config.websocket_ping_interval = PING_INTERVAL_S
    return config
