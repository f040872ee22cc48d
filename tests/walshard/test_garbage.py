"""A shard does without looks of the garbage collector at all of its objects: a topic that ends leaves no cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.topic import Topic
from topics.shm.queue_messages import Ack, Claim
from topics.shm.topic_messages import DeleteTopic, PutTopic


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the collector as the other tests expect it."""
    yield
    gc.enable()


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
