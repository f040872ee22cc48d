"""The index arenas of all shards, mapped by this frontend."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from topics.core.errors import TopicsError
from topics.core.names import owner_shard
from topics.shm.arena import ArenaReader, TopicView
from topics.shm.control import Role
from topics.shm.instance import SharedMemory

SLICE_S: Final = 0.001
SLICE_TOPICS: Final = 64
_ATTACH_TRIES = 10


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
    """The newest arena of each shard, also of a dead one. A replaced one stays mapped until the next replacement."""

    def __init__(self, shared: SharedMemory) -> None:
        self._identity = shared.identity
        self._cells = [shared.control.cell(Role.WALSHARD, shard) for shard in range(shared.shards)]
        self._readers: list[ArenaReader | None] = [None] * shared.shards
        self._retired: list[ArenaReader | None] = [None] * shared.shards

    def of(self, shard: int) -> ArenaReader | None:
        """Return the arena of a shard; None until it has been ready for the first time since the service started."""
        generation = self._cells[shard].get("generation")
        reader = self._readers[shard]
        if reader is not None and reader.generation == generation:
            return reader
        return self._attach(shard) if generation else None

    def require(self, shard: int) -> ArenaReader:
        """Return the arena of a shard; `503 not_ready` if there is none yet."""
        reader = self.of(shard)
        if reader is None:
            progress = self._cells[shard].get("progress_ppm") / 1_000_000
            raise TopicsError("not_ready", "the log is still being replayed", {"replay_progress": progress})
        return reader

    def view(self, name: str) -> TopicView | None:
        """Return a topic as its shard has published it; None if it is not known to exist."""
        arena = self.of(owner_shard(name, len(self._readers)))
        found = None if arena is None else arena.look_up(name)
        return None if found is None else found[1]

    async def learn(self, slices: Slices) -> None:
        """Learn of all topics of all shards in slices. A look for a name learns all that is new, which would
        hold up the loop where these are thousands of topics, as after a start.
        """
        for shard in range(len(self._readers)):
            while (arena := self.of(shard)) is not None and not arena.learn(SLICE_TOPICS):
                await slices.yield_if_over()

    def _attach(self, shard: int) -> ArenaReader:
        for _ in range(_ATTACH_TRIES):
            generation = self._cells[shard].get("generation")
            try:
                reader = ArenaReader(self._identity, shard, generation)
            except FileNotFoundError:
                continue  # it was replaced again between the two lines
            retired = self._retired[shard]
            if retired is not None:
                retired.close()
            self._retired[shard] = self._readers[shard]
            self._readers[shard] = reader
            return reader
        raise RuntimeError(f"index arena {generation} of shard {shard} is announced but not there")

    def close(self) -> None:
        for reader in (*self._readers, *self._retired):
            if reader is not None:
                reader.close()
