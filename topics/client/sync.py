"""The client for programs with threads. What its methods raise: `errors.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import httpx_sse

from topics.client import calls, cursor_calls
from topics.client.asynchronous import AsyncClient
from topics.client.attempts import Attempts, Retry, error_of
from topics.client.calls import Call
from topics.client.connection import http_options, may_have_left
from topics.client.cursor import Cursor
from topics.client.cursor_calls import CursorState
from topics.client.errors import GapError, NotFoundError, ServiceBusyError
from topics.client.following import SILENCE_MAX_S, Following
from topics.client.queue import Queue
from topics.client.records import (
    Appended,
    Configured,
    Item,
    Page,
    Producer,
    RecordsDeleted,
    Tombstones,
    TopicDeleted,
    TopicEntry,
    TopicGone,
    TopicState,
)

T = TypeVar("T")


class Client:
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

    # -- topics

    def put_topic(self, topic: str, **config: Any) -> Configured:
        """Create a topic or replace its configuration; what is not given goes to its default."""
        return self.call(calls.put_topic(topic, config))

    def get_topic(self, topic: str, *, touch: bool = True) -> TopicState:
        return self.call(calls.get_topic(topic, touch=touch))

    def list_topics(self, prefix: str = "") -> Iterator[TopicEntry]:
        """Every topic whose name begins with `prefix`, by name."""
        cursor = None
        while True:
            page = self.call(calls.list_topics(prefix, cursor=cursor))
            yield from page.topics
            cursor = page.next_cursor
            if cursor is None:
                return

    def delete_topic(self, topic: str, *, if_empty: bool = False) -> TopicDeleted:
        return self.call(calls.delete_topic(topic, if_empty=if_empty))

    # -- records

    def append(
        self,
        topic: str,
        records: Iterable[Any],
        *,
        node: str | None = None,
        idempotency_key: str | None = None,
        create: bool = True,
        config: Mapping[str, Any] | None = None,
        if_head_seq: int | None = None,
        producer: Producer | None = None,
    ) -> Appended:
        """Writes all records or none. A record is a NewRecord, or just its `data`.

        It is repeated until it is answered, under one idempotency key, so it is committed once. A key of your own
        makes repeats of yours safe as well, over restarts of your program. A `producer` also keeps its writes in their
        order and former lives of itself out: ConflictError `fenced` or `out_of_order`, whose `detail` says where it is.
        """
        return self.call(
            calls.append(
                topic,
                records,
                node=node,
                idempotency_key=idempotency_key,
                create=create,
                config=config,
                if_head_seq=if_head_seq,
                producer=producer,
            )
        )

    def diff(self, topic: str, from_seq: int = 0, **options: Any) -> Page:
        """One page of what follows `from_seq`; options as `calls.diff`."""
        return self.call(calls.diff(topic, from_seq, **options))

    def read(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        tombstones: Tombstones = "raise",
        wait: bool = False,
        **options: Any,
    ) -> Iterator[Item]:
        """Every record behind `from_seq`, page by page, up to the head, or for ever with `wait` (long polls)."""
        if wait:
            options = {"wait_ms": 30_000} | options
        while True:
            page = self.diff(topic, from_seq, **options)
            options.pop("from_ts", None)
            if page.tombstone is not None:
                if tombstones == "raise":
                    raise GapError(topic, page.tombstone)
                yield page.tombstone
            yield from page.records
            from_seq = page.next_from_seq
            if page.caught_up and not wait:
                return

    def delete_records(
        self, topic: str, *, before_seq: int | None = None, match: str | list[str] | None = None
    ) -> RecordsDeleted:
        """Deletes below a seq, by tag (`"x"`, `"x*"`, `["tag", "Eq", "x*"]`), or what is both."""
        return self.call(calls.delete_records(topic, before_seq=before_seq, match=match))

    def queue(self, topic: str, *, node: str | None = None) -> Queue:
        """A queue as a worker sees it; `node` is the worker's name, made up unless given."""
        return Queue(self, self._again, topic, node)

    # -- named cursors

    def cursor(self, topic: str, name: str) -> Cursor:
        """A read position that the server keeps (api §10); `put` makes it."""
        return Cursor(self, topic, name)

    def list_cursors(self, topic: str) -> Iterator[CursorState]:
        """Every cursor of a topic, by name."""
        after = None
        while True:
            page = self.call(cursor_calls.list_cursors(topic, after))
            yield from page.cursors
            after = page.next_cursor
            if after is None:
                return

    # -- live

    def follow(
        self, positions: Mapping[str, int] | str, *, tombstones: Tombstones = "raise", **options: Any
    ) -> Iterator[tuple[str, Item | TopicGone]]:
        """(topic, record) of everything behind these seqs, live, over every disconnect, each once and in order.

        It ends when all topics are deleted (each says so with a TopicGone). Options are those of the watch session.
        """
        start = {positions: 0} if isinstance(positions, str) else dict(positions)
        following = Following(start, tombstones, options)
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
                attempts = Attempts(self._retry, True, f"GET {self._url}/v0/watch/{following.wid}", time.monotonic())
            self._sleep(attempts.no_answer(trouble, True, time.monotonic(), random.random()))

    def _events(self, following: Following) -> Iterator[httpx_sse.ServerSentEvent]:
        timeout = httpx.Timeout(5.0, read=SILENCE_MAX_S)
        path = f"/v0/watch/{following.wid}"
        with self._http.stream("GET", path, headers=following.headers(), timeout=timeout) as answer:
            if not answer.is_success:
                refusal = error_of(answer.status_code, answer.read())
                if isinstance(refusal, ServiceBusyError):
                    raise httpx.RemoteProtocolError(str(refusal))
                raise refusal
            yield from httpx_sse.EventSource(answer).iter_sse()
