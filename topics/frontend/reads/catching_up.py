"""Reads catch up (api §6): whoever reads the dest of a router sees every record that its source acknowledged before.

Shared memory says whether a dest is behind, so a read that is not pays two loads and a look into a dict. One that is
asks the dest's shard to copy what there is, down the chain from its far end, and waits; not for ever: what is committed
can be read while that shard is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from topics.core.errors import TopicsError
from topics.core.routers import RouterRegistry
from topics.frontend.reads.reading import TopicReader
from topics.frontend.shards.gateway import Gateway
from topics.shm.control import Role, replay_progress
from topics.shm.instance import SharedMemory
from topics.shm.router_board import RouterBoard, RouterProgress
from topics.shm.router_table import RouterTable
from topics.shm.topic_messages import CatchUp

WAIT_S: Final = 2.0
AGAIN_S: Final = 0.02
"""Until it is asked again after a source could not be read at that moment; then twice as long, and so on."""


class RouterSight:
    """The routers of the service and how far they are, as shared memory says; no shard is asked."""

    def __init__(self, shared: SharedMemory) -> None:
        self._table = RouterTable(shared.router_table)
        self._boards = [RouterBoard(board) for board in shared.router_boards]
        self._shards = [shared.control.cell(Role.WALSHARD, shard) for shard in range(shared.shards)]

    def registry(self) -> RouterRegistry:
        """The registry as of now; `503 not_ready` until the shard that keeps it has recovered."""
        if self._table.stale:
            self._table.refresh()
        if not self._table.known:
            raise TopicsError(
                "not_ready",
                "the log that has the routers is still being replayed",
                {"replay_progress": replay_progress(self._shards)},
            )
        return self._table.registry

    def progress(self, shard: int, router_id: int) -> RouterProgress | None:
        """`shard` is that of the router's dest."""
        return self._boards[shard].find(router_id)


class CatchingUp:
    """To be awaited before a topic is looked at."""

    def __init__(self, sight: RouterSight, reader: TopicReader, gateway: Gateway) -> None:
        self._sight = sight
        self._reader = reader
        self._gateway = gateway

    async def one(self, name: str) -> bool:
        """The topic has all that its source has now, and that one its own; False: it may not, its shard did not answer
        in time, or could not copy it.
        """
        registry = self._sight.registry()
        return registry.source_of(name) is None or await self._chain(registry, name)

    async def all(self, names: Iterable[str]) -> bool:
        """The same of each of them."""
        registry = self._sight.registry()
        dests = [name for name in names if registry.source_of(name) is not None]
        return all(await asyncio.gather(*[self._chain(registry, dest) for dest in dests])) if dests else True

    async def _chain(self, registry: RouterRegistry, name: str) -> bool:
        complete, pause_s = True, AGAIN_S
        try:
            async with asyncio.timeout(WAIT_S):
                for dest in reversed(list(registry.upstream(name))):
                    while self._is_behind(registry, dest):
                        shard = self._reader.owner(dest)
                        reply = await self._gateway.call(shard, CatchUp(dest))
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
            progress = self._sight.progress(self._reader.owner(dest), router.id)
            if progress is None or progress.version != router.version:
                return True
            if progress.source_topic_id not in (0, view.topic_id):
                return False  # another topic had the source's name: the router is about to go
            if progress.source_topic_id == 0 or progress.source_seq < view.head_seq:
                return True
        return False
