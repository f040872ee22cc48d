"""The registry of all routers, kept by shard 0. One place decides which routers may exist together, and logs that.

Every process reads the registry in the router table. The shard of a router's dest does the copying (`routing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from topics.core.errors import TopicsError
from topics.core.routers import FoldedRouters, Router, RouterRegistry, encode_router
from topics.log import get_logger
from topics.shm.asks import Deleted, Done, Message
from topics.shm.control import ProcessCell
from topics.shm.quotas import quota_reached
from topics.shm.router_memory import Change, RouterTableWriter
from topics.shm.topic_messages import DeleteRouter, PutRouter, PutRouterReply, RemoveRouters
from topics.storage.frame import FLAG_MORE, Bytes, FrameType
from topics.storage.topic_frames import control_frame
from topics.walshard.commit.draft import Draft, LogWrite, Steps

log = get_logger()


@dataclass(eq=False)
class Registrar:
    """Owns the registry and the table of routers in shared memory. It logs each change before it shows it."""

    _table: RouterTableWriter
    state: InitVar[FoldedRouters]
    _cell: ProcessCell
    _routers_max: int
    _now_ms: Callable[[], int]
    _registry: RouterRegistry = field(default_factory=RouterRegistry)

    def __post_init__(self, state: FoldedRouters) -> None:
        for router in sorted(state.routers.values(), key=lambda router: router.id):
            self._registry.put(router)
        self._registry.last_id = max(self._registry.last_id, state.last_id)
        self._table.store_all(self._registry.by_name.values())
        self._cell.set("routers", len(self._registry))

    def follow(self, state: FoldedRouters, router_ids: set[int]) -> None:
        """Take over, and show, the state of these routers in the leader's log."""
        changes: list[Change] = []
        by_id = self._registry.by_id
        if any(router_id not in by_id and state.find(router_id) is None for router_id in router_ids):
            router_ids = router_ids | by_id.keys()  # a router came and went, and may have taken another's name
        for router_id in sorted(router_ids):
            router, former = state.find(router_id), by_id.get(router_id)
            if router == former:
                continue
            if router is not None:
                self._registry.put(router)
                changes.append(Change(router.name, router))
            elif former is not None:
                self._registry.remove(former.name)
                changes.append(Change(former.name, None))
        self._registry.last_id = max(self._registry.last_id, state.last_id)
        self._show(changes)

    def put(self, call: PutRouter, _frontend: int) -> Steps[PutRouterReply]:
        """Register or change a router. Raise TopicsError if the registry refuses it."""
        registry = self._registry
        router, created = registry.plan(call.name, call.spec)
        reply = PutRouterReply(created, router)
        if registry.by_name.get(call.name) == router:
            return reply
        if created and self._routers_max and len(registry) >= self._routers_max:
            raise quota_reached("routers", self._routers_max)
        self._table.reserve()

        def apply() -> None:
            registry.put(router)
            self._show([Change(router.name, router)])

        entry = control_frame(FrameType.ROUTER_CREATE, 0, self._now_ms(), encode_router(router), seq=router.id)
        yield Draft([LogWrite([entry], apply, sync=True)], reply=reply)
        return reply

    def delete(self, call: DeleteRouter, _frontend: int) -> Steps[Deleted]:
        """Remove a router by its name."""
        router = self._registry.by_name.get(call.name)
        reply = Deleted(router is not None)
        yield from self._remove([] if router is None else [router], reply)
        return reply

    def remove(self, call: RemoveRouters, _frontend: int) -> Steps[Done]:
        """Remove routers by their ids."""
        yield from self._remove(self._with_ids(call.router_ids), Done())
        return Done()

    def ended(self, router_ids: list[int]) -> Steps[None]:
        """Remove routers that ended with a topic. The topic's shard asks again until the table has none of them."""
        try:
            yield from self._remove(self._with_ids(router_ids), None)
        except TopicsError as error:
            log.error("routers of a deleted topic cannot be removed now", reason=error.message)

    def _with_ids(self, router_ids: list[int]) -> list[Router]:
        by_id = self._registry.by_id
        return [by_id[router_id] for router_id in dict.fromkeys(router_ids) if router_id in by_id]

    def _remove(self, routers: list[Router], reply: Message | None) -> Steps[None]:
        if not routers:
            return
        self._table.reserve()

        def apply() -> None:
            for router in routers:
                self._registry.remove(router.name)
            self._show([Change(router.name, None) for router in routers])

        last = len(routers) - 1
        entries: list[Bytes] = [
            control_frame(
                FrameType.ROUTER_DELETE, 0, self._now_ms(), seq=router.id, flags=FLAG_MORE if at < last else 0
            )
            for at, router in enumerate(routers)
        ]
        yield Draft([LogWrite(entries, apply, sync=True)], reply=reply)

    def _show(self, changes: list[Change]) -> None:
        self._table.store(changes, self._registry.by_name.values())
        self._cell.set("routers", len(self._registry))
