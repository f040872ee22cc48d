"""`/v0/topics` and `/v0/topics/:t`: configuration, state, list, deletion (api §1, §5)."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any, Final

from topics.api import answers
from topics.api.requests import DeleteBody, GivenConfig
from topics.core.config import parse_config
from topics.core.errors import TopicsError, invalid
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name
from topics.core.scheduler import age
from topics.core.tags import parse_match
from topics.frontend.entry import wire
from topics.frontend.entry.wire import flag, name_cursor
from topics.frontend.live.delivery import Hub
from topics.frontend.live.step_cache import KnownTopics
from topics.frontend.queues.cursor_routes import shown_cursor
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicRef
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.routes.router_routes import RouterRoutes, is_shown
from topics.frontend.routes.topic_ranking import ALLOWED, TopicRanking, check_query
from topics.frontend.shards.arenas import Arenas, Slices, live_names
from topics.frontend.shards.gateway import Gateway, stopping
from topics.settings import Settings
from topics.shm.durations import Route
from topics.shm.topic_messages import DeleteRecords, DeleteRecordsReply, DeleteTopic, Expire, PutTopic

_PUT: Final = api.made_or_there(answers.PutTopicAnswer)
_DELETED: Final = api.ok("It is gone", answers.DeleteTopicAnswer)
EXPIRE_WAIT_S: Final = 0.25
"""Longest wait of a state read for the shard to expire records. After it the answer is the state last published."""


@dataclass(eq=False)
class TopicRoutes:
    """The requests about topics as a whole, and deletions of records: one method for each."""

    known: KnownTopics
    arenas: Arenas
    gateway: Gateway
    hub: Hub
    catching_up: CatchingUp
    routers: RouterRoutes
    settings: Settings
    ranking: TopicRanking

    @api.json_route("GET", "/v0/topics", Route.LIST_TOPICS, KeyScope.READ, "topics")
    @api.describe("List topics by name, or in the order of a figure", api.ok("A page of topics", answers.TopicList))
    @api.takes(
        api.Query("prefix", api.STRING, "only names that begin with it"),
        *api.PAGED,
        api.flag_query("touch", False, "whether this counts as reading the topics"),
        *[api.Query(name, {"type": "string", "enum": [*values]}, "see §1") for name, values in ALLOWED.items()],
        api.Query("contains", api.STRING, "with sort, only names that contain it"),
    )
    async def list_all(self, request: ApiRequest) -> JsonReply:
        query = request.query
        touch = flag(query, "touch", False)
        check_query(query)
        prefixes = request.caller.narrowed(wire.parameter(query, "prefix") or "")
        await self.arenas.learn(Slices())
        arenas = [self.arenas.require(shard) for shard in range(self.gateway.shards)]
        size, after = await request.list_page(check_topic_name)
        if "sort" in query:
            return await self._list_ranked(request, prefixes, size, touch)
        names = list(itertools.islice(live_names(arenas, prefixes, after), size + 1))
        page = names[:size]
        with_copies = await self.catching_up.wait_for_all(page)
        answer: dict[str, Any] = {"topics": list((await self.entries(page, touch)).values())}
        if len(names) > size:
            answer["next_cursor"] = name_cursor(page[-1])
        return JsonReply(answer, with_copies=with_copies)

    async def _list_ranked(self, request: ApiRequest, prefixes: tuple[str, ...], size: int, touch: bool) -> JsonReply:
        ranked, matched = await self.ranking.best(request.query, prefixes, size)
        shown = await self.entries([one.topic for one in ranked], touch)
        entries, slices = [], Slices()
        for one in ranked:
            if one.topic in shown:
                figures = {"rate": one.rate, "lag": one.lag, "cursors": [*map(shown_cursor, one.cursors)] or None}
                found = {name: figure for name, figure in figures.items() if figure is not None}
                entries.append(shown[one.topic] | found)
            await slices.yield_if_over()
        return JsonReply({"topics": entries, "matched": matched})

    @api.json_route("GET", api.TOPIC_PATH, Route.GET_TOPIC, KeyScope.READ, "topics")
    @api.describe("The state of a topic", api.ok("The topic", answers.TopicState), "topic_not_found")
    @api.takes(api.flag_query("touch", True, "whether this counts as reading the topic"))
    async def get(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        touch = flag(request.query, "touch", True)
        with_copies = await self.catching_up.wait_for(name)
        ref = await self.evicted(self.known.reader.get(name))
        view = ref.view
        answer = self._shown(ref, touch) | {
            "next_seq": view.head_seq + 1,
            "durable_seq": view.durable_seq,
            "epoch": f"{self.known.reader.epoch_of(view.topic_id):016x}",
            "config": ref.config.echo(),
            "last_read_ts": self.known.last_read_ms(ref) or None,
        }
        if self.settings.has_archive:
            answer["archived_seq"] = view.archived_seq
        former = self.known.reader.former_epoch_of(view)
        if former is not None:
            answer |= {"former_epoch": f"{former:016x}", "restored_seq": view.restored_seq}
        return JsonReply(answer, with_copies=with_copies)

    @api.json_route("PUT", api.TOPIC_PATH, Route.PUT_TOPIC, KeyScope.ADMIN, "topics")
    @api.describe("Create a topic, or replace its configuration", _PUT, "topic_exists_incompatible", *api.LOST)
    @api.takes(body=GivenConfig, body_required=False)
    async def put(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        body = await request.body(self.settings.max_command_bytes)
        config, type_given = parse_config(wire.decode(wire.config_decoder, body or b"{}"), name)
        if config.dead_letter is not None:
            request.caller.require(KeyScope.ADMIN, (config.dead_letter,))
        self.gateway.archive_acks.check(config)
        with_copies = await self.catching_up.wait_for(name)
        reply = await self.gateway.ask(PutTopic(name, config, type_given))
        while reply.rest is not None:
            # A change that has begun is not given up because a ring is full.
            reply = await self.gateway.ask(reply.rest, unthrottled=True)
        answer = {"topic": name, "created": reply.created, "config": reply.config.echo()}
        return JsonReply(answer, 201 if reply.created else 200, with_copies=with_copies)

    @api.json_route("DELETE", api.TOPIC_PATH, Route.DELETE_TOPIC, KeyScope.DELETE, "topics")
    @api.describe("Delete a topic and all of its records", _DELETED, "topic_not_empty", *api.LOST)
    @api.takes(api.flag_query("if_empty", False, "only a topic without records"))
    async def delete(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        if_empty = flag(request.query, "if_empty", False)
        routers, with_copies = await self.routers.before_delete(name)
        reply = await self.gateway.ask(DeleteTopic(name, if_empty))
        if not reply.deleted:
            routers = []
        if routers:
            await self.routers.after_delete(name, routers)
        removed = [router.name for router in routers if is_shown(router, request.caller)]
        answer = {"topic": name, "deleted": reply.deleted, "routers_removed": removed}
        return JsonReply(answer, with_copies=with_copies)

    @api.json_route("POST", f"{api.TOPIC_PATH}/delete", Route.DELETE_RECORDS, KeyScope.DELETE, "records")
    @api.describe(
        "Delete records by seq, by tag, or both", api.ok("They are gone", answers.DeleteRecordsAnswer), *api.TOPIC_LOST
    )
    @api.takes(body=DeleteBody)
    async def delete_records(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        given = await request.decoded(DeleteBody, self.settings.max_command_bytes)
        if given.before_seq is None and given.match is None:
            raise invalid("a delete needs before_seq, match or both", field="match")
        op, tag = (None, b"") if given.match is None else parse_match(given.match)
        with_copies = await self.catching_up.wait_for(name)
        deleted, reply = await delete_in_turns(self.gateway, DeleteRecords(name, given.before_seq, op, tag))
        ref = self.known.reader.find(name)
        if ref is not None and ref.config.durability == "archived":
            await self.gateway.archive_acks.wait_for_topic(name)
        seqs = {"earliest_seq": reply.earliest_seq, "head_seq": reply.head_seq}
        answer = {"topic": name, "deleted": deleted, **seqs, "count": reply.records, "bytes": reply.live_bytes}
        return JsonReply(answer, with_copies=with_copies)

    async def entries(self, names: list[str], touch: bool) -> dict[str, dict[str, Any]]:
        """Return the entries of these topics in a list. A thousand are not made in one go: that takes over 10 ms."""
        refs, entries, slices = list[TopicRef](), dict[str, dict[str, Any]](), Slices()
        for name in names:
            if (ref := self.known.reader.find(name)) is not None:
                refs.append(ref)
            await slices.yield_if_over()
        for ref in await self._all_evicted(refs):
            entries[ref.name] = self._shown(ref, touch) | {"durable": ref.config.is_synced}
            await slices.yield_if_over()
        return entries

    def _shown(self, ref: TopicRef, touch: bool) -> dict[str, Any]:
        """Return what the list and the state of a topic have in common. With `touch` it counts as read."""
        view = ref.view
        if touch:
            self.known.note_read(ref)
        shown: dict[str, Any] = {
            "topic": ref.name,
            "head_seq": view.head_seq,
            "earliest_seq": view.earliest_seq,
            "count": view.records,
            "bytes": view.live_bytes,
            "effective_priority": self._effective_priority(ref),
            "type": ref.config.type,
            "last_write_ts": view.last_write_ts or None,
        }
        if view.is_queue:
            shown["queue"] = {
                "ready": view.jobs_ready,
                "in_flight": view.jobs_in_flight,
                "scheduled": view.jobs_scheduled,
                "dead_lettered": view.jobs_dead_lettered,
            }
        return shown

    def _effective_priority(self, ref: TopicRef) -> int:
        """Return the priority by which this process schedules the topic now (`core/scheduler.py`)."""
        return self.known.priority(ref) + age(self.hub.waiting_ms(ref.name))

    async def _all_evicted(self, refs: list[TopicRef]) -> list[TopicRef]:
        slices, expired = Slices(), dict[int, asyncio.Task[TopicRef | None]]()
        async with asyncio.TaskGroup() as group:
            for at, ref in enumerate(refs):
                if self.known.reader.has_expired(ref):
                    expired[at] = group.create_task(self._evicted_if_there(ref))
                await slices.yield_if_over()
        evicted = [expired[at].result() if at in expired else ref for at, ref in enumerate(refs)]
        return [ref for ref in evicted if ref is not None]

    async def _evicted_if_there(self, ref: TopicRef) -> TopicRef | None:
        """Return the topic as `evicted` does; None if it was deleted in the meantime, so that it is not listed."""
        try:
            return await self.evicted(ref)
        except TopicsError:
            return None

    async def evicted(self, ref: TopicRef) -> TopicRef:
        """Return the topic with exact floors, count and bytes: its shard evicts what has expired."""
        if not self.known.reader.has_expired(ref):
            return ref
        try:
            async with asyncio.timeout(EXPIRE_WAIT_S):
                await self.gateway.ask(Expire(ref.name))
        except (TimeoutError, TopicsError):
            return self.known.reader.refresh(ref)
        return self.known.reader.get(ref.name)


async def delete_in_turns(gateway: Gateway, call: DeleteRecords) -> tuple[int, DeleteRecordsReply]:
    """Delete records in turns, between which the shard serves others. Return their number, and its last reply."""
    deleted = 0
    while True:
        try:
            # A deletion that has begun is not given up because a ring is full.
            reply = await gateway.ask(call, unthrottled=call.topic_id != 0)
        except (TopicsError, asyncio.CancelledError) as error:
            cause = error if isinstance(error, TopicsError) else stopping()
            if cause is error and (not deleted or cause.code == "topic_not_found"):
                raise
            # The error's own code may say that nothing was done. A client would then repeat the request by itself.
            raise TopicsError(
                "shard_unavailable",
                f"{cause.message}; before that {deleted} records were deleted",
                {**(cause.detail or {}), "deleted": deleted, "reason": cause.code},
            ) from error
        deleted += reply.deleted
        if reply.rest is None:
            return deleted, reply
        call = reply.rest
