"""HTTP/2 on Hypercorn, with a bound on what waits for the client of a stream (api §7).

Hypercorn's own buffer looks at how little it could send just now. With a window of 0 that is nothing, which it takes
for a client that keeps up, so a client that gives no window pulls a whole topic into memory. Here `send` waits until
the client has taken the message. Three more bounds: a stream whose client takes nothing is reset (`unread`), the
streams of one connection share room for long answers (`responses.reserve_room`), and so do the clients of the process
(`kept_answers`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from h2.errors import ErrorCodes
from h2.events import Event, RequestReceived, StreamReset
from h2.exceptions import ProtocolError
from hypercorn.config import Config
from hypercorn.events import Closed, Updated
from hypercorn.events import Event as ConnectionEvent
from hypercorn.protocol.events import Body, Data, EndBody, EndData, Request, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper, WorkerContext
from hypercorn.typing import Event as IOEvent

from topics.frontend.asgi import DELIVER, ROOM, Send
from topics.frontend.entry.budget import Reservation
from topics.frontend.http.hypercorn_connection import HypercornConnection
from topics.frontend.http.hypercorn_deadlines import Unread
from topics.frontend.http.kept_answers import KeptAnswers


class BoundedBuffer(StreamBuffer):
    """The bytes that wait for the client of one stream: one message, and less than BUFFER_HIGH_WATER before it.

    A message is kept as it came, not copied: its sender has it in memory anyway while it waits.
    """

    kept: KeptAnswers
    cut = False
    """Closed before its client was told that this is all."""

    def __init__(self, event_class: type[IOEvent]) -> None:
        super().__init__(event_class)
        self.abort: Callable[[], None] = lambda: None
        """Its client takes nothing, or too little of all that is kept."""
        self._parts: deque[memoryview] = deque()
        self._ended: IOEvent = event_class()
        self.buffered_bytes = 0
        self._added_bytes = 0
        """By `add`, since it was empty."""

    @property
    def complete(self) -> bool:
        return self._complete and not self._parts

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def is_closing(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing more is sent, and nobody waits for it."""
        self.cut |= not self._ended.is_set()
        self._parts.clear()
        self.buffered_bytes = 0
        await super().close()
        await self.end()

    async def end(self) -> None:
        """The client has been told that this is all."""
        await self._ended.set()

    async def drain(self) -> None:
        """Until then, or the stream is closed. That all is taken is not enough: who is answered last ends a connection
        that is to be closed.
        """
        await self._ended.wait()

    async def push(self, data: bytes) -> None:
        """Returns when there is room for the next one, or the stream is closed."""
        if self._complete:
            raise BufferCompleteError
        await self._keep(data)
        if self.buffered_bytes >= BUFFER_HIGH_WATER:
            await self._paused.clear()  # room that there was before this message
            self.kept.hold(self)
            try:
                await self._paused.wait()
            finally:
                self.kept.let_go(self)

    async def add(self, data: bytes) -> None:
        """Without waiting; dropped when BUFFER_HIGH_WATER of this kind have not been taken yet."""
        if self._complete or self._added_bytes + len(data) > BUFFER_HIGH_WATER:
            return
        self._added_bytes += len(data)
        await self._keep(data)

    async def _keep(self, data: bytes) -> None:
        self._parts.append(memoryview(data))
        self.buffered_bytes += len(data)
        await self._is_empty.clear()

    async def pop(self, max_length: int) -> bytes:
        pieces = []
        left = max_length
        while left and self._parts:
            part = self._parts.popleft()
            if len(part) > left:
                rest = part[left:]
                if len(rest) < BUFFER_LOW_WATER:  # nobody waits for it any more: not to keep all of the message
                    rest = memoryview(bytes(rest))
                self._parts.appendleft(rest)
            pieces.append(part[:left])
            left -= len(pieces[-1])
        self.buffered_bytes -= max_length - left
        if self.buffered_bytes < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self._parts:
            self._added_bytes = 0
            await self._is_empty.set()
        return b"".join(pieces)


class BoundedStream(HTTPStream):
    """Hypercorn's stream of a request. In addition it tells its app where to get room for a long answer."""

    def __init__(self, app: AppWrapper, config: Config, context: WorkerContext, *rest: Any) -> None:
        super().__init__(app, config, context, *rest)
        self.room = Reservation(context.room)  # type: ignore[attr-defined]

    async def handle(self, event: StreamEvent) -> None:
        if isinstance(event, StreamClosed):
            self.room.close()
        await super().handle(event)
        if isinstance(event, Request):  # its app begins when this task waits for something
            cast("dict[str, Any]", self.scope["extensions"])[ROOM] = self.room


class BoundedProtocol(H2Protocol):
    """Hypercorn's HTTP/2, with four differences.

    - A stream that the client resets frees what waits for it, and its sender: a client may reset as many as it likes.
    - The task that reads the connection waits for no window, which would come over that connection. It answers pings
      and refuses handshakes.
    - An answer whose app is gone before its end is reset, so that the client does not wait for ever.
    - A connection without a request is idle from the beginning. It would stay for ever, and hold up a stop.
    """

    _reader: asyncio.Task[Any] | None = None

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        await super().initiate(headers, settings)
        if headers is None:
            await self.send(Updated(idle=True))

    async def stream_send(self, event: StreamEvent) -> None:
        buffer = self.stream_buffers.get(event.stream_id)
        stream = self.streams.get(event.stream_id)
        answer = isinstance(stream, BoundedStream)
        if isinstance(event, StreamClosed) and answer and buffer is not None and not buffer.complete:
            # The app is gone before its answer had an end: a client that heard nothing would wait for ever.
            await buffer.close()
            with contextlib.suppress(ProtocolError):
                self.connection.reset_stream(event.stream_id, ErrorCodes.INTERNAL_ERROR)
                await self._flush()
        says = isinstance(event, Body | Data)
        if says and (buffer is None or buffer.complete):
            await asyncio.sleep(0)  # nothing waits for a stream that is closed: others get their turn all the same
        if buffer is None or not (says or isinstance(event, EndBody | EndData)):
            await super().stream_send(event)
            return
        assert isinstance(buffer, BoundedBuffer)
        if isinstance(event, Body) and isinstance(stream, BoundedStream):
            stream.room.resize(len(event.data))
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
        buffer.abort = partial(self._abort, event.stream_id)
        buffer.kept = self.context.kept  # type: ignore[attr-defined]
        unread.made(buffer)
        unread.begin(len(event.data) if isinstance(event, Body | Data) else 0)
        try:
            await super().stream_send(event)
        finally:
            unread.lost()

    def _abort(self, stream_id: int) -> None:
        with contextlib.suppress(RuntimeError):  # all of the connection is being ended
            self.task_group.spawn(self._give_up, stream_id)

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
            self.context.room.close_waiting()  # type: ignore[attr-defined]
            for buffer in self.stream_buffers.values():
                await buffer.close()
        await super().handle(event)

    async def _create_stream(self, request: RequestReceived) -> None:
        await super()._create_stream(request)
        stream = self.streams.get(request.stream_id)
        if isinstance(stream, BoundedStream):
            cast("dict[str, Any]", stream.scope["extensions"])[DELIVER] = partial(self._deliver, request.stream_id)

    async def _deliver(self, stream_id: int, send: Send, body: bytes) -> None:
        """Send the whole body, and return when the kernel has all of it (`asgi.DELIVER`).

        `send` does not tell that the stream was closed before the body's end; its buffer does.
        """
        buffer = self.stream_buffers.get(stream_id)
        assert isinstance(buffer, BoundedBuffer | None)
        await send({"type": "http.response.body", "body": body})
        if buffer is None or buffer.cut:
            raise ConnectionResetError("the stream is closed")
        connection: HypercornConnection = cast(
            "Any", self.send
        ).__self__  # Hypercorn passes on its `protocol_send` alone
        await connection.wait_emptied()

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
