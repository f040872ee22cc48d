"""What waits for the client of an HTTP/2 stream, bounded: who has more to say waits until it is taken (api §7).

Hypercorn's own buffer goes by how little it could send just now: with a window of 0 that is nothing, it takes this for
a client that keeps up, and lets the next message in. A client that gives no window pulls a whole topic into memory.

Nor is it waited for without an end: a stream whose client takes nothing is reset (`unread`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import hypercorn.protocol
from h2.errors import ErrorCodes
from h2.events import Event, RequestReceived, StreamReset
from h2.exceptions import ProtocolError
from hypercorn.events import Closed, Updated
from hypercorn.events import Event as ConnectionEvent
from hypercorn.protocol import h2
from hypercorn.protocol.events import Body, Data, EndBody, EndData, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import Event as IOEvent

from topics.frontend.asgi import DELIVER, Send
from topics.frontend.http.unread import Unread


class BoundedBuffer(StreamBuffer):
    """Of one stream: one message, and less than BUFFER_HIGH_WATER before it."""

    _added_bytes = 0
    """By `add`, since it was empty."""
    abort: Callable[[], None]
    """Its client takes nothing."""
    cut = False
    """Closed before its client was told that this is all."""

    def __init__(self, event_class: type[IOEvent]) -> None:
        super().__init__(event_class)
        self._ended: IOEvent = event_class()

    def get_write_buffer_size(self) -> int:
        return len(self.buffer)

    def is_closing(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing more is sent, and nobody waits for it."""
        self.cut |= not self._ended.is_set()
        await super().close()
        await self.end()

    async def end(self) -> None:
        """The client has been told that this is all."""
        await self._ended.set()

    async def drain(self) -> None:
        """Until then, or the stream is closed."""
        await self._ended.wait()

    async def push(self, data: bytes) -> None:
        """Returns when there is room for the next one, or the stream is closed."""
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()  # room that there was before this message
            await self._paused.wait()

    async def add(self, data: bytes) -> None:
        """Without waiting; dropped when BUFFER_HIGH_WATER of this kind have not been taken yet."""
        if self._complete or self._added_bytes + len(data) > BUFFER_HIGH_WATER:
            return
        self._added_bytes += len(data)
        self.buffer.extend(data)
        await self._is_empty.clear()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            self._added_bytes = 0
            await self._is_empty.set()
        return data


class BoundedProtocol(H2Protocol):
    """Hypercorn's, but that a stream which the client resets takes what waits for it along, and whoever sends: there
    may be as many of them as the client likes. And who reads the connection waits for no window, which would come over
    it: that one answers pings and refuses handshakes. And one who never asks for anything is idle from the beginning:
    it would stay for ever, and hold up a stop until the end of the grace.
    """

    _reader: asyncio.Task[Any] | None = None

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        await super().initiate(headers, settings)
        if headers is None:
            await self.send(Updated(idle=True))

    async def stream_send(self, event: StreamEvent) -> None:
        buffer = self.stream_buffers.get(event.stream_id)
        answer = isinstance(self.streams.get(event.stream_id), HTTPStream)
        if isinstance(event, StreamClosed) and answer and buffer is not None and not buffer.complete:
            # The app is gone before its answer had an end: a client that heard nothing would wait for ever.
            await buffer.close()
            with contextlib.suppress(ProtocolError):
                self.connection.reset_stream(event.stream_id, ErrorCodes.INTERNAL_ERROR)
                await self._flush()
        ends = isinstance(event, EndBody | EndData)
        if buffer is None or not (ends or isinstance(event, Body | Data)):
            await super().stream_send(event)
            return
        assert isinstance(buffer, BoundedBuffer)
        if asyncio.current_task() is not self._reader:
            await self._send_watched(event, buffer)
            return
        if isinstance(event, Body | Data):
            await buffer.add(event.data)
        else:
            buffer.set_complete()
        self.priority.unblock(event.stream_id)
        await self.has_data.set()

    async def _send_watched(self, event: StreamEvent, buffer: BoundedBuffer) -> None:
        """For the time that the stream is waited for."""
        unread: Unread = self.context.watched()  # type: ignore[attr-defined]
        buffer.abort = lambda: self.task_group.spawn(self._give_up, event.stream_id)
        unread.made(buffer)
        unread.begin(len(event.data) if isinstance(event, Body | Data) else 0)
        try:
            await super().stream_send(event)
        finally:
            unread.lost()

    async def _give_up(self, stream_id: int) -> None:
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None:
            await buffer.close()
            with contextlib.suppress(ProtocolError):
                self.connection.reset_stream(stream_id, ErrorCodes.CANCEL)
                await self._flush()
            await super().stream_send(StreamClosed(stream_id))

    async def handle(self, event: ConnectionEvent) -> None:
        if isinstance(event, Closed):
            for buffer in self.stream_buffers.values():
                await buffer.close()
        await super().handle(event)

    async def _create_stream(self, request: RequestReceived) -> None:
        await super()._create_stream(request)
        stream = self.streams.get(request.stream_id)
        if isinstance(stream, HTTPStream):  # its app begins when this task waits for something
            extensions: dict[str, Any] = stream.scope["extensions"]
            extensions[DELIVER] = partial(self._deliver, request.stream_id)

    async def _deliver(self, stream_id: int, send: Send, body: bytes) -> None:
        """The whole body, as `http.delivery` says. Of a stream that was closed before its end `send` says nothing."""
        buffer = self.stream_buffers.get(stream_id)
        await send({"type": "http.response.body", "body": body})
        assert isinstance(buffer, BoundedBuffer | None)
        if buffer is not None:
            await buffer.drain()
        if buffer is None or buffer.cut:
            raise ConnectionResetError("the stream is closed")
        await self.context.emptied()  # type: ignore[attr-defined]

    async def _send_data(self, stream_id: int) -> None:
        buffer = self.stream_buffers.get(stream_id)
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers and isinstance(buffer, BoundedBuffer):
            await buffer.end()

    async def _handle_events(self, events: list[Event]) -> None:
        self._reader = asyncio.current_task()
        for event in events:
            if isinstance(event, StreamReset) and event.stream_id in self.stream_buffers:
                await self.stream_buffers[event.stream_id].close()
        await super()._handle_events(events)


def install() -> None:
    """HTTP/2 of this process uses them from now on."""
    vars(h2)["StreamBuffer"] = BoundedBuffer
    vars(hypercorn.protocol)["H2Protocol"] = BoundedProtocol
