"""The client for programs with an event loop (asyncio). What its methods raise: `errors.py`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import httpx_sse

from topics.client.attempts import Attempts, Retry
from topics.client.calls import Call
from topics.client.commands import AsyncCursor, Commands
from topics.client.connection import http_options, may_have_left, refused_stream
from topics.client.errors import NotFoundError
from topics.client.follow import SILENCE_MAX_S, Following, TopicGone
from topics.client.queue import AsyncQueue
from topics.client.walks import Item, Tombstones, Walk

T = TypeVar("T")


class AsyncClient(Commands):
    """A service at `url`; `token` is its API key, if it wants one."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 — it is frozen
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._http = httpx.AsyncClient(**http_options(url, token))
        self._url = url.rstrip("/")
        self._retry = retry
        self._sleep = sleep

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(self, call: Call[T]) -> T:
        """Carries out any call of `topics.client.calls`, with repeats."""
        attempts = Attempts(self._retry, call.repeatable, f"{call.method} {self._url}{call.path}", time.monotonic())
        headers = {} if call.body is None else {"Content-Type": "application/json"}
        while True:
            try:
                answer = await self._http.request(
                    call.method, call.path, content=call.body, params=call.query, headers=headers
                )
            except httpx.TransportError as error:
                pause_s = attempts.no_answer(error, may_have_left(error), time.monotonic(), random.random())
            else:
                if answer.is_success:
                    return call.read(answer.content)
                pause_s = attempts.refused(
                    answer.status_code, answer.headers, answer.content, time.monotonic(), random.random()
                )
            await self._sleep(pause_s)

    async def _walk(self, walk: Walk[T]) -> AsyncIterator[T]:
        while (call := walk.next_call()) is not None:
            for item in walk.take(await self.call(call)):
                yield item

    def queue(self, topic: str, *, node: str | None = None) -> AsyncQueue:
        """A queue as a worker sees it; `node` is the worker's name, made up unless given."""
        return AsyncQueue(self, topic, node)

    def cursor(self, topic: str, name: str) -> AsyncCursor:
        """A read position that the server keeps (api §10); `put` makes it."""
        return AsyncCursor(self, topic, name)

    async def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> AsyncIterator[tuple[str, Item | TopicGone]]:
        """(topic, record) of everything behind these seqs, live, over every disconnect, each once and in order.

        It ends when all topics are deleted (each says so with a TopicGone). Options are those of the watch session.
        """
        following = Following(positions, tombstones, options)
        attempts: Attempts | None = None
        while not following.ended():
            if following.wid is None:
                for gone in following.began(await self.call(following.session_call())):
                    yield gone
                if following.ended():
                    return
            try:
                stream = self.events(following.path, headers=following.headers(), silence_max_s=SILENCE_MAX_S)
                async for event in stream:
                    attempts = None
                    for item in following.take(event.event, event.data, event.id):
                        yield item
                    if following.ended():
                        return
                trouble: Exception = httpx.RemoteProtocolError("the stream ended")
            except NotFoundError:
                following.session_gone()
                continue
            except httpx.TransportError as error:
                trouble = error
            if attempts is None:
                attempts = Attempts(self._retry, True, f"GET {self._url}{following.path}", time.monotonic())
            await self._sleep(attempts.no_answer(trouble, True, time.monotonic(), random.random()))

    async def events(
        self, path: str, query: Mapping[str, str] = {}, *, headers: Mapping[str, str] = {}, silence_max_s: float
    ) -> AsyncGenerator[httpx_sse.ServerSentEvent, None]:
        """The events of one stream, until it breaks (httpx.TransportError) or ends; ApiError when it is refused."""
        timeout = httpx.Timeout(5.0, read=silence_max_s)
        headers = {"Accept": "text/event-stream"} | dict(headers)
        async with self._http.stream("GET", path, params=dict(query), headers=headers, timeout=timeout) as answer:
            if not answer.is_success:
                raise refused_stream(answer.status_code, await answer.aread())
            async for event in httpx_sse.EventSource(answer).aiter_sse():
                yield event
