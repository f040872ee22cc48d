"""One HTTP/1.1 request and its answer, as ASGI sees them, and the answers that no app makes.

The connection (`http1.py`) decides on order, time-outs, reading and writing. Here it is an `ExchangeConnection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Final, Protocol

from topics.core.errors import RETRY_AFTER_S, TopicsError
from topics.frontend.asgi import DELIVER, AsgiApp, Message, Scope, Send
from topics.frontend.entry.responses import error_body
from topics.frontend.http.http1_parser import Head
from topics.log import get_logger

_last_chunk: tuple[bytes, bytes] = (b"", b"")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class PushStream:
    """Raw writes into one answer (an `event_streams.Push`), each one chunk and one `transport.write`. The app's
    coroutine must not return meanwhile, which would close the stream: `await receive()` ends with `http.disconnect`.
    """

    def __init__(self, transport: asyncio.Transport, chunked: bool, writable: bool, end: Callable[[], None]) -> None:
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
            self.lose()
            self._end()

    def abort(self) -> None:
        """Cut the connection. What waits for the client is lost."""
        self.lose()
        self._transport.abort()

    def client_caught_up(self) -> None:
        """Resume: the client is below the low-water mark again."""
        if not self.closed:
            self.writable = True
            if self.on_writable is not None:
                self.on_writable()

    def lose(self) -> None:
        """Write nothing more: nothing can be delivered. `client_gone` tells the writer."""
        self.closed, self.writable = True, False

    def client_gone(self) -> None:
        """Close, and tell the writer. Idempotent."""
        self.lose()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
YIELD_AFTER_BYTES: Final = 256 * 1024
"""`send` yields to other tasks after so many bytes, even to a client that reads as fast as the app writes."""

_ASGI: Final = {"version": "3.0", "spec_version": "2.4"}  # 2.4: send raises OSError when the client is gone
_BODYLESS: Final = frozenset({204, 304})
# Each header must be one whole line of this shape. Together with the count of lines this is the defence against
# response splitting: CR, LF and NUL cannot occur in a value, nor a colon or a blank in a name.
_HEADER_LINES: Final = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9a-z]+: [\t\x20-\x7e\x80-\xff]*\r\n)*")

log = get_logger()


def error_answer(error: TopicsError, more: bytes = b"", *, with_body: bool = True) -> bytes:
    """Return a whole answer that did not come from the app (api §0.6), and is the last, with `more` header lines."""
    body = error_body(error)
    allow = b"allow: DELETE, GET, HEAD, OPTIONS, POST, PUT\r\n" if error.code == "method_not_allowed" else b""
    retry_after_s = RETRY_AFTER_S.get(error.code)
    more += b"" if retry_after_s is None else b"retry-after: %d\r\n" % retry_after_s
    if error.code == "upgrade_required":
        more += b"sec-websocket-version: 13\r\n"
    return b"%bcontent-type: application/json\r\n%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        STATUS_LINES[error.status],
        allow,
        more,
        len(body),
        body if with_body else b"",
    )


@lru_cache(maxsize=1024)
def header_block(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, int | None, bool]:
    """Return (lines of an answer's headers without its framing, its content-length, whether the connection is to close
    after it). It is cached: the same few headers come again and again. Raise ValueError if HTTP does not allow them.
    """
    lines = []
    length: int | None = None
    asks_close = False
    for any_name, value in headers:
        name = any_name.lower()
        if name == b"content-length":
            if not value.isdigit():
                raise ValueError(f"response header content-length is {value!r}, not a number of bytes")
            length = int(value)
        elif name == b"connection":
            asks_close = asks_close or b"close" in value.lower()
        elif name != b"transfer-encoding":  # how the body is framed is decided here
            lines.append(b"%b: %b\r\n" % (name, value))
    block = b"".join(lines)
    if _HEADER_LINES.fullmatch(block) is None or block.count(b"\n") != len(lines):
        raise ValueError(f"a response header has characters that HTTP does not allow: {block!r}")
    return block, length, asks_close


def scope_of(head: Head, client: tuple[str, int] | None, server: tuple[str, int] | None) -> Scope:
    """Return the ASGI scope of a request, without extensions."""
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1" if head.http11 else "1.0",
        "method": head.method,
        "scheme": "http",
        "path": head.path,
        "raw_path": head.raw_path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.headers,
        "client": client,
        "server": server,
    }


class ExchangeConnection(Protocol):
    """The connection, as its exchange sees it. `wait_…` return when the client is gone, too."""

    reading: bool
    writable: bool
    """False while more than `write_high_water_bytes` wait for the client. Only then `wait_writable` may be called."""

    @property
    def draining(self) -> bool: ...  # whether the server is stopping
    def write(self, data: bytes, more: bytes = b"") -> None: ...  # sent, or kept by the transport
    async def wait_writable(self) -> None: ...  # until the client has caught up
    async def wait_emptied(self) -> None: ...  # until the transport keeps nothing for the client
    def apply_state(self) -> None: ...  # the app has received the bytes that were there, or waits for more
    def may_stay_open(self) -> bool: ...  # whether another request can follow the answer that is about to begin
    def refuse(self, error: TopicsError) -> None: ...  # instead of an answer; one that has begun is cut
    def answer_done(self, exchange: Exchange) -> None: ...  # the whole answer is written


class AnswerStage(IntEnum):
    """The progress of an answer."""

    WAITING = 0
    STARTED = 1  # the app has sent its head, nothing is on the wire yet
    STREAMING = 2  # the head is on the wire
    DONE = 3


class Exchange:
    """One request and its answer. The connection calls `feed`, `end_of_request`, `half_closed` and `drop`; the app
    calls `receive`, `send`, `deliver` and `push`. It has no reference to its scope: reference counting alone frees it.
    """

    def __init__(
        self, connection: ExchangeConnection, transport: asyncio.Transport, head: Head, request_complete: bool
    ) -> None:
        self._connection = connection
        self._transport = transport
        # The request.
        self.request = head
        self._body: bytes | bytearray = b""
        self._body_ended = False  # the app has been given the message that says so
        self._changed: asyncio.Event | None = None
        self.request_complete = request_complete
        self.expects_continue = head.expects_continue and not request_complete
        self.half_closed_by_client = False
        self.lost = False
        # The answer.
        self._head = b""
        self._length_left: int | None = None
        self._bodyless = False
        self._chunked = False
        self.push_stream: PushStream | None = None  # the writer of an event stream, after `push`
        self._unyielded_bytes = 0
        self.keep_alive = head.keep_alive
        self.stage = AnswerStage.WAITING

    def scope(self, head: Head, client: tuple[str, int] | None, server: tuple[str, int] | None) -> Scope:
        scope = scope_of(head, client, server)
        scope["extensions"] = {"topics.push": self.push, DELIVER: self.deliver}
        return scope

    async def run(self, app: AsgiApp, scope: Scope) -> None:
        """Run the app. Whatever it does, the client gets a whole answer or a connection that is visibly cut."""
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            cancelled = TopicsError("internal", "the request was cancelled inside the server")
            stopping = TopicsError("shutting_down", "the server is stopping")
            self._fail(stopping if self._connection.draining else cancelled)
            raise
        except Exception as error:  # the border between the app and the connection
            # An app that fails because its client is gone has nothing to report (Starlette wraps the error).
            if not (self.lost and any(isinstance(e, ConnectionError) for e in (error, error.__context__))):
                log.exception("request failed", method=scope["method"], path=scope["path"])
            self._fail(TopicsError("internal", "the request failed inside the server"))
        else:
            if self.push_stream is not None:
                self.push_stream.close()
            if self.stage is not AnswerStage.DONE and not self.lost:
                if self.half_closed_by_client:  # the app was told of the disconnect, and may give up
                    self._transport.abort()
                    return
                log.error("the app returned without a whole answer", method=scope["method"], path=scope["path"])
                self._fail(TopicsError("internal", "the request was not answered"))

    # The request, from the connection to the app.

    @property
    def unread_bytes(self) -> int:
        """Bytes of the body that have arrived and that the app has not received."""
        return len(self._body)

    def feed(self, data: bytes) -> None:
        if self.stage is AnswerStage.DONE:
            return
        if not self._body:
            self._body = data
        else:
            # A list would cost memory for each piece: clients may send 100,000 chunks of one byte.
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += data
        self._wake()

    def end_of_request(self) -> None:
        self.request_complete = True
        self._wake()

    def half_closed(self) -> None:
        """Tell the app that the client sends nothing more. It may still be reading, so the answer goes out."""
        self.half_closed_by_client = True
        self._wake()
        if self.push_stream is not None:
            self.push_stream.client_gone()

    def lose(self) -> None:
        """Write nothing more: the connection is closed. `drop` tells the app."""
        self.lost = True
        if self.push_stream is not None:
            self.push_stream.lose()

    def drop(self) -> None:
        """Drop the exchange: nobody reads the answer."""
        self.lost = True
        self._body = b""
        self._wake()
        push, self.push_stream = self.push_stream, None
        if push is not None:
            push.client_gone()

    async def receive(self) -> Message:
        """ASGI receive: return the part of the body that has arrived, waiting for some; then `http.disconnect`."""
        while True:
            if self.stage is AnswerStage.DONE or self.lost:
                return {"type": "http.disconnect"}
            if self._body or (self.request_complete and not self._body_ended):
                body = self._body if type(self._body) is bytes else bytes(self._body)
                self._body = b""
                self._body_ended = self.request_complete
                if not self.request_complete or not self._connection.reading:
                    self._connection.apply_state()
                return {"type": "http.request", "body": body, "more_body": not self._body_ended}
            if self.half_closed_by_client:
                return {"type": "http.disconnect"}
            if not self.request_complete:
                if self.expects_continue and self.stage is AnswerStage.WAITING:
                    self.expects_continue = False
                    self._connection.write(CONTINUE)
                self._connection.apply_state()
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    # The answer, from the app to the connection.

    async def send(self, message: Message) -> None:
        """ASGI send. Waits while the client reads too slowly. Raise ConnectionResetError when it is gone."""
        kind = message["type"]
        self._check_client()
        if kind == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body":
            body, more = message.get("body", b""), message.get("more_body", False)
            self._send_body(body, more)
            if more:
                self._unyielded_bytes += len(body)
                if not self._connection.writable:
                    self._unyielded_bytes = 0
                    await self._connection.wait_writable()
                elif self._unyielded_bytes > YIELD_AFTER_BYTES:
                    self._unyielded_bytes = 0
                    await asyncio.sleep(0)
                if self.lost:
                    raise ConnectionResetError("the client is gone")
        else:
            raise RuntimeError(f"ASGI message {kind!r} is unknown here; http.response.start and .body are")

    async def deliver(self, send: Send, body: bytes) -> None:
        """Send the whole body, and return when the kernel has all of it (`asgi.DELIVER`). The answer must have a
        content-length, so that its end takes no bytes. No other answer is written before that end, so an empty buffer
        means that this answer is out. Raise ConnectionResetError when the client is gone.
        """
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._check_client()
        await self._connection.wait_emptied()
        self._check_client()
        with contextlib.suppress(ConnectionError):  # the client has the whole body
            await send({"type": "http.response.body", "body": b""})

    def _check_client(self) -> None:
        if self.lost or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")

    def push(self) -> PushStream:
        """Send the head, and return a stream of raw writes for the body. Only before the first body."""
        if self.lost or self.half_closed_by_client:
            raise ConnectionResetError("the client is gone")
        if self.stage is not AnswerStage.STARTED or self._bodyless or self._length_left is not None:
            raise RuntimeError(
                "a push stream begins after http.response.start, before any body, without content-length, not on HEAD"
            )
        self._send_body(b"", more=True)
        end = partial(self._send_body, b"", more=False)
        self.push_stream = PushStream(self._transport, self._chunked, self._connection.writable, end)
        return self.push_stream

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.stage is not AnswerStage.WAITING:
            raise RuntimeError("http.response.start was sent twice")
        status_line = STATUS_LINES.get(status)
        if status_line is None or status < 200:
            raise ValueError(f"status {status!r} is not a final HTTP status")
        self._bodyless = self.request.method == "HEAD" or status in _BODYLESS
        block, self._length_left, asks_close = header_block(tuple(headers))
        if asks_close:
            self.keep_alive = False
        self._head = status_line + block
        self.stage = AnswerStage.STARTED

    def _send_body(self, body: bytes, more: bool) -> None:
        head = b""
        if self.stage is AnswerStage.STARTED:
            head = self._finish_head(body, more)
            self.stage = AnswerStage.STREAMING
        elif self.stage is not AnswerStage.STREAMING:
            raise RuntimeError(f"http.response.body is out of place: the answer is {self.stage.name.lower()}")
        elif self._length_left is not None:
            self._length_left -= len(body)
            self._check_length(more)
        if self._bodyless:
            body = b""
        elif self._chunked:
            body = (chunk(body) if body else b"") + (b"" if more else LAST_CHUNK)
        if head:
            self._connection.write(head, body)
        elif body:
            self._connection.write(body)
        if not more:
            self._done()

    def _finish_head(self, body: bytes, more: bool) -> bytes:
        """Return the head, with the framing and `connection` that follow from the first body message."""
        framing = b""
        if self._bodyless:
            if self._length_left is not None:  # the length that a GET would have
                framing = b"content-length: %d\r\n" % self._length_left
            elif self.request.method == "HEAD" and not more:
                framing = b"content-length: %d\r\n" % len(body)
            self._length_left = None
        elif self._length_left is not None or not more:
            length = len(body) if self._length_left is None else self._length_left
            framing = b"content-length: %d\r\n" % length
            self._length_left = length - len(body)
            self._check_length(more)
        elif self.request.http11:
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False  # HTTP/1.0 knows no other end of a body than the end of the connection
        if not self.keep_alive or not self._connection.may_stay_open():
            self.keep_alive = False
            return b"%b%bconnection: close\r\n\r\n" % (self._head, framing)
        if not self.request.http11:
            return b"%b%bconnection: keep-alive\r\n\r\n" % (self._head, framing)
        return b"%b%b\r\n" % (self._head, framing)

    def _check_length(self, more: bool) -> None:
        assert self._length_left is not None
        if self._length_left < 0 or (self._length_left and not more):
            raise RuntimeError(f"the body does not have its content-length: {-self._length_left:+d} bytes")

    def _done(self) -> None:
        self.stage = AnswerStage.DONE
        self._body = b""
        self.push_stream = None  # it refers to the exchange: only the garbage collector would free the two
        self._wake()
        self._connection.answer_done(self)

    def _fail(self, error: TopicsError) -> None:
        """End an answer that the app did not end: send `error` if nothing is on the wire, else cut the connection."""
        if not self.lost and self.stage is not AnswerStage.DONE:
            self._connection.refuse(error)
