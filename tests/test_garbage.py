"""Frontends and shards do without looks of the garbage collector at all objects: what ends there leaves no cycle."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.live import Live, on_loop, turns, until
from tests.walshard.rig import Rig
from topics import garbage
from topics.core.config import TopicConfig
from topics.core.topic import Topic
from topics.shm.queue_messages import Ack, Claim
from topics.shm.topic_messages import DeleteTopic, PutTopic


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the collector as the other tests expect it."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def test_old_objects_are_not_looked_at() -> None:
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looks.append(info["generation"])

    garbage.only_young()
    gc.callbacks.append(note)
    try:
        kept: list[list[object]] = []
        for _ in range(200_000):
            kept.append([kept])
    finally:
        gc.callbacks.remove(note)
    assert {0, 1} == set(looks)


def topics_in_memory() -> int:
    return sum(type(one) is Topic for one in gc.get_objects())


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_a_deleted_topic_leaves_nothing_to_the_collector(tmp_path: Path, kind: str) -> None:
    rig = Rig(str(tmp_path))
    gc.collect()
    gc.disable()
    rig.call(PutTopic("t", TopicConfig(type="queue" if kind == "queue" else "log", ttl_ms=10_000), True))
    rig.append("t", b"1", b"2")
    if kind == "queue":
        rig.call(Claim("t", "n", 2, None, 1))
        rig.call(Ack("t", "n", [1], None))
    assert topics_in_memory() == 1
    rig.call(DeleteTopic("t", False))
    rig.run()
    assert topics_in_memory() == 0
    rig.close()


def test_a_stream_that_has_ended_leaves_nothing_to_the_collector(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        for name in ("s", "t"):
            await live.write(name)
        wires = [live.follow({"s": 0, "t": 0}) for _ in range(3)]
        await until(lambda: all(wire.seqs("t") == [1] for wire, _ in wires))
        gc.collect()
        gc.disable()
        ended = [weakref.ref(connection) for _, connection in wires]
        wires[0][0].vanish()
        live.hub.close(wires[1][1])
        live.hub.drain()
        wires.clear()
        await turns()
        assert [one() for one in ended] == [None] * 3

    on_loop(tmp_path, test)
