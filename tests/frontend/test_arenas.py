"""Arenas as a frontend maps them: it learns of topics in slices."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

import pytest

from topics.frontend.shards import arenas
from topics.frontend.shards.arenas import SLICE_TOPICS, Arenas, Slices
from topics.shm.arena import ArenaReader


class Unlearned:
    """An arena with so many topics that its reader does not know."""

    def __init__(self, topics: int) -> None:
        self.left = topics

    def learn(self, slots_max: int) -> bool:
        self.left -= min(self.left, slots_max)
        return self.left == 0


class Mapped(Arenas):
    """The arenas of two shards, one of which has none yet."""

    def __init__(self, reader: Unlearned) -> None:
        self._readers = [None, cast(ArenaReader, reader)]

    def of(self, shard: int) -> ArenaReader | None:
        return self._readers[shard]


def test_fifty_thousand_topics_are_learned_while_others_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    reader = Unlearned(50_000)
    seen: list[int] = []

    async def test() -> None:
        learning = asyncio.create_task(Mapped(reader).learn(Slices()))
        while not learning.done():
            seen.append(reader.left)
            await asyncio.sleep(0)

    asyncio.run(test())
    assert reader.left == 0
    assert max(before - after for before, after in itertools.pairwise(seen)) <= SLICE_TOPICS
