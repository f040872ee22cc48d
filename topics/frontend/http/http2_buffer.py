"""HTTP/2 on Hypercorn, with a bound on what waits for the client of a stream (api §7).

To Hypercorn's own buffer a client with a window of 0 looks like one that keeps up, which would pull a whole topic into
memory. Here `send` waits until the client has read the message. A stream whose client reads nothing is reset
(`SlowReaderTimer`). Long answers are bounded for a connection (`responses.reserve_room`) and for all (`KeptAnswers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PriorityUpdated, RequestReceived, StreamReset
from h2.exceptions import InvalidBodyLengthError, ProtocolError, StreamClosedError, StreamIDTooLowError
from hpack import Decoder, HPACKError, OversizedHeaderListError
from hypercorn.events import Closed, RawData, Updated
from hypercorn.events import Event as ConnectionEvent
from hypercorn.protocol.events import Body, Data, EndBody, EndData, Request, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import Event as IOEvent
from hyperframe.frame import DataFrame, Frame, HeadersFrame, WindowUpdateFrame
from priority.priority import TooManyStreamsError

from topics.frontend.asgi import DELIVER, ROOM, Message, Send
from topics.frontend.entry.budget import Reservation
from topics.frontend.http.connections import KeptAnswers
from topics.frontend.http.frame_budget import EARNED_BY_ANSWER, EARNED_PER_BYTES, FIELDS_FREE, RESET_COST, CheckedFrames
from topics.frontend.http.http1_parser import join_lists
from topics.frontend.http.hypercorn_connection import RECEIVE, context_of

_DataEvent = Body | Data
_Taken = tuple[list[Frame], list[Event]]
_Checked = HeadersFrame | DataFrame | WindowUpdateFrame
_UNWANTED_MAX_BYTES: Final = 1 << 20
_MALFORMED: Final = (ProtocolError, InvalidBodyLengthError)
"""Exactly these types are h2's errors about one request. Those about the connection have types of their own."""
_WINDOW_BYTES: Final = 65_535  # of each stream, and of a connection that has not enlarged it (RFC 9113 §6.9.2)
_percent_encoded = partial(re.compile(rb"[\x80-\xff]").sub, lambda byte: b"%%%02X" % ord(byte[0]))


class _UnreadableBlockError(ProtocolError):
    """A header block that HPACK cannot read, after which it can read no other of the connection."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class BoundedBuffer(StreamBuffer):
    """The bytes that wait for the client of one stream: one message, and less than BUFFER_HIGH_WATER before it. It
    keeps a message without a copy, because the sender has the message in memory anyway while it waits.
    """

    def __init__(self, event_class: type[IOEvent]) -> None:
        super().__init__(event_class)
        self.cut = False  # true if it was closed before the client was told of the end
        self._kept: KeptAnswers | None = None
        self._reset: Callable[[], None] | None = None
        self._parts: deque[memoryview] = deque()
        self._ended: IOEvent = event_class()
        self.buffered_bytes = 0
        self._waiting = 0  # calls of `push`: those of the app, and of pongs and pings of its WebSocket

    def attach(self, kept: KeptAnswers, reset: Callable[[], None]) -> None:
        """Count long messages in `kept`; `abort` calls `reset`. (Hypercorn makes buffers without either.)"""
        self._kept, self._reset = kept, reset

    @property
    def complete(self) -> bool:
        return self._complete and not self._parts

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Reset the stream, because its client reads nothing, or all clients together read too little."""
        if self._reset is not None:
            self._reset()

    async def close(self) -> None:
        """Drop what waits, and wake those that wait for room."""
        self.cut |= not self._ended.is_set()
        self._parts.clear()
        self.buffered_bytes = 0
        await super().close()
        await self.end()

    async def end(self) -> None:
        """Wake `drain`: the client has been told of the end."""
        await self._ended.set()

    async def drain(self) -> None:
        """Wait for `end` or `close`. An empty buffer is not enough: the app of the last answer ends a connection that
        drains, and must not do so before the end of the stream is on the wire.
        """
        await self._ended.wait()

    async def push(self, data: bytes) -> None:
        """Add a message, and wait until there is room for the next one or the stream is closed."""
        if self._complete:
            raise BufferCompleteError
        self._parts.append(memoryview(data))
        self.buffered_bytes += len(data)
        await self._is_empty.clear()
        if self.buffered_bytes >= BUFFER_HIGH_WATER:
            await self._paused.clear()  # set by room before this message
            assert self._kept is not None
            self._waiting += 1
            self._kept.add(self)
            try:
                await self._paused.wait()
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._kept.remove(self)

    async def pop(self, max_length: int) -> bytes:
        pieces = []
        left = max_length
        while left and self._parts:
            part = self._parts.popleft()
            if len(part) > left:
                rest = part[left:]
                if len(rest) < BUFFER_LOW_WATER:  # frees the message: nobody waits for its rest any more
                    rest = memoryview(bytes(rest))
                self._parts.appendleft(rest)
            pieces.append(part[:left])
            left -= len(pieces[-1])
        self.buffered_bytes -= max_length - left
        if self.buffered_bytes < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self._parts:
            await self._is_empty.set()
        return b"".join(pieces)


class BoundedStream(HTTPStream):
    """Hypercorn's stream of a request, with our extensions of its scope, and a `receive` that holds up no other stream.
    Owns the bytes that the app has not received, at most the window of the stream.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.room = Reservation(context_of(self).answers)
        self._http2 = cast(BoundedProtocol, context_of(self).http2)
        self._arrived = bytearray()
        self._changed = asyncio.Event()
        self._is_whole = False  # until the app is told

    async def handle(self, event: StreamEvent) -> None:
        """Begin or end the request, without waiting."""
        if isinstance(event, EndBody):
            self._is_whole = True
        else:
            await super().handle(event)
        if isinstance(event, Request):  # its app starts when this task next waits
            deliver = partial(self._http2.deliver, self.stream_id)
            cast(Any, self.scope["extensions"]).update({ROOM: self.room, RECEIVE: self.receive, DELIVER: deliver})
        elif isinstance(event, StreamClosed):
            self.room.close()
            self._http2.give_back(self.stream_id, len(self._arrived))
            if not self._is_whole:
                self._arrived.clear()
        self._changed.set()

    def arrive(self, data: bytes, window_bytes: int) -> int:
        """Keep bytes of the body until the app receives them. Return the part of the window that is free again."""
        self._arrived += data
        self._changed.set()
        return window_bytes - len(data)

    async def receive(self) -> Message:
        """ASGI receive: return the part of the body that has arrived, waiting for some; then `http.disconnect`."""
        while not (self._arrived or self._is_whole or self.closed):
            self._changed.clear()
            await self._changed.wait()
        if not (self._arrived or self._is_whole):
            return {"type": "http.disconnect"}
        body, self._arrived = bytes(self._arrived), bytearray()
        more_body, self._is_whole = not self._is_whole, False
        if not self.closed:
            self._http2.give_back(self.stream_id, len(body))
        return {"type": "http.request", "body": body, "more_body": more_body}


class BoundedProtocol(H2Protocol):
    """Hypercorn's HTTP/2, with eleven differences.

    - A stream that the client resets frees its waiting bytes and its sender: a client may reset any number of streams.
    - The task that reads the connection never waits for a window, because that comes over the same connection. Nor does
      it wait for an app, which may wait for a window: what it has not taken waits in its stream.
    - If an app ends before its answer does, the stream is reset, so that the client does not wait for ever.
    - A connection without a stream is idle, however its last one ended. Else it would stay for ever, and delay a stop.
    - Frames are checked, counted, and handled a few in each turn (`frame_budget`).
    - A GOAWAY without an error, of either side, ends no answer that is due: h2 would send nothing any more.
    - The rest of a body behind its answer is dropped, where Hypercorn raises KeyError.
    - A malformed request ends no other (RFC 9113 §8.1.1): its head or trailers are none, or its body is not as long as
      its `content-length` says. That of a WebSocket says nothing about its frames.
    - The client may repeat a request that comes during a drain.
    - Priorities are ignored (RFC 9113 §5.3): streams without a request would fill their tree.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        context = context_of(self)
        context.http2 = self
        self._budget = context.frames
        self._unwanted_bytes = 0
        self.frames = CheckedFrames(self._budget, self.config.h2_max_header_list_size)
        self.connection.incoming_buffer = context.http2_frames = self.frames
        take_frame = self.connection._frame_dispatch_table
        for kind in (HeadersFrame, DataFrame, WindowUpdateFrame):
            take_frame[kind] = partial(self._take_checked, take_frame[kind])
        cast(Any, self.connection.decoder).decode = self._decode_counted

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        await super().initiate(headers, settings)
        # The window of all streams together: the frames of one that waits must not take the window of the others.
        self.connection.increment_flow_control_window(_WINDOW_BYTES * (self.config.h2_max_concurrent_streams - 1))
        await self._flush()
        if headers is None:
            await self.send(Updated(idle=True))

    async def stream_send(self, event: StreamEvent) -> None:
        buffer = self.stream_buffers.get(event.stream_id)
        stream = self.streams.get(event.stream_id)
        if isinstance(event, StreamClosed):
            if isinstance(stream, BoundedStream) and buffer is not None and not buffer.complete:
                await buffer.close()
                self._tell(self.connection.reset_stream, event.stream_id, ErrorCodes.INTERNAL_ERROR)
            await self._close_stream(event.stream_id)  # without Hypercorn's GOAWAY at a stop: the context sends one
            await self.send(Updated(idle=self.idle))
            return
        has_data = isinstance(event, _DataEvent)
        if has_data and (buffer is None or buffer.complete):
            await asyncio.sleep(0)  # a closed stream makes its app never wait: let other tasks run
        if buffer is None or not (has_data or isinstance(event, EndBody | EndData)):
            await super().stream_send(event)
            return
        assert isinstance(buffer, BoundedBuffer)
        if isinstance(event, Body) and isinstance(stream, BoundedStream):
            stream.room.resize(len(event.data))
        context = context_of(self)
        buffer.attach(context.kept, partial(self._spawn_reset, event.stream_id))
        timer = context.watch(buffer)  # limits the client's time to read it
        timer.start(len(event.data) if isinstance(event, _DataEvent) else 0)
        try:
            await super().stream_send(event)
        finally:
            timer.close()

    def _spawn_reset(self, stream_id: int) -> None:
        with contextlib.suppress(RuntimeError):  # the whole connection is ending
            self.task_group.spawn(self._reset, stream_id)

    async def _reset(self, stream_id: int) -> None:
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None:
            await buffer.close()
            self._tell(self.connection.reset_stream, stream_id, ErrorCodes.CANCEL)
            await self.stream_send(StreamClosed(stream_id))

    async def handle(self, event: ConnectionEvent) -> None:
        if isinstance(event, Closed):
            context_of(self).answers.close_waiting()
            for buffer in self.stream_buffers.values():
                await buffer.close()
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        data = event.data
        try:
            while True:
                self.frames.begin_turn()
                await super().handle(RawData(data=data))
                if not self.frames.more:
                    return
                data = b""
                await asyncio.sleep(self.frames.pause_s)
        except (ProtocolError, TooManyStreamsError) as error:
            await self.cut(error)

    async def cut(self, error: ProtocolError | TooManyStreamsError) -> None:
        """Tell the client why, and close the connection."""
        self._budget.refuse(str(error))
        code = error.error_code if isinstance(error, ProtocolError) else ErrorCodes.ENHANCE_YOUR_CALM
        self._tell(self.connection.close_connection, code)
        await self.send(Closed())

    def arrive(self, data: bytes, window_bytes: int) -> int:
        """Drop bytes that came behind the answer of their stream. Return their part of the window."""
        self._unwanted_bytes += len(data)
        return window_bytes

    def give_back(self, stream_id: int, window_bytes: int) -> None:
        """Let the client send `window_bytes` more: the service has taken as many from the stream."""
        self._tell(self.connection.acknowledge_received_data, window_bytes, stream_id)

    def _tell(self, act: Callable[..., None], *arguments: int) -> None:
        """Let h2 act, if it still can, and send the frames for that at once."""
        with contextlib.suppress(ProtocolError):
            act(*arguments)
        context_of(self).write(self.connection.data_to_send())

    async def _create_stream(self, request: RequestReceived) -> None:
        headers = join_lists(request.headers)
        request.headers = [(name, _percent_encoded(value) if name == b":path" else value) for name, value in headers]
        await super()._create_stream(request)

    async def deliver(self, stream_id: int, send: Send, body: bytes) -> None:
        """Send the whole body, and return when the kernel has all of it (`asgi.DELIVER`)."""
        buffer = cast(BoundedBuffer | None, self.stream_buffers.get(stream_id))
        await send({"type": "http.response.body", "body": body})
        if buffer is None or buffer.cut:
            raise ConnectionResetError("the stream is closed")
        await cast(Any, context_of(self).server).wait_emptied()

    async def _send_data(self, stream_id: int) -> None:
        buffer = self.stream_buffers.get(stream_id)
        before_bytes = 0 if buffer is None else cast(BoundedBuffer, buffer).buffered_bytes
        await super()._send_data(stream_id)
        if before_bytes:
            left_bytes = cast(BoundedBuffer, buffer).buffered_bytes
            sent_bytes = max(0, before_bytes - left_bytes)
            self._budget.earn(sent_bytes // EARNED_PER_BYTES + (0 if left_bytes else EARNED_BY_ANSWER))
        if stream_id not in self.stream_buffers and isinstance(buffer, BoundedBuffer):
            await buffer.end()

    async def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StreamReset) and event.stream_id in self.stream_buffers:
                await self.stream_buffers[event.stream_id].close()
            if isinstance(event, DataReceived):
                stream = cast(Any, self.streams.get(event.stream_id, self))
                free_bytes = stream.arrive(event.data, event.flow_controlled_length)
                self.give_back(event.stream_id, free_bytes)  # h2 opens a window of 0 only here, if it owes any
                if self._unwanted_bytes > _UNWANTED_MAX_BYTES and stream is self:  # asks it to stop (RFC 9113 §8.1)
                    self._tell(self.connection.reset_stream, event.stream_id, ErrorCodes.NO_ERROR)
            elif isinstance(event, RequestReceived) and self.context.terminated.is_set():
                self._tell(self.connection.reset_stream, event.stream_id, ErrorCodes.REFUSED_STREAM)
            elif not isinstance(event, PriorityUpdated):
                await super()._handle_events([event])
        # Also without frames: those of `_tell` are on their way, and the reader waits for a client that does not read.
        await self.send(RawData(data=self.connection.data_to_send()))
        if self.idle and any(isinstance(event, RequestReceived | StreamReset) for event in events):
            await self.send(Updated(idle=True))

    def _decode_counted(self, block: bytes, *, raw: bool) -> list[Any]:
        """Decode a header block, and count its fields: also those of a request that does not begin, and of trailers."""
        try:
            fields = cast(list[Any], Decoder.decode(self.connection.decoder, block, raw=raw))
        except OversizedHeaderListError:
            raise
        except HPACKError as error:
            raise _UnreadableBlockError(f"a header block cannot be read: {error}") from error
        if len(fields) > FIELDS_FREE:
            self._budget.spend(len(fields) - FIELDS_FREE)
        if b":status" in dict(fields):  # malformed, but of a status 1xx h2 would say so too early for a reset
            return [(b":status", b"")]
        return fields

    def _take_checked(self, take: Callable[[Any], _Taken], frame: _Checked) -> _Taken:
        """Let h2 take a frame, and count what h2 answers with a reset. If the request is malformed, reset its stream,
        where h2 ends the connection, or looks at no length of a body because the last frame is no piece of it.
        """
        streams, stream_id = self.connection.streams, frame.stream_id
        known = streams.get(stream_id)
        stated_bytes = None if known is None else known._expected_content_length
        try:
            resets, events = taken = take(frame)
            if resets:
                # The first one undoes a request. What was begun before that may come yet, and end once. Pieces of its
                # body are free: they cost no more than those that are wanted (docs/limits.md has figures).
                self._budget.spend(RESET_COST if events else int("END_STREAM" in frame.flags))
                return taken
            stream = streams.get(stream_id)
            if known is None and stream is not None:
                fields = cast("dict[bytes, bytes]", dict(cast(RequestReceived, events[0]).headers))
                if b":path" not in fields or not fields[b":method"].isascii():
                    raise ProtocolError("a request for a proxy, or a method that is none")
                if fields[b":method"] == b"CONNECT":  # what follows is no body (RFC 9110 §9.3.6)
                    stream._expected_content_length = None
            if isinstance(frame, HeadersFrame) and "END_STREAM" in frame.flags:
                assert stream is not None
                if known is not None:  # trailers, by which h2 has forgotten it
                    stream._expected_content_length = stated_bytes
                stream._track_content_length(0, end_stream=True)
        except (StreamClosedError, StreamIDTooLowError):  # a head or trailers for a stream that is over
            self._budget.spend(RESET_COST)
            raise
        except ProtocolError as error:
            if type(error) not in _MALFORMED or stream_id not in streams:
                raise
            self._budget.spend(RESET_COST)
            self._tell(self.connection.reset_stream, stream_id, ErrorCodes.PROTOCOL_ERROR)
            if isinstance(frame, DataFrame):
                self.give_back(stream_id, frame.flow_controlled_length)
            reset = StreamReset(stream_id=stream_id, error_code=ErrorCodes.PROTOCOL_ERROR, remote_reset=False)
            return [], [reset]
        return taken
