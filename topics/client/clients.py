"""Both clients: `Client` for threads, `AsyncClient` for asyncio. `errors.py` has the exceptions of their methods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import httpx
import httpx_sse

from topics.client.attempts import RETRY, Attempts, Retry, error_of
from topics.client.calls import Call
from topics.client.commands import AsyncCursor, Commands, Cursor
from topics.client.errors import ClientError, NotFoundError, ServiceBusyError
from topics.client.queue import AsyncQueue, Queue
from topics.client.walks import SILENCE_MAX_S, Following, Item, Tombstones, TopicGone, Walk

ANSWER_MAX_S = 45.0
"""Time-out of an answer: the longest long poll, and a margin."""
CONNECT_MAX_S = 5.0
T = TypeVar("T")


class Connection(Commands):
    """The service that a client talks to, and how its requests are sent and repeated. ClientError for a bad `url`."""

    def __init__(self, url: str, token: str | None, retry: Retry) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ClientError(f"url {url!r} is not valid: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ClientError(f"url {url!r} does not name a service: give one like http://127.0.0.1:4000")
        self._url = url.rstrip("/")
        self._retry = retry
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": {"Accept-Encoding": "identity"} | authorization,
            "timeout": httpx.Timeout(ANSWER_MAX_S, connect=CONNECT_MAX_S),
            # A proxy from the environment has no business between a program and its log.
            "trust_env": False,
            # Reading the authorities' certificates takes each client 14 ms, and plain HTTP does not use them.
            "verify": parsed.scheme == "https",
        }

    def _following(self, positions: Mapping[str, int] | str, tombstones: Tombstones, options: Any) -> Following:
        return Following(positions, tombstones, options, partial(self._attempts, "GET"))

    def _attempts(self, method: str, path: str, repeatable: bool = True) -> Attempts:
        return Attempts(self._retry, repeatable, f"{method} {self._url}{path}")


def request_of(call: Call[Any]) -> dict[str, Any]:
    """Return a call as the arguments of a request."""
    headers = {} if call.body is None else {"Content-Type": "application/json"}
    return {"method": call.method, "url": call.path, "content": call.body, "params": call.query, "headers": headers}


def stream_options(query: Mapping[str, str], headers: Mapping[str, str], silence_max_s: float) -> dict[str, Any]:
    """Return arguments of a request for an event stream that is taken for dead after this silence."""
    timeout = httpx.Timeout(CONNECT_MAX_S, read=silence_max_s)
    return {"params": dict(query), "headers": {"Accept": "text/event-stream", **headers}, "timeout": timeout}


def refused_stream(status: int, body: bytes) -> Exception:
    """Return the error of an event stream that was not opened. A busy service counts as one that was not reached."""
    refusal = error_of(status, body)
    return httpx.RemoteProtocolError(str(refusal)) if isinstance(refusal, ServiceBusyError) else refusal


class AsyncClient(Connection):
    """A client of the service at `url`; `token` is its API key, if it requires one."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        retry: Retry = RETRY,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(url, token, retry)
        self._http = httpx.AsyncClient(**self._options)
        self._sleep = sleep

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, call: Call[T]) -> T:
        """Carry out any call of `topics.client.calls`, and repeat it where that is safe."""
        attempts = self._attempts(call.method, call.path, call.repeatable)
        while True:
            try:
                answer = await self._http.request(**request_of(call))
            except httpx.TransportError as error:
                pause_s = attempts.pause_after_failure(error)
            else:
                if answer.is_success:
                    return call.read(answer.content)
                pause_s = attempts.pause_after_refusal(answer.status_code, answer.headers, answer.content)
            await self._sleep(pause_s)

    async def _walk(self, walk: Walk[T]) -> AsyncIterator[T]:
        call: Call[Any] | None = walk.first
        while call is not None:
            items, call = walk.take(await self.call(call))
            for item in items:
                yield item

    def queue(self, topic: str, *, node: str | None = None) -> AsyncQueue:
        """Return a queue for one worker, called `node`; without one its name is made up."""
        return AsyncQueue(self, topic, node)

    def cursor(self, topic: str, name: str) -> AsyncCursor:
        """Return a read position that the server keeps (api §10). Its `put` makes it."""
        return AsyncCursor(self, topic, name)

    async def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> AsyncIterator[tuple[str, Item | TopicGone]]:
        """Yield (topic, record) of everything behind these seqs, live, each once and in order, across disconnects.

        It ends when all topics are deleted (each with a TopicGone). Options are those of the watch session.
        """
        following = self._following(positions, tombstones, options)
        while not following.ended():
            if following.wid is None:
                for gone in following.begin(await self.call(following.session_call())):
                    yield gone
                continue
            trouble: Exception | None = None
            try:
                async for event in self.events(
                    following.path, headers=following.headers(), silence_max_s=SILENCE_MAX_S
                ):
                    for item in following.take(event.event, event.data, event.id):
                        yield item
                    if following.ended():
                        return
            except (NotFoundError, httpx.TransportError) as error:
                trouble = error
            await self._sleep(following.pause_s(trouble))

    async def events(
        self, path: str, query: Mapping[str, str] = {}, *, headers: Mapping[str, str] = {}, silence_max_s: float
    ) -> AsyncGenerator[httpx_sse.ServerSentEvent, None]:
        """Yield the events of one stream until it breaks (httpx.TransportError) or ends; ApiError when refused."""
        options = stream_options(query, headers, silence_max_s)
        async with self._http.stream("GET", path, **options) as answer:
            if not answer.is_success:
                raise refused_stream(answer.status_code, await answer.aread())
            async for event in httpx_sse.EventSource(answer).aiter_sse():
                yield event


class Client(Connection):
    """A client of the service at `url`; `token` is its API key, if it requires one. Threads may share it."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        retry: Retry = RETRY,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(url, token, retry)
        self._http = httpx.Client(**self._options)
        self._connect_async = partial(AsyncClient, url, token=token, retry=retry)
        self._sleep = sleep

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, call: Call[T]) -> T:
        """Carry out any call of `topics.client.calls`, and repeat it where that is safe."""
        attempts = self._attempts(call.method, call.path, call.repeatable)
        while True:
            try:
                answer = self._http.request(**request_of(call))
            except httpx.TransportError as error:
                pause_s = attempts.pause_after_failure(error)
            else:
                if answer.is_success:
                    return call.read(answer.content)
                pause_s = attempts.pause_after_refusal(answer.status_code, answer.headers, answer.content)
            self._sleep(pause_s)

    def _walk(self, walk: Walk[T]) -> Iterator[T]:
        call: Call[Any] | None = walk.first
        while call is not None:
            items, call = walk.take(self.call(call))
            yield from items

    def queue(self, topic: str, *, node: str | None = None) -> Queue:
        """Return a queue for one worker, called `node`; without one its name is made up."""
        return Queue(self, self._connect_async, topic, node)

    def cursor(self, topic: str, name: str) -> Cursor:
        """Return a read position that the server keeps (api §10). Its `put` makes it."""
        return Cursor(self, topic, name)

    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> Iterator[tuple[str, Item | TopicGone]]:
        """Yield (topic, record) of everything behind these seqs, live, each once and in order, across disconnects.

        It ends when all topics are deleted (each with a TopicGone). Options are those of the watch session.
        """
        following = self._following(positions, tombstones, options)
        while not following.ended():
            if following.wid is None:
                yield from following.begin(self.call(following.session_call()))
                continue
            trouble: Exception | None = None
            try:
                for event in self._events(following):
                    yield from following.take(event.event, event.data, event.id)
                    if following.ended():
                        return
            except (NotFoundError, httpx.TransportError) as error:
                trouble = error
            self._sleep(following.pause_s(trouble))

    def _events(self, following: Following) -> Iterator[httpx_sse.ServerSentEvent]:
        options = stream_options({}, following.headers(), SILENCE_MAX_S)
        with self._http.stream("GET", following.path, **options) as answer:
            if not answer.is_success:
                raise refused_stream(answer.status_code, answer.read())
            yield from httpx_sse.EventSource(answer).iter_sse()
