"""Server push over HTTP/1.1: raw writes into one answer, without ASGI messages and without `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_last_chunk: tuple[bytes, bytes] = (b"", b"")


def chunk(data: bytes) -> bytes:
    """Return one chunk of a body of unknown length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class PushStream:
    """Raw writes into one answer (a `push.Push`), each one chunk and one `transport.write`. They never block or fail.

    The writer must stop while `writable` is false, and continue at `on_writable`. `on_close` is called once when the
    client goes away; nothing is called after the writer's own `close`. The app's coroutine must stay pending meanwhile
    (`await receive()` ends with `http.disconnect`): the stream is closed when it returns.
    """

    def __init__(self, transport: asyncio.Transport, chunked: bool, writable: bool, end: Callable[[], None]) -> None:
        """`end` writes the end of the answer."""
        self._transport = transport
        self._write = transport.write
        self._end = end
        self._chunked = chunked
        self.closed = False
        self.writable = writable
        """True while it is open and below the high-water mark. An attribute, as each frame reads it for each client."""
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that this process keeps for the client."""
        return self._transport.get_write_buffer_size()

    @property
    def progress_bytes(self) -> int:
        """A counter that rises as the client reads, while nothing is written."""
        return -self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> bool:
        """Send `data` now, unless the stream is closed. False: the client is above the high-water mark."""
        global _last_chunk
        if data and not self.closed:
            if self._chunked:
                # The same frame goes to every watcher in turn, so it is framed once: the last one is remembered.
                if _last_chunk[0] is not data:
                    _last_chunk = (data, chunk(data))
                data = _last_chunk[1]
            self._write(data)
        return self.writable or self.closed

    def close(self) -> None:
        """End the answer. The connection may serve the next request."""
        if not self.closed:
            self._mark_closed()
            self._end()

    def abort(self) -> None:
        """Cut the connection. What waits for the client is lost."""
        self._mark_closed()
        self._transport.abort()

    def client_caught_up(self) -> None:
        """Resume: the client is below the low-water mark again."""
        if not self.closed:
            self.writable = True
            if self.on_writable is not None:
                self.on_writable()

    def client_gone(self) -> None:
        """Close: nothing more can be delivered. Idempotent."""
        if not self.closed:
            self._mark_closed()
            if self.on_close is not None:
                self.on_close()

    def _mark_closed(self) -> None:
        self.closed, self.writable = True, False
