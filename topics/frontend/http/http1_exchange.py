"""One HTTP/1.1 request and its answer, as ASGI sees them, and the answers that no app makes.

An `Exchange` knows ASGI and the shape of an answer. Which bytes arrive when, time-outs and the order of requests are
the connection's (`http1.Http1Protocol`), which it sees as a `Connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import partial
from http import HTTPStatus
from typing import Final, Protocol

import msgspec

from topics.core.errors import STATUS_BY_CODE
from topics.frontend.asgi import AsgiApp, Message, Scope, Send
from topics.frontend.http.http1_parser import Head
from topics.log import get_logger

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
YIELD_AFTER_BYTES: Final = 256 * 1024
"""A client that reads as fast as the app writes never makes `send` wait; others get their turn after this many."""

_BODYLESS: Final = frozenset({204, 304})
# Each header must be one whole line of this shape. Together with the count of lines this is the defence against
# response splitting: CR, LF and NUL cannot occur in a value, nor a colon or a blank in a name.
_HEADER_LINES: Final = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9a-z]+: [\t\x20-\x7e\x80-\xff]*\r\n)*")

_log = get_logger()
_last_push: tuple[bytes, bytes] = (b"", b"")


def chunk(data: bytes) -> bytes:
    """One chunk of a body of unknown length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_answer(
    code: str, message: str, detail: Mapping[str, object] | None = None, *, with_body: bool = True
) -> bytes:
    """A whole answer that did not come from the app (api §0.6); the connection closes after it."""
    status = STATUS_BY_CODE[code]
    error = {"code": code, "message": message} | ({"detail": detail} if detail else {})
    body = msgspec.json.encode({"error": error})
    allow = b"allow: DELETE, GET, HEAD, OPTIONS, POST, PUT\r\n" if code == "method_not_allowed" else b""
    retry = b"retry-after: 1\r\n" if status in (429, 503) else b""
    return b"%bcontent-type: application/json\r\n%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        STATUS_LINES[status],
        allow,
        retry,
        len(body),
        body if with_body else b"",
    )


class ExchangeConnection(Protocol):
    """The connection, as its exchange sees it."""

    reading: bool
    writable: bool
    """False while more than `write_high_water_bytes` wait for the client."""

    @property
    def draining(self) -> bool:
        """The server is stopping."""
        ...

    def write(self, data: bytes, more: bytes = b"") -> None:
        """Send both, or let the transport keep them."""
        ...

    async def wait_writable(self) -> None:
        """Wait until the client has caught up, or is gone. Only while not `writable`."""
        ...

    async def wait_emptied(self) -> None:
        """Wait until the transport keeps nothing for the client, or the client is gone."""
        ...

    def body_wanted(self) -> None:
        """The app has taken what was there, or waits for more."""
        ...

    def may_stay_open(self) -> bool:
        """True: another request can follow the answer whose head is about to be written."""
        ...

    def answer_done(self, exchange: Exchange) -> None:
        """The whole answer is written."""
        ...


class PushStream:
    """Raw writes into one answer, for server push: one chunk, one `transport.write`, no await.

    Writing never blocks and never fails. The writer must stop while `writable` is false and go on at `on_writable`.
    `on_close` is called once when the client goes away; after the writer's own `close()` nothing is called.
    The app's coroutine must stay pending meanwhile (`await receive()` ends with `http.disconnect`); when it returns,
    the stream is closed.
    """

    def __init__(self, transport: asyncio.Transport, chunked: bool, writable: bool, end: Callable[[], None]) -> None:
        """`end` writes the end of the answer."""
        self._transport = transport
        self._write = transport.write
        self._end = end
        self._chunked = chunked
        self.closed = False
        self.writable = writable
        """Below the high-water mark, and open. Every frame reads it once for each client, so it is an attribute."""
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the client has not taken yet and that this process keeps for it."""
        return self._transport.get_write_buffer_size()

    @property
    def taken_bytes(self) -> int:
        """Rises with what the client takes, as long as nothing is written."""
        return -self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> bool:
        """Send `data` now, as one chunk. It is dropped when the stream is closed, or when it is empty.

        False: more than the high-water mark now waits for the client.
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
        """End the answer; the connection may serve the next request."""
        if not self.closed:
            self._ended()
            self._end()

    def abort(self) -> None:
        """Cut the connection. What waits for the client is lost."""
        self._ended()
        self._transport.abort()

    # The exchange's calls.

    def client_caught_up(self) -> None:
        """The client is below the low-water mark again."""
        if not self.closed:
            self.writable = True
            if self.on_writable is not None:
                self.on_writable()

    def client_gone(self) -> None:
        """Nothing more can be delivered. Can be repeated."""
        if not self.closed:
            self._ended()
            if self.on_close is not None:
                self.on_close()

    def _ended(self) -> None:
        self.closed, self.writable = True, False


class AnswerStage(IntEnum):
    """How far the answer is."""

    WAITING = 0
    STARTED = 1  # the app has sent its head, nothing is on the wire yet
    STREAMING = 2  # the head is on the wire
    DONE = 3


class Exchange:
    """One request, one answer.

    The connection calls `feed`, `end_of_request`, `half_closed` and `lose`; the app calls `receive`, `send`, `deliver`
    and `push`. It holds no reference to its scope: a finished request is freed by reference counting alone, and the
    cycle collector never looks at it.
    """

    def __init__(
        self, connection: ExchangeConnection, transport: asyncio.Transport, head: Head, request_complete: bool
    ) -> None:
        self._connection = connection
        self._transport = transport
        # The request.
        self._head_request = head.method == "HEAD"
        self._http11 = head.http11
        self._body: bytes | bytearray = b""
        self._body_ended = False  # the app has been given the message that says so
        self._news: asyncio.Event | None = None
        self.request_complete = request_complete
        self.expects_continue = head.expects_continue and not request_complete
        self.half_closed_by_client = False
        self.lost = False
        # The answer.
        self._head = b""
        self._length_left: int | None = None
        self._bodyless = False
        self._chunked = False
        self._push: PushStream | None = None
        self._unyielded_bytes = 0
        self.keep_alive = head.keep_alive
        self.stage = AnswerStage.WAITING

    async def run(self, app: AsgiApp, scope: Scope) -> None:
        """Run the app; whatever it does, the client gets a whole answer or a connection that visibly ends."""
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if self._connection.draining:
                self._fail("shutting_down", "the server is stopping")
            else:
                self._fail("internal", "the request was cancelled inside the server")
            raise
        except Exception as error:  # noqa: BLE001 - the border between the app and the connection
            # An app that fails because its client is gone has nothing to report (Starlette wraps the error).
            if not (self.lost and any(isinstance(e, ConnectionError) for e in (error, error.__context__))):
                _log.exception("request failed", method=scope["method"], path=scope["path"])
            self._fail("internal", "the request failed inside the server")
        else:
            if self._push is not None:
                self._push.close()
            if self.stage is not AnswerStage.DONE and not self.lost:
                if self.half_closed_by_client:  # it was told of the disconnect, and has rightly given up
                    self._transport.abort()
                    return
                _log.error("the app returned without a whole answer", method=scope["method"], path=scope["path"])
                self._fail("internal", "the request was not answered")

    # The request, from the connection to the app.

    @property
    def unread_bytes(self) -> int:
        """Bytes of the body that have arrived and the app has not taken."""
        return len(self._body)

    @property
    def pushing(self) -> bool:
        """The answer is an event stream."""
        return self._push is not None

    def feed(self, data: bytes) -> None:
        """A piece of the body."""
        if self.stage is AnswerStage.DONE:
            return
        if not self._body:
            self._body = data
        else:
            # A bytearray costs nothing per piece: a hundred thousand chunks of one byte take a hundred kilobytes.
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += data
        self._wake()

    def end_of_request(self) -> None:
        """The body is complete."""
        self.request_complete = True
        self._wake()

    def half_closed(self) -> None:
        """The client will send nothing more, but may still be reading: the app learns, its answer still goes out."""
        self.half_closed_by_client = True
        self._wake()
        if self._push is not None:
            self._push.client_gone()

    def lose(self) -> None:
        """Nobody will read the answer."""
        self.lost = True
        self._body = b""
        self._wake()
        push, self._push = self._push, None
        if push is not None:
            push.client_gone()

    async def receive(self) -> Message:
        """ASGI receive: all of the body that is there, or wait for some; then `http.disconnect`."""
        while True:
            if self.stage is AnswerStage.DONE or self.lost:
                return {"type": "http.disconnect"}
            if self._body or (self.request_complete and not self._body_ended):
                body = self._body if type(self._body) is bytes else bytes(self._body)
                self._body = b""
                self._body_ended = self.request_complete
                if not self.request_complete or not self._connection.reading:
                    self._connection.body_wanted()
                return {"type": "http.request", "body": body, "more_body": not self._body_ended}
            if self.half_closed_by_client:
                return {"type": "http.disconnect"}
            if not self.request_complete:
                if self.expects_continue and self.stage is AnswerStage.WAITING:
                    self.expects_continue = False
                    self._connection.write(CONTINUE)
                self._connection.body_wanted()
            if self._news is None:
                self._news = asyncio.Event()
            self._news.clear()
            await self._news.wait()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    # The answer, from the app to the connection.

    async def send(self, message: Message) -> None:
        """ASGI send. Waits while the client reads too slowly; raises `ConnectionResetError` when it is gone."""
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
        """Send the whole body, and return when the kernel has all of it (`asgi.DELIVER`).

        The start must have told the length: the end of such a body is no bytes. No other answer is written before that
        end, so all that is kept for the client is this one. Raises ConnectionResetError when the client is gone before.
        """
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._check_client()
        await self._connection.wait_emptied()
        self._check_client()
        with contextlib.suppress(ConnectionError):  # the client has it all, and needs no connection any more
            await send({"type": "http.response.body", "body": b""})

    def _check_client(self) -> None:
        if self.lost or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")

    def push(self) -> PushStream:
        """Leave ASGI: put the head on the wire and go on with raw writes. Only after `http.response.start`.

        Raises RuntimeError before the start or after the first body, ConnectionResetError when the client is gone.
        """
        if self.lost or self.half_closed_by_client:
            raise ConnectionResetError("the client is gone")
        if self.stage is not AnswerStage.STARTED or self._bodyless or self._length_left is not None:
            raise RuntimeError(
                "a push stream begins after http.response.start, before any body, without content-length, not on HEAD"
            )
        self._send_body(b"", more=True)
        end = partial(self._send_body, b"", more=False)
        self._push = PushStream(self._transport, self._chunked, self._connection.writable, end)
        return self._push

    def paused(self) -> None:
        """The transport keeps more than its high-water mark."""
        if self._push is not None:
            self._push.writable = False

    def writable_again(self) -> None:
        """The transport has drained below its low-water mark."""
        if self._push is not None:
            self._push.client_caught_up()

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.stage is not AnswerStage.WAITING:
            raise RuntimeError("http.response.start was sent twice")
        status_line = STATUS_LINES.get(status)
        if status_line is None or status < 200:
            raise ValueError(f"status {status!r} is not a final HTTP status")
        self._bodyless = self._head_request or status in _BODYLESS
        lines = []
        for any_name, value in headers:
            name = any_name.lower()
            if name == b"content-length":
                if not value.isdigit():
                    raise ValueError(f"response header content-length is {value!r}, not a number of bytes")
                self._length_left = int(value)
            elif name == b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
            elif name != b"transfer-encoding":  # how the body is framed is decided here
                lines.append(b"%b: %b\r\n" % (name, value))
        block = b"".join(lines)
        if _HEADER_LINES.fullmatch(block) is None or block.count(b"\n") != len(lines):
            raise ValueError(f"a response header has characters that HTTP does not allow: {block!r}")
        self._head = status_line + block
        self.stage = AnswerStage.STARTED

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.stage is AnswerStage.STARTED:
            head = self._finish_head(body, more)
            self.stage = AnswerStage.STREAMING
            if self._bodyless or not body:
                self._connection.write(head + LAST_CHUNK if self._chunked and not more and not self._bodyless else head)
            elif self._chunked:
                self._connection.write(head, chunk(body) if more else chunk(body) + LAST_CHUNK)
            else:
                self._connection.write(head, body)
        elif self.stage is AnswerStage.STREAMING:
            if not self._bodyless:
                if self._length_left is not None:
                    self._length_left -= len(body)
                    self._check_length(more)
                if body:
                    self._connection.write(chunk(body) if self._chunked else body)
                if self._chunked and not more:
                    self._connection.write(LAST_CHUNK)
        else:
            raise RuntimeError(f"http.response.body is out of place: the answer is {self.stage.name.lower()}")
        if not more:
            self._done()

    def _finish_head(self, body: bytes, more: bool) -> bytes:
        """The head with what the first body message tells: length or chunks, and whether the connection stays."""
        framing = b""
        if self._bodyless:
            if self._length_left is not None:  # what a GET would have had
                framing = b"content-length: %d\r\n" % self._length_left
            elif self._head_request and not more:
                framing = b"content-length: %d\r\n" % len(body)
            self._length_left = None
        elif self._length_left is not None or not more:
            length = len(body) if self._length_left is None else self._length_left
            framing = b"content-length: %d\r\n" % length
            self._length_left = length - len(body)
            self._check_length(more)
        elif self._http11:
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False  # HTTP/1.0 knows no other end of a body than the end of the connection
        if not self.keep_alive or not self._connection.may_stay_open():
            self.keep_alive = False
            return b"%b%bconnection: close\r\n\r\n" % (self._head, framing)
        if not self._http11:
            return b"%b%bconnection: keep-alive\r\n\r\n" % (self._head, framing)
        return b"%b%b\r\n" % (self._head, framing)

    def _check_length(self, more: bool) -> None:
        assert self._length_left is not None
        if self._length_left < 0 or (self._length_left and not more):
            raise RuntimeError(f"the body does not have its content-length: {-self._length_left:+d} bytes")

    def _done(self) -> None:
        self.stage = AnswerStage.DONE
        self._body = b""
        self._wake()
        self._connection.answer_done(self)

    def _fail(self, code: str, message: str) -> None:
        """Finish what the app did not: an error if nothing is on the wire, else cut the connection."""
        if self.lost or self.stage is AnswerStage.DONE:
            return
        if self.stage is AnswerStage.STREAMING:
            # Only a broken connection tells the client that the answer is not whole.
            self._transport.abort()
            return
        self.keep_alive = False
        self._connection.write(error_answer(code, message, with_body=not self._head_request))
        self._done()
