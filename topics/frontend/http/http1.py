"""HTTP/1.1 connections: order, time-outs, keep-alive and back-pressure of each; limit, drain and end of them all.

`http1_parser` says what a request is, `http1_exchange` what an answer is; this is the connection between them.

    rest of head ──▶ rest of body ──▶ answer ──▶ next head …       what a client pipelines waits unparsed in `_pending`
        │ 4xx/505        │ 4xx           │
        └────────────────┴───────────────┴─▶ end: half-close, drop input until the client has closed, too
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import unquote

from topics.core.clock import Clock, SystemClock
from topics.frontend.asgi import DELIVER, AsgiApp, Scope
from topics.frontend.http.deadlines import AttendedClock, Awaited, Deadlines, HttpLimits, Verdict
from topics.frontend.http.http1_exchange import AnswerStage, Exchange, error_answer
from topics.frontend.http.http1_parser import Head, Refusal, RequestParser
from topics.frontend.http.kept_answers import KeptAnswers
from topics.frontend.http.vanished import Lookout
from topics.shm.cap import Cap

JOIN_MAX_BYTES: Final = 16 * 1024
"""Up to here, joining head and body for one write is cheaper than handing the transport two buffers."""
TURNED_AWAY_MAX: Final = 1024
"""Connections of one process that are told that they are too many and may take their time to read it."""
_ASGI: Final = {"version": "3.0", "spec_version": "2.4"}  # 2.4: send raises OSError when the client is gone

HandOver = Callable[[asyncio.Transport, bytes], None]
"""Takes over a transport and the bytes read from it so far."""


class Connections:
    """Every HTTP/1.1 connection of this process: it counts them, drains them and says when all are gone.

    `places` is how many connections the whole service may have, those of other protocols included. `kept` counts what
    the clients of all protocols have not taken.
    """

    def __init__(self, places: Cap | None = None, clock: Clock | None = None) -> None:
        self.places = places
        self.draining = False
        self.requests = 0
        self.open: set[Http1Protocol] = set()
        self.turned_away = 0
        self.kept = KeptAnswers(clock or SystemClock())
        self.tasks: set[asyncio.Task[None]] = set()
        """App calls of HTTP/1.1, and connections that Hypercorn serves. The loop itself keeps weak references only."""
        self._changed = asyncio.Event()

    def add(self, connection: Http1Protocol) -> bool:
        """A connection was accepted. False: it is one too many, and not kept."""
        if self.places is not None and not self.places.claim():
            return False
        self.open.add(connection)
        return True

    def release_place(self) -> None:
        """A connection is closed, whichever protocol it spoke."""
        if self.places is not None:
            self.places.release()

    def begin_drain(self) -> None:
        """Close what is idle; what is busy finishes its request with `connection: close`. Can be repeated."""
        self.draining = True
        for connection in list(self.open):
            connection.drain()

    async def wait_closed(self) -> None:
        """Until no connection and no request is left. It starts no drain by itself and has no time limit."""
        while self.open or self.tasks:
            self._changed.clear()
            await self._changed.wait()

    async def abort(self) -> None:
        """Cut all that is left. Requests that are not yet answered get `503 shutting_down`."""
        if tasks := list(self.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
        for connection in list(self.open):
            connection.close_now()

    def forget(self, connection: Http1Protocol, handed_over: bool = False) -> None:
        """The connection is closed, or `handed_over`: no longer ours, and keeps its place. Can be repeated."""
        if connection in self.open:
            self.open.remove(connection)
            if not handed_over:
                self.release_place()
        self._changed.set()

    def task_done(self) -> None:
        """The current task, one of `tasks`, ends."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.discard(task)
        if self.draining:
            self._changed.set()


class Http1Factory:
    """Makes the protocol of each accepted connection, and holds what all connections of one process share."""

    def __init__(
        self,
        app: AsgiApp,
        limits: HttpLimits,
        connections: Connections,
        hand_over: HandOver,
        clock: AttendedClock,
    ) -> None:
        self.app = app
        self.limits = limits
        self.connections = connections
        self.hand_over = hand_over
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.lookout = Lookout(self.loop, connections.open, limits.vanished_after_ms, clock)
        self.unread_head_max_bytes = max(limits.read_high_water_bytes, limits.max_header_bytes)
        """A head waits in memory until it is whole: reading must not stop in the middle of it."""

    def __call__(self) -> Http1Protocol:
        return Http1Protocol(self)


class Http1Protocol(asyncio.Protocol):
    """One HTTP/1.1 connection. It owns the transport, the bytes that are not parsed yet, the exchange that is under way
    and one timer.

    `_settle`, called after every change, derives from the state whether to read on, what is awaited and until when. A
    timer that fires early, because the deadline has moved on, arms itself again, so traffic does not touch timers.
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
        # What comes in.
        self._parser = RequestParser(factory.limits)
        self._pending = bytearray()
        self._eof = False
        self.reading = True
        # What goes out.
        self._can_write = asyncio.Event()  # means nothing while `writable`
        self._written_bytes = 0  # by the last call of `write`
        self.writable = True
        # The request under way.
        self._exchange: Exchange | None = None
        self._scope: Scope | None = None  # until its app is started
        self._discard_left_bytes = 0
        # What is awaited, and until when.
        self._deadlines = Deadlines(factory.limits, factory.clock)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = cast(asyncio.Transport, transport)
        self._limit_buffer()
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        if not self._factory.connections.add(self):
            self._turn_away()
            return
        self._factory.lookout.watch()
        self._deadlines.wait(Awaited.FIRST_REQUEST)
        self._settle()
        if self.draining:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is gone, and with it whoever waits for it."""
        self._ending = True
        self._disarm()
        connections = self._factory.connections
        connections.forget(self)
        connections.turned_away -= self._turned_away
        connections.kept.let_go(self)
        self._can_write.set()
        self._parser.close()
        self._pending = bytearray()
        exchange, self._exchange = self._exchange, None  # breaks the cycle: nobody waits for the collector
        if exchange is not None:
            exchange.lose()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes from the client."""
        if self._ending:
            return
        if self._pending:
            self._pending += data
            self._advance(self._pending)
        else:
            self._advance(data)

    def eof_received(self) -> bool:
        """asyncio: the client has closed its sending side. True: keep ours open, an answer is still to be written."""
        self._eof = True
        if self._ending:
            return False
        if self._exchange is None:
            return not self.writable  # then whole requests may be waiting; `resume_writing` goes on
        self._pass_on_eof(self._exchange)
        return True

    def pause_writing(self) -> None:
        """asyncio: more than `write_high_water_bytes` are buffered for the client."""
        exchange = self._exchange
        self.writable = False
        self._can_write.clear()
        self._deadlines.begin_taking(self.buffered_bytes)
        if exchange is None or not exchange.pushing:  # the hub counts what event streams hold
            self._factory.connections.kept.hold(self, self._written_bytes)
        if exchange is not None:
            exchange.paused()
        self._settle()

    def resume_writing(self) -> None:
        """asyncio: the client has caught up."""
        self.writable = True
        self._deadlines.end_taking()
        self._factory.connections.kept.let_go(self)
        self._can_write.set()
        if self._pending or self._eof:
            self._loop.call_soon(self._go_on)
        self._settle()
        if self._exchange is not None:
            self._exchange.writable_again()

    # Bytes to requests.

    def _go_on(self) -> None:
        """Take up what was pipelined behind the request that has been answered."""
        if not self._ending:
            self._advance(self._pending)

    def _advance(self, data: bytes | bytearray) -> None:
        """Do all that `data` allows, and keep the rest. `data` is `_pending`, or `_pending` is empty."""
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
                        self._hand_over(bytes(data[position:]))
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
        except Refusal as refusal:
            self._refuse(refusal.code, refusal.message, refusal.detail)
            return
        if data is self._pending:
            del self._pending[:position]
        elif position < len(data):
            self._pending += data[position:]
        if self._eof:
            if self._exchange is not None:
                self._pass_on_eof(self._exchange)
            elif self.writable:
                self._transport.close()
        self._settle()

    def _pass_on_eof(self, exchange: Exchange) -> None:
        """Tell the exchange that the client has ended, also one that was pipelined and began later. Can be repeated."""
        if self._parser.complete:
            exchange.half_closed()
        else:
            exchange.lose()
            self._end()

    def _begin(self, head: Head) -> None:
        complete = self._parser.complete
        if not complete:
            self._deadlines.begin_body()
        self._exchange = exchange = Exchange(self, self._transport, head, complete)
        path = head.raw_path.decode()
        self._factory.connections.requests += 1
        self._scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1" if head.http11 else "1.0",
            "method": head.method,
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": self._client,
            "server": self._server,
            "extensions": {"topics.push": exchange.push, DELIVER: exchange.deliver},
        }

    def _start_app(self, scope: Scope) -> None:
        # A task for each request. Running the app's first step right here would save a tenth of the CPU when the app
        # never suspends, but until Python 3.12 that step has no current task, and `asyncio.timeout` needs one.
        assert self._exchange is not None
        self._scope = None
        self._factory.connections.tasks.add(self._loop.create_task(self._run(self._exchange, scope)))

    async def _run(self, exchange: Exchange, scope: Scope) -> None:
        try:
            await exchange.run(self._factory.app, scope)
        finally:
            self._factory.connections.task_done()

    def _read_body(self, data: bytes | bytearray, position: int) -> int:
        exchange = self._exchange
        assert exchange is not None
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

    # The exchange's calls (`http1_exchange.Connection`).

    def write(self, data: bytes, more: bytes = b"") -> None:
        """Send both, or let the transport keep them."""
        self._written_bytes = len(data) + len(more)
        if len(more) <= JOIN_MAX_BYTES:
            self._transport.write(data + more if more else data)
        else:
            self._transport.writelines((data, more))

    async def wait_writable(self) -> None:
        """Wait until the client has caught up, or is gone. Only while not `writable`."""
        await self._can_write.wait()

    async def wait_emptied(self) -> None:
        """Wait until the transport keeps nothing for the client, or the client is gone."""
        self._transport.set_write_buffer_limits(high=0)
        try:
            if not self.writable:
                await self._can_write.wait()
        finally:
            if not self._transport.is_closing():
                self._limit_buffer()

    def _limit_buffer(self) -> None:
        # The client has caught up when it has all: uvloop keeps the whole of an answer of which a byte is to be sent.
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water_bytes, low=0)

    def body_wanted(self) -> None:
        """The app has taken what was there, or waits for more."""
        self._settle()

    @property
    def draining(self) -> bool:
        """The server is stopping."""
        return self._factory.connections.draining

    def may_stay_open(self) -> bool:
        """True: another request can follow the answer whose head is about to be written."""
        if self.draining:
            return False
        exchange = self._exchange
        if self._parser.complete or exchange is None:
            return True
        # An answer before the end of the request: the rest is worth reading only if it is small. A client that waits
        # for `100 Continue` may send its body or not, so nothing can follow.
        return not exchange.expects_continue and self._parser.body_left_bytes <= self._limits.discard_max_bytes

    def answer_done(self, exchange: Exchange) -> None:
        """The answer is written; go on with the next request, or end."""
        if exchange is not self._exchange:
            return
        if not self.writable:  # the rest of an event stream, too: the hub no longer counts it
            self._factory.connections.kept.hold(self)
        if not exchange.keep_alive or self.draining:
            self._end()
            return
        if not self._parser.complete:
            self._discard_left_bytes = self._limits.discard_max_bytes
            self.body_wanted()
            return  # the rest of the body is dropped as it comes
        self._exchange = None
        if self._pending or self._eof:
            self._go_on()
        else:
            self._settle()

    # Ends.

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the transport keeps for the client."""
        return self._transport.get_write_buffer_size()

    @property
    def end(self) -> socket.socket | None:
        """Our socket; None when it is closing."""
        return None if self._transport.is_closing() else self._transport.get_extra_info("socket")

    def abort(self) -> None:
        """Cut the connection. What waits for the client is lost."""
        self._transport.abort()

    def drain(self) -> None:
        """Close if nothing is going on; else the running request is the last one."""
        if self._ending:
            return
        if self._exchange is None:
            if not self._pending:
                self._transport.close()
        elif self._exchange.stage is AnswerStage.DONE:
            self._end()  # what is still to come is the rest of a body that nobody wants

    def close_now(self) -> None:
        """Close without waiting for the client."""
        self._transport.close()

    def _turn_away(self) -> None:
        """Answer one connection too many, before its request is read: many have to be turned away cheaply."""
        connections = self._factory.connections
        assert connections.places is not None
        reached = connections.places.reached()
        self._transport.write(error_answer(reached.code, reached.message, reached.detail))
        if connections.turned_away < TURNED_AWAY_MAX:
            self._turned_away = True
            connections.turned_away += 1
            self._end()
        else:
            self._ending = True
            self._transport.close()

    def _refuse(self, code: str, message: str, detail: dict[str, int] | None = None) -> None:
        exchange, self._exchange, self._scope = self._exchange, None, None
        started = exchange is not None and exchange.stage in (AnswerStage.STREAMING, AnswerStage.DONE)
        if exchange is not None:
            exchange.lose()
        if not started:
            self._transport.write(error_answer(code, message, detail))
        elif exchange is not None and exchange.stage is AnswerStage.STREAMING:
            self._transport.abort()
            return
        self._end()

    def _end(self) -> None:
        """Nothing more is answered. Half-close, and drop input until the client closes, too: closing with unread input
        would send a reset, and that may destroy the answer before the client has read it."""
        self._ending = True
        self._exchange = None
        self._pending = bytearray()
        if self._transport.is_closing():
            return
        if self._eof or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()
        self._deadlines.watch_reader(self.buffered_bytes)
        self._settle()

    def _hand_over(self, data: bytes) -> None:
        self._ending = True
        self._disarm()
        self._factory.connections.forget(self, handed_over=True)
        self._parser.close()
        if not self.reading:
            self._transport.resume_reading()
        self._factory.hand_over(self._transport, data)
        if self._eof:  # it came while another request was answered, and comes only once
            cast(asyncio.Protocol, self._transport.get_protocol()).eof_received()

    # What is awaited, and until when.

    def _settle(self) -> None:
        """After every change: derive from the state whether to read on, what is awaited, and until when."""
        exchange, writable = self._exchange, self.writable
        unread_bytes = len(self._pending)
        if exchange is not None and exchange.unread_bytes > unread_bytes:
            unread_bytes = exchange.unread_bytes
        in_head = exchange is None and writable
        most_bytes = self._factory.unread_head_max_bytes if in_head else self._limits.read_high_water_bytes
        reading = unread_bytes <= most_bytes or self._ending
        # After the client's end of file there is nothing to read.
        if reading is not self.reading and not self._eof and not self._transport.is_closing():
            self.reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        deadlines = self._deadlines
        if self._ending:
            deadlines.wait(Awaited.END)
        elif exchange is None:
            awaited = Awaited.REST_OF_HEAD if self._pending else Awaited.REQUEST
            deadlines.wait(awaited if writable else Awaited.READER)
        elif self._parser.complete:
            deadlines.wait(Awaited.NOTHING if writable else Awaited.READER)
        else:
            wanted = self.reading and not exchange.expects_continue
            awaited = Awaited.REST_OF_BODY if wanted else Awaited.NOTHING
            deadlines.wait(awaited if writable else Awaited.READER, self._parser.body_came_bytes)
        if self._timer_at_s > deadlines.at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._arm(deadlines.at_s)

    def _arm(self, at_s: float) -> None:
        self._timer_at_s = at_s
        self._timer = self._loop.call_at(at_s + self._factory.clock.missed_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._timer_at_s = math.inf
        verdict = self._deadlines.overdue(self.buffered_bytes)
        if verdict is Verdict.NOTHING_YET:
            if self._deadlines.at_s < math.inf:
                self._arm(self._deadlines.at_s)
        elif verdict is Verdict.LOOK_AGAIN:
            self._settle()
        elif verdict is Verdict.CLOSE:
            self._transport.close()
        elif verdict is Verdict.CUT:
            self.abort()
        elif verdict is Verdict.REFUSE_HEAD:
            self._refuse("request_timeout", f"the head took longer than {self._limits.header_timeout_ms} ms")
        else:
            self._refuse("request_timeout", "the body came too slowly, or not at all")

    def _disarm(self) -> None:
        self._deadlines.wait(Awaited.NOTHING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _address(name: object) -> tuple[str, int] | None:
    """Host and port of an IPv4 or IPv6 socket name; a Unix socket has none."""
    return (name[0], name[1]) if isinstance(name, tuple) else None
