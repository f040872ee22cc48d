"""The index arenas of all shards, mapped by this frontend."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from topics.core.names import owner_shard
from topics.shm.arena import ArenaReader, TopicView, announced_arena
from topics.shm.control import Role, not_ready
from topics.shm.instance import SharedMemory

SLICE_S: Final = 0.001
SLICE_TOPICS: Final = 64


class Slices:
    """The slices of time in which long work is done. Other tasks run between two of them."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + SLICE_S

    async def yield_if_over(self) -> None:
        if time.monotonic() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.monotonic() + SLICE_S


def live_names(arenas: Sequence[ArenaReader], prefixes: Iterable[str], after: str) -> Iterator[str]:
    """Yield live topics with one of `prefixes` (none a prefix of another) behind `after`, in order. Use it at once."""
    return itertools.chain.from_iterable(_range(arenas, prefix, after) for prefix in sorted(prefixes))


def _range(arenas: Sequence[ArenaReader], prefix: str, after: str) -> Iterator[str]:
    ranges = [arena.names.irange(max(prefix, after), None, (prefix > after, True)) for arena in arenas]
    return itertools.takewhile(lambda name: name.startswith(prefix), heapq.merge(*ranges))


class Arenas:
    """The newest arena of each shard, also of a dead one. A replaced one stays mapped until the next replacement.

    A shard that has started has a new arena, of which nothing is known yet. If it has many topics, a task learns them
    in slices; meanwhile the former arena, if there is one, is used. Nobody may miss changes by the new life of the
    shard, so its messages wait in its ring, and new requests wait for the task.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._identity = shared.identity
        self._cells = [shared.control.cell(Role.WALSHARD, shard) for shard in range(shared.shards)]
        self._readers: list[ArenaReader | None] = [None] * shared.shards
        self._retired: list[ArenaReader | None] = [None] * shared.shards
        self._next: list[ArenaReader | None] = [None] * shared.shards
        self._renewals: dict[int, asyncio.Task[None]] = {}

    def of(self, shard: int) -> ArenaReader | None:
        """Return the arena of a shard; None until it has been ready for the first time since the service started, and
        its topics are known.
        """
        generation = self._cells[shard].get("generation")
        reader = self._readers[shard]
        if not generation or (reader is not None and reader.generation == generation):
            return reader if generation else None
        if self._next[shard] is None:
            found = announced_arena(self._identity, shard, lambda: self._cells[shard].get("generation"))
            if found.learn(SLICE_TOPICS):
                return self._replace(shard, found)
            self._next[shard] = found
        return reader

    def is_behind(self) -> bool:
        """Return whether a shard has a new arena that is not in use yet. This is cheap, since each request asks."""
        for cell, reader in zip(self._cells, self._readers, strict=True):
            generation = cell.get("generation")
            if generation and (reader is None or reader.generation != generation):
                return True
        return False

    def renewal(self, shard: int) -> asyncio.Task[None] | None:
        """Return the task that learns the topics in a shard's new arena; None if its newest arena is in use."""
        self.of(shard)
        if self._next[shard] is None:
            return None
        task = self._renewals.get(shard)
        if task is None or task.done():
            task = self._renewals[shard] = asyncio.create_task(self._renew(shard))
        return task

    async def renewed(self, shards: Iterable[int]) -> None:
        """Wait until the arenas of these shards are in use."""
        for shard in shards:
            while (task := self.renewal(shard)) is not None:
                await asyncio.shield(task)

    async def _renew(self, shard: int) -> None:
        slices = Slices()
        while (found := self._next[shard]) is not None:
            if found.generation != self._cells[shard].get("generation"):
                found.close()  # the shard was restarted once more
                self._next[shard] = None
            elif found.learn(SLICE_TOPICS):
                self._next[shard] = None
                self._replace(shard, found)
            else:
                await slices.yield_if_over()

    def require(self, shard: int) -> ArenaReader:
        """Return the arena of a shard; `503 not_ready` if there is none yet."""
        reader = self.of(shard)
        if reader is None:
            raise not_ready([self._cells[shard]])
        return reader

    def view(self, name: str) -> TopicView | None:
        """Return a topic as its shard has published it; None if it is not known to exist."""
        arena = self.of(owner_shard(name, len(self._readers)))
        found = None if arena is None else arena.look_up(name)
        return None if found is None else found[1]

    async def learn(self, slices: Slices) -> None:
        """Learn all topics of all shards, in slices. Otherwise the first look for a name would learn them all at once,
        and hold up the loop if they are thousands, as after a start.
        """
        for shard in range(len(self._readers)):
            await self.renewed([shard])
            while (arena := self.of(shard)) is not None and not arena.learn(SLICE_TOPICS):
                await slices.yield_if_over()

    def _replace(self, shard: int, reader: ArenaReader) -> ArenaReader:
        retired = self._retired[shard]
        if retired is not None:
            retired.close()
        self._retired[shard] = self._readers[shard]
        self._readers[shard] = reader
        return reader

    def close(self) -> None:
        for reader in (*self._readers, *self._retired, *self._next):
            if reader is not None:
                reader.close()
