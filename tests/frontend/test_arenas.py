"""Arenas as a frontend maps them: it learns of topics in slices."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import cast

import pytest

from tests.frontend.live import Live
from topics.frontend.shards import arenas
from topics.frontend.shards.arenas import SLICE_TOPICS, Arenas, Slices
from topics.shm.arena import ArenaReader, TopicView


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


def test_the_topics_of_a_restarted_shard_are_learned_while_others_have_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    topics = 5 * SLICE_TOPICS
    looks: list[int] = []
    view = ArenaReader.view

    def counted(reader: ArenaReader, slot: int) -> TopicView:
        looks.append(slot)
        return view(reader, slot)

    async def test() -> None:
        live = Live(str(tmp_path))
        await asyncio.gather(*[live.submit(f"t{number}") for number in range(topics)])
        assert live.reader.find("t0") is not None
        monkeypatch.setattr(ArenaReader, "view", counted)
        live.restart_shard()
        waiting = [asyncio.create_task(live.arenas.renewed([0])) for _ in range(3)]
        write = live.submit("new")
        seen = []
        while not write.done():
            assert live.reader.find("t0") is not None, "the former arena is there until the new one is known"
            seen.append(len(looks))
            await asyncio.sleep(0)
        assert live.reader.find("new") is not None, "whoever has an answer of the new shard sees what it did"
        await asyncio.gather(*waiting)
        assert all(live.reader.find(f"t{number}") is not None for number in range(topics))
        assert len(looks) >= 2 * topics, "a topic is learned by two looks"
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * SLICE_TOPICS + 8, (
            "and `find` looks, too"
        )
        live.close()

    asyncio.run(test())
