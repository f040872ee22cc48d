"""Answers that are event streams: which clients may open one, its head, and its writes until the client is gone.

A `Push` writes into an open answer without `await`. HTTP/1.1 offers it as the ASGI extension `topics.push`
(`http1_exchange.PushStream`). `AsgiPush` does the same over plain ASGI, for HTTP/2.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol

from topics.core.errors import TopicsError
from topics.core.keys import ApiKey
from topics.frontend.asgi import Receive, Scope, Send, disconnected_before, until_disconnect
from topics.frontend.entry.access import KeyLimits
from topics.frontend.entry.bodies import Headers
from topics.frontend.entry.responses import HeaderList, weight
from topics.shm.quotas import Counted, Quota

HEARTBEAT_MAX_MS: Final = 60_000
PACE_MAX_MS: Final = 10_000
HIGH_WATER_BYTES: Final = 64 * 1024
PIECE_BYTES_MAX: Final = 64 * 1024
"""Length of one message to the server."""
LINGER_S: Final = 10.0
"""Time for pending writes to go out after `close`."""
_HEAD: Final[HeaderList] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class StreamSlots:
    """Limits the open streams and WebSockets of the whole service (`places`) and of each key (api §11)."""

    def __init__(self, limits: KeyLimits, places: Quota) -> None:
        self._limits = limits
        self._places = places

    def hold(self, key: ApiKey) -> StreamSlot:
        """Count one stream of this key until the context ends. Raise `429 throttled`."""
        self._limits.acquire(key, Counted.STREAMS)
        if not self._places.claim():
            self._limits.release(key, Counted.STREAMS)
            raise self._places.reached()
        return StreamSlot(self, key)

    def release(self, key: ApiKey) -> None:
        self._places.release()
        self._limits.release(key, Counted.STREAMS)


class StreamSlot(NamedTuple):
    """The count of one open stream, given back at the end of its context: small, since there are thousands."""

    slots: StreamSlots
    key: ApiKey

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.slots.release(self.key)


def check_accept(headers: Headers) -> None:
    """Raise `406 not_acceptable` if the client does not accept `text/event-stream`. An empty list accepts anything."""
    accept = headers.get(b"accept", b"")
    if accept.strip(b" \t,") and not weight(accept, b"text/event-stream"):
        shown = accept[:100].decode("latin-1")
        raise TopicsError("not_acceptable", f"this is a text/event-stream, which Accept: {shown} rules out")


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
        try:
            await disconnected_before(sender, receive)
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sender
            if not self._closed:
                self._closed = True
                self._pending.clear()
                if self.on_close is not None:
                    self.on_close()

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


async def begin_stream(scope: Scope, send: Send) -> Push:
    await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
    extension = scope.get("extensions", {}).get("topics.push")
    push: Push = AsgiPush(send) if extension is None else extension()
    return push


def run_stream(push: Push, receive: Receive) -> Awaitable[None]:
    """Return when the stream is closed or its client is gone."""
    return push.run(receive) if isinstance(push, AsgiPush) else until_disconnect(receive)
