"""Both clients: `Client` for threads, `AsyncClient` for asyncio. `errors.py` has the exceptions of their methods."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack
from urllib.parse import urlencode

from topics.client.attempts import RETRY, Attempts, Retry
from topics.client.calls import Call
from topics.client.commands import AsyncCursor, Commands, Cursor
from topics.client.errors import NotFoundError
from topics.client.http import AnswerReader, Event, ServiceAddress, TransportError
from topics.client.links import AsyncLink, Link, LinkPool, finish, finish_each
from topics.client.producers import AsyncProducer, Producer, ProducerOptions
from topics.client.queue import AsyncQueue, Queue
from topics.client.walks import SILENCE_MAX_S, Following, Item, Tombstones, TopicGone, Walk

T = TypeVar("T")

REQUESTS_MAX: Final = 100
"""Requests that an AsyncClient sends at a time; more of them wait. Event streams are not counted."""

log = logging.getLogger("topics.client")


class Connection(Commands):
    """The service that a client talks to, and how its requests are sent and repeated: the rules of both clients, as
    coroutines that never suspend in a `Client`. ClientError for a bad `url`.
    """

    def __init__(
        self, address: ServiceAddress, links: LinkPool, retry: Retry, pause: Callable[[float], Awaitable[None]]
    ) -> None:
        self._address = address
        self._links = links
        self._retry = retry
        self._pause = pause

    async def _ask(self, request: bytes) -> AnswerReader:
        return await self._links.ask(request)

    async def carry_out(self, call: Call[T]) -> T:
        """Carry out a call and repeat it where that is safe, as a coroutine in both kinds of client."""
        attempts = self._attempts(call.method, call.path, call.repeatable)
        headers = {"Accept": call.accept} if call.accept else {}
        request = self._address.request(call.method, call.target, call.body, headers)
        while True:
            try:
                answer = await self._ask(request)
            except TransportError as error:
                pause_s = attempts.pause_after_failure(error)
            else:
                if log.isEnabledFor(logging.DEBUG):
                    log.debug('%s %s%s "HTTP/1.1 %d"', call.method, self._address.url, call.target, answer.status)
                if 200 <= answer.status < 300:
                    return call.read(answer.take_body())
                pause_s = attempts.pause_after_refusal(answer.status, answer.headers, answer.take_body())
            await self._pause(pause_s)

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
                async with aclosing(self._stream(following.path, {}, following.headers(), SILENCE_MAX_S)) as stream:
                    async for events in stream:
                        for event in events:
                            yield following.take(event)
                            if following.ended():
                                return
            except (NotFoundError, TransportError) as error:
                trouble = error
            await self._pause(following.pause_s(trouble))

    def _stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silence_max_s: float
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one stream until it breaks (TransportError) or ends; ApiError when it is refused."""
        headers = {"Accept": "text/event-stream", **headers}
        target = f"{path}?{urlencode(query)}" if query else path
        return self._links.events(self._address.request("GET", target, None, headers), silence_max_s)

    def _attempts(self, method: str, path: str, repeatable: bool = True) -> Attempts:
        return Attempts(self._retry, repeatable, f"{method} {self._address.url}{path}")


class AsyncClient(Connection):
    """A client of the service at `url`; `token` is its API key, if it requires one. `tls` replaces the usual checks of
    a service with https, for authorities of your own.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        retry: Retry = RETRY,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        address = ServiceAddress(url, token, tls)
        super().__init__(address, LinkPool(partial(AsyncLink.connect, address)), retry, sleep)
        self._connect_again = partial(AsyncClient, url, token=token, tls=tls)
        self._turns = asyncio.Semaphore(REQUESTS_MAX)

    async def close(self) -> None:
        self._links.close()
        await asyncio.sleep(0)  # the event loop closes them in its next round

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, request: bytes) -> AnswerReader:
        async with self._turns:
            return await self._links.ask(request)

    async def call(self, call: Call[T]) -> T:
        """Carry out any call of `topics.client.calls`, and repeat it where that is safe."""
        return await self.carry_out(call)

    async def _walk(self, walk: Walk[T]) -> AsyncIterator[T]:
        async for items in self._pages(walk):
            for item in items:
                yield item

    def queue(self, topic: str, *, node: str | None = None) -> AsyncQueue:
        """Return a queue for one worker, called `node`; without one its name is made up."""
        return AsyncQueue(self, topic, node)

    def producer(self, topic: str, name: str | None = None, **options: Unpack[ProducerOptions]) -> AsyncProducer:
        """Return a producer, which batches records, writes each once and in order, and answers each by itself.

        A `name` is that of one writer of this topic: its next life shuts this one out and asks `last` where to go on.
        """
        return AsyncProducer(self, partial(self._connect_again, retry=self._retry.for_ever()), topic, name, options)

    def cursor(self, topic: str, name: str) -> AsyncCursor:
        """Return a read position that the server keeps (api §10). Its `put` makes it."""
        return AsyncCursor(self, topic, name)

    async def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> AsyncIterator[tuple[str, Item | TopicGone]]:
        """Yield (topic, record) of everything behind these seqs, live, each once and in order, across disconnects.

        It ends when all topics are deleted (each with a TopicGone). Options are those of the watch session.
        """
        async with aclosing(self._frames(positions, tombstones, options)) as frames:
            async for items in frames:
                for item in items:
                    yield item

    async def events(self, path: str, query: Mapping[str, str], *, silence_max_s: float) -> AsyncGenerator[Event, None]:
        """Yield the events of one stream until it breaks (TransportError) or ends; ApiError when it is refused."""
        async with aclosing(self._stream(path, query, {}, silence_max_s)) as stream:
            async for events in stream:
                for event in events:
                    yield event


class Client(Connection):
    """A client of the service at `url`; `token` is its API key, if it requires one. `tls` replaces the usual checks of
    a service with https, for authorities of your own. Threads may share the client.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        retry: Retry = RETRY,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        async def pause(pause_s: float) -> None:
            sleep(pause_s)

        address = ServiceAddress(url, token, tls)
        super().__init__(address, LinkPool(partial(Link.connect, address)), retry, pause)
        self._connect_async = partial(AsyncClient, url, token=token, tls=tls, retry=retry)
        self._connect_again = partial(Client, url, token=token, tls=tls)

    def close(self) -> None:
        self._links.close()

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

        A `name` is that of one writer of this topic: its next life shuts this one out and asks `last` where to go on.
        """
        return Producer(self, partial(self._connect_again, retry=self._retry.for_ever()), topic, name, options)

    def cursor(self, topic: str, name: str) -> Cursor:
        """Return a read position that the server keeps (api §10). Its `put` makes it."""
        return Cursor(self, topic, name)

    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> Iterator[tuple[str, Item | TopicGone]]:
        """Yield (topic, record) of everything behind these seqs, live, each once and in order, across disconnects.

        It ends when all topics are deleted (each with a TopicGone). Options are those of the watch session.
        """
        with closing(finish_each(self._frames(positions, tombstones, options))) as frames:
            for items in frames:
                yield from items
