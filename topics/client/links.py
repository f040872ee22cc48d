"""Connections to the service. The rules are written once, as coroutines. In a client for threads they never suspend,
because its `Link` blocks instead; `finish` runs such coroutines without an event loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from topics.client.attempts import error_of
from topics.client.http import AnswerReader, Event, EventReader, NotSentError, ServiceAddress, TransportError

T = TypeVar("T")

ANSWER_MAX_S: Final = 45.0
"""Time-out of an answer: the longest long poll, and a margin."""
CONNECT_MAX_S: Final = 5.0
NEXT_ADDRESS_S: Final = 0.25
"""Time after which the next address of a host name is tried as well: the first may hang."""
IDLE_LINKS_MAX: Final = 20
IDLE_MAX_S: Final = 5.0
"""Longest idle time after which a connection is used again: one that was cut unnoticed costs a time-out."""
PART_BYTES: Final = 1 << 18
THIS_PROCESS: Final = [os.getpid()]
"""The id of this process; to ask the system for it each time is slow."""
os.register_at_fork(after_in_child=lambda: THIS_PROCESS.__setitem__(0, os.getpid()))
_of_parents: list[AsyncLink] = []
"""Connections of the parent, in a forked child, which keeps them open. The child shares the epoll of the parent's loop;
if it closed them, the parent would wait for ever.
"""


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine of a client for threads waits for an event loop")


def finish_each(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items of a generator that never suspends."""
    try:
        while True:
            try:
                yield finish(items.asend(None))
            except StopAsyncIteration:
                return
    finally:
        finish(items.aclose())


class LinkPool:
    """Owns the connections of a client. After an answer it keeps the connection for the next request, unless the
    service closes it or it is idle for long. After a failure or a cancelled request it closes the connection. A forked
    child makes connections of its own: two processes that share one would read each other's answers.
    """

    def __init__(self, connect: Callable[[], Awaitable[Link | AsyncLink]]) -> None:
        self._connect = connect
        self._idle: list[Link | AsyncLink] = []
        self._open: set[Link | AsyncLink] = set()
        self._closed = False

    async def ask(self, request: bytes) -> AnswerReader:
        """Send a request and return its answer; TransportError when there is none."""
        link = await self._take()
        answer = AnswerReader()
        try:
            await link.send(request, ANSWER_MAX_S)
            while not answer.whole:
                answer.feed(await link.receive())
        except BaseException:
            self._drop(link)
            raise
        if answer.reusable and not self._closed and len(self._idle) < IDLE_LINKS_MAX:
            link.used_s = time.monotonic()
            self._idle.append(link)
        else:
            self._drop(link)
        return answer

    async def events(self, request: bytes, silence_max_s: float) -> AsyncGenerator[list[Event], None]:
        """Yield the events of a stream, as many as came together (with a heartbeat none), until it ends or breaks
        (TransportError).
        """
        link = await self._take()
        answer, events = AnswerReader(), EventReader()
        try:
            await link.send(request, silence_max_s)
            while not answer.whole:
                answer.feed(await link.receive())
                if 200 <= answer.status < 300 and (data := answer.take_body()):
                    yield events.feed(data)
            if answer.status >= 300:
                raise error_of(answer.status, answer.take_body())
        finally:
            self._drop(link)

    def close(self) -> None:
        """Close all connections; callers that wait for an answer get a TransportError."""
        self._closed = True
        for link in list(self._open):
            self._drop(link)

    async def _take(self) -> Link | AsyncLink:
        """Return the connection that was used last, or a new one."""
        if self._closed:
            raise RuntimeError("this client was closed, so it cannot send a request")
        with suppress(IndexError):  # other threads take connections as well
            while True:
                link = self._idle.pop()
                if time.monotonic() - link.used_s < IDLE_MAX_S and link.fit():
                    return link
                self._drop(link)
        link = await self._connect()
        self._open.add(link)
        return link

    def _drop(self, link: Link | AsyncLink) -> None:
        self._open.discard(link)
        link.close()


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class Link:
    """A connection for one thread at a time, which blocks it."""

    def __init__(self, address: ServiceAddress) -> None:
        self.used_s = 0.0
        """Time of its last answer."""
        self._pid = THIS_PROCESS[0]
        self._silence_max_s = CONNECT_MAX_S
        try:
            self._socket = socket.create_connection((address.host, address.port), CONNECT_MAX_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls is not None:
                self._socket = address.tls.wrap_socket(self._socket, server_hostname=address.host)
        except OSError as error:
            raise NotSentError(error) from error

    @classmethod
    async def connect(cls, address: ServiceAddress) -> Self:
        return cls(address)

    def fit(self) -> bool:
        """Return whether the idle connection can be used. Bytes to read mean that the service has closed it."""
        return self._pid == THIS_PROCESS[0] and not _is_readable(self._socket.fileno())

    async def send(self, request: bytes, silence_max_s: float) -> None:
        """Send a request. After so many seconds of silence its answer counts as lost."""
        if silence_max_s != self._silence_max_s:
            self._silence_max_s = silence_max_s
            self._socket.settimeout(silence_max_s)
        try:
            self._socket.sendall(request)
        except TimeoutError as error:
            raise TransportError(error) from None
        except OSError:
            pass  # The service may have answered before it closed the connection. If not, reading fails as well.

    async def receive(self) -> bytes:
        """Return the next bytes, at the end none."""
        try:
            return self._socket.recv(PART_BYTES)
        except OSError as error:
            raise TransportError(error) from error

    def close(self) -> None:
        if self._pid == THIS_PROCESS[0]:  # in a forked child this would end the parent's connection
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        self._socket.close()


class AsyncLink:
    """A connection on an event loop, for one task at a time; otherwise like `Link`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.used_s = self._silence_max_s = 0.0
        self._pid = THIS_PROCESS[0]
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, address: ServiceAddress) -> Self:
        name, loop = address.host if address.tls else None, asyncio.get_running_loop()
        options: dict[str, Any] = {"ssl": address.tls, "server_hostname": name, "limit": PART_BYTES}
        if isinstance(loop, asyncio.BaseEventLoop):  # uvloop asks one address of a host after the other
            options["happy_eyeballs_delay"] = NEXT_ADDRESS_S
        try:
            async with asyncio.timeout(CONNECT_MAX_S):
                return cls(*await asyncio.open_connection(address.host, address.port, **options))
        except OSError as error:
            raise NotSentError(error) from error

    def fit(self) -> bool:
        if self._loop is not asyncio.get_running_loop():
            return False
        looking = self._reader.read(1)
        try:
            looking.send(None)
        except (StopIteration, OSError):  # raised if there is something to read: bytes, or the end
            return False
        looking.close()
        return not _is_readable(self._writer.get_extra_info("socket").fileno())

    async def send(self, request: bytes, silence_max_s: float) -> None:
        self._silence_max_s = silence_max_s
        self._writer.write(request)
        if self._writer.transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(silence_max_s):
                    await self._writer.drain()
            except TimeoutError as error:
                raise TransportError(error) from None
            except OSError:
                pass  # as in a Link

    async def receive(self) -> bytes:
        try:
            async with asyncio.timeout(self._silence_max_s):
                return await self._reader.read(PART_BYTES)
        except OSError as error:
            raise TransportError(error) from error

    def close(self) -> None:
        if self._pid != THIS_PROCESS[0]:
            _of_parents.append(self)
        elif not self._loop.is_closed():
            self._writer.transport.abort()
