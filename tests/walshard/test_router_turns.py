"""Dests of a source have a turn when there may be something to copy: not with each router that is made beside them, and
always when nobody else would tell them. No second passes here: nothing is found by the look at everything.
"""

from __future__ import annotations

import pytest

from tests.core.cost import lines_of
from tests.walshard.rig import Rig, step
from tests.walshard.test_many_routers import ask, head_of
from topics.core.routers import RouterSpec
from topics.shm.topic_messages import DeleteRouter, DeleteTopic, EnsureTopic, PutRouter, SyncRouters
from topics.walshard.routers.feed_turns import FeedTurns
from topics.walshard.routers.sources import Links

SHARDS = 3
"""The first has the routers, the second the dest of most tests."""
pytestmark = pytest.mark.shard(shards=SHARDS)


def name_on(rig: Rig, shard: int, start: str) -> str:
    """Return the name of a topic of a shard."""
    return next(name for name in (f"{start}{number}" for number in range(99)) if rig.owner(name) == shard)


def settle(rig: Rig) -> None:
    """Let the shards do all that they know of."""
    while rig.step() or not all(shard.is_idle for shard in rig.shards):
        rig.take_replies()
    rig.take_replies()


def put(rig: Rig, name: str, source: str, dest: str, filter: str | None = None) -> None:
    """Make or change a router as a frontend does, without a look at everything."""
    ask(rig, (PutRouter(name, RouterSpec(source, dest, filter=filter)), 0))
    ask(rig, (EnsureTopic(dest), rig.owner(dest)))
    ask(rig, (SyncRouters(dest, 0, 0), rig.owner(dest)))


def data_of(rig: Rig, name: str) -> list[bytes]:
    return [data for _, data in rig.read(name)]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the dests that have had a turn."""
    taken: list[int] = []
    take = FeedTurns.take

    def seen(self: FeedTurns) -> int:
        taken.append(take(self))
        return taken[-1]

    monkeypatch.setattr(FeedTurns, "take", seen)
    return taken


@pytest.mark.parametrize("source_exists", [True, False])
def test_a_router_that_is_made_changed_or_deleted_gives_other_dests_no_turn(
    rig: Rig, turns: list[int], source_exists: bool
) -> None:
    if source_exists:
        ask(rig, (EnsureTopic("source"), rig.owner("source")))
    counts = []
    for number in range(30):
        turns.clear()
        put(rig, f"r-{number}", "source", f"dest-{number}")
        counts.append(len(turns))
    assert max(counts) == counts[0] > 0
    turns.clear()
    put(rig, "r-7", "source", "dest-7", filter="x")
    assert 0 < len(turns) <= counts[0]
    turns.clear()
    ask(rig, (DeleteRouter("r-8"), 0), (SyncRouters("dest-8", 0, 0), rig.owner("dest-8")))
    assert not turns
    rig.append("source", b"1")
    assert [len(data_of(rig, f"dest-{number}")) for number in (0, 6, 7, 8, 29)] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("of_shard", range(SHARDS))
def test_records_that_wait_when_another_router_is_made_are_copied(rig: Rig, of_shard: int) -> None:
    source, dest, other = name_on(rig, of_shard, "s"), name_on(rig, 1, "d"), name_on(rig, 1, "e")
    ask(rig, (EnsureTopic(source), of_shard))
    put(rig, "r", source, dest)
    rig.post_append(source, [b"1"])
    rig.shards[of_shard].serve()  # it says so to itself, or to the shard of the dest, which has not looked yet
    put(rig, "other", source, other)
    settle(rig)
    assert (data_of(rig, dest), data_of(rig, other)) == ([b"1"], [])
    rig.post_append(source, [b"2"])
    settle(rig)
    assert (data_of(rig, dest), data_of(rig, other)) == ([b"1", b"2"], [b"2"])


@pytest.mark.parametrize("of_shard", range(SHARDS))
def test_what_is_written_between_a_router_and_its_begin_is_there_or_copied(rig: Rig, of_shard: int) -> None:
    """The shard of the source sees the router first, and tells a shard that has no feed yet."""
    source, dest = name_on(rig, of_shard, "s"), name_on(rig, 1, "d")
    ask(rig, (EnsureTopic(source), of_shard), (EnsureTopic(dest), 1))
    rig.post_call(PutRouter("r", RouterSpec(source, dest)), 0)
    rig.shards[0].serve()
    rig.post_append(source, [b"before"])
    rig.shards[of_shard].serve()
    ask(rig, (SyncRouters(dest, 0, 0), 1))
    rig.post_append(source, [b"behind"])
    settle(rig)
    assert data_of(rig, dest) == [b"behind"]


@pytest.mark.parametrize("of_shard", range(SHARDS))
def test_a_source_that_is_made_later_is_copied_at_once(rig: Rig, of_shard: int) -> None:
    source, dest = name_on(rig, of_shard, "s"), name_on(rig, 1, "d")
    put(rig, "r", source, dest)
    ask(rig, (EnsureTopic(source), of_shard))
    (feed,) = rig.shards[1].routing.feeds.by_dest.values()
    assert feed.source_topic_id, "it is known at once, though it has no record"
    rig.post_append(source, [b"1"])
    settle(rig)
    assert data_of(rig, dest) == [b"1"]


@pytest.mark.parametrize("of_shard", range(SHARDS))
def test_a_source_that_is_deleted_ends_its_routers_at_once_and_may_come_again(rig: Rig, of_shard: int) -> None:
    source, dest = name_on(rig, of_shard, "s"), name_on(rig, 1, "d")
    put(rig, "r", source, dest)
    rig.post_append(source, [b"1"])
    settle(rig)
    rig.post_append(source, [b"lost"])
    rig.post_call(DeleteTopic(source, False), of_shard)
    rig.shards[of_shard].serve()
    settle(rig)
    assert head_of(rig, dest) == 2, "the end of the source is known, so what was not copied is a gap"
    assert rig.cell.get("routers") == 0
    assert not rig.shards[1].routing.feeds.by_dest
    rig.post_append(source, [b"of another topic"])
    settle(rig)
    put(rig, "r", source, dest)
    rig.post_append(source, [b"2"])
    settle(rig)
    assert data_of(rig, dest) == [b"1", b"2"]


@pytest.mark.parametrize("of_shard", range(SHARDS))
def test_a_router_that_changes_goes_on_at_once_with_what_waited(rig: Rig, of_shard: int) -> None:
    source, dest = name_on(rig, of_shard, "s"), name_on(rig, 1, "d")
    ask(rig, (EnsureTopic(source), of_shard))
    put(rig, "r", source, dest)
    rig.post_append(source, [b"1"], tag=b"y")
    rig.shards[of_shard].serve()
    put(rig, "r", source, dest, filter="x")
    rig.post_append(source, [b"2"], tag=b"y")
    rig.post_append(source, [b"3"], tag=b"x")
    settle(rig)
    assert data_of(rig, dest) == [b"1", b"3"], "what was acknowledged before passes the router as it was"
    put(rig, "r", other := name_on(rig, (of_shard + 1) % SHARDS, "o"), dest)
    rig.post_append(other, [b"4"])
    rig.post_append(source, [b"5"], tag=b"x")
    settle(rig)
    assert data_of(rig, dest) == [b"1", b"3", b"4"]


def test_what_a_shard_published_and_told_nobody_is_told_by_its_next_life(rig: Rig) -> None:
    source, dest = name_on(rig, 2, "s"), name_on(rig, 1, "d")
    ask(rig, (EnsureTopic(source), 2))
    put(rig, "r", source, dest)
    rig.post_append(source, [b"1"])
    rig.shards[2].serve()  # and is killed
    rig.take_replies()
    for alive in rig.shards[:2]:
        while step(alive):
            pass
    assert data_of(rig, dest) == []
    rig.every[2] = rig.recover(2)
    settle(rig)
    assert data_of(rig, dest) == [b"1"]


def test_what_was_published_while_nobody_knew_the_routers_is_told_when_they_are_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start the shard that has the routers is the last to recover; the source and its dest are at work."""
    source, dest = name_on(rig, 2, "s"), name_on(rig, 1, "d")
    ask(rig, (EnsureTopic(source), 2))
    put(rig, "r", source, dest)

    def boot() -> None:
        one, two = rig.recover(1), rig.recover(2)
        step(one.shard)  # the dest has had its first turn
        rig.post_append(source, [b"1"])
        step(two.shard)
        step(one.shard)
        rig.every = [rig.recover(0), one, two]

    monkeypatch.setattr(rig, "boot", boot)
    rig.restart_service()
    assert data_of(rig, dest) == []
    settle(rig)
    assert data_of(rig, dest) == [b"1"]


@pytest.mark.parametrize("of_shard", range(SHARDS))
def test_once_a_second_only_dests_that_are_behind_have_a_turn(
    rig: Rig, turns: list[int], of_shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = name_on(rig, of_shard, "s")
    for number in range(20):
        put(rig, f"r-{number}", source, f"dest-{number}", filter="x" if number == 7 else None)
        put(rig, f"w-{number}", "not yet", f"waits-{number}")
    rig.append(source, b"1")
    turns.clear()
    sweep(rig)
    quiet = rig.every[rig.owner("dest-7")].catalog.find("dest-7")
    assert quiet is not None
    assert turns == [quiet.topic.id], "the log does not have how far it is"
    with monkeypatch.context() as lost:
        lost.setattr(Links, "changed", lambda *_: None)
        rig.append(source, b"2")
    assert {head_of(rig, f"dest-{number}") for number in range(20)} == {0, 1}
    sweep(rig)
    assert [head_of(rig, f"dest-{number}") for number in range(20)] == [2] * 7 + [0] + [2] * 12


def sweep(rig: Rig) -> None:
    for shard in rig.shards:
        shard.sweep()
    settle(rig)


def test_a_turn_costs_the_same_however_many_have_one_or_wait() -> None:
    def cost(count: int) -> int:
        turns = FeedTurns()
        for dest_id in range(count):
            turns.line_up(dest_id)
            turns.defer(count + dest_id, 100 + dest_id)

        def use() -> None:
            turns.wake_due(100)
            for _ in range(5):
                turns.defer(turns.take(), 10_000)

        return lines_of(use)

    assert cost(1000) == cost(10) > 0
