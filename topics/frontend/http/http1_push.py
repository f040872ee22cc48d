"""The push stream of an HTTP/1.1 answer, which leaves ASGI behind."""

from __future__ import annotations

from collections.abc import Callable

from topics.frontend.http.http1_outflow import Outflow
from topics.frontend.http.http1_wire import chunk

_last_push: tuple[bytes, bytes] = (b"", b"")


class PushStream:
    """Raw writes into one answer, for server push: one chunk, one `transport.write`, no await.

    Writing never blocks and never fails; it is the writer's job to stop while `writable` is false and go on at
    `on_writable`. `on_close` is called once when the client goes away; after `close()` by the writer nothing is called.
    The app's coroutine must stay pending meanwhile (`await receive()` ends with `http.disconnect`); when it returns,
    the stream is closed.
    """

    __slots__ = ("_chunked", "_end", "_out", "_write", "closed", "on_close", "on_writable", "writable")

    def __init__(self, out: Outflow, chunked: bool, end: Callable[[], None]) -> None:
        """`end` writes the end of the answer."""
        self._out = out
        self._write = out.write_now
        self._end = end
        self._chunked = chunked
        self.closed = False
        self.writable = out.writable
        """Below the high-water mark, and still open. Looked at for every frame and client, so it is kept, not asked."""
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the client has not taken yet and that are kept for it in this process."""
        return self._out.buffered_bytes

    @property
    def taken_bytes(self) -> int:
        """Rises with what the client takes, as nothing is written meanwhile."""
        return -self._out.buffered_bytes

    def write(self, data: bytes) -> bool:
        """Send `data` now, as one chunk. Dropped when the stream is closed; an empty one is no chunk and not sent.
        False: now more than the high-water mark is kept for the client.
        """
        global _last_push
        if data and not self.closed:
            if self._chunked:
                # The same frame goes to every watcher in turn, so it is framed once: remembered by identity, one deep.
                if _last_push[0] is not data:
                    _last_push = (data, chunk(data))
                data = _last_push[1]
            self._write(data)
        return self.writable or self.closed

    def close(self) -> None:
        """The end of the answer; the connection may serve the next request."""
        if not self.closed:
            self._ended()
            self._end()

    def abort(self) -> None:
        """Cut the connection, whatever waits for the client is gone."""
        self._ended()
        self._out.abort()

    # The connection's calls.

    def client_full(self) -> None:
        """More than the high-water mark is kept for the client."""
        self.writable = False

    def client_took(self) -> None:
        """The client has caught up."""
        if not self.closed:
            self.writable = True
            if self.on_writable is not None:
                self.on_writable()

    def client_gone(self) -> None:
        """Once, when no more can be delivered."""
        if not self.closed:
            self._ended()
            if self.on_close is not None:
                self.on_close()

    def _ended(self) -> None:
        self.closed, self.writable = True, False
