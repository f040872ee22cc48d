"""Arenas as a frontend maps them: it learns of topics in slices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.frontend.live import Live
from tests.walshard.rig import Rig
from topics.frontend.app import StartGate
from topics.frontend.shards import arenas
from topics.frontend.shards.arenas import SLICE_TOPICS, Arenas, Slices
from topics.shm.arena import ArenaReader, TopicView
from topics.shm.topic_messages import EnsureTopic


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

    async def renewed(self, shards: Iterable[int]) -> None:
        """No shard was restarted."""


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


async def nothing(*_: Any) -> Any:
    raise AssertionError("nobody asks for more")


def test_topics_of_a_shard_that_recovered_late_are_learned_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(str(tmp_path))
    for number in range(8 * SLICE_TOPICS):
        rig.post_call(EnsureTopic(f"t{number}"))
        if number % 100 == 0:
            rig.run()
    rig.run()
    generation = rig.cell.get("generation")
    rig.cell.set("generation", 0)  # it still reads its log
    at_once: list[int] = []
    learn = ArenaReader.learn

    def counted(self: ArenaReader, slots_max: int) -> bool:
        at_once.append(min(slots_max, self.unlearned))
        return learn(self, slots_max)

    monkeypatch.setattr(ArenaReader, "learn", counted)

    async def test() -> None:
        arenas = Arenas(rig.shared)

        async def app(*_: Any) -> None:
            arenas.view("t0")

        async def learned() -> None:
            await arenas.learn(Slices())

        gate = StartGate(app, [rig.cell], 0, learned, arenas)
        await gate({"path": "/v0/topics/t0"}, nothing, nothing)  # answered `not_ready` after shard_wait_ms
        rig.cell.set("generation", generation)
        await gate({"path": "/v0/topics/t0"}, nothing, nothing)
        arenas.close()

    asyncio.run(test())
    rig.close()
    assert 0 < max(at_once) <= SLICE_TOPICS, f"{max(at_once)} topics were learned in one turn of the loop"
