"""Bare connections to Redis and JetStream: requests as bytes made beforehand, answers counted by their line ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import uvloop

from bench.load import LoadError, always

_connections: Final = itertools.count(1)


class Talk(NamedTuple):
    """The words for one server: what a connection says first and how the answer to that ends, a batch, and how
    many lines answer it. A line with one of `errors` in it is a failure.
    """

    opening: bytes
    opened: bytes
    request: bytes
    lines: int
    errors: tuple[bytes, ...]


def command(*parts: bytes) -> bytes:
    """Return a command as the Redis protocol has it."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def redis_talk(stream: str, record: bytes, batch: int) -> Talk:
    """Add a batch as a pipeline. The reply to an XADD is two lines: a length and an id."""
    request = command(b"XADD", stream.encode(), b"*", b"d", record) * batch
    return Talk(command(b"PING"), b"+PONG\r\n", request, batch * 2, (b"-ERR", b"-OOM", b"-MISCONF", b"-LOADING"))


def jetstream_talk(stream: str, record: bytes, batch: int) -> Talk:
    """Publish a batch without waiting in between. Each ack is a message to this connection's inbox, of two lines."""
    inbox = b"_INBOX.bench%d" % next(_connections)
    opening = b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %b 1\r\nPING\r\n' % inbox
    request = b"PUB %b %b %d\r\n%b\r\n" % (stream.encode(), inbox, len(record), record) * batch
    return Talk(opening, b"PONG\r\n", request, batch * 2, (b"-ERR", b'"error"'))


TALKS: Final[dict[str, Callable[[str, bytes, int], Talk]]] = {"redis": redis_talk, "jetstream": jetstream_talk}


class Plan(NamedTuple):
    """Batches of these records on so many connections: each sends one, and the next when all of it is answered, for
    `duration_s` or `rounds` times.
    """

    family: str
    port: int
    stream: str
    record: bytes
    batch: int
    connections: int
    duration_s: float = 0.0
    rounds: int = 0


def bare_appends(plan: Plan) -> float:
    """Return batches a second."""
    return uvloop.run(_run(plan))


async def _run(plan: Plan) -> float:
    loop = asyncio.get_running_loop()
    clients = [Client(TALKS[plan.family](plan.stream, plan.record, plan.batch)) for _ in range(plan.connections)]
    for client in clients:
        await loop.create_connection(always(client), "127.0.0.1", plan.port)
        await client.is_open
    began = time.perf_counter()
    until = began + plan.duration_s if plan.duration_s else float("inf")
    for client in clients:
        client.begin(until, plan.rounds)
    await asyncio.gather(*[client.done for client in clients])
    return sum(client.answered for client in clients) / (time.perf_counter() - began)


class Client(asyncio.Protocol):
    """One connection with one batch in flight."""

    def __init__(self, talk: Talk) -> None:
        loop = asyncio.get_running_loop()
        self._talk = talk
        self._until = 0.0
        self._rounds = 0
        self._missing = 0
        self._rest = b""
        self._transport: asyncio.WriteTransport | None = None
        self.is_open = loop.create_future()
        self.done = loop.create_future()
        self.answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._talk.opening)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the server closed a connection ({error})")

    def begin(self, until: float, rounds: int) -> None:
        """Send the first batch: the last one is the one that is answered after `until`, or the one of this number."""
        self._until, self._rounds = until, rounds
        self._send()

    def _send(self) -> None:
        self._missing += self._talk.lines
        assert self._transport is not None
        self._transport.write(self._talk.request)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(error in line for error in self._talk.errors for line in lines):
            self._fail(data[:200].decode(errors="replace"))
            return
        if not self.is_open.done():
            if self._talk.opened[:-1] in lines:
                self.is_open.set_result(None)
            return
        pings = lines.count(b"PING\r")
        if pings:
            self._transport.write(b"PONG\r\n" * pings)
        self._missing -= len(lines) - pings
        if self._missing == 0 and not self.done.done():
            self.answered += 1
            if self.answered != self._rounds and time.perf_counter() < self._until:
                self._send()
            else:
                self.done.set_result(None)
                self._transport.close()

    def _fail(self, what: str) -> None:
        for future in (self.is_open, self.done):
            if not future.done():
                future.set_exception(LoadError(what))
        if self._transport is not None:
            self._transport.abort()
