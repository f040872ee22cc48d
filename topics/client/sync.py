"""The client for programs with threads. `errors.py` has the exceptions of its methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import httpx
import httpx_sse

from topics.client.asynchronous import AsyncClient
from topics.client.attempts import RETRY, Retry
from topics.client.calls import Call
from topics.client.commands import Cursor
from topics.client.connection import Connection, refused_stream, request_of, stream_timeout
from topics.client.errors import NotFoundError
from topics.client.follow import SILENCE_MAX_S, Following, TopicGone
from topics.client.queue import Queue
from topics.client.walks import Item, Tombstones, Walk

T = TypeVar("T")


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
        following = Following(positions, tombstones, options)
        attempts = None
        while not following.ended():
            if following.wid is None:
                yield from following.begin(self.call(following.session_call()))
                continue
            error: Exception = httpx.RemoteProtocolError("the stream ended")
            try:
                for event in self._events(following):
                    attempts = None
                    yield from following.take(event.event, event.data, event.id)
                    if following.ended():
                        return
            except NotFoundError:
                following.forget_session()
                continue
            except httpx.TransportError as broken:
                error = broken
            attempts = attempts or self._attempts("GET", following.path)
            self._sleep(attempts.pause_after_failure(error))

    def _events(self, following: Following) -> Iterator[httpx_sse.ServerSentEvent]:
        timeout = stream_timeout(SILENCE_MAX_S)
        with self._http.stream("GET", following.path, headers=following.headers(), timeout=timeout) as answer:
            if not answer.is_success:
                raise refused_stream(answer.status_code, answer.read())
            yield from httpx_sse.EventSource(answer).iter_sse()
