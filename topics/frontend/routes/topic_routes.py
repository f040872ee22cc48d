"""`/v0/topics` and `/v0/topics/:t` without the write: configuration, state, list, deletion (api §1)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.datastructures import QueryParams

from topics.api import answers as answer
from topics.api.requests import AppendBody, DeleteBody, DiffBody, GivenConfig
from topics.core.config import parse_config
from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name, owner_shard
from topics.core.priority import age
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import read_body
from topics.frontend.entry.query import flag, name_after, name_cursor, page_size
from topics.frontend.entry.responses import LIST_BYTES_MAX, reserve_room, send_object
from topics.frontend.live.delivery import Hub
from topics.frontend.live.step_cache import KnownTopics
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.diff import DiffRoute
from topics.frontend.reads.reading import TopicRef
from topics.frontend.routes.append import AppendRoute
from topics.frontend.routes.operations import (
    LOST,
    ApiOperation,
    Binding,
    Endpoint,
    Query,
    flag_query,
    json_answer,
    made_or_there,
)
from topics.frontend.routes.router_routes import RouterRoutes
from topics.frontend.shards.arenas import Arenas, live_names
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.durations import Route
from topics.shm.topic_messages import (
    DeleteRecords,
    DeleteRecordsReply,
    DeleteTopic,
    Expire,
    PutTopic,
)

EXPIRE_WAIT_S: Final = 0.25
"""A dead shard must not hold up a state read: it is then answered as the topic was last published."""


class TopicRoutes:
    """The requests to `/v0/topics` and below it that are neither a write nor a read, a method for each."""

    def __init__(
        self,
        known: KnownTopics,
        arenas: Arenas,
        gateway: Gateway,
        hub: Hub,
        catching_up: CatchingUp,
        routers: RouterRoutes,
        settings: Settings,
    ) -> None:
        self._known = known
        self._reader = known.reader
        self._arenas = arenas
        self._gateway = gateway
        self._hub = hub
        self._catching_up = catching_up
        self._routers = routers
        self._settings = settings

    async def put(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        config, type_given = parse_config(wire.decode_object(body) if body else {}, name)
        if config.dead_letter is not None:
            caller_of(scope).require(KeyScope.ADMIN, (config.dead_letter,))
        shard, call = owner_shard(name, self._gateway.shards), PutTopic(name, config, type_given)
        reply = await self._gateway.call(shard, call)
        while reply.rest is not None:
            # What has begun is not given up for a ring that is full.
            reply = await self._gateway.call(shard, reply.rest, patient=True)
        answer = {"topic": name, "created": reply.created, "config": reply.config.echo()}
        await send_object(send, headers, 201 if reply.created else 200, answer, started_ns)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name = _topic_name(scope)
        if_empty = flag(QueryParams(scope["query_string"]), "if_empty", False)
        routers, with_copies = await self._routers.before_delete(name)
        call = DeleteTopic(name, if_empty)
        reply = await self._gateway.call(owner_shard(name, self._gateway.shards), call)
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
        view, config = ref.view, ref.config
        if touch:
            self._known.note_read(ref)
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
            "effective_priority": self._effective_priority(ref),
            "last_write_ts": view.last_write_ts or None,
            "last_read_ts": self._known.last_read_ms(ref) or None,
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
        await reserve_room(scope, LIST_BYTES_MAX)
        names = list(itertools.islice(live_names(arenas, prefixes, after), most + 1))
        more = len(names) > most
        with_copies = await self._catching_up.all(names[:most])
        refs = [ref for name in names[:most] if (ref := self._reader.find(name)) is not None]
        refs = await self._all_settled(refs)
        answer: dict[str, Any] = {"topics": [self._entry(ref, touch) for ref in refs]}
        if more:
            answer["next_cursor"] = name_cursor(names[most - 1])
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    def _entry(self, ref: TopicRef, touch: bool) -> dict[str, Any]:
        view = ref.view
        if touch:
            self._known.note_read(ref)
        return {
            "topic": ref.name,
            "head_seq": view.head_seq,
            "earliest_seq": view.earliest_seq,
            "count": view.records,
            "bytes": view.live_bytes,
            "durable": ref.config.durability == "fsync",
            "effective_priority": self._effective_priority(ref),
        }

    def _effective_priority(self, ref: TopicRef) -> int:
        """The priority by which this process schedules the topic now (`core/priority.py`)."""
        return self._known.priority(ref) + age(self._hub.waiting_ms(ref.name))

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
                await self._gateway.call(ref.shard, Expire(ref.name))
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
            reply = await gateway.call(shard, call, patient=call.topic_id != 0)
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


NamedEndpoint = Callable[[str, Scope, Receive, Send], Awaitable[None]]

_TOPIC: Final = "/v0/topics/{topic}"
_PAGE_SIZE: Final = {"type": "integer", "minimum": 0, "default": 100}


def topic_operations(append: AppendRoute, diff: DiffRoute, topics: TopicRoutes) -> list[ApiOperation]:
    """Lists, configuration, writes, reads and deletions (api §1 to §5)."""
    delete = topics.delete_records
    return [
        ApiOperation(
            Binding("GET", "/v0/topics", topics.list_all, Route.LIST_TOPICS, KeyScope.READ, "topics"),
            "List topics by name",
            {200: json_answer("A page of topics", answer.TopicList)},
            query=(
                Query("prefix", {"type": "string"}, "only names that begin with it"),
                Query("page_size", _PAGE_SIZE, "at most 1000"),
                Query("cursor", {"type": "string"}, "next_cursor of the page before"),
                flag_query("touch", False, "whether this counts as reading the topics"),
            ),
        ),
        ApiOperation(
            Binding("GET", _TOPIC, topics.get, Route.GET_TOPIC, KeyScope.READ, "topics"),
            "The state of a topic",
            {200: json_answer("The topic", answer.TopicState)},
            ("topic_not_found",),
            query=(flag_query("touch", True, "whether this counts as reading the topic"),),
        ),
        ApiOperation(
            Binding("PUT", _TOPIC, topics.put, Route.PUT_TOPIC, KeyScope.ADMIN, "topics"),
            "Create a topic, or replace its configuration",
            made_or_there(answer.PutTopicAnswer),
            ("topic_exists_incompatible", *LOST),
            body=GivenConfig,
            body_required=False,
        ),
        ApiOperation(
            Binding("DELETE", _TOPIC, topics.delete, Route.DELETE_TOPIC, KeyScope.DELETE, "topics"),
            "Delete a topic and all of its records",
            {200: json_answer("It is gone", answer.DeleteTopicAnswer)},
            ("topic_not_empty", *LOST),
            query=(flag_query("if_empty", False, "only a topic without records"),),
        ),
        ApiOperation(
            Binding("POST", _TOPIC, of_topic(append), Route.APPEND, KeyScope.WRITE, "records"),
            "Append records, all or none",
            {
                200: json_answer("Appended", answer.AppendAnswer),
                201: json_answer("Appended, and the topic created", answer.AppendAnswer),
            },
            (
                "batch_too_large",
                "record_too_large",
                "topic_not_found",
                "not_a_queue",
                "head_mismatch",
                "fenced",
                "out_of_order",
                "topic_full",
                *LOST,
            ),
            body=AppendBody,
            query=(flag_query("return_seqs", True, "whether the answer lists the seqs"),),
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/diff", of_topic(diff), Route.DIFF, KeyScope.READ, "records"),
            "Read what follows a cursor, or wait for it",
            {200: json_answer("A page of records", answer.DiffAnswer)},
            ("topic_not_found", "storage_unavailable"),
            body=DiffBody,
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/delete", delete, Route.DELETE_RECORDS, KeyScope.DELETE, "records"),
            "Delete records by seq, by tag, or both",
            {200: json_answer("They are gone", answer.DeleteRecordsAnswer)},
            ("topic_not_found", *LOST),
            body=DeleteBody,
        ),
    ]


def of_topic(endpoint: NamedEndpoint) -> Endpoint:
    """An endpoint that is also reached without the router, with the topic's name."""

    async def with_name(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoint(scope["path_params"]["topic"], scope, receive, send)

    return with_name
