"""Writes into an open answer without `await`, for event streams.

HTTP/1.1 offers them as the ASGI extension `topics.push` (`http1_push.PushStream`). `AsgiPush` does the same over plain
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
"""Length of one message to the server."""
LINGER_S: Final = 10.0
"""Time for pending writes to go out after `close`."""


class Push(Protocol):
    """An open answer. `write` never blocks and never fails: the writer must stop while `writable` is false, and
    continue at `on_writable`. `on_close` is called once when the client goes away, but not after `close`.
    """

    on_writable: Callable[[], None] | None
    on_close: Callable[[], None] | None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that are kept for the client."""

    @property
    def progress_bytes(self) -> int:
        """A counter that rises as the client reads, while it is not writable."""

    @property
    def writable(self) -> bool: ...

    def write(self, data: bytes) -> bool:
        """Write, and return False if more than HIGH_WATER_BYTES are now kept for the client."""

    def close(self) -> None: ...

    def abort(self) -> None:
        """Cut the connection. What waits for the client is lost."""


class AsgiPush:
    """A Push over ASGI `send`, which waits. Writes that it has not accepted are kept here, and joined."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[bytes] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._sender: asyncio.Task[None] | None = None
        self.buffered_bytes = 0
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def progress_bytes(self) -> int:
        return -self.buffered_bytes

    @property
    def writable(self) -> bool:
        return self.buffered_bytes < HIGH_WATER_BYTES and not self._closed

    def write(self, data: bytes) -> bool:
        if data and not self._closed:
            self._pending.append(data)
            self.buffered_bytes += len(data)
            self._changed.set()
        return self.buffered_bytes < HIGH_WATER_BYTES

    def close(self) -> None:
        """End the answer after the pending writes, for which the client has LINGER_S."""
        self._closed = True
        self._changed.set()
        if self._sender is not None:
            asyncio.get_running_loop().call_later(LINGER_S, self._sender.cancel)

    def abort(self) -> None:
        """Return from `run` without the end of the answer, so that the server cuts the stream."""
        self._closed = True
        self._pending.clear()
        if self._sender is not None:
            self._sender.cancel()

    async def run(self, receive: Receive) -> None:
        """Send the writes until the client goes away, or all is sent after `close`."""
        self._sender = sender = asyncio.create_task(self._send_all())
        listener = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait((sender, listener), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, listener):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sender
            self._client_gone()

    async def _send_all(self) -> None:
        while self._pending or not self._closed:
            await self._changed.wait()
            self._changed.clear()
            if not self._pending:
                continue
            data = memoryview(b"".join(self._pending))
            self._pending.clear()
            # In pieces, so that the progress of a client that reads a long frame slowly is seen.
            for start in range(0, len(data), PIECE_BYTES_MAX):
                piece = bytes(data[start : start + PIECE_BYTES_MAX])
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                self.buffered_bytes -= len(piece)
                if self.writable and self.on_writable is not None:
                    self.on_writable()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _client_gone(self) -> None:
        if not self._closed:
            self._closed = True
            self._pending.clear()
            if self.on_close is not None:
                self.on_close()


async def disconnected_before(done: asyncio.Future[Any], receive: Receive) -> bool:
    """Wait for `done` or the client's disconnect, and return True if the client is gone."""
    gone = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        return gone.done()
    finally:
        gone.cancel()


async def until_disconnect(receive: Receive) -> None:
    """Wait for the end of the connection or of the answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
