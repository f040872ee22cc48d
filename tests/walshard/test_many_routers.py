"""Thousands of routers of one source: what one step of a shard does for them is bounded, however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.walshard.rig import Rig
from topics.core.routers import RouterSpec
from topics.shm.arena import ArenaReader
from topics.shm.asks import Message
from topics.shm.router_memory import RouterBoard
from topics.shm.topic_messages import DeleteRouter, DeleteTopic, EnsureTopic, PutRouter, SyncRouters
from topics.walshard.commit.commits import Commits
from topics.walshard.commit.draft import Draft
from topics.walshard.routers.originals import LEARNED_AT_ONCE
from topics.walshard.routers.routing import DESTS_PER_STEP, ENDED_PER_STEP

ROUTERS = 2 * ENDED_PER_STEP + 30
MADE_AT_ONCE = 100


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Rig]:
    """Two shards."""
    rig = Rig(str(tmp_path), shards=2)
    yield rig
    rig.close()


class Commit:
    """A count of what one step wrote."""

    def __init__(self) -> None:
        self.synced_commits = 0
        self.frames = 0


def steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commit]:
    """Step the shards, one at a time, until there is nothing to do. Yield what each step committed."""
    now = Commit()
    commit = Commits.commit

    def seen(self: Commits, draft: Draft) -> None:
        now.frames += sum(write.frames for write in draft.durable)
        now.synced_commits += any(write.sync for write in draft.durable)
        commit(self, draft)

    with monkeypatch.context() as patched:
        patched.setattr(Commits, "commit", seen)
        worked = True
        while worked:
            worked = False
            for shard in rig.shards:
                now = Commit()
                served = shard.serve()
                worked |= shard.copy() or served
                yield now
            rig.take_replies()


def settle(rig: Rig) -> None:
    while rig.step():
        rig.take_replies()
    rig.take_replies()


def settle_and_sweep(rig: Rig) -> None:
    """Let 40 seconds pass."""
    for _ in range(40):
        settle(rig)
        rig.clock.ms += 1000
        for shard in rig.shards:
            shard.sweep()
    settle(rig)


def ask(rig: Rig, *calls: tuple[Message, int]) -> None:
    """Have these done, without a look at everything after each."""
    ids = [rig.post_call(call, shard) for call, shard in calls]
    settle(rig)
    for one in ids:
        assert not isinstance(rig.replies[one], Exception), rig.replies[one]


def make_routers(rig: Rig, first: int, count: int) -> None:
    for number in range(first, first + count):
        dest = f"dest-{number}"
        ask(
            rig,
            (PutRouter(f"r-{number}", RouterSpec("source", dest)), 0),
            (EnsureTopic(dest), rig.owner(dest)),
            (SyncRouters(dest, 0, 0), rig.owner(dest)),
        )


def head_of(rig: Rig, name: str) -> int:
    found = rig.reader_of(rig.owner(name)).look_up(name)
    assert found is not None
    return found[1].head_seq


def make_topics_of_shard_1(rig: Rig, count: int) -> list[str]:
    """Make topics of the second shard, and return their names."""
    names = [name for name in (f"t-{number}" for number in range(3 * count)) if rig.owner(name) == 1][:count]
    for begin in range(0, len(names), MADE_AT_ONCE):
        ask(rig, *((EnsureTopic(name), 1) for name in names[begin : begin + MADE_AT_ONCE]))
    return names


def dest_on_shard_0(rig: Rig) -> str:
    return next(name for name in (f"dest-{number}" for number in range(99)) if rig.owner(name) == 0)


def feeds(rig: Rig) -> int:
    return sum(len(shard.routing.feeds.by_dest) for shard in rig.shards)


def test_the_routers_of_a_deleted_source_end_in_steps_of_a_bounded_size(
    two: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(two, (EnsureTopic("source"), two.owner("source")))
    make_routers(two, 0, ROUTERS)
    two.run()
    assert feeds(two) == ROUTERS
    two.post_call(DeleteTopic("source", False), two.owner("source"))
    seen = list(steps(two, monkeypatch))
    assert feeds(two) == 0
    assert not len(two.shard.routing.sources.table.registry)
    assert max(one.frames for one in seen) <= ENDED_PER_STEP + DESTS_PER_STEP
    assert sum(one.frames for one in seen) <= 2 * ROUTERS + 8, "one for each router, one for each dest"
    synced = sum(one.synced_commits for one in seen)
    assert synced <= ROUTERS // DESTS_PER_STEP + ROUTERS // ENDED_PER_STEP + 8, "dests are changed together"
    two.run()


def test_a_router_looks_at_few_others_of_its_source(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    find = RouterBoard.find

    def counted(self: RouterBoard, router_id: int) -> object:
        nonlocal looks
        looks += 1
        return find(self, router_id)

    monkeypatch.setattr(RouterBoard, "find", counted)
    ask(two, (EnsureTopic("source"), two.owner("source")))
    make_routers(two, 0, 50)
    first, looks = looks, 0
    make_routers(two, 50, 50)
    assert looks <= first + 8, "the second fifty cost what the first did"
    monkeypatch.undo()
    two.run()
    two.append("source", b"1")
    assert [head_of(two, f"dest-{number}") for number in (0, 99)] == [1, 1]


def test_topics_of_another_shard_are_learned_in_steps_of_a_bounded_size(
    two: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is among thousands that shard 0 has never looked at, as after a start."""
    every = make_topics_of_shard_1(two, 3 * LEARNED_AT_ONCE)
    source, dest = every[-1], dest_on_shard_0(two)
    learned = 0
    learn = ArenaReader.learn

    def counted(self: ArenaReader, slots_max: int) -> bool:
        nonlocal learned
        learned += min(slots_max, self.unlearned)
        return learn(self, slots_max)

    monkeypatch.setattr(ArenaReader, "learn", counted)
    two.post_call(PutRouter("r", RouterSpec(source, dest)))
    two.post_call(EnsureTopic(dest))
    two.post_call(SyncRouters(dest, 0, 0))
    most, everything = 0, 0
    for _ in steps(two, monkeypatch):
        most, everything, learned = max(most, learned), everything + learned, 0
    assert everything >= len(every)
    assert most <= 2 * LEARNED_AT_ONCE
    monkeypatch.undo()
    two.append(source, b"1")
    assert head_of(two, dest) == 1


def test_a_source_that_had_to_be_learned_is_copied_at_once(two: Rig) -> None:
    """A shard that starts again has a new arena. Nobody waits a second until its topics are known."""
    names, dest = make_topics_of_shard_1(two, 2 * LEARNED_AT_ONCE), dest_on_shard_0(two)
    ask(two, (PutRouter("r", RouterSpec(names[0], dest)), 0), (EnsureTopic(dest), 0), (SyncRouters(dest, 0, 0), 0))
    two.append(names[0], b"1")
    assert head_of(two, dest) == 1
    two.boot()
    two.append(names[0], b"2")
    assert head_of(two, dest) == 2


def test_a_router_whose_end_was_answered_forwards_nothing_more(two: Rig) -> None:
    """The shard of the dest is learning topics of the source's shard, as after any start with more than 256."""
    names, dest = make_topics_of_shard_1(two, 1100), dest_on_shard_0(two)
    ask(two, (PutRouter("r", RouterSpec(names[0], dest)), 0), (EnsureTopic(dest), 0), (SyncRouters(dest, 0, 0), 0))
    two.append(names[0], b"before")
    assert head_of(two, dest) == 1
    two.boot()
    two.shards[0].copy()  # its feeds have their first turn: it begins to learn
    # What RouterRoutes.delete does, before it answers 200.
    gone = two.post_call(DeleteRouter("r"), 0)
    two.shards[0].serve()
    two.shards[0].copy()
    two.post_call(SyncRouters(dest, 0, 0), 0)
    two.shards[0].serve()
    two.take_replies()
    assert two.replies[gone].deleted
    two.append(names[0], b"after the answer")
    settle(two)
    assert [data for _, data in two.read(dest)] == [b"before"]


def test_a_router_whose_end_was_answered_stays_ended_when_the_service_is_killed(two: Rig) -> None:
    names, dest = make_topics_of_shard_1(two, 1100), dest_on_shard_0(two)
    ask(two, (PutRouter("r", RouterSpec(names[0], dest)), 0), (EnsureTopic(dest), 0), (SyncRouters(dest, 0, 0), 0))
    two.append(names[0], b"before")
    two.boot()
    two.shards[0].copy()
    gone, synced = two.post_call(DeleteRouter("r"), 0), two.post_call(SyncRouters(dest, 0, 0), 0)
    two.shards[0].serve()
    two.take_replies()
    assert two.replies[gone].deleted
    assert two.replies[synced]  # now the client has its 200
    two.restart_service()
    for data in (b"an hour later", b"two"):
        two.append(names[0], data)
        for _ in range(5):
            two.run()
            two.clock.ms += 1000
            for shard in two.shards:
                shard.sweep()
    two.run()
    assert [data for _, data in two.read(dest)] == [b"before"]


def test_routers_of_a_deleted_source_are_gone_after_a_kill_between_two_parts(two: Rig) -> None:
    ask(two, (EnsureTopic("source"), two.owner("source")))
    make_routers(two, 0, ROUTERS)
    two.post_call(DeleteTopic("source", False), two.owner("source"))
    while two.cell.get("routers") == ROUTERS:
        two.step()
        two.take_replies()
    assert two.cell.get("routers") > 0
    two.restart_service()
    settle_and_sweep(two)
    assert feeds(two) == 0


@pytest.mark.parametrize("of_shard", [0, 1])
def test_a_removed_router_is_gone_after_a_restart_of_the_service(two: Rig, of_shard: int) -> None:
    dest = next(f"d-{n}" for n in range(99) if two.owner(f"d-{n}") == of_shard)
    two.call(EnsureTopic("source"), two.owner("source"))
    two.call(PutRouter("r", RouterSpec("source", dest)), 0)
    two.call(EnsureTopic(dest), of_shard)
    two.call(SyncRouters(dest, 0, 0), of_shard)
    two.append("source", b"before")
    two.run()
    assert two.read(dest) == [(1, b"before")]
    gone = two.post_call(DeleteRouter("r"), 0)
    two.shards[0].serve()
    two.take_replies()
    assert two.replies[gone].deleted  # it is in the log of shard 0; the shard of the dest has not looked yet
    two.restart_service()
    settle_and_sweep(two)
    two.append("source", b"after")
    settle_and_sweep(two)
    assert two.read(dest) == [(1, b"before")], "no list of routers has it, and no DELETE can end it"
