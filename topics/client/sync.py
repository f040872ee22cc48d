"""The client for programs with threads. What its methods raise: `errors.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import httpx_sse

from topics.client.asynchronous import AsyncClient
from topics.client.attempts import Attempts, Retry
from topics.client.calls import Call
from topics.client.commands import Commands, Cursor
from topics.client.connection import http_options, may_have_left, refused_stream
from topics.client.errors import NotFoundError
from topics.client.follow import SILENCE_MAX_S, Following, TopicGone
from topics.client.queue import Queue
from topics.client.walks import Item, Tombstones, Walk

T = TypeVar("T")


class Client(Commands):
    """A service at `url`; `token` is its API key, if it wants one. Safe for use by several threads."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:4000",
        *,
        token: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 — it is frozen
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http = httpx.Client(**http_options(url, token))
        self._again = partial(AsyncClient, url, token=token, retry=retry)
        self._url = url.rstrip("/")
        self._retry = retry
        self._sleep = sleep

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, call: Call[T]) -> T:
        """Carries out any call of `topics.client.calls`, with repeats."""
        attempts = Attempts(self._retry, call.repeatable, f"{call.method} {self._url}{call.path}", time.monotonic())
        headers = {} if call.body is None else {"Content-Type": "application/json"}
        while True:
            try:
                answer = self._http.request(
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
            self._sleep(pause_s)

    def _walk(self, walk: Walk[T]) -> Iterator[T]:
        while (call := walk.next_call()) is not None:
            yield from walk.take(self.call(call))

    def queue(self, topic: str, *, node: str | None = None) -> Queue:
        """A queue as a worker sees it; `node` is the worker's name, made up unless given."""
        return Queue(self, self._again, topic, node)

    def cursor(self, topic: str, name: str) -> Cursor:
        """A read position that the server keeps (api §10); `put` makes it."""
        return Cursor(self, topic, name)

    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> Iterator[tuple[str, Item | TopicGone]]:
        """(topic, record) of everything behind these seqs, live, over every disconnect, each once and in order.

        It ends when all topics are deleted (each says so with a TopicGone). Options are those of the watch session.
        """
        following = Following(positions, tombstones, options)
        attempts: Attempts | None = None
        while not following.ended():
            if following.wid is None:
                yield from following.began(self.call(following.session_call()))
                if following.ended():
                    return
            try:
                for event in self._events(following):
                    attempts = None
                    yield from following.take(event.event, event.data, event.id)
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
            self._sleep(attempts.no_answer(trouble, True, time.monotonic(), random.random()))

    def _events(self, following: Following) -> Iterator[httpx_sse.ServerSentEvent]:
        timeout = httpx.Timeout(5.0, read=SILENCE_MAX_S)
        with self._http.stream("GET", following.path, headers=following.headers(), timeout=timeout) as answer:
            if not answer.is_success:
                raise refused_stream(answer.status_code, answer.read())
            yield from httpx_sse.EventSource(answer).iter_sse()
