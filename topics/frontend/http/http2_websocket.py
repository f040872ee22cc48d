"""WebSockets over HTTP/2 (RFC 8441), on Hypercorn, with other handshake errors, and with bounds on messages.

    message ─▶ frame ─▶ the stream's buffer, whole
    the connection's reader ─▶ arrive, never waits ─▶ _take, a task that may wait for the app ─▶ the client's window

Hypercorn answers a malformed handshake with an empty 400, and keeps an outgoing message in three forms.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any, Final, cast

from h2.exceptions import ProtocolError
from hypercorn.protocol.events import Body, Data, EndBody, EndData, Event, Request, Response, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, WSStream
from hypercorn.typing import ASGISendEvent, WebsocketAcceptEvent
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Ping, TextMessage
from wsproto.events import Event as WebSocketEvent
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from topics.core.errors import TopicsError
from topics.frontend.asgi import WRITE_BUFFER
from topics.frontend.entry.responses import error_body
from topics.frontend.http.frame_budget import FRAMES_PER_TURN
from topics.frontend.http.http2_buffer import BoundedBuffer, BoundedProtocol
from topics.frontend.http.hypercorn_connection import context_of
from topics.frontend.http.websocket_input import VERSION, IncomingMessages, MessageTooLongError, handshake_error

_REFUSALS: Final = {
    400: ("invalid_request", "frames of a WebSocket, or its end, came before the answer to its handshake"),
    403: ("forbidden", "no WebSocket may be opened here"),
    500: ("internal", "the handshake failed inside the server"),
}
"""Code and message of the refusals that Hypercorn makes by itself, by status."""


class BoundedWebSocket(WSStream):
    """Hypercorn's stream of a WebSocket, with its own ways to refuse, read and send. It is a `WriteBuffer` in its app's
    scope. Owns the client's bytes that are not taken yet, at most the window of the stream.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._http2 = cast(BoundedProtocol, context_of(self).http2)
        self._incoming = IncomingMessages(self.config.websocket_max_message_size, context_of(self).frames)
        self._arrived = bytearray()
        self._window_bytes = 0  # the part of the client's window that arrived or is being taken, padding included
        self._is_taking = False
        self._is_over = False  # true if nothing more comes

    async def handle(self, event: Event) -> None:
        """Begin or end the stream, without waiting."""
        if isinstance(event, StreamClosed) or (isinstance(event, EndBody) and not self.closed):
            self._is_over = True
            if isinstance(event, StreamClosed) and not self._http2.closed:
                self._close()  # only the stream ends: bytes not taken would count for no stream
            self._begin_taking()
        if not isinstance(event, Request):
            return
        error = handshake_error(event.headers, event.http_version)
        if error is not None:
            self.closed = True
            self.state = ASGIWebsocketState.HTTPCLOSED
            self.task_group.spawn(self._refuse, error)  # waits for the client
            return
        # Drop the client's offer to compress: packing 8 MiB would block every other client.
        headers = [header for header in event.headers if header[0] != b"sec-websocket-extensions"]
        await super().handle(dataclasses.replace(event, headers=headers))
        if not self.closed:  # its app starts when this task next waits
            cast("dict[str, Any]", self.scope["extensions"])[WRITE_BUFFER] = self

    # What the client sends.

    def arrive(self, data: bytes, window_bytes: int) -> int:
        """Keep bytes of the client until they are taken, with their part of the window: none of it is free."""
        if not self.closed:
            self._arrived += data
        self._window_bytes += window_bytes
        self._begin_taking()
        return 0

    def _close(self) -> None:
        """Take no frame any more. Bytes that have arrived are dropped, and later ones, too."""
        self.closed = True
        self._arrived.clear()

    def _begin_taking(self) -> None:
        if not self._is_taking:
            self._is_taking = True
            with contextlib.suppress(RuntimeError):  # the whole connection is ending
                self.task_group.spawn(self._take)

    async def _take(self) -> None:
        """Take what has arrived, then the end of the stream. There is one such task at a time."""
        if self.state is ASGIWebsocketState.HANDSHAKE and not self.closed and not self._http2.closed:
            await self._send_error_response(400)
        while window_bytes := self._window_bytes:
            try:
                await self._take_frames()
            except ProtocolError as error:
                self._close()
                await self._http2.cut(error)
            self._http2.give_back(self.stream_id, window_bytes)
            self._window_bytes -= window_bytes  # last: this task goes on until none is left
        if self._is_over:
            await self._end()
        self._is_taking = False
        if self._window_bytes > 0:  # bytes came behind the end
            self._begin_taking()

    async def _end(self) -> None:
        """End the stream: nothing more comes. A refusal that is under way ends by itself."""
        is_open = self.state in (ASGIWebsocketState.CONNECTED, ASGIWebsocketState.CLOSED)
        if self.closed or self._http2.closed or is_open:
            await self._tell_end()
        if is_open and not self._http2.closed:
            await self.send(EndData(stream_id=self.stream_id))  # else it would count as an open stream
            await self.send(StreamClosed(stream_id=self.stream_id))

    async def _take_frames(self) -> None:
        data, self._arrived = bytes(self._arrived), bytearray()
        if not self.closed and self.handshake.accepted:
            self.connection.receive_data(data)
            del data  # wsproto has a copy
            await self._handle_events()

    async def _tell_end(self) -> None:
        """Tell the app that nothing more comes. Idempotent."""
        self._close()
        app_put, self.app_put = self.app_put, None
        if app_put is not None:
            self.scope["extensions"].pop(WRITE_BUFFER, None)  # breaks a reference cycle
            is_ended = self.state in (ASGIWebsocketState.HTTPCLOSED, ASGIWebsocketState.CLOSED)
            code = CloseReason.NORMAL_CLOSURE if is_ended else CloseReason.ABNORMAL_CLOSURE
            await app_put({"type": "websocket.disconnect", "code": code.value})

    # Refusals.

    async def _send_error_response(self, status_code: int) -> None:
        await self._refuse(TopicsError(*_REFUSALS[status_code]))

    async def _refuse(self, error: TopicsError) -> None:
        self.state = ASGIWebsocketState.HTTPCLOSED
        await self._tell_end()
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.code == "upgrade_required":
            headers.append((b"sec-websocket-version", VERSION))
        await self.send(Response(stream_id=self.stream_id, headers=headers, status_code=error.status))
        await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
        await self.send(StreamClosed(stream_id=self.stream_id))

    # Messages.

    async def _accept(self, message: WebsocketAcceptEvent) -> None:
        context_of(self).admit()
        await super()._accept(message)

    async def _send_pings(self) -> None:
        """Send a ping after each interval. Hypercorn's first one comes at once, before any answer."""
        interval_s = self.config.websocket_ping_interval
        assert interval_s is not None  # without an interval nobody sends pings
        await self.context.sleep(interval_s)
        await super()._send_pings()

    async def _handle_events(self) -> None:
        for number, event in enumerate(self.connection.events(), 1):
            if number % FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            if self.closed:
                return
            try:
                await self._handle_frame(event)
            except MessageTooLongError:
                await self._send_wsproto_event(CloseConnection(CloseReason.MESSAGE_TOO_BIG))
                return

    async def _handle_frame(self, event: WebSocketEvent) -> None:
        message = self._incoming.take(event)
        if message is not None:
            assert self.app_put is not None
            await self.app_put(cast(Any, message))
        elif isinstance(event, Ping):
            await self._send_wsproto_event(event.response())
        elif isinstance(event, CloseConnection):
            self._is_over = True
            self._close()
            if self.connection.state is not ConnectionState.CLOSED:
                await self._send_wsproto_event(event.response())

    async def app_send(self, message: ASGISendEvent | None) -> None:
        if message is None or message["type"] != "websocket.send" or self.state is not ASGIWebsocketState.CONNECTED:
            await super().app_send(message)
        elif not self.closed:
            # Taken out of the message, which the sender keeps until this is done.
            await self._send_wsproto_event(TextMessage(data=cast("dict[str, Any]", message).pop("text")))

    async def _send_wsproto_event(self, event: WebSocketEvent) -> None:
        try:
            data = self.connection.send(event)
        except LocalProtocolError:
            return
        del event
        await self.send(Data(stream_id=self.stream_id, data=data))

    # The calls of `asgi.WriteBuffer`.

    def get_write_buffer_size(self) -> int:
        """Return the number of sent bytes that are kept for the client."""
        return 0 if self._buffer is None else self._buffer.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._buffer is None or self._buffer.is_closing()

    def abort(self) -> None:
        """Cut the stream. What waits for the client is lost."""
        if self._buffer is not None:
            self._buffer.abort()

    @property
    def _buffer(self) -> BoundedBuffer | None:
        """The buffer of the stream: streams share the transport."""
        http2 = context_of(self).http2
        buffer = None if http2 is None else http2.stream_buffers.get(self.stream_id)
        assert isinstance(buffer, BoundedBuffer | None)
        return buffer
