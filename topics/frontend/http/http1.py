"""One HTTP/1.1 connection: the order of its requests, time-outs, keep-alive, back-pressure and end.

`http1_parser` parses requests, `http1_exchange` answers them; the connection stands between them.

    rest of head ──▶ rest of body ──▶ answer ──▶ next head …       pipelined requests wait unparsed in `pending`
        │ 4xx/505        │ 4xx           │
        └────────────────┴───────────────┴─▶ end: half-close, drop input until the client has closed, too
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from topics.core.errors import TopicsError
from topics.frontend.asgi import AsgiApp, Scope
from topics.frontend.http.connections import Connections
from topics.frontend.http.deadlines import Awaited, Deadlines, HttpLimits, RunningClock, Verdict, body_timed_out
from topics.frontend.http.http1_exchange import AnswerStage, Exchange, error_answer, scope_of
from topics.frontend.http.http1_parser import Head, Heads, RequestParser, origin_of
from topics.frontend.http.http1_websocket import Http1WebSockets
from topics.frontend.http.vanished import VanishedClients

JOIN_MAX_BYTES: Final = 16 * 1024  # up to here, to join head and body is cheaper than to hand over two buffers
CHUNKED_BYTES_PER_TURN: Final = 8 * 1024
"""The part of a chunked body that is parsed in one turn of the event loop. It may have 1,400 chunks of one byte."""
TINY_CHUNKS: Final = 64
"""Behind a part with more chunks than this the next part is short, and waits TINY_CHUNK_PAUSE_S for each chunk. All
connections that wait then do so one after the other."""
TINY_CHUNKS_BYTES_PER_TURN: Final = 1024
TINY_CHUNK_PAUSE_S: Final = 5e-6
TURNED_AWAY_MAX: Final = 1024
"""Refused connections of one process that may stay open until their clients have read why."""

HandOver = Callable[[asyncio.Transport, bytes], None]
"""Takes over a transport and the bytes read from it so far."""
ReadableBy = Callable[[bytes], bytes]  # origin ─▶ header lines by which its pages may read an answer without an app


class Http1Factory:
    """Makes the protocol of each accepted connection, and owns what all connections of one process share."""

    def __init__(
        self,
        app: AsgiApp,
        limits: HttpLimits,
        connections: Connections,
        websockets: Http1WebSockets,
        hand_over: HandOver,
        clock: RunningClock,
        readable_by: ReadableBy,
    ) -> None:
        """`hand_over` takes connections that turn out to be HTTP/2."""
        self.app = app
        self.limits = limits
        self.heads = Heads(limits)
        self.connections = connections
        self.websockets = websockets
        self.hand_over = hand_over
        self.clock = clock
        self.readable_by = readable_by
        self.loop = asyncio.get_running_loop()
        self.vanished = VanishedClients(connections.open, limits.vanished_after_ms, clock)
        self.unread_head_max_bytes = max(limits.read_high_water_bytes, limits.max_header_bytes)
        """A head waits in memory until it is whole, so reading must not pause in the middle of it."""

    def __call__(self) -> Http1Protocol:
        return Http1Protocol(self)


class Http1Protocol(asyncio.Protocol):
    """One HTTP/1.1 connection. It owns the transport, the unparsed bytes, the current exchange, and one timer.

    `apply_state`, called after every change, derives from the state whether to read on, what is awaited and until when.
    A timer that fires early, because the deadline has moved on, is armed again, so traffic does not touch timers.
    """

    def __init__(self, factory: Http1Factory) -> None:
        self._factory = factory
        self._limits = factory.limits
        self._loop = factory.loop
        # The connection.
        self._transport = cast(asyncio.Transport, None)  # until connection_made, before which nothing is called
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._turned_away = False
        self._ending = False  # the last answer is written, input is dropped
        # Input.
        self._parser = RequestParser(factory.heads)
        self.pending = bytearray()  # not parsed yet
        self._held_bytes = 0  # of a head that is not whole
        self._advances_soon = False  # a part of a chunked body waits for the next turn
        self.eof = False  # whether the client has ended its side
        self.reading = True
        # Output.
        self._can_write = asyncio.Event()  # means nothing while `writable`
        self._written_bytes = 0  # by the last call of `write`
        self.writable = True
        # The current request.
        self._exchange: Exchange | None = None
        self._scope: Scope | None = None  # until its app is started
        self._discard_left_bytes = 0
        # Deadlines.
        self._deadlines = Deadlines(factory.limits, factory.clock)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._limit_buffer()
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        if not self._factory.connections.add(self):
            self._turn_away()
            return
        self._factory.vanished.start()
        self._deadlines.wait(Awaited.FIRST_REQUEST)
        self.apply_state()
        if self.draining:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is closed. Everything that waits for it ends."""
        self._ending = True
        self._stop_timer()
        connections = self._factory.connections
        connections.forget(self)
        connections.turned_away -= self._turned_away
        connections.kept.remove(self)
        self._hold(0)
        self._can_write.set()
        self.pending = bytearray()
        exchange, self._exchange = self._exchange, None  # breaks a reference cycle
        if exchange is not None:
            exchange.lose()
            connections.end_in_turn(exchange.drop)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if self.pending or self._advances_soon:
            self.pending += data
        if self._advances_soon:
            self.apply_state()
        else:
            self._advance(self.pending or data)

    def eof_received(self) -> bool:
        """asyncio: the client has closed its sending side. Return True: ours stays open for an answer or a turn."""
        self.eof = True
        self._factory.connections.end_in_turn(self._act_on_eof)
        return True

    def _act_on_eof(self) -> None:
        if self._transport.get_protocol() is not self:
            return  # it is closed, or another protocol's
        if self._exchange is not None:
            self._pass_on_eof(self._exchange)
        elif self._ending or self.writable:  # else whole requests may be waiting for `resume_writing`
            self._transport.close()

    def pause_writing(self) -> None:
        """asyncio: more than `write_high_water_bytes` are buffered for the client."""
        self.writable = False
        self._can_write.clear()
        self._deadlines.begin_reader(self.buffered_bytes)
        push = None if self._exchange is None else self._exchange.push_stream
        if push is None:
            self._factory.connections.kept.add(self, self._written_bytes)
        else:  # the hub counts what event streams hold
            push.writable = False
        self.apply_state()

    def resume_writing(self) -> None:
        self.writable = True
        self._deadlines.end_reader()
        self._factory.connections.kept.remove(self)
        self._can_write.set()
        if self.pending or self.eof:
            self._loop.call_soon(self._advance_pending)
        self.apply_state()
        if self._exchange is not None and self._exchange.push_stream is not None:
            self._exchange.push_stream.client_caught_up()

    # Bytes to requests.

    def _advance_pending(self) -> None:
        """Begin what was pipelined behind the request that has been answered, or go on with a chunked body."""
        self._advances_soon = False
        if not self._ending:
            self._advance(self.pending)

    def _advance(self, data: bytes | bytearray) -> None:
        """Parse and begin all that `data` allows, and keep the rest. Either `data` is `pending`, or that is empty."""
        position = 0
        try:
            while position < len(data):
                if self._exchange is None:
                    if not self.writable:
                        break
                    position, end = self._parser.find_head(data, position)
                    if end < 0:
                        break
                    head = self._parser.parse_head(bytes(data[position:end]))
                    if head is None:
                        self._leave()
                        self._factory.hand_over(self._transport, bytes(data[position:]))
                        self._repeat_eof()
                        return
                    if head.is_websocket:
                        self._leave()
                        scope = scope_of(head, self._client, self._server)
                        self._factory.websockets.take_over(self._transport, head, scope, bytes(data[end:]))
                        self._repeat_eof()
                        return
                    position = end
                    self._begin(head)
                if not self._parser.complete and position < len(data):
                    position = self._read_body(data, position)
                if self._ending:
                    return
                if self._scope is not None:
                    self._start_app(self._scope)
                if self._exchange is not None and self._parser.complete:
                    break
                if not self._parser.complete and position < len(data):
                    self._advances_soon = True
                    chunks = self._parser.chunks_read
                    pause_s = chunks * TINY_CHUNK_PAUSE_S if chunks > TINY_CHUNKS else 0
                    self._loop.call_at(self._factory.connections.pause_until_s(pause_s), self._advance_pending)
                    break
        except TopicsError as error:
            self.refuse(error, data[position:])
            return
        if data is self.pending:
            del self.pending[:position]
        elif position < len(data):
            self.pending += data[position:]
        if self.eof:
            if self._exchange is not None:
                self._pass_on_eof(self._exchange)
            elif self.writable:
                self._transport.close()
        self.apply_state()

    def _pass_on_eof(self, exchange: Exchange) -> None:
        """Tell the exchange that the client has ended its input, also a pipelined one that began later. Idempotent."""
        if self._parser.complete:
            exchange.half_closed()
        elif not self._advances_soon:
            exchange.drop()
            self._end()

    def _begin(self, head: Head) -> None:
        complete = self._parser.complete
        if not complete:
            self._deadlines.begin_body()
        self._exchange = exchange = Exchange(self, self._transport, head, complete)
        self._scope = exchange.scope(head, self._client, self._server)

    def _start_app(self, scope: Scope) -> None:
        # A task for each request. Running the app's first step right here would save a tenth of the CPU where the app
        # never suspends, but until Python 3.12 that step has no current task, and `asyncio.timeout` needs one.
        assert self._exchange is not None
        self._scope = None
        self._factory.connections.arrived += 1
        self._factory.connections.start_task(partial(self._exchange.run, self._factory.app, scope))

    def _read_body(self, data: bytes | bytearray, position: int) -> int:
        exchange = self._exchange
        assert exchange is not None
        is_tiny = self._parser.chunks_read > TINY_CHUNKS
        most_bytes = TINY_CHUNKS_BYTES_PER_TURN if is_tiny else CHUNKED_BYTES_PER_TURN
        if self._parser.body_left_bytes is None and len(data) - position > most_bytes:
            part = data[position : position + most_bytes]
            end = position + self._parser.read_body(part, 0, exchange.feed)
        else:
            end = self._parser.read_body(data, position, exchange.feed)
        if self._parser.complete:
            exchange.end_of_request()
        if exchange.stage is AnswerStage.DONE:
            self._discard_left_bytes -= end - position
            if self._parser.complete:
                self._exchange = None
            elif self._discard_left_bytes < 0:
                self._end()
        return end

    # The exchange's calls (`http1_exchange.ExchangeConnection`).

    def write(self, data: bytes, more: bytes = b"") -> None:
        self._written_bytes = len(data) + len(more)
        if len(more) <= JOIN_MAX_BYTES:
            self._transport.write(data + more if more else data)
        else:
            self._transport.writelines((data, more))

    async def wait_writable(self) -> None:
        await self._can_write.wait()

    async def wait_emptied(self) -> None:
        self._transport.set_write_buffer_limits(high=0)
        try:
            if not self.writable:
                await self._can_write.wait()
        finally:
            if not self._transport.is_closing():
                self._limit_buffer()

    def _limit_buffer(self) -> None:
        # The low-water mark is 0 because uvloop keeps a whole answer until its last byte is sent.
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water_bytes, low=0)

    @property
    def draining(self) -> bool:
        return self._factory.connections.draining

    def may_stay_open(self) -> bool:
        if self.draining:
            return False
        exchange = self._exchange
        if self._parser.complete or exchange is None:
            return True
        # The answer is early: the rest of the request is worth reading only if it is short. A client that waits for
        # `100 Continue` may send its body or not, so nothing can follow.
        return not exchange.expects_continue and (self._parser.body_left_bytes or 0) <= self._limits.discard_max_bytes

    def answer_done(self, exchange: Exchange) -> None:
        if exchange is not self._exchange:
            return
        if not self.writable:  # also the rest of an event stream, which the hub no longer counts
            self._factory.connections.kept.add(self)
        if not exchange.keep_alive or self.draining:
            self._end()
            return
        if not self._parser.complete:
            self._discard_left_bytes = self._limits.discard_max_bytes
            self.apply_state()
            return  # the rest of the body is dropped as it comes
        self._exchange = None
        if self.pending or self.eof:
            self._advance_pending()
        else:
            self.apply_state()

    # The calls of `Connections`.

    @property
    def buffered_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def open_socket(self) -> socket.socket | None:
        return None if self._transport.is_closing() else self._transport.get_extra_info("socket")

    def abort(self) -> None:
        self._transport.abort()

    def drain(self) -> None:
        if self._ending:
            return
        if self._exchange is None:
            if not self.pending:
                self._transport.close()
        elif self._exchange.stage is AnswerStage.DONE:
            self._end()  # the rest of its body is all that is still to come

    def close_now(self) -> None:
        self._transport.close()

    # Ends.

    def _turn_away(self) -> None:
        """Refuse a connection that is one too many before its request is read, which is cheap."""
        connections = self._factory.connections
        assert connections.places is not None
        self._transport.write(error_answer(connections.places.reached()))
        if connections.turned_away < TURNED_AWAY_MAX:
            self._turned_away = True
            connections.turned_away += 1
            self._end()
        else:
            self._ending = True
            self._transport.close()

    def refuse(self, error: TopicsError, head: bytes | bytearray = b"") -> None:
        """Answer the current request, or the `head` that is there of the next one, with an error, and end."""
        exchange, self._exchange, self._scope = self._exchange, None, None
        stage, is_head, origin = AnswerStage.WAITING, False, origin_of(head)
        if exchange is not None:
            stage, is_head = exchange.stage, exchange.request.method == "HEAD"
            origin = dict(exchange.request.headers).get(b"origin", b"")
            exchange.drop()
        if stage is AnswerStage.STREAMING:  # only a cut tells the client that its answer is not whole
            self._transport.abort()
            return
        if stage is not AnswerStage.DONE:
            more = self._factory.readable_by(origin)
            self._transport.write(error_answer(error, more, with_body=not is_head))
        self._end()

    def _end(self) -> None:
        """Half-close, and drop input until the client closes, too: a reset could destroy the last answer."""
        self._ending = True
        self._exchange = None
        self.pending = bytearray()
        if self._transport.is_closing():
            return
        if self.eof or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()
        self._deadlines.note_progress(self.buffered_bytes)
        self.apply_state()

    def _leave(self) -> None:
        """Give up the connection, which keeps its place: another protocol goes on."""
        self._ending = True
        self._stop_timer()
        self._factory.connections.forget(self, handed_over=True)
        self._hold(0)
        if not self.reading:
            self._transport.resume_reading()

    def _repeat_eof(self) -> None:
        if self.eof:  # it came while another request was answered, and asyncio does not repeat it
            cast(asyncio.Protocol, self._transport.get_protocol()).eof_received()

    # Deadlines.

    def apply_state(self) -> None:
        """Derive from the state whether to read on, what is awaited, and until when. Call it after every change."""
        exchange, writable = self._exchange, self.writable
        unread_bytes = len(self.pending) if exchange is None else len(self.pending) + exchange.unread_bytes
        in_head = exchange is None and writable
        most_bytes = self._factory.unread_head_max_bytes if in_head else self._limits.read_high_water_bytes
        reading = unread_bytes <= most_bytes or self._ending
        # After the client's end of file there is nothing to read.
        if reading is not self.reading and not self.eof and not self._transport.is_closing():
            self.reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        held_bytes = len(self.pending) if exchange is None else 0
        if held_bytes != self._held_bytes:
            self._hold(held_bytes)
        deadlines = self._deadlines
        if self._ending:
            deadlines.wait(Awaited.END)
        elif exchange is None:
            awaited = Awaited.REST_OF_HEAD if self.pending else Awaited.REQUEST
            deadlines.wait(awaited if writable else Awaited.READER)
        elif self._parser.complete:
            deadlines.wait(Awaited.NOTHING if writable else Awaited.READER)
        else:
            wanted = self.reading and not exchange.expects_continue
            awaited = Awaited.REST_OF_BODY if wanted else Awaited.NOTHING
            deadlines.wait(awaited if writable else Awaited.READER, self._parser.body_received_bytes)
        if self._timer_at_s > deadlines.at_s:
            self._arm()

    def _hold(self, size_bytes: int) -> None:
        if size_bytes != self._held_bytes:
            self._held_bytes = size_bytes
            self._factory.connections.unadmitted.resize(self._transport, size_bytes)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at_s = None, self._deadlines.at_s
        if self._timer_at_s < math.inf:
            self._timer = self._loop.call_at(self._timer_at_s + self._factory.clock.suspended_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        verdict = self._deadlines.verdict(self.buffered_bytes)
        if verdict is Verdict.NOT_YET:
            self._arm()
        elif verdict is Verdict.CHECK_AGAIN:
            self.apply_state()
        elif verdict is Verdict.CLOSE:
            self._transport.close()
        elif verdict is Verdict.CUT:
            self.abort()
        elif verdict is Verdict.REFUSE_HEAD:
            limit_ms = self._limits.header_timeout_ms
            self.refuse(TopicsError("request_timeout", f"the head took longer than {limit_ms} ms"), self.pending)
        else:
            self.refuse(body_timed_out())

    def _stop_timer(self) -> None:
        self._deadlines.wait(Awaited.NOTHING)
        self._arm()


def _address(name: object) -> tuple[str, int] | None:
    """Return host and port of an IPv4 or IPv6 socket name; None for a Unix socket."""
    return (name[0], name[1]) if isinstance(name, tuple) else None
