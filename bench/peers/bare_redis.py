"""Bare connections to Redis: commands as bytes made beforehand, replies counted by their line ends."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import uvloop

from bench.load import LoadError, always


def command(*parts: bytes) -> bytes:
    """Return a command as the Redis protocol has it."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def bare_appends(port: int, stream: str, record: bytes, batch: int, connections: int, duration_s: float) -> float:
    """Return batches a second: each connection sends one as a pipeline, and the next when all replies are there."""
    request = command(b"XADD", stream.encode(), b"*", b"d", record) * batch
    return uvloop.run(_run(port, request, batch, connections, duration_s))


async def _run(port: int, request: bytes, batch: int, connections: int, duration_s: float) -> float:
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    clients = [_Client(request, batch, began + duration_s, loop.create_future()) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(always(client), "127.0.0.1", port)
    await asyncio.gather(*[client.done for client in clients])
    return sum(client.answered for client in clients) / (time.perf_counter() - began)


class _Client(asyncio.Protocol):
    """One connection with one batch in flight. The reply to an XADD is two lines: a length and an id."""

    def __init__(self, request: bytes, batch: int, until: float, done: asyncio.Future[None]) -> None:
        self._request = request
        self._lines = batch * 2
        self._until = until
        self._missing = 0
        self.done = done
        self.answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send()

    def _send(self) -> None:
        self._missing = self._lines
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"-" in data[:1]:
            self.done.set_exception(LoadError(data[:200].decode(errors="replace")))
            self._transport.abort()
            return
        self._missing -= data.count(b"\r\n")
        if self._missing == 0:
            self.answered += 1
            if time.perf_counter() < self._until:
                self._send()
            else:
                self._transport.close()
                self.done.set_result(None)
