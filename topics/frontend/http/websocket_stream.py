"""WebSockets on Hypercorn, with other handshake errors, and with bounds on messages in both directions.

    message ─▶ frame ─▶ HTTP/1.1: pieces of PIECE_BYTES_MAX, each when the transport has room for it
                   └──▶ HTTP/2: the stream's buffer, whole

Malformed WebSocket handshakes get the usual JSON error (RFC 6455 §4.2.1, api §0.6). Hypercorn itself accepts any key,
answers the rest with an empty 400 before the app hears of it, and leaves the connection open. It also keeps an outgoing
message in three forms until the client has read it. Here it is kept once, and its size is known.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any, Final, cast

from h2.exceptions import DenialOfServiceError
from hypercorn.protocol.events import Body, Data, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, FrameTooLargeError, WebsocketBuffer, WSStream
from hypercorn.typing import ASGISendEvent, WebsocketAcceptEvent
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping, Pong, TextMessage
from wsproto.events import Event as WebSocketEvent
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from topics.core.errors import TopicsError, invalid
from topics.frontend.asgi import DROPPED, RESERVATION, WRITE_BUFFER, WriteBuffer
from topics.frontend.entry.bodies import COUNTED_FROM_BYTES, MessageReservation
from topics.frontend.entry.responses import error_body
from topics.frontend.http.frame_budget import FRAMES_PER_TURN
from topics.frontend.http.http2_buffer import BoundedBuffer
from topics.frontend.http.hypercorn_connection import context_of

PIECE_BYTES_MAX: Final = 64 * 1024
FRAGMENT_BYTES: Final = 1024
"""A shorter part of a message counts as a frame without content."""
_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")  # 16 bytes in base64
_VERSION: Final = b"13"
_SHOWN_BYTES: Final = 60
_REFUSALS: Final = {
    400: ("invalid_request", "frames of a WebSocket came before the answer to its handshake"),
    403: ("forbidden", "no WebSocket may be opened here"),
    404: ("not_found", "there is nothing at this host"),
    500: ("internal", "the handshake failed inside the server"),
}
"""Code and message of the refusals that Hypercorn makes by itself, by status."""


class CountedMessages(WebsocketBuffer):
    """The incoming message. It counts as a body does; one without room is dropped, and the app is told."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self._reservation: MessageReservation | None = None
        self._kept_bytes = 0
        self._dropped = False

    def extend(self, event: Message[Any]) -> None:
        if self.length + len(event.data) > self.max_length:
            self._drop()
            raise FrameTooLargeError
        if self._dropped:
            self.length += len(event.data)
            return
        self._kept_bytes += sys.getsizeof(event.data)
        if self._kept_bytes > COUNTED_FROM_BYTES:
            if self._reservation is None:
                self._reservation = MessageReservation()
            if not self._reservation.reach(self._kept_bytes):
                self.length += len(event.data)
                self._drop()
                return
        super().extend(event)

    def _drop(self) -> None:
        self.value = self._reservation = None
        self._dropped = True

    def clear(self) -> None:
        super().clear()
        self._reservation = None
        self._kept_bytes = 0
        self._dropped = False

    def to_message(self) -> dict[str, Any]:
        message: dict[str, Any] = super().to_message()
        if self._dropped:
            message[DROPPED] = True
        if self._reservation is not None:
            message[RESERVATION] = self._reservation
        return message


class BoundedWebSocket(WSStream):
    """Hypercorn's stream of a WebSocket, except for how it refuses and sends. A `WriteBuffer` in its app's scope."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer = CountedMessages(self.config.websocket_max_message_size)
        self._over_http2 = False
        self._sending = asyncio.Lock()  # one frame at a time
        self._left_bytes = 0  # of the frame that is sent in pieces
        self._frame_bytes = 0  # of the data frame that is being received

    async def handle(self, event: Event) -> None:
        if not isinstance(event, Request) or self.closed:
            await super().handle(event)
            return
        self._over_http2 = event.http_version == "2"
        error = handshake_error(event.headers, event.http_version)
        if error is not None:
            await self._refuse(error)
            return
        await super().handle(event)
        if not self.closed:  # its app starts when this task next waits
            cast("dict[str, Any]", self.scope["extensions"])[WRITE_BUFFER] = self

    # Refusals.

    async def _send_error_response(self, status_code: int) -> None:
        await self._refuse(TopicsError(*_REFUSALS[status_code]))

    async def _refuse(self, error: TopicsError) -> None:
        self.closed = True
        self.state = ASGIWebsocketState.HTTPCLOSED
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.code == "upgrade_required":
            headers.append((b"sec-websocket-version", _VERSION))
        if not self._over_http2:
            headers.append((b"connection", b"close"))
        await self.send(Response(stream_id=self.stream_id, headers=headers, status_code=error.status))
        await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
        if not self._over_http2:
            # Nobody else closes the connection. A stream of HTTP/2 must stay: the client may still send on it.
            await self.send(StreamClosed(stream_id=self.stream_id))

    # Messages.

    async def _accept(self, message: WebsocketAcceptEvent) -> None:
        context_of(self).admit()
        await super()._accept(message)

    async def _send_pings(self) -> None:
        """Send a ping after each interval. Hypercorn's first one comes at once, before any answer."""
        interval_s = self.config.websocket_ping_interval
        assert interval_s is not None  # without one nobody sends pings
        await self.context.sleep(interval_s)
        await super()._send_pings()

    async def _handle_events(self) -> None:
        for number, event in enumerate(self.connection.events(), 1):
            if number % FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)
            if self.closed:
                return
            try:
                await self._handle_wsproto_event(event)
            except DenialOfServiceError as error:
                if self._over_http2:
                    raise
                await self._send_wsproto_event(CloseConnection(CloseReason.POLICY_VIOLATION, str(error)))
                await self.send(StreamClosed(stream_id=self.stream_id))
            except FrameTooLargeError:
                await self._send_wsproto_event(CloseConnection(CloseReason.MESSAGE_TOO_BIG))
                return

    async def _handle_wsproto_event(self, event: WebSocketEvent) -> None:
        if isinstance(event, Message):
            self._frame_bytes += len(event.data)
            self.buffer.extend(event)
            if event.frame_finished:
                is_fragment = not event.message_finished and self._frame_bytes < FRAGMENT_BYTES
                self._frame_bytes = 0
                if is_fragment or not self.buffer.length:
                    context_of(self).frames.spend()
            if event.message_finished:
                assert self.app_put is not None
                await self.app_put(self.buffer.to_message())
                self.buffer.clear()
        elif isinstance(event, Ping | Pong):
            context_of(self).frames.spend()
            if isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
        elif isinstance(event, CloseConnection):
            if self.connection.state is ConnectionState.REMOTE_CLOSING:
                await self._send_wsproto_event(event.response())
            await self.send(StreamClosed(stream_id=self.stream_id))

    async def app_send(self, message: ASGISendEvent | None) -> None:
        if message is None or message["type"] != "websocket.send" or self.state is not ASGIWebsocketState.CONNECTED:
            await super().app_send(message)
        elif not self.closed:
            # Taken out of the message, which the sender keeps until this is done.
            await self._send_wsproto_event(TextMessage(data=cast("dict[str, Any]", message).pop("text")))

    async def _send_wsproto_event(self, event: WebSocketEvent) -> None:
        if self._over_http2:
            # Must not wait: the task that reads the connection answers pings here.
            data = self._framed(event)
            del event
            await self._send_data(data)
            return
        async with self._sending:
            data = b"" if self._left_bytes else self._framed(event)  # nothing can follow half a frame
            del event
            if len(data) <= PIECE_BYTES_MAX:
                await self._send_data(data)
            else:
                await self._send_in_pieces(memoryview(data))

    def _framed(self, event: WebSocketEvent) -> bytes:
        """Return the frame of a message; empty if it can no longer be sent."""
        try:
            return self.connection.send(event)
        except LocalProtocolError:
            return b""

    async def _send_in_pieces(self, frame: memoryview) -> None:
        self._left_bytes = len(frame)
        # The transport has little of the frame at any time, so the client's time for all of it is limited here.
        timer = context_of(self).watch(self)
        timer.start()
        try:
            while self._left_bytes and not self.closed:
                piece = bytes(frame[-self._left_bytes :][:PIECE_BYTES_MAX])
                self._left_bytes -= len(piece)
                await self._send_data(piece)
        finally:
            timer.close()

    async def _send_data(self, data: bytes) -> None:
        if data:
            await self.send(Data(stream_id=self.stream_id, data=data))

    # The calls of `asgi.WriteBuffer`.

    def get_write_buffer_size(self) -> int:
        """Return the number of sent bytes that are kept for the client."""
        below = self._below
        return self._left_bytes + (0 if below is None else below.get_write_buffer_size())

    def is_closing(self) -> bool:
        below = self._below
        return below is None or below.is_closing()

    def abort(self) -> None:
        """Cut the connection or stream. What waits for the client is lost."""
        if self._below is not None:
            self._below.abort()

    @property
    def _below(self) -> WriteBuffer | None:
        """The transport; over HTTP/2, where streams share the transport, the buffer of the stream."""
        context = context_of(self)
        if context.http2 is None:
            return context.transport
        buffer = context.http2.stream_buffers.get(self.stream_id)
        assert isinstance(buffer, BoundedBuffer | None)
        return buffer


def handshake_error(headers: list[tuple[bytes, bytes]], http_version: str) -> TopicsError | None:
    """Return the error of a malformed WebSocket handshake. Over HTTP/2 it has no key (RFC 8441)."""
    if http_version == "1.0":
        return invalid("a WebSocket needs HTTP/1.1 or HTTP/2, not HTTP/1.0")
    versions = [value for name, value in headers if name.lower() == b"sec-websocket-version"]
    if versions != [_VERSION]:
        return TopicsError("upgrade_required", f"Sec-WebSocket-Version must be 13, once; it is {_show(versions)}")
    keys = [value for name, value in headers if name.lower() == b"sec-websocket-key"]
    if http_version == "1.1" and not (len(keys) == 1 and _KEY.fullmatch(keys[0])):
        return invalid(f"Sec-WebSocket-Key must be 16 bytes in base64, once; it is {_show(keys)}")
    return None


def _show(values: list[bytes]) -> str:
    return ", ".join(repr(value[:_SHOWN_BYTES].decode("latin-1")) for value in values[:2]) or "not there"
