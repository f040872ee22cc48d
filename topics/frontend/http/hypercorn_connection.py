"""One connection that Hypercorn serves: what it knows beyond Hypercorn, so that it ends when its client is gone.

WatchedProtocol ─ closed, or takes nothing ─▶ ConnectionContext ─▶ Connection, its app calls and streams
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, cast

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import EventWrapper, WorkerContext

from topics.frontend import limits
from topics.frontend.asgi import Receive
from topics.frontend.budget import Budget
from topics.frontend.http.delivery import Emptied
from topics.frontend.http.http1_parser import HttpLimits
from topics.frontend.http.kept_answers import KeptAnswers
from topics.frontend.http.unread import Unread

GONE_S: Final = 2.0
"""How long app calls may go on whose client has closed its end of the connection."""
CLOSED_NAP_S: Final = 0.05
"""Between two looks of who would ping a connection that is closed already."""


class _Flag(EventWrapper):
    def set_now(self) -> None:
        self._event.set()


class ConnectionContext(WorkerContext):
    """Of one connection. Whoever waits for the end of an idle connection, or sleeps between two pings of a WebSocket,
    wakes when the client has closed it, else Hypercorn would keep the socket until then.
    """

    def __init__(self, watched: Callable[[], Unread], kept: KeptAnswers) -> None:
        super().__init__(None)
        self.watched = watched
        self.kept = kept
        self.room = Budget(limits.CONNECTION_ANSWERS)
        self.unread = watched()
        self.terminated = self.end = _Flag()
        self.closed = asyncio.Event()
        self.emptied: Emptied  # once there is a connection, before which nobody asks
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
        """The client has closed its end. App calls learn of it from Hypercorn, but not in all of its states: those that
        go on all the same are cancelled, or they and their socket would stay for ever.
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
        """Nobody is left to be pinged: over HTTP/2 the sockets of a connection end one by one, and it with the last."""
        if self._client_gone and not self._apps:
            self.closed.set()

    def drop(self, receive: Receive) -> None:
        """Takes what still comes for a WebSocket whose app has ended. Hypercorn reads on only as long as somebody does,
        and without reading on it never ends: it does not learn that the client is gone.
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


class Connection(TCPServer):
    """Hypercorn's, but that what is left when it closes waits for its client for a time only."""

    def __init__(self, context: ConnectionContext, limits: HttpLimits, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unread = context.unread
        self._high_bytes = limits.write_high_water_bytes
        context.emptied = self._emptied

    async def _emptied(self) -> None:
        transport = self.writer.transport
        async with self.send_lock:  # what is about to be written is: who waits for the lock waits in order
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
