"""Copies that readers have seen and no log holds are made again, with their seqs, in whatever life comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.walshard.rig import Rig
from tests.walshard.test_routing import logged_types, put, route
from topics.core.config import TopicConfig
from topics.core.routers import RouterSpec
from topics.shm.router_messages import PutRouter, SyncRouters
from topics.shm.topic_messages import DeleteTopic, EnsureTopic, PutTopic
from topics.storage.frame import FrameType


def topic_on(rig: Rig, shard: int, prefix: str) -> str:
    """A name that this shard has."""
    return next(name for name in (f"{prefix}{at}" for at in range(100)) if rig.owner(name) == shard)


def put_on(rig: Rig, name: str, **config: Any) -> None:
    rig.call(PutTopic(name, TopicConfig(**config), type_given=False), rig.owner(name))


def route_on(rig: Rig, source: str, dest: str, **fields: Any) -> None:
    """As `route`, of topics of any shard."""
    router = rig.call(PutRouter(f"{source}-{dest}", RouterSpec(source, dest, **fields))).router
    rig.call(EnsureTopic(dest), rig.owner(dest))
    for _ in range(10):
        reply = rig.call(SyncRouters(dest, router.id, router.version), rig.owner(dest))
        if reply.begun and reply.held:
            return
    raise AssertionError(f"the router into {dest} does not begin: {reply}")


def head_of(rig: Rig, name: str) -> int:
    found = rig.reader_of(rig.owner(name)).look_up(name)
    assert found is not None, f"{name} does not exist"
    return found[1].head_seq


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Rig]:
    """Two shards."""
    rig = Rig(str(tmp_path), shards=2)
    yield rig
    rig.close()


LIVES: list[Callable[[Rig], None]] = [Rig.boot, Rig.restart_service]


@pytest.mark.parametrize("end", LIVES)
def test_a_cap_on_all_bytes_keeps_no_copy_from_being_made_again(tmp_path: Path, end: Callable[[Rig], None]) -> None:
    """A shard that starts has not said what it holds, so nobody knows how much is left of the cap."""
    rig = Rig(str(tmp_path), max_total_bytes="100000000")
    try:
        put(rig, "a")
        route(rig, "r", "a", "b")
        rig.append("a", b"1", b"2", b"3")
        end(rig)
        view = rig.view("b")
        assert view is not None
        assert view.head_seq == 3, "before anybody sees the shard"
        assert rig.append("b", b"direct").first_seq == 4
    finally:
        rig.close()


def test_a_service_at_its_cap_holds_after_a_crash_what_it_held(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path), max_total_bytes="1000")
    try:
        put(rig, "a")
        route(rig, "r", "a", "b")
        rig.append("a", b"1" * 150, b"2" * 150)
        expected = rig.read("b")
        assert len(expected) == 2
        assert rig.cell.get("bytes_live") > 1000 - 2 * 150, "no room to claim the copies twice"
        rig.boot()
        assert rig.read("b") == expected
    finally:
        rig.close()


@pytest.mark.parametrize("end", LIVES)
def test_what_only_ram_has_of_a_source_that_was_ephemeral_is_copied_into_the_log(
    rig: Rig, end: Callable[[Rig], None]
) -> None:
    """A dest was behind when its source became durable: its records before that are lost with the service."""
    put(rig, "a", durability="ephemeral")
    route(rig, "r", "a", "b")
    route(rig, "q", "b", "c")
    rig.post_append("a", [b"1", b"2", b"3"])
    rig.post_call(PutTopic("a", TopicConfig(), type_given=False))
    rig.run()
    expected = [(1, b"1"), (2, b"2"), (3, b"3")]
    assert rig.read("b") == rig.read("c") == expected
    end(rig)
    assert rig.read("b") == rig.read("c") == expected
    rig.append("a", b"4")
    assert rig.read("b") == rig.read("c") == [*expected, (4, b"4")]
    logged = logged_types(rig)
    assert logged.count(FrameType.APPEND) == 3 + 1, "what follows is derived again"


@pytest.mark.parametrize("end", LIVES)
def test_copies_of_a_source_that_is_deleted_are_in_the_log_before_its_routers_go(
    two: Rig, end: Callable[[Rig], None]
) -> None:
    """The shard that has the routers is away: until it is back, they stay."""
    source, dest = topic_on(two, 1, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    assert head_of(two, dest) == 3
    two.post_call(DeleteTopic(source, if_empty=False), 1)
    while two.shards[1].step():
        pass
    (feed,) = two.shards[1].routing.feeds.by_dest.values()
    assert feed.registered(), "its router is still there"
    end(two)
    assert head_of(two, dest) == 3
    two.run()
    assert not two.shards[1].routing.feeds.by_dest
    assert two.append(dest, b"direct").first_seq == 4
