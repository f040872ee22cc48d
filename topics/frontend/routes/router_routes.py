"""`/v0/routers` (api §6). A key needs its scopes over the topics that a router names, too, which is checked here."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from topics.api import answers
from topics.api.requests import GivenRouter
from topics.core.errors import TopicsError, forbidden, invalid, topic_not_found
from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_router_name
from topics.core.routers import ROUTERS_SHARD, Router, RouterSpec, parse_router
from topics.frontend.entry import wire
from topics.frontend.entry.wire import name_cursor
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.reading import TopicReader
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.shards.arenas import Slices
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.durations import Route
from topics.shm.topic_messages import DeleteRouter, EnsureTopic, PutRouter, RemoveRouters, SyncRouters

SLICE_ROUTERS: Final = 256
SYNCED_AT_ONCE: Final = 64
BEGIN_WAIT_S: Final = 2.0
BEGIN_RETRY_S: Final = 0.001
_PATH: Final = "/v0/routers/{router}"
_CONFLICTS: Final = ("topic_not_found", "topic_exists_incompatible", "router_cycle", *api.LOST)


def is_shown(router: Router, caller: ApiKey) -> bool:
    """Return whether the caller may learn of a router: it covers the router's name and both topics."""
    return all(map(caller.covers, (router.name, router.spec.source, router.spec.dest)))


def _require(caller: ApiKey, needed: KeyScope, router: Router) -> None:
    """Raise `403 forbidden` unless the caller may do this to a router. The error names no topic of it."""
    caller.require(needed)
    if not (caller.covers(router.spec.source) and caller.covers(router.spec.dest)):
        raise forbidden(f"router {router.name!r} has a topic outside the prefixes of this key", name=router.name)


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


@dataclass(eq=False)
class RouterRoutes:
    """The requests to `/v0/routers`, a method for each; and the removal of the routers of a deleted topic."""

    sight: RouterSight
    catching_up: CatchingUp
    reader: TopicReader
    gateway: Gateway
    settings: Settings

    @api.json_route("GET", "/v0/routers", Route.LIST_ROUTERS, KeyScope.READ, "routers")
    @api.describe("List routers by name", api.ok("A page of routers", answers.RouterList))
    @api.takes(
        api.Query("prefix", api.STRING, "only names that begin with it"),
        api.Query("source", api.STRING, "only routers from this topic"),
        api.Query("dest", api.STRING, "only routers into this topic"),
        *api.PAGED,
    )
    async def list_all(self, request: ApiRequest) -> JsonReply:
        size, after = await request.list_page(check_router_name)
        slices = Slices()
        await self.gateway.arenas.learn(slices)  # in slices: `_lag` would learn all new names at once
        found = await self._find(request, after, size + 1, slices)
        page, lags, shown = found[:size], list[int | None](), list[dict[str, Any]]()
        for router in page:
            lags.append(self._lag(router))
            await slices.yield_if_over()
        with_copies = await self.catching_up.wait_for_all({router.spec.dest for router in page})
        for router, lag in zip(page, lags, strict=True):
            shown.append(self._shown(router, lag))
            await slices.yield_if_over()
        answer: dict[str, Any] = {"routers": shown}
        if len(found) > size:
            answer["next_cursor"] = name_cursor(page[-1].name)
        return JsonReply(answer, with_copies=with_copies)

    @api.json_route("GET", _PATH, Route.GET_ROUTER, KeyScope.READ, "routers")
    @api.describe(
        "A router, and how much it has forwarded", api.ok("The router", answers.RouterState), "router_not_found"
    )
    async def get(self, request: ApiRequest) -> JsonReply:
        name = _router_name(request)
        router = self._visible(name, request.caller)
        lag = self._lag(router)
        with_copies = await self.catching_up.wait_for(router.spec.dest)
        return JsonReply(self._shown(self._visible(name, request.caller), lag), with_copies=with_copies)

    @api.json_route("PUT", _PATH, Route.PUT_ROUTER, KeyScope.ADMIN, "routers")
    @api.describe(
        "Forward what comes into a topic to another one", api.made_or_there(answers.PutRouterAnswer), *_CONFLICTS
    )
    @api.takes(body=GivenRouter)
    async def put(self, request: ApiRequest) -> JsonReply:
        name, caller = _router_name(request), request.caller
        body = await request.body(self.settings.max_command_bytes)
        spec = parse_router(name, wire.decode_as(GivenRouter, body or b"{}"))
        caller.require(KeyScope.ADMIN, (spec.source, spec.dest))
        if spec.match is not None and len(spec.match.tag) > self.settings.max_tag_bytes:
            raise invalid(f"filter: a tag has at most {self.settings.max_tag_bytes} bytes", field="filter")
        known, with_copies = self.sight.registry().by_name.get(name), True
        if known is not None:
            _require(caller, KeyScope.ADMIN, known)
            # The old router still forwards records that were acknowledged before the change.
            with_copies = await self.catching_up.wait_for(known.spec.dest)
        if not spec.create_dest and self.reader.find(spec.dest) is None:
            raise topic_not_found(spec.dest)
        try:
            reply = await self.gateway.call(ROUTERS_SHARD, PutRouter(name, spec))
        except TopicsError as error:
            raise _visible_conflict(error, name, spec, caller) from None
        try:
            for topic in (spec.dest, spec.source) if spec.create_dest else (spec.dest,):
                await self.gateway.ask(EnsureTopic(topic))
        except TopicsError:
            if reply.created:
                await self.gateway.call(ROUTERS_SHARD, RemoveRouters([reply.router.id]))
            raise
        await self._wait_until_begun(reply.router)
        if known is not None and known.spec.dest != spec.dest:
            await self._sync(known.spec.dest)
        answer = {"router": name, "created": reply.created, **spec.echo()}
        return JsonReply(answer, 201 if reply.created else 200, with_copies)

    @api.json_route("DELETE", _PATH, Route.DELETE_ROUTER, KeyScope.DELETE, "routers")
    @api.describe(
        "Remove a router; what it has forwarded stays", api.ok("It is gone", answers.DeleteRouterAnswer), *api.LOST
    )
    async def delete(self, request: ApiRequest) -> JsonReply:
        name = _router_name(request)
        router = self.sight.registry().by_name.get(name)
        deleted, with_copies = False, True
        if router is not None:
            _require(request.caller, KeyScope.DELETE, router)
            with_copies = await self.catching_up.wait_for(router.spec.dest)
            deleted = (await self.gateway.call(ROUTERS_SHARD, DeleteRouter(name))).deleted
            await self._sync(router.spec.dest)
        return JsonReply({"router": name, "deleted": deleted}, with_copies=with_copies)

    # -- for topics that are deleted

    async def before_delete(self, topic: str) -> tuple[list[Router], bool]:
        """Return the routers that are deleted with a topic. True: all records acknowledged in it are copied."""
        routers = self.sight.registry().touching(topic)
        return routers, await self.catching_up.wait_for_all({router.spec.dest for router in routers})

    async def after_delete(self, topic: str, routers: list[Router]) -> None:
        """Remove the routers of a deleted topic. They forward nothing once this returns."""
        for begin in range(0, len(routers), SLICE_ROUTERS):
            ids = [router.id for router in routers[begin : begin + SLICE_ROUTERS]]
            await self.gateway.call(ROUTERS_SHARD, RemoveRouters(ids))
        dests = sorted({router.spec.dest for router in routers} - {topic})
        for begin in range(0, len(dests), SYNCED_AT_ONCE):
            await asyncio.gather(*map(self._sync, dests[begin : begin + SYNCED_AT_ONCE]))

    # -- parts

    async def _find(self, request: ApiRequest, after: str, most: int, slices: Slices) -> list[Router]:
        """Return the first routers behind a name that a list is to show, by name."""
        query, caller, registry = request.query, request.caller, self.sight.registry()
        prefix, source, dest = (wire.parameter(query, name) for name in ("prefix", "source", "dest"))
        end = "dest" if dest is not None else "source" if source is not None else ""
        topic = (source if dest is None else dest) or ""

        def fits(router: Router) -> bool:
            return source in (None, router.spec.source) and is_shown(router, caller)

        found: list[Router] = []
        while len(found) < most and (some := registry.named(prefix or "", after, SLICE_ROUTERS, end, topic)):
            found += filter(fits, some)
            after = some[-1].name
            await slices.yield_if_over()
        return found[:most]

    def _visible(self, name: str, caller: ApiKey) -> Router:
        router = self.sight.registry().by_name.get(name)
        if router is None:
            raise TopicsError("router_not_found", f"router {name!r} does not exist", {"router": name})
        _require(caller, KeyScope.READ, router)
        return router

    def _shown(self, router: Router, lag: int | None) -> dict[str, Any]:
        progress = self.sight.progress(self.gateway.owner(router.spec.dest), router.id)
        forwarded_total = 0 if progress is None else progress.forwarded_total
        shown = {"router": router.name, **router.spec.echo(), "forwarded_total": forwarded_total}
        return shown if lag is None else shown | {"lag": lag}

    def _lag(self, router: Router) -> int | None:
        """Return how many records a router is behind. Ask before a wait for its copies, after which it is mostly 0."""
        progress = self.sight.progress(self.gateway.owner(router.spec.dest), router.id)
        source = self.reader.find(router.spec.source)
        if source is None or progress is None:
            return None
        begun = progress.source_topic_id == source.view.topic_id
        return max(0, source.view.head_seq - progress.source_seq) if begun else source.view.head_seq

    async def _wait_until_begun(self, router: Router) -> None:
        """Wait until the shard of the dest forwards new records; `shard_unavailable` if that takes too long."""
        has_begun = await self._until_begun(SyncRouters(router.spec.dest, router.id, router.version))
        if not has_begun and self.sight.registry().by_name.get(router.name) == router:
            raise TopicsError("shard_unavailable", f"router {router.name!r} has not begun yet; ask again")

    async def _sync(self, dest: str) -> None:
        """Have the shard of this dest do what the router table says now. One that is down does it when it starts."""
        with suppress(TopicsError):
            await self._until_begun(SyncRouters(dest, 0, 0))

    async def _until_begun(self, call: SyncRouters) -> bool:
        """Ask the shard of a dest until it does what the table says; False if that takes too long."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + BEGIN_WAIT_S
        while True:
            reply = await self.gateway.ask(call)
            if reply.begun or loop.time() > until_s:
                return reply.begun
            await asyncio.sleep(BEGIN_RETRY_S)


def _router_name(request: ApiRequest) -> str:
    return check_router_name(request.scope["path_params"]["router"])
