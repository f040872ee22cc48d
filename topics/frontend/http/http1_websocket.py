"""WebSockets over HTTP/1.1, on connections that `http1` has read a handshake from. wsproto makes and reads the frames.

bytes ─▶ wsproto ─▶ IncomingMessages ─▶ receive()        FRAMES_PER_TURN in a turn, MESSAGES_MAX for the app
send(), send_now() ─▶ frame ─▶ transport                 a long frame in pieces, each when there is room for it

HANDSHAKE ─ accept ─▶ OPEN ─ a close frame is sent ─▶ CLOSING ─▶ OVER: half-close, and drop input until the client
    └── refused ──────────┴─ the client's close, or it is gone ─────┘  has closed, too

Nothing can follow half a frame: a close frame of ours comes behind the rest of it (ANSWERING, where it is an answer).
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from h2.exceptions import DenialOfServiceError
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Event, Ping
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, generate_accept_token

from topics.core.errors import TopicsError, invalid
from topics.frontend.asgi import SEND_NOW, WRITE_BUFFER, AsgiApp, Message, Scope
from topics.frontend.http.connections import GONE_S, Connections
from topics.frontend.http.deadlines import HttpLimits, RunningClock, SlowReaderTimer
from topics.frontend.http.frame_budget import FRAMES_PER_TURN, ClientAddresses
from topics.frontend.http.http1_exchange import STATUS_LINES, error_answer, header_block
from topics.frontend.http.http1_parser import Head
from topics.frontend.http.websocket_input import (
    PIECE_BYTES_MAX,
    PING_INTERVAL_S,
    IncomingMessages,
    MessageTooLongError,
    handshake_error,
)
from topics.frontend.http.websocket_output import SocketStage, message_frame, text_frame
from topics.log import get_logger

MESSAGES_MAX: Final = 8  # whole messages that wait for the app; then nothing more is read

_TOO_EARLY: Final = invalid("frames of a WebSocket came before the answer to its handshake")
log = get_logger()


@dataclass(eq=False)
class Http1WebSockets:
    """Makes the WebSocket of each connection, and owns what those of one process share."""

    app: AsgiApp
    limits: HttpLimits
    connections: Connections
    clock: RunningClock
    addresses: ClientAddresses
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def take_over(self, transport: asyncio.Transport, head: Head, scope: Scope, data: bytes) -> None:
        """Serve a connection from now on, beginning with a handshake's `head`, and the bytes that came behind it.
        `scope` is that of the request.
        """
        websocket = Http1WebSocket(self, transport)
        transport.set_protocol(websocket)
        self.connections.adopt(websocket)
        websocket.begin(head, scope, data)


class Http1WebSocket(asyncio.Protocol):
    """One WebSocket. It owns the transport, the frames that are not handled, and the app's messages. A `WriteBuffer`,
    an `AnswerHolder` and an `OpenConnection`.
    """

    def __init__(self, shared: Http1WebSockets, transport: asyncio.Transport) -> None:
        self._shared = shared
        self._loop = shared.loop
        self._transport = transport
        self.stage = SocketStage.HANDSHAKE
        self._scope: Scope | None = None  # until its app is started
        self._app: asyncio.Task[Any] | None = None
        self._accept_token = b""
        self._timer: asyncio.TimerHandle | None = None  # for a turn, the next ping, or the client's close
        # Input.
        self._frames = shared.addresses.budget(transport.get_extra_info("peername"))
        self._wire = Connection(ConnectionType.SERVER)
        self._incoming = IncomingMessages(shared.limits.max_body_bytes, self._frames)
        self._unparsed = bytearray()
        self._is_wire_empty = True  # true if wsproto holds no whole frame
        self._parses_soon = False
        self._is_full = False
        self._is_ended = False  # whether the client has ended its side
        self._messages: deque[Message] = deque(({"type": "websocket.connect"},))
        self._arrival: asyncio.Future[None] | None = None
        # Output.
        self._writable = True
        self._can_write = asyncio.Event()  # means nothing while `_writable`
        self._sending = asyncio.Lock()
        self._left_bytes = 0  # of the frame that is sent in pieces
        self._close_frame = b""  # waits until half a frame is whole
        self._close_code = 0  # of that frame
        self._pong = b""  # waits until there is room, or half a frame is whole
        self._reader_timer = SlowReaderTimer(shared.limits, shared.clock, shared.loop, self)

    def begin(self, head: Head, scope: Scope, data: bytes) -> None:
        """Check the handshake, and start the app when it is this address's turn."""
        wait_s = self._frames.address.claim_turn_s()
        if wait_s == math.inf:
            self._transport.abort()
            return
        error = handshake_error(head.headers, "1.1" if head.http11 else "1.0")
        if error is not None:
            self._refuse(error)
        elif head.length != 0:
            self._refuse(invalid("the handshake of a WebSocket has no body"))
        elif data:
            self._refuse(_TOO_EARLY)
        else:
            self._accept_token = generate_accept_token(dict(head.headers)[b"sec-websocket-key"])
            extensions = {"websocket.http.response": {}, WRITE_BUFFER: self, SEND_NOW: self.send_now}
            del scope["method"]  # a WebSocket has none
            self._scope = {**scope, "type": "websocket", "scheme": "ws", "subprotocols": [], "extensions": extensions}
            if wait_s > 0:
                self._set_timer(wait_s, self._start_app)
            else:
                self._start_app()

    def _set_timer(self, after_s: float, call: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(after_s, call)

    # The app.

    def _start_app(self) -> None:
        if self.stage is SocketStage.HANDSHAKE:
            self._shared.connections.arrived += 1
            self._shared.connections.start_task(self._run_app)

    async def _run_app(self) -> None:
        scope, self._scope = self._scope, None
        assert scope is not None
        self._app = asyncio.current_task()
        try:
            await self._shared.app(scope, self.receive, self.send)
        except Exception:  # the border between the app and the connection
            log.exception("a WebSocket failed", path=scope["path"])
        finally:
            self._app = None
            self._messages.clear()
            if self.stage is SocketStage.HANDSHAKE:
                self._refuse(TopicsError("internal", "the handshake failed inside the server"))
            else:
                is_draining = self._shared.connections.draining
                self._close(CloseReason.SERVICE_RESTART if is_draining else CloseReason.INTERNAL_ERROR)

    async def receive(self) -> Message:
        """ASGI receive: `websocket.connect`, messages, and then `websocket.disconnect` again and again."""
        while not self._messages:
            if self._arrival is None or self._arrival.done():  # a cancelled `receive` may end after the next one began
                self._arrival = self._loop.create_future()
            await self._arrival
        message = self._messages[0]
        if message["type"] != "websocket.disconnect":
            self._messages.popleft()
            if self._is_full:
                self._is_full = False
                self._parse_soon()
        return message

    def _put(self, message: Message) -> None:
        self._messages.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def send(self, message: Message) -> None:
        """ASGI send. Waits while the client reads too slowly. Drops messages once the WebSocket is over."""
        kind = message["type"]
        if kind == "websocket.send":
            # Taken out of the message, which the sender keeps until this is done.
            await self._send(message.pop("text").encode())
        elif self.stage is SocketStage.OVER:
            return
        elif kind == "websocket.accept":
            self._accept(message.get("headers", ()))
        elif kind == "websocket.http.response.start":
            block, length, _ = header_block(tuple(message["headers"]))
            framing = b"" if length is None else b"content-length: %d\r\n" % length
            self._transport.write(STATUS_LINES[message["status"]] + block + framing + b"connection: close\r\n\r\n")
        elif kind == "websocket.http.response.body":
            self._transport.write(message.get("body", b""))
            if not message.get("more_body", False):
                self._end(CloseReason.NORMAL_CLOSURE)
        elif self.stage is SocketStage.HANDSHAKE:
            self._refuse(TopicsError("forbidden", "no WebSocket may be opened here"))
        else:
            async with self._sending:
                self._close(message.get("code", CloseReason.NORMAL_CLOSURE), message.get("reason"))

    # The handshake.

    def _accept(self, headers: Any) -> None:
        assert self.stage is SocketStage.HANDSHAKE
        block, _, _ = header_block(tuple(headers))
        self.stage = SocketStage.OPEN
        self._transport.write(
            b"%bupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: %b\r\n%b\r\n"
            % (STATUS_LINES[101], self._accept_token, block)
        )
        self._set_timer(PING_INTERVAL_S, self._ping)

    def _refuse(self, error: TopicsError) -> None:
        if self.stage is SocketStage.HANDSHAKE:
            self._transport.write(error_answer(error))
            self._end(CloseReason.NORMAL_CLOSURE)

    # The transport's calls.

    def data_received(self, data: bytes) -> None:
        if self.stage is SocketStage.HANDSHAKE:
            self._refuse(_TOO_EARLY)
        elif self.stage >= SocketStage.ANSWERING:
            return
        elif self._parses_soon or self._is_full:
            self._unparsed += data
            self._pause_or_resume()
        else:
            self._wire.receive_data(data)
            self._parse()

    def eof_received(self) -> bool:
        """asyncio: the client has closed its sending side. Return True to keep ours open for what it sent before."""
        self._is_ended = True
        if self.stage is SocketStage.OVER:
            return False
        if not (self._parses_soon or self._is_full or self.stage is SocketStage.ANSWERING):
            self._shared.connections.end_in_turn(self._lose)
        return True

    def pause_writing(self) -> None:
        """asyncio: more than `write_high_water_bytes` are buffered for the client."""
        self._writable = False
        self._can_write.clear()
        self._reader_timer.start()
        self._shared.connections.kept.add(self)

    def resume_writing(self) -> None:
        self._writable = True
        self._reader_timer.caught_up()
        self._shared.connections.kept.remove(self)
        self._can_write.set()
        self._send_pong()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is closed. Everything that waits for it ends."""
        self._over(self._close_code if self.stage is SocketStage.ANSWERING else CloseReason.ABNORMAL_CLOSURE)
        if self._timer is not None:
            self._timer.cancel()
        self._reader_timer.close()
        self._shared.connections.kept.remove(self)
        self._shared.connections.forget(self)
        self._can_write.set()
        # Break reference cycles that may hold much memory: the garbage collector may come late.
        self._scope = None
        del self._reader_timer, self._incoming, self._wire, self._unparsed

    # Frames of the client.

    def _parse(self) -> None:
        """Handle the frames that are whole, some of them now. Stop while the app has enough to do."""
        self._is_wire_empty = False
        try:
            for number, event in enumerate(self._wire.events(), 1):
                self._handle(event)
                if self.stage >= SocketStage.ANSWERING:
                    return
                self._is_full = len(self._messages) >= MESSAGES_MAX
                if self._is_full:
                    break
                if number == FRAMES_PER_TURN:
                    self._parse_soon()
                    break
            else:
                self._is_wire_empty = True
                if self._unparsed:
                    self._parse_soon()
                elif self._is_ended:
                    self._lose()
        except MessageTooLongError:
            self._close(CloseReason.MESSAGE_TOO_BIG)
            self._parse_soon()
        except DenialOfServiceError as error:
            self._close(CloseReason.POLICY_VIOLATION, str(error))
            self._end(CloseReason.POLICY_VIOLATION)
        self._pause_or_resume()

    def _parse_soon(self) -> None:
        if not self._parses_soon:
            self._parses_soon = True
            self._loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self._parses_soon = False
        if self.stage >= SocketStage.ANSWERING:
            return
        if self._unparsed and self._is_wire_empty:  # else a client that sends faster than we parse would fill it
            self._wire.receive_data(bytes(self._unparsed))
            self._unparsed.clear()
        self._parse()

    def _handle(self, event: Event) -> None:
        if isinstance(event, CloseConnection):
            with suppress(LocalProtocolError):  # our close frame is sent already, or waits
                self._send_close(self._wire.send(event.response()))
            if self._left_bytes:
                self.stage, self._close_code = SocketStage.ANSWERING, event.code
            else:
                self._end(event.code)
            return
        message = self._incoming.take(event)
        if self.stage is not SocketStage.OPEN:
            return  # only the client's close frame counts now
        if isinstance(event, Ping):
            self._pong = bytes(self._wire.send(event.response()))  # only the last one needs one (RFC 6455 §5.5.3)
            self._send_pong()
        elif message is not None:
            self._put(message)

    def _pause_or_resume(self) -> None:
        """Read on, or pause while there is enough to do."""
        is_behind = self._is_full or len(self._unparsed) > self._shared.limits.read_high_water_bytes
        if self._transport.is_closing() or self._is_ended or self._frames.refused:
            return
        if is_behind and self._transport.is_reading():
            self._transport.pause_reading()
        elif not is_behind and not self._transport.is_reading():
            self._transport.resume_reading()

    # Frames for the client.

    def send_now(self, message: bytes) -> bool:
        """Send a message at once (`asgi.SEND_NOW`); False if it has to wait: `send` does."""
        if not self._writable or self._sending.locked() or len(message) > PIECE_BYTES_MAX:
            return False
        if self.stage is SocketStage.OPEN:
            self._transport.write(text_frame(message))
        return True

    async def _send(self, message: bytes) -> None:
        async with self._sending:  # one frame at a time
            await self._wait_writable()
            if self.stage is not SocketStage.OPEN:
                return
            frame = text_frame(message) if len(message) <= PIECE_BYTES_MAX else message_frame(message)
            del message
            if len(frame) <= PIECE_BYTES_MAX:
                self._transport.write(frame)
                await self._wait_writable()
            else:
                await self._send_in_pieces(memoryview(frame))

    async def _send_in_pieces(self, frame: memoryview) -> None:
        self._left_bytes = len(frame)
        # The transport never has more than a part of the frame, so the client's time for all of it is limited here.
        timer = SlowReaderTimer(self._shared.limits, self._shared.clock, self._loop, self)
        timer.start()
        try:
            while self._left_bytes and self.stage is not SocketStage.OVER:
                piece = bytes(frame[-self._left_bytes :][:PIECE_BYTES_MAX])
                self._left_bytes -= len(piece)
                self._transport.write(piece)
                await self._wait_writable()
        except asyncio.CancelledError:
            if (self._left_bytes or self._close_frame) and self.stage is not SocketStage.OVER:
                self._transport.abort()  # nothing can follow half a frame, nor is its rest sent
            raise
        finally:
            timer.close()
        if self._close_frame and self.stage is not SocketStage.OVER:
            self._transport.write(self._close_frame)
            self._await_close()
        self._send_pong()

    async def _wait_writable(self) -> None:
        while not self._writable and not self._transport.is_closing():
            await self._can_write.wait()

    def _write_control(self, frame: bytes) -> None:
        if not self._left_bytes:  # nothing can follow half a frame
            self._transport.write(frame)

    def _send_pong(self) -> None:
        if self._pong and self._writable and not self._left_bytes and self.stage is SocketStage.OPEN:
            self._transport.write(self._pong)
            self._pong = b""

    def _ping(self) -> None:
        if self.stage is SocketStage.OPEN:
            self._write_control(self._wire.send(Ping()))
            self._set_timer(PING_INTERVAL_S, self._ping)

    # Ends.

    def _close(self, code: int, reason: str | None = None) -> None:
        """Send a close frame. The client has `linger_ms` to answer it."""
        if self.stage is SocketStage.OPEN:
            self._close_code = code
            self._send_close(self._wire.send(CloseConnection(code, reason)))
            if not self._left_bytes:
                self._await_close()

    def _send_close(self, frame: bytes) -> None:
        self.stage = SocketStage.CLOSING
        if self._left_bytes:
            self._close_frame = bytes(frame)
        else:
            self._transport.write(frame)

    def _await_close(self) -> None:
        if self.stage is SocketStage.ANSWERING:
            self._end(self._close_code)
        else:
            self._set_timer(self._shared.limits.linger_ms / 1000, lambda: self._end(self._close_code))

    def _lose(self) -> None:
        """The client has ended its side without a close frame, and all that it sent before is handled. Idempotent."""
        if self.stage is not SocketStage.OVER:
            self._over(CloseReason.ABNORMAL_CLOSURE)
            self._reader_timer.start()
            self._transport.close()

    def _end(self, code: int) -> None:
        """Half-close, and drop input until the client closes, too: a reset could destroy what was sent last."""
        if self.stage is SocketStage.OVER:
            return
        self._over(code)
        self._unparsed.clear()
        transport = self._transport
        if transport.is_closing():
            return
        self._reader_timer.start()
        if self._is_ended or not transport.can_write_eof():
            transport.close()
            return
        if self._frames.refused:
            transport.pause_reading()  # to read on would be work
        elif not transport.is_reading():
            transport.resume_reading()
        transport.write_eof()
        self._set_timer(self._shared.limits.linger_ms / 1000, transport.close)

    def _over(self, code: int) -> None:
        """Note that the WebSocket is over, and tell the app when its turn comes. The app has GONE_S to end."""
        if self.stage is not SocketStage.OVER:
            self.stage = SocketStage.OVER
            self._shared.connections.end_in_turn(partial(self._tell_over, code))

    def _tell_over(self, code: int) -> None:
        self._put({"type": "websocket.disconnect", "code": int(code)})
        if self._app is not None:
            self._loop.call_later(GONE_S, self._app.cancel)

    # The calls of `asgi.WriteBuffer`, `Connections` and `VanishedClients`.

    def get_write_buffer_size(self) -> int:
        """Return the number of sent bytes that are kept for the client."""
        return self._left_bytes + self._transport.get_write_buffer_size()

    @property
    def buffered_bytes(self) -> int:
        return self.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def abort(self) -> None:
        """Cut the connection. What waits for the client is lost."""
        self._transport.abort()

    @property
    def open_socket(self) -> socket.socket | None:
        return None if self._transport.is_closing() else self._transport.get_extra_info("socket")

    def drain(self) -> None:
        """Close the connection if its app is not started; else the app closes it."""
        if self._scope is not None and self._app is None:
            self._transport.close()

    def close_now(self) -> None:
        self._transport.close()
