"""Writing into an open answer, now, without awaiting: what event streams are made with.

HTTP/1.1 offers it as the ASGI extension `topics.push` (`http1_exchange.PushStream`); `AsgiPush` is the same over plain
ASGI, for HTTP/2.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from topics.frontend.asgi import Receive, Send

HIGH_WATER_BYTES: Final = 64 * 1024
PIECE_BYTES_MAX: Final = 64 * 1024
"""As much is one message to the server."""
LINGER_S: Final = 10.0
"""How long what is pending at `close` may take to go out."""


class Push(Protocol):
    """`write` never blocks and never fails; it is the writer's job to stop while `writable` is false and go on at
    `on_writable`. `on_close` is called once when the client goes away, not after `close`."""

    on_writable: Callable[[], None] | None
    on_close: Callable[[], None] | None

    @property
    def buffered_bytes(self) -> int:
        """What is kept for the client."""
        ...

    @property
    def taken_bytes(self) -> int:
        """Rises when the client takes some of it, while it is not writable; compared with itself only."""
        ...

    @property
    def writable(self) -> bool: ...

    def write(self, data: bytes) -> bool:
        """False: now more is kept for the client than HIGH_WATER_BYTES."""
        ...

    def close(self) -> None: ...

    def abort(self) -> None:
        """Cuts the connection, whatever waits for the client is gone."""
        ...


class AsgiPush:
    """A Push over ASGI `send`, which waits: what it has not taken is kept here, and joined."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[bytes] = []
        self._news = asyncio.Event()
        self._closed = False
        self._sender: asyncio.Task[None] | None = None
        self.buffered_bytes = 0
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def taken_bytes(self) -> int:
        return -self.buffered_bytes

    @property
    def writable(self) -> bool:
        return self.buffered_bytes < HIGH_WATER_BYTES and not self._closed

    def write(self, data: bytes) -> bool:
        if data and not self._closed:
            self._pending.append(data)
            self.buffered_bytes += len(data)
            self._news.set()
        return self.buffered_bytes < HIGH_WATER_BYTES

    def close(self) -> None:
        """What is pending still goes out, if the client takes it; then the answer ends."""
        self._closed = True
        self._news.set()
        if self._sender is not None:
            asyncio.get_running_loop().call_later(LINGER_S, self._sender.cancel)

    def abort(self) -> None:
        """The answer ends without its end: the server cuts the stream."""
        self._closed = True
        self._pending.clear()
        if self._sender is not None:
            self._sender.cancel()

    async def run(self, receive: Receive) -> None:
        """Carries the writes out until the client goes away or all is sent after `close`."""
        self._sender = sender = asyncio.create_task(self._carry())
        listener = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait((sender, listener), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, listener):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sender
            self._gone()

    async def _carry(self) -> None:
        while self._pending or not self._closed:
            await self._news.wait()
            self._news.clear()
            if not self._pending:
                continue
            data = memoryview(b"".join(self._pending))
            self._pending.clear()
            # In pieces: so that a client that takes a long frame slowly is seen to.
            for start in range(0, len(data), PIECE_BYTES_MAX):
                piece = bytes(data[start : start + PIECE_BYTES_MAX])
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                self.buffered_bytes -= len(piece)
                if self.writable and self.on_writable is not None:
                    self.on_writable()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _gone(self) -> None:
        if not self._closed:
            self._closed = True
            self._pending.clear()
            if self.on_close is not None:
                self.on_close()


async def gone_before(done: asyncio.Future[Any], receive: Receive) -> bool:
    """Whether the client is gone, however far `done` is; False: it is there and `done` is done."""
    gone = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        return gone.done()
    finally:
        gone.cancel()


async def until_disconnect(receive: Receive) -> None:
    """The end of the connection, or of the answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
