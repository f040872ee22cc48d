"""Lets reads of a router's dest catch up (api §6): they see every record that its source acknowledged before.

Shared memory says whether a dest is behind. If it is, the read asks the dest's shard to copy the missing records. In a
chain of routers it asks from the far end on. It waits for a limited time, so a dead shard holds up no read for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from topics.core.errors import TopicsError
from topics.core.routers import RouterRegistry
from topics.frontend.reads.reading import TopicReader
from topics.frontend.shards.arenas import Slices
from topics.frontend.shards.gateway import Gateway
from topics.shm.control import Role, not_ready
from topics.shm.instance import SharedMemory
from topics.shm.router_memory import RouterBoard, RouterProgress, RouterTable
from topics.shm.topic_messages import CatchUp

WAIT_S: Final = 2.0
AGAIN_S: Final = 0.02
"""First pause before a shard that could not read a source is asked again; each is twice the one before."""


class RouterSight:
    """The routers of the service and their progress, read from shared memory; no shard is asked."""

    def __init__(self, shared: SharedMemory) -> None:
        self._table = RouterTable(shared.router_table)
        self._boards = [RouterBoard(board) for board in shared.router_boards]
        self._shards = [shared.control.cell(Role.WALSHARD, shard) for shard in range(shared.shards)]

    def registry(self) -> RouterRegistry:
        """Return the current registry; `503 not_ready` until the shard that keeps it has recovered."""
        if self._table.stale:
            self._table.refresh()
        if not self._table.known:
            raise not_ready(self._shards, "the log that has the routers is still being replayed")
        return self._table.registry

    def progress(self, shard: int, router_id: int) -> RouterProgress | None:
        """Return the progress of a router. `shard` is that of its dest."""
        return self._boards[shard].find(router_id)


class CatchingUp:
    """The waits of reads until the copies for a topic are made. Await one before each look at a topic."""

    def __init__(self, sight: RouterSight, reader: TopicReader, gateway: Gateway) -> None:
        self._sight = sight
        self._reader = reader
        self._gateway = gateway

    async def wait_for(self, name: str) -> bool:
        """Wait until the topic has all that its sources have. False: a shard was too slow, or could not copy all."""
        registry = self._sight.registry()
        return registry.source_of(name) is None or await self._chain(registry, name)

    async def wait_for_all(self, names: Iterable[str]) -> bool:
        """Wait as `wait_for` does for each of these topics. A list has a thousand, so the waits begin in slices."""
        await self._gateway.arenas.renewed(range(self._gateway.shards))  # no StartGate does it for WebSocket commands
        registry, slices = self._sight.registry(), Slices()
        dests = [name for name in names if registry.source_of(name) is not None]
        waits: list[asyncio.Task[bool]] = []
        if dests:
            async with asyncio.TaskGroup() as group:
                for dest in dests:
                    if not self._has_all(registry, dest):
                        waits.append(group.create_task(self._chain(registry, dest)))
                    await slices.yield_if_over()
        return all(wait.result() for wait in waits)

    def _has_all(self, registry: RouterRegistry, name: str) -> bool:
        """Return whether there is nothing to wait for; False also when that is not known."""
        try:
            # Look from the far end on. Otherwise a record that is copied into a topic behind the look at its readers
            # would be missed: the whole chain would count as complete without it.
            return not any(self._is_behind(registry, dest) for dest in reversed(list(registry.upstream(name))))
        except TopicsError:
            return False

    async def _chain(self, registry: RouterRegistry, name: str) -> bool:
        complete, pause_s = True, AGAIN_S
        try:
            async with asyncio.timeout(WAIT_S):
                for dest in reversed(list(registry.upstream(name))):
                    while self._is_behind(registry, dest):
                        reply = await self._gateway.ask(CatchUp(dest))
                        if reply.done:
                            complete &= not reply.pending
                            break
                        if reply.pending:
                            await asyncio.sleep(pause_s)
                            pause_s *= 2
        except (TimeoutError, TopicsError):
            return False
        return complete

    def _is_behind(self, registry: RouterRegistry, dest: str) -> bool:
        source = registry.source_of(dest)
        found = None if source is None else self._reader.find(source)
        if found is None or self._reader.find(dest) is None:
            return False
        view = found.view
        for router in registry.into(dest):
            progress = self._sight.progress(self._gateway.owner(dest), router.id)
            if progress is None or progress.version != router.version:
                return True
            if progress.source_topic_id not in (0, view.topic_id):
                return False  # another topic had the source's name, and the router is about to be removed
            if progress.source_topic_id == 0 or progress.source_seq < view.head_seq:
                return True
        return False
