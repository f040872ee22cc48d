"""A named cursor as its readers see it: the server keeps where they stand (api §10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topics.client import cursor_calls
from topics.client.cursor_calls import Consistency, CursorDeleted, CursorMade, CursorPage, CursorState

if TYPE_CHECKING:
    from topics.client.asynchronous import AsyncClient
    from topics.client.sync import Client


class AsyncCursor:
    """A cursor for programs with an event loop."""

    def __init__(self, client: AsyncClient, topic: str, name: str) -> None:
        self._client = client
        self.topic = topic
        self.name = name

    async def put(
        self,
        *,
        consistency: Consistency | None = None,
        persist_every: int | None = None,
        from_seq: int | None = None,
        tail: bool = False,
    ) -> CursorMade:
        """Makes it (`at_least_once`, 1), or changes what is given; `from_seq` or `tail` moves it, else it stays."""
        call = cursor_calls.put_cursor(
            self.topic, self.name, consistency=consistency, persist_every=persist_every, from_seq=from_seq, tail=tail
        )
        return await self._client.call(call)

    async def get(self) -> CursorState:
        return await self._client.call(cursor_calls.get_cursor(self.topic, self.name))

    async def read(self, *, checkpoint: bool = True, **options: Any) -> CursorPage:
        """The next page, which is this reader's alone; with `checkpoint=False` a look at it. `options`: `limit`,
        `max_bytes`, `node`, `include_tags`, `include_meta`. What was lost to cap or ttl is in the page's `tombstone`.

        A read that moves the cursor is not repeated when its answer is lost (UnreachableError, or ServiceBusyError with
        the code `shard_unavailable`): with `at_least_once` those records come again unless they had left the service
        whole, with `strictly_at_once` never.
        """
        return await self._client.call(
            cursor_calls.read_cursor(self.topic, self.name, checkpoint=checkpoint, **options)
        )

    async def delete(self) -> CursorDeleted:
        return await self._client.call(cursor_calls.delete_cursor(self.topic, self.name))


class Cursor:
    """A cursor for programs with threads. Its methods are those of `AsyncCursor`."""

    def __init__(self, client: Client, topic: str, name: str) -> None:
        self._client = client
        self.topic = topic
        self.name = name

    def put(
        self,
        *,
        consistency: Consistency | None = None,
        persist_every: int | None = None,
        from_seq: int | None = None,
        tail: bool = False,
    ) -> CursorMade:
        """Makes it (`at_least_once`, 1), or changes what is given; `from_seq` or `tail` moves it, else it stays."""
        call = cursor_calls.put_cursor(
            self.topic, self.name, consistency=consistency, persist_every=persist_every, from_seq=from_seq, tail=tail
        )
        return self._client.call(call)

    def get(self) -> CursorState:
        return self._client.call(cursor_calls.get_cursor(self.topic, self.name))

    def read(self, *, checkpoint: bool = True, **options: Any) -> CursorPage:
        """The next page, as `AsyncCursor.read`."""
        return self._client.call(cursor_calls.read_cursor(self.topic, self.name, checkpoint=checkpoint, **options))

    def delete(self) -> CursorDeleted:
        return self._client.call(cursor_calls.delete_cursor(self.topic, self.name))
