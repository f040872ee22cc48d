"""Both clients: `Client` for threads, `AsyncClient` for asyncio. `errors.py` has the exceptions of their methods."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing, nullcontext
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack, overload
from urllib.parse import urlencode

from topics.api.answers import Record
from topics.client.arguments import require
from topics.client.attempts import NOT_LEADER, RETRY, THROTTLED, UNKNOWN, Attempts, Retry, describe, error_of
from topics.client.calls import Call
from topics.client.commands import AsyncCursor, Commands, Cursor
from topics.client.errors import ApiError, NotFoundError, ServiceBusyError
from topics.client.http import Event, NotSentError, TransportError
from topics.client.links import AsyncLink, Link, finish, finish_each
from topics.client.producers import AsyncProducer, Producer, ProducerOptions
from topics.client.queue import AsyncQueue, Queue
from topics.client.servers import Reads, Servers, make_servers
from topics.client.walks import Following, Item, Raised, Tombstones, TopicGone, Walk

T = TypeVar("T")

REQUESTS_MAX: Final = 100
"""Requests that an AsyncClient sends at a time; more of them wait. Event streams and long polls are not counted."""

log = logging.getLogger("topics.client")


class Connection(Commands):
    """The base of both clients: it sends requests to the service and repeats them. Its methods are coroutines, which
    never suspend in a `Client`. ClientError for a bad `url`.
    """

    def __init__(
        self, servers: tuple[Servers, Servers], retry: Retry, pause: Callable[[float], Awaitable[None]]
    ) -> None:
        """`servers` are (the servers for requests that change anything, those for requests that only read)."""
        require(isinstance(retry, Retry), "retry", retry, "a Retry, like Retry(total_s=60.0)")
        self._writes, self._reads = servers
        self._retry = retry
        self._pause = pause

    def _turn(self, waits: bool) -> AbstractAsyncContextManager[Any]:
        """Return what a request is sent within; `waits`: it is a long poll."""
        return nullcontext()

    async def carry_out(self, call: Call[T]) -> T:
        """Carry out a call and repeat it where that is safe, as a coroutine in both kinds of client."""
        attempts = self._attempts(call.method, call.path, call.repeatable)
        headers = {"Accept": call.accept} if call.accept else {}
        if call.of_leader and self._reads is not self._writes:
            headers["Topics-Leader"] = "required"
        servers = self._reads if call.only_reads else self._writes
        untried, is_told = len(servers) - 1, False
        while True:
            refusal: ApiError | None = None
            pause_s, stays = 0.0, False
            try:
                async with self._turn(call.waits):
                    server = servers.current  # not before: while this one waited, others may have moved on
                    request = server.address.request(call.method, call.target, call.body, headers)
                    asked_s = time.monotonic()
                    try:
                        answer = await server.links.ask(request)
                    except asyncio.CancelledError:
                        if not call.waits:
                            servers.give_up(server, asked_s)
                        raise
                    servers.given_up = 0
            except TransportError as error:
                trouble = describe(error)
                servers.move_on(server)
                # A request that did not leave goes to every address, even when its time is over: some may be dead.
                if not (untried and isinstance(error, NotSentError)):
                    pause_s = attempts.pause_after_failure(error)
            else:
                if log.isEnabledFor(logging.DEBUG):
                    log.debug('%s %s%s "HTTP/1.1 %d"', call.method, server.address.url, call.target, answer.status)
                if 200 <= answer.status < 300:
                    servers.have_led |= not (call.only_reads or call.of_leader or call.path.endswith("/peek"))
                    return call.read(answer.take_body())
                body = answer.take_body()
                refusal = error_of(answer.status, body)
                trouble = str(refusal)
                if refusal.code != NOT_LEADER or not (servers.have_led or len(servers) > 1):
                    pause_s = attempts.pause_after_refusal(answer.status, answer.headers, body)
                    stays = refusal.code != UNKNOWN
                elif not untried:
                    pause_s = attempts.pause_after_move(refusal)
                if not stays:
                    servers.move_on(server, refusal)
            if untried and not stays:
                untried -= 1
                continue
            if not stays:
                untried = len(servers) - 1
            # A client that repeats for ever (a producer's) raises no error that says why it waits, so log it, unless
            # the service only slows it down.
            code = "" if refusal is None else refusal.code
            endless = self._retry.total_s == math.inf and code != THROTTLED
            if (endless or code == NOT_LEADER) and not is_told:
                log.warning("%s %s%s waits: %s", call.method, server.address.url, call.target, trouble)
                is_told = True
            await self._pause(pause_s)

    def _producers_own(self, connect: Callable[..., Any], **options: Any) -> Any:
        """Return a producer's own connection. It takes over whether this one has found a leader."""
        made = connect(retry=self._retry.for_ever(), **options)
        made._writes.have_led = self._writes.have_led
        return made

    async def _pages(self, walk: Walk[T]) -> AsyncGenerator[Iterable[T], None]:
        call: Call[Any] | None = walk.first
        while call is not None:
            items, call = walk.take(await self.carry_out(call))
            yield items

    async def _frames(
        self, positions: Mapping[str, int] | str, tombstones: Tombstones, options: dict[str, Any]
    ) -> AsyncGenerator[Iterable[tuple[str, Item | TopicGone]], None]:
        following = Following(positions, tombstones, options, partial(self._attempts, "GET"))
        while not following.ended():
            if following.wid is None:
                yield following.begin(await self.carry_out(following.session_call()))
                continue
            trouble: Exception | None = None
            try:
                opened = self._stream(self._reads, following.path, {}, following.headers(), following.silence_max_s)
                async with aclosing(opened) as stream:
                    async for events in stream:
                        for event in events:
                            yield following.take(event)
                            if following.ended():
                                return
            except (NotFoundError, TransportError) as error:
                trouble = error
            await self._pause(following.pause_s(trouble))

    async def _stream(
        self, servers: Servers, path: str, query: Mapping[str, str], headers: Mapping[str, str], silence_max_s: float
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one stream until it breaks (TransportError) or ends; ApiError when it is refused."""
        headers = {"Accept": "text/event-stream", **headers}
        target = f"{path}?{urlencode(query)}" if query else path
        server = servers.current
        try:
            request = server.address.request("GET", target, None, headers)
            async with aclosing(server.links.events(request, silence_max_s)) as stream:
                async for events in stream:
                    yield events
        except TransportError:
            servers.move_on(server)
            raise
        except ServiceBusyError as refusal:  # counts as a service that was not reached
            servers.move_on(server, refusal)
            raise TransportError(str(refusal)) from None

    def _attempts(self, method: str, path: str, repeatable: bool = True) -> Attempts:
        return Attempts(self._retry, repeatable, f"{method} {self._writes.urls}{path}")

    def _close_links(self) -> None:
        for server in self._writes.every:
            server.links.close()


class AsyncClient(Connection):
    """A client for asyncio; otherwise like `Client`."""

    def __init__(
        self,
        url: str | Sequence[str] = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        reads: Reads = "leader",
        retry: Retry = RETRY,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(make_servers(url, reads, token, tls, AsyncLink.connect), retry, sleep)
        self._connect_again = partial(AsyncClient, url, token=token, tls=tls, reads=reads)
        self._turns: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def close(self) -> None:
        self._close_links()
        await asyncio.sleep(0)  # the event loop closes the connections in its next round

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _turn(self, waits: bool) -> AbstractAsyncContextManager[Any]:
        loop = asyncio.get_running_loop()
        if loop not in self._turns:  # one loop after the other may use the client, but each needs its own semaphore
            self._turns = {loop: asyncio.Semaphore(REQUESTS_MAX)}
        return nullcontext() if waits else self._turns[loop]

    async def call(self, call: Call[T]) -> T:
        """Carry out any call of `topics.client.calls`, and repeat it where that is safe."""
        return await self.carry_out(call)

    async def _walk(self, walk: Walk[T]) -> AsyncGenerator[T, None]:
        async for items in self._pages(walk):
            for item in items:
                yield item

    def queue(self, topic: str, *, node: str | None = None) -> AsyncQueue:
        """Return a queue for one worker, called `node`; without one its name is made up."""
        return AsyncQueue(self, topic, node)

    def producer(self, topic: str, name: str | None = None, **options: Unpack[ProducerOptions]) -> AsyncProducer:
        """Return a producer as `Client.producer` does."""
        return AsyncProducer(self, partial(self._producers_own, self._connect_again), topic, name, options)

    def cursor(self, topic: str, name: str) -> AsyncCursor:
        """Return a read position that the server keeps (api §10). Its `put` makes it."""
        return AsyncCursor(self, topic, name)

    @overload
    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Raised = "raise", **options: Any
    ) -> AsyncGenerator[tuple[str, Record | TopicGone], None]: ...
    @overload
    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones, **options: Any
    ) -> AsyncGenerator[tuple[str, Item | TopicGone], None]: ...
    async def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield (topic, record) as `Client.follow` does."""
        async with aclosing(self._frames(positions, tombstones, options)) as frames:
            async for items in frames:
                for item in items:
                    yield item

    async def events(self, path: str, query: Mapping[str, str], *, silence_max_s: float) -> AsyncGenerator[Event, None]:
        """Yield the events of one stream until it breaks (TransportError) or ends; ApiError when it is refused."""
        async with aclosing(self._stream(self._writes, path, query, {}, silence_max_s)) as stream:
            async for events in stream:
                for event in events:
                    yield event


class Client(Connection):
    """A client of the service at `url`, for threads, which may share it. `token` is the API key, if the service needs
    one. `tls` replaces the usual checks of https, for authorities of your own. Several URLs, between commas or in a
    list, are those of one service and its followers: the client finds the leader among them. It also sends reads to the
    leader, unless `reads` is "any".
    """

    def __init__(
        self,
        url: str | Sequence[str] = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        reads: Reads = "leader",
        retry: Retry = RETRY,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        async def pause(pause_s: float) -> None:
            sleep(pause_s)

        super().__init__(make_servers(url, reads, token, tls, Link.connect), retry, pause)
        self._connect_async = partial(AsyncClient, url, token=token, tls=tls, reads=reads, retry=retry)
        self._connect_again = partial(Client, url, token=token, tls=tls, reads=reads)

    def close(self) -> None:
        self._close_links()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, call: Call[T]) -> T:
        """Carry out any call of `topics.client.calls`, and repeat it where that is safe."""
        return finish(self.carry_out(call))

    def _walk(self, walk: Walk[T]) -> Iterator[T]:
        for items in finish_each(self._pages(walk)):
            yield from items

    def queue(self, topic: str, *, node: str | None = None) -> Queue:
        """Return a queue for one worker, called `node`; without one its name is made up."""
        return Queue(self, self._connect_async, topic, node)

    def producer(self, topic: str, name: str | None = None, **options: Unpack[ProducerOptions]) -> Producer:
        """Return a producer, which batches records, writes each once and in order, and answers each by itself.

        A `name` stands for one writer of this topic. A new producer of the same name shuts this one out, and learns
        from `last` where to go on.
        """
        return Producer(self, partial(self._producers_own, self._connect_again), topic, name, options)

    def cursor(self, topic: str, name: str) -> Cursor:
        """Return a read position that the server keeps (api §10). Its `put` makes it."""
        return Cursor(self, topic, name)

    @overload
    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Raised = "raise", **options: Any
    ) -> Generator[tuple[str, Record | TopicGone], None, None]: ...
    @overload
    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones, **options: Any
    ) -> Generator[tuple[str, Item | TopicGone], None, None]: ...
    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield (topic, record) of everything behind these seqs, live, each once and in order, across disconnects.

        It ends when all topics are deleted (each with a TopicGone). Options are those of the watch session.
        """
        with closing(finish_each(self._frames(positions, tombstones, options))) as frames:
            for items in frames:
                yield from items
