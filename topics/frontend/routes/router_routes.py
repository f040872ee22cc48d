"""`/v0/routers` (api §6). Who made the request is asked for what it says over the topics that a router names."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from starlette.datastructures import QueryParams

from topics.api import answers as answer
from topics.api.requests import GivenRouter
from topics.core.errors import TopicsError, topic_not_found
from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_router_name
from topics.core.routers import Router, RouterSpec, parse_router
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import read_body
from topics.frontend.entry.query import name_after, name_cursor, page_size
from topics.frontend.entry.responses import LIST_BYTES_MAX, reserve_room, send_object
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.reading import TopicReader
from topics.frontend.routes.operations import LOST, ApiOperation, Binding, Query, json_answer, made_or_there
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.durations import Route
from topics.shm.topic_messages import (
    DeleteRouter,
    EnsureTopic,
    PutRouter,
    RemoveRouters,
    SyncRouters,
)

REGISTRY_SHARD: Final = 0
BEGIN_WAIT_S: Final = 2.0
BEGIN_RETRY_S: Final = 0.001


def _require(caller: ApiKey, needed: KeyScope, router: Router) -> None:
    """Raise `403 forbidden` unless the caller may do this to a router. The error names no topic of it."""
    caller.require(needed)
    if not (caller.covers(router.spec.source) and caller.covers(router.spec.dest)):
        raise TopicsError(
            "forbidden",
            f"router {router.name!r} has a topic outside the prefixes of this key",
            {"name": router.name},
        )


def _visible_conflict(error: TopicsError, name: str, spec: RouterSpec, caller: ApiKey) -> TopicsError:
    """Return a refused PUT's error without names of topics and routers that the caller may not see."""
    detail = error.detail or {}
    named = detail.get("cycle") or ([detail["source"]] if "source" in detail else [])
    if all(map(caller.covers, named)):
        return error
    if error.code == "router_cycle":
        message = f"router {name!r} would close a cycle through topics outside the prefixes of this key; allow_cycle"
        return TopicsError(error.code, f"{message} permits that")
    message = f"topic {spec.dest!r} already gets copies of a topic outside the prefixes of this key"
    return TopicsError(error.code, f"{message}: a dest has one source", {"reason": detail["reason"]})


class RouterRoutes:
    """The requests to `/v0/routers`, a method for each."""

    def __init__(
        self, sight: RouterSight, catching_up: CatchingUp, reader: TopicReader, gateway: Gateway, settings: Settings
    ) -> None:
        self._sight = sight
        self._catching_up = catching_up
        self._reader = reader
        self._gateway = gateway
        self._settings = settings

    async def put(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _router_name(scope), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        spec = parse_router(name, wire.decode_object(body) if body else {})
        caller_of(scope).require(KeyScope.ADMIN, (spec.source, spec.dest))
        known, with_copies = self._sight.registry().by_name.get(name), True
        if known is not None:
            _require(caller_of(scope), KeyScope.ADMIN, known)
            # What was acknowledged before is forwarded by the router as it was.
            with_copies = await self._catching_up.one(known.spec.dest)
        if not spec.create_dest and self._reader.find(spec.dest) is None:
            raise topic_not_found(spec.dest)
        try:
            reply = await self._gateway.call(REGISTRY_SHARD, PutRouter(name, spec))
        except TopicsError as error:
            raise _visible_conflict(error, name, spec, caller_of(scope)) from None
        try:
            await self._gateway.call(self._reader.owner(spec.dest), EnsureTopic(spec.dest))
        except TopicsError:
            if reply.created:
                await self._gateway.call(REGISTRY_SHARD, RemoveRouters([reply.router.id]))
            raise
        await self._begun(reply.router)
        if known is not None and known.spec.dest != spec.dest:
            await self._sync(known.spec.dest)
        answer = {"router": name, "created": reply.created, **spec.echo()}
        status = 201 if reply.created else 200
        await send_object(send, headers, status, answer, started_ns, with_copies=with_copies)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name = _router_name(scope)
        router = self._visible(name, caller_of(scope))
        with_copies = await self._catching_up.one(router.spec.dest)
        answer = self._shown(self._visible(name, caller_of(scope)))
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name = _router_name(scope)
        router = self._sight.registry().by_name.get(name)
        deleted, with_copies = False, True
        if router is not None:
            _require(caller_of(scope), KeyScope.DELETE, router)
            with_copies = await self._catching_up.one(router.spec.dest)
            reply = await self._gateway.call(REGISTRY_SHARD, DeleteRouter(name))
            await self._sync(router.spec.dest)
            deleted = reply.deleted
        answer = {"router": name, "deleted": deleted}
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    async def list_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        query = QueryParams(scope["query_string"])
        most = page_size(query)
        after = name_after(query.get("cursor"), check_router_name)
        prefix, source, dest = query.get("prefix", ""), query.get("source"), query.get("dest")
        caller = caller_of(scope)
        await reserve_room(scope, LIST_BYTES_MAX)
        found = sorted(
            (
                router
                for router in self._sight.registry().by_name.values()
                if router.name > after
                and router.name.startswith(prefix)
                and source in (None, router.spec.source)
                and dest in (None, router.spec.dest)
                and _covers(caller, router)
            ),
            key=lambda router: router.name,
        )
        page = found[:most]
        with_copies = await self._catching_up.all({router.spec.dest for router in page})
        answer: dict[str, Any] = {"routers": [self._shown(router) for router in page]}
        if len(found) > most:
            answer["next_cursor"] = name_cursor(page[-1].name)
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns, with_copies=with_copies)

    # -- for topics that are deleted

    async def before_delete(self, topic: str) -> tuple[list[Router], bool]:
        """Return the routers that go with a topic, and whether all that was acknowledged in it is copied."""
        routers = self._sight.registry().touching(topic)
        return routers, await self._catching_up.all({router.spec.dest for router in routers})

    async def after_delete(self, topic: str, routers: list[Router]) -> None:
        """Remove the routers of a topic that is gone; they are gone when this returns."""
        await self._gateway.call(REGISTRY_SHARD, RemoveRouters([router.id for router in routers]))
        await asyncio.gather(*[self._sync(router.spec.dest) for router in routers if router.spec.dest != topic])

    # -- parts

    def _visible(self, name: str, caller: ApiKey) -> Router:
        router = self._sight.registry().by_name.get(name)
        if router is None:
            raise TopicsError("router_not_found", f"router {name!r} does not exist", {"router": name})
        _require(caller, KeyScope.READ, router)
        return router

    def _shown(self, router: Router) -> dict[str, Any]:
        progress = self._sight.progress(self._reader.owner(router.spec.dest), router.id)
        forwarded_total = 0 if progress is None else progress.forwarded_total
        return {"router": router.name, **router.spec.echo(), "forwarded_total": forwarded_total}

    async def _begun(self, router: Router) -> None:
        """Wait until the shard of the dest forwards what comes; `shard_unavailable` if it cannot be reached."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + BEGIN_WAIT_S
        call = SyncRouters(router.spec.dest, router.id, router.version)
        while True:
            reply = await self._gateway.call(self._reader.owner(router.spec.dest), call)
            if reply.begun or loop.time() > until_s:
                break
            await asyncio.sleep(BEGIN_RETRY_S)
        if not reply.begun and self._sight.registry().by_name.get(router.name) == router:
            raise TopicsError("shard_unavailable", f"router {router.name!r} has not begun yet; ask again")

    async def _sync(self, dest: str) -> None:
        """Have the shard of this dest do what the table says now; a shard that is down does it when it starts."""
        try:
            await self._gateway.call(self._reader.owner(dest), SyncRouters(dest, 0, 0))
        except TopicsError:
            return


def _router_name(scope: Scope) -> str:
    return check_router_name(scope["path_params"]["router"])


def _covers(caller: ApiKey, router: Router) -> bool:
    return all(map(caller.covers, (router.name, router.spec.source, router.spec.dest)))


_ROUTER: Final = "/v0/routers/{router}"
_NAME: Final = {"type": "string"}
_PAGE_SIZE: Final = {"type": "integer", "minimum": 0, "default": 100}


def router_operations(routers: RouterRoutes) -> list[ApiOperation]:
    """Operations on routers (api §6)."""
    return [
        ApiOperation(
            Binding("GET", "/v0/routers", routers.list_all, Route.LIST_ROUTERS, KeyScope.READ, "routers"),
            "List routers by name",
            {200: json_answer("A page of routers", answer.RouterList)},
            query=(
                Query("prefix", _NAME, "only names that begin with it"),
                Query("source", _NAME, "only routers from this topic"),
                Query("dest", _NAME, "only routers into this topic"),
                Query("page_size", _PAGE_SIZE, "at most 1000"),
                Query("cursor", _NAME, "next_cursor of the page before"),
            ),
        ),
        ApiOperation(
            Binding("GET", _ROUTER, routers.get, Route.GET_ROUTER, KeyScope.READ, "routers"),
            "A router, and how much it has forwarded",
            {200: json_answer("The router", answer.RouterState)},
            ("router_not_found",),
        ),
        ApiOperation(
            Binding("PUT", _ROUTER, routers.put, Route.PUT_ROUTER, KeyScope.ADMIN, "routers"),
            "Forward what comes into a topic to another one",
            made_or_there(answer.PutRouterAnswer),
            ("topic_not_found", "topic_exists_incompatible", "router_cycle", *LOST),
            body=GivenRouter,
        ),
        ApiOperation(
            Binding("DELETE", _ROUTER, routers.delete, Route.DELETE_ROUTER, KeyScope.DELETE, "routers"),
            "Remove a router; what it has forwarded stays",
            {200: json_answer("It is gone", answer.DeleteRouterAnswer)},
            LOST,
        ),
    ]
