"""HTTP/1.1 on one connection: order, time-outs, keep-alive, drain.

`http1_parser` says what a request is, `http1_exchange` what an answer is, `http1_outflow` sends it; this is the
connection between them.

    rest of head ──▶ rest of body ──▶ answer ──▶ next head …       what a client pipelines waits unparsed in `_pending`
        │ 4xx/505        │ 4xx           │
        └────────────────┴───────────────┴─▶ end: half-close, drop input until the client has closed, too

There is at most one timer. `_settle`, called after every change, derives from the state whether to read on and what is
awaited, `http1_deadlines` until when; a timer that fires early (the deadline has moved on) re-arms itself, so traffic
does not touch timers.
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

from topics.frontend.asgi import DELIVER, Scope
from topics.frontend.http.http1_deadlines import Awaited, Deadlines, Verdict
from topics.frontend.http.http1_exchange import Exchange, Stage
from topics.frontend.http.http1_outflow import Outflow
from topics.frontend.http.http1_parser import Head, Refusal, RequestParser
from topics.frontend.http.http1_wire import error_answer

if TYPE_CHECKING:
    from topics.frontend.http.http1_factory import Http1Factory

_ASGI = {"version": "3.0", "spec_version": "2.4"}  # 2.4: send raises OSError when the client is gone


class Http1Protocol(asyncio.Protocol):
    """One connection. See the head of the module."""

    def __init__(self, factory: Http1Factory) -> None:
        self._factory = factory
        self._limits = factory.limits
        self._loop = factory.loop
        self._transport = cast(asyncio.Transport, None)  # until connection_made, before which nothing is called
        self.out = cast(Outflow, None)
        self._parser = RequestParser(factory.limits)
        self._pending = bytearray()
        self._exchange: Exchange | None = None
        self._start: Scope | None = None  # the scope of an exchange whose app has not been started yet
        self.reading = True
        self._eof = False
        self._ending = False  # the last answer is written, input is dropped
        self._turned_away = False
        self._discard_left = 0
        self._deadlines = Deadlines(factory.limits, factory.clock)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = cast(asyncio.Transport, transport)
        self.out = Outflow(
            self._transport, self._limits.write_high_water_bytes, self._deadlines, self._factory.connections.kept
        )
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        if not self._factory.connections.add(self):
            # Many are to be turned away cheaply: no time to read a request, let alone to answer it.
            answer, self._turned_away = self._factory.connections.turn_away()
            self._transport.write(answer)
            if self._turned_away:
                self._end()
            else:
                self._ending = True
                self._transport.close()
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
        self._factory.connections.forget(self)
        self._factory.connections.turned_away -= self._turned_away
        self.out.lost()
        self._parser.close()
        self._pending = bytearray()
        exchange, self._exchange = self._exchange, None  # and not a cycle: nobody is to wait for the collector
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
            return not self.out.writable  # then whole requests may be waiting; `resume_writing` goes on
        self._pass_on_eof(self._exchange)
        return True

    def pause_writing(self) -> None:
        """asyncio: more than `write_high_water_bytes` are buffered for the client."""
        exchange = self._exchange
        self.out.full(exchange is not None and exchange.pushing)  # of streams the hub knows what they hold
        if exchange is not None:
            exchange.paused()
        self._settle()

    def resume_writing(self) -> None:
        """asyncio: the client has caught up."""
        self.out.emptied()
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
        """Do all that `data` (which is `_pending`, or follows on an empty `_pending`) allows; keep the rest."""
        position = 0
        try:
            while position < len(data):
                if self._exchange is None:
                    if not self.out.writable:
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
                if self._start is not None:
                    self._start_app(self._start)
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
            elif self.out.writable:
                self._transport.close()
        self._settle()

    def _pass_on_eof(self, exchange: Exchange) -> None:
        """Also to one that began after it, pipelined. Can be repeated."""
        if self._parser.complete:
            exchange.half_closed()
        else:
            exchange.lose()
            self._end()

    def _begin(self, head: Head) -> None:
        complete = self._parser.complete
        if not complete:
            self._deadlines.begin_body()
        self._exchange = exchange = Exchange(
            self,
            self.out,
            http11=head.http11,
            keep_alive=head.keep_alive,
            head_request=head.method == "HEAD",
            expects_continue=head.expects_continue and not complete,
            request_complete=complete,
        )
        path = head.raw_path.decode()
        factory = self._factory
        factory.connections.requests += 1
        self._start = {
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
            "state": factory.state.copy(),
            "extensions": {"topics.push": exchange.push, DELIVER: exchange.deliver},
        }

    def _start_app(self, scope: Scope) -> None:
        # A task for each request. Running the app's first step right here would save a tenth of the CPU when the app
        # never suspends, but until Python 3.12 that step has no current task, and `asyncio.timeout` needs one.
        assert self._exchange is not None
        self._start = None
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
        if exchange.stage is Stage.DONE:
            self._discard_left -= end - position
            if self._parser.complete:
                self._exchange = None
            elif self._discard_left < 0:
                self._end()
        return end

    # The exchange's calls.

    def body_wanted(self) -> None:
        """The app has taken what was there, or waits for more."""
        self._settle()

    @property
    def draining(self) -> bool:
        """The server is stopping."""
        return self._factory.connections.draining

    def may_stay_open(self) -> bool:
        """Whether the connection can serve another request after the answer whose head is now to be written."""
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
        if not self.out.writable:
            self.out.leave()
        if not exchange.keep_alive or self.draining:
            self._end()
            return
        if not self._parser.complete:
            self._discard_left = self._limits.discard_max_bytes
            self.body_wanted()
            return  # the rest of the body is dropped as it comes
        self._exchange = None
        if self._pending or self._eof:
            self._go_on()
        else:
            self._settle()

    # Ends.

    @property
    def end(self) -> socket.socket | None:
        """The kernel's of our side, None when it is closing."""
        return None if self._transport.is_closing() else self._transport.get_extra_info("socket")

    def abort(self) -> None:
        """Cut it, whatever waits for the client is gone."""
        self._transport.abort()

    def drain(self) -> None:
        """Close if nothing is going on; else the running request is the last one."""
        if self._ending:
            return
        if self._exchange is None:
            if not self._pending:
                self._transport.close()
        elif self._exchange.stage is Stage.DONE:
            self._end()  # what is still to come is the rest of a body that nobody wants

    def close_now(self) -> None:
        """Close without waiting for the client."""
        self._transport.close()

    def _refuse(self, code: str, message: str, detail: dict[str, int] | None = None) -> None:
        exchange, self._exchange, self._start = self._exchange, None, None
        started = exchange is not None and exchange.stage in (Stage.STREAMING, Stage.DONE)
        if exchange is not None:
            exchange.lose()
        if not started:
            self._transport.write(error_answer(code, message, detail))
        elif exchange is not None and exchange.stage is Stage.STREAMING:
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
        self._deadlines.watch_reader(self.out.buffered_bytes)
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
        exchange, writable = self._exchange, self.out.writable
        if exchange is not None:
            unread_bytes = max(len(self._pending), exchange.unread_bytes)
            reading = unread_bytes <= self._limits.read_high_water_bytes
        elif writable:
            reading = len(self._pending) <= self._factory.unread_head_max_bytes
        else:
            reading = len(self._pending) <= self._limits.read_high_water_bytes
        reading = reading or self._ending
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
        verdict = self._deadlines.overdue(self.out.buffered_bytes)
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
