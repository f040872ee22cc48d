"""The client for programs with an event loop (asyncio). `errors.py` has the exceptions of its methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

import httpx
import httpx_sse

from topics.client.attempts import RETRY, Retry
from topics.client.calls import Call
from topics.client.commands import AsyncCursor
from topics.client.connection import Connection, refused_stream, request_of, stream_timeout
from topics.client.errors import NotFoundError
from topics.client.follow import SILENCE_MAX_S, Following, TopicGone
from topics.client.queue import AsyncQueue
from topics.client.walks import Item, Tombstones, Walk

T = TypeVar("T")


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
        following = Following(positions, tombstones, options)
        attempts = None
        while not following.ended():
            if following.wid is None:
                for gone in following.begin(await self.call(following.session_call())):
                    yield gone
                continue
            error: Exception = httpx.RemoteProtocolError("the stream ended")
            stream = self.events(following.path, headers=following.headers(), silence_max_s=SILENCE_MAX_S)
            try:
                async for event in stream:
                    attempts = None
                    for item in following.take(event.event, event.data, event.id):
                        yield item
                    if following.ended():
                        return
            except NotFoundError:
                following.forget_session()
                continue
            except httpx.TransportError as broken:
                error = broken
            attempts = attempts or self._attempts("GET", following.path)
            await self._sleep(attempts.pause_after_failure(error))

    async def events(
        self, path: str, query: Mapping[str, str] = {}, *, headers: Mapping[str, str] = {}, silence_max_s: float
    ) -> AsyncGenerator[httpx_sse.ServerSentEvent, None]:
        """Yield the events of one stream until it breaks (httpx.TransportError) or ends; ApiError when refused."""
        timeout = stream_timeout(silence_max_s)
        headers = {"Accept": "text/event-stream"} | dict(headers)
        async with self._http.stream("GET", path, params=dict(query), headers=headers, timeout=timeout) as answer:
            if not answer.is_success:
                raise refused_stream(answer.status_code, await answer.aread())
            async for event in httpx_sse.EventSource(answer).aiter_sse():
                yield event
