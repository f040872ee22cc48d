"""`/v0/topics` and `/v0/topics/:t` but for the write: configuration, state, list, deletion (api §1)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import QueryParams

from topics.core import priority
from topics.core.clock import Clock
from topics.core.config import parse_config
from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name, owner_shard
from topics.frontend import wire
from topics.frontend.access import caller_of
from topics.frontend.answers import LIST_BYTES_MAX, send_object, take_room
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.bodies import read_body
from topics.frontend.query import flag, name_after, name_cursor, page_size
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.routers import RouterRoutes
from topics.frontend.shards.arenas import Arenas, live_names
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.messages import Done
from topics.shm.recency import Recency, RecencyWriter
from topics.shm.topic_messages import (
    DeleteRecords,
    DeleteRecordsReply,
    DeleteTopic,
    DeleteTopicReply,
    Expire,
    PutTopic,
    PutTopicReply,
)

EXPIRE_WAIT_S: Final = 0.25
"""A dead shard must not hold up a state read: it is then answered as the topic was last published."""


class TopicRoutes:
    """One method for each method of HTTP; routing is the app's."""

    def __init__(
        self,
        reader: TopicReader,
        arenas: Arenas,
        gateway: Gateway,
        recency_writer: RecencyWriter,
        recency: Recency,
        settings: Settings,
        waiting_ms: Callable[[str], int],
        catching_up: CatchingUp,
        routers: RouterRoutes,
        clock: Clock,
    ) -> None:
        """`waiting_ms(name)`: how long what is new in a topic waits to be delivered by this process."""
        self._reader = reader
        self._arenas = arenas
        self._gateway = gateway
        self._recency_writer = recency_writer
        self._recency = recency
        self._settings = settings
        self._waiting_ms = waiting_ms
        self._catching_up = catching_up
        self._routers = routers
        self._clock = clock

    async def put(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        config, type_given = parse_config(wire.decode_object(body) if body else {}, name)
        if config.dead_letter is not None:
            caller_of(scope).require(KeyScope.ADMIN, (config.dead_letter,))
        shard, call = owner_shard(name, self._gateway.shards), PutTopic(name, config, type_given)
        reply = await self._gateway.call(shard, call, PutTopicReply)
        while reply.rest is not None:
            # What has begun is not given up for a ring that is full.
            reply = await self._gateway.call(shard, reply.rest, PutTopicReply, patient=True)
        answer = {"topic": name, "created": reply.created, "config": reply.config.echo()}
        await send_object(send, headers, 201 if reply.created else 200, answer, started_ns)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name = _topic_name(scope)
        if_empty = flag(QueryParams(scope["query_string"]), "if_empty", False)
        routers, with_copies = await self._routers.before_delete(name)
        call = DeleteTopic(name, if_empty)
        reply = await self._gateway.call(owner_shard(name, self._gateway.shards), call, DeleteTopicReply)
        if not reply.deleted:
            routers = []
        if routers:
            await self._routers.after_delete(name, routers)
        removed = [router.name for router in routers]
        answer: dict[str, Any] = {"topic": name, "deleted": reply.deleted, "routers_removed": removed}
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    async def delete_records(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v0/topics/:t/delete` (api §5)."""
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        before_seq, match = wire.decode_delete(body)
        op, tag = (None, b"") if match is None else match
        with_copies = await self._catching_up.one(name)
        deleted, reply = await delete_in_turns(self._gateway, DeleteRecords(name, before_seq, op, tag))
        answer: dict[str, Any] = {
            "topic": name,
            "deleted": deleted,
            "earliest_seq": reply.earliest_seq,
            "head_seq": reply.head_seq,
            "count": reply.records,
            "bytes": reply.live_bytes,
        }
        await send_object(send, headers, 200, answer, started_ns, with_copies=with_copies)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name = _topic_name(scope)
        touch = flag(QueryParams(scope["query_string"]), "touch", True)
        with_copies = await self._catching_up.one(name)
        ref = await self.settled(self._reader.get(name))
        now_ms = self._clock.now_ms()
        view, config = ref.view, ref.config
        if touch:
            self._recency_writer.touch(ref.shard, ref.slot, view.topic_id, now_ms)
        last_read_ms = self._recency.last_read_ms(ref.shard, ref.slot, view.topic_id)
        answer = {
            "topic": name,
            "type": config.type,
            "head_seq": view.head_seq,
            "earliest_seq": view.earliest_seq,
            "next_seq": view.head_seq + 1,
            "count": view.records,
            "bytes": view.live_bytes,
            "durable_seq": view.durable_seq,
            "epoch": f"{view.topic_id:016x}",
            "config": config.echo(),
            "effective_priority": self._effective_priority(ref, last_read_ms, now_ms),
            "last_write_ts": view.last_write_ts or None,
            "last_read_ts": last_read_ms or None,
        }
        if config.type == "queue":
            answer["queue"] = {
                "ready": view.jobs_ready,
                "in_flight": view.jobs_in_flight,
                "dead_lettered": view.jobs_dead_lettered,
            }
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    async def list_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        query = QueryParams(scope["query_string"])
        most = page_size(query)
        touch = flag(query, "touch", False)
        prefix = query.get("prefix", "")
        prefixes = caller_of(scope).narrowed(prefix)
        arenas = [self._arenas.require(shard) for shard in range(self._gateway.shards)]
        after = name_after(query.get("cursor"), check_topic_name)
        await take_room(scope, LIST_BYTES_MAX)
        names = list(itertools.islice(live_names(arenas, prefixes, after), most + 1))
        more = len(names) > most
        with_copies = await self._catching_up.all(names[:most])
        refs = [ref for name in names[:most] if (ref := self._reader.find(name)) is not None]
        refs = await self._all_settled(refs)
        now_ms = self._clock.now_ms()
        answer: dict[str, Any] = {"topics": [self._entry(ref, touch, now_ms) for ref in refs]}
        if more:
            answer["next_cursor"] = name_cursor(names[most - 1])
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    def _entry(self, ref: TopicRef, touch: bool, now_ms: int) -> dict[str, Any]:
        view = ref.view
        if touch:
            self._recency_writer.touch(ref.shard, ref.slot, view.topic_id, now_ms)
        last_read_ms = self._recency.last_read_ms(ref.shard, ref.slot, view.topic_id)
        return {
            "topic": ref.name,
            "head_seq": view.head_seq,
            "earliest_seq": view.earliest_seq,
            "count": view.records,
            "bytes": view.live_bytes,
            "durable": ref.config.durability == "fsync",
            "effective_priority": self._effective_priority(ref, last_read_ms, now_ms),
        }

    def _effective_priority(self, ref: TopicRef, last_read_ms: int, now_ms: int) -> int:
        """What it is scheduled by in this process (`core/priority.py`)."""
        return priority.base_priority(ref.config, last_read_ms, now_ms) + priority.age(self._waiting_ms(ref.name))

    async def _all_settled(self, refs: list[TopicRef]) -> list[TopicRef]:
        now_ms = self._reader.now_ms()
        if not any(self._reader.has_expired(ref, now_ms) for ref in refs):
            return refs
        settled = await asyncio.gather(*[self.settled(ref) for ref in refs], return_exceptions=True)
        for outcome in settled:
            if isinstance(outcome, BaseException) and not isinstance(outcome, TopicsError):
                raise outcome
        # A topic that was deleted meanwhile is not listed.
        return [outcome for outcome in settled if isinstance(outcome, TopicRef)]

    async def settled(self, ref: TopicRef) -> TopicRef:
        """The topic with its floors, count and bytes exact: the shard evicts what has expired."""
        if not self._reader.has_expired(ref, self._reader.now_ms()):
            return ref
        try:
            async with asyncio.timeout(EXPIRE_WAIT_S):
                await self._gateway.call(ref.shard, Expire(ref.name), Done)
        except (TimeoutError, TopicsError):
            return self._reader.refresh(ref)
        return self._reader.get(ref.name)


def _topic_name(scope: Scope) -> str:
    return check_topic_name(scope["path_params"]["topic"])


async def delete_in_turns(gateway: Gateway, call: DeleteRecords) -> tuple[int, DeleteRecordsReply]:
    """Turn after turn of the shard, with room for others in between: how many were deleted, and its last answer."""
    shard = owner_shard(call.name, gateway.shards)
    deleted = 0
    while True:
        try:
            # What has begun is not given up for a ring that is full.
            reply = await gateway.call(shard, call, DeleteRecordsReply, patient=call.topic_id != 0)
        except asyncio.CancelledError as error:
            # At the end of a stop. `shutting_down` would say that nothing was done.
            what = f"the service stopped before all was done; before that {deleted} records were deleted"
            detail = {"deleted": deleted, "reason": "shutting_down"}
            raise TopicsError("shard_unavailable", what, detail) from error
        except TopicsError as error:
            if not deleted or error.code == "topic_not_found":
                raise
            # The shard's own code may say that nothing was done, and a client would send it again by itself.
            raise TopicsError(
                "shard_unavailable",
                f"{error.message}; before that {deleted} records were deleted",
                {**(error.detail or {}), "deleted": deleted, "reason": error.code},
            ) from error
        deleted += reply.deleted
        if reply.rest is None:
            return deleted, reply
        call = reply.rest
