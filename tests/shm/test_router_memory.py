"""The table of routers and the board of their progress, as writers and readers see them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from topics.core.errors import TopicsError
from topics.core.routers import Router, RouterSpec
from topics.shm import router_memory
from topics.shm.memory import SharedObject, unlink
from topics.shm.router_memory import (
    BOARD_BYTES,
    BOARD_RESERVE_BYTES,
    TABLE_BYTES,
    TABLE_RESERVE_BYTES,
    Change,
    RouterBoard,
    RouterBoardWriter,
    RouterProgress,
    RouterTable,
    RouterTableWriter,
)


@pytest.fixture
def table_object(identity: str) -> Iterator[SharedObject]:
    shared = SharedObject.create(f"/topics-{identity}-routers", TABLE_BYTES, TABLE_RESERVE_BYTES)
    yield shared
    unlink(shared.name)


def make(router_id: int, name: str, version: int = 1) -> Router:
    return Router(router_id, version, name, RouterSpec(f"s{router_id % 7}", f"d{router_id}"))


def test_a_reader_follows_whatever_the_writer_does(table_object: SharedObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of 2 KiB: the table is written again and again; two lives of the writer, readers that lag."""
    monkeypatch.setattr(router_memory, "REGION_BYTES", 2048)
    monkeypatch.setattr(router_memory, "GROW_BYTES", 512)
    chance = random.Random(7)
    readers = [RouterTable(table_object) for _ in range(3)]
    assert not readers[0].known
    routers: dict[str, Router] = {}
    writer = RouterTableWriter(table_object)
    writer.store_all([])
    assert readers[0].known
    for step in range(1, 600):
        name = f"r{chance.randrange(12)}"
        if step % 150 == 0:
            writer = RouterTableWriter(table_object)
            writer.store_all(routers.values())
        elif name in routers and chance.randrange(2):
            del routers[name]
            writer.store([Change(name, None)], routers.values())
        else:
            routers[name] = make(step, name)
            writer.store([Change(name, routers[name])], routers.values())
        for at, reader in enumerate(readers):
            if step % (1 + 40 * at) == 0:
                assert reader.stale or at == 0
                reader.refresh()
                assert not reader.stale
                assert reader.registry.by_name == routers
    fresh = RouterTable(table_object)
    assert fresh.refresh() >= {topic for r in routers.values() for topic in (r.spec.source, r.spec.dest)}
    assert fresh.registry.by_name == routers


def test_a_full_table_refuses_before_anything_is_logged(
    table_object: SharedObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_memory, "REGION_BYTES", 256)
    writer = RouterTableWriter(table_object)
    with pytest.raises(TopicsError, match="no room"):
        writer.store_all([make(at, f"r{at}") for at in range(50)])


def test_a_board_shows_what_was_shown_last(identity: str) -> None:
    shared = SharedObject.create(f"/topics-{identity}-routed", BOARD_BYTES, 4096)
    try:
        writer, reader = RouterBoardWriter(shared), RouterBoard(shared)
        for router_id in range(1, 201):
            writer.show(RouterProgress(router_id, 1, 5, router_id, 0))
        assert reader.find(77) == RouterProgress(77, 1, 5, 77, 0)
        writer.show(RouterProgress(77, 2, 5, 80, 3))
        assert reader.find(77) == RouterProgress(77, 2, 5, 80, 3)
        writer.remove(77)
        assert reader.find(77) is None
        writer.show(RouterProgress(300, 1, 6, 9, 9))
        assert reader.find(77) is None
        assert reader.find(300) == RouterProgress(300, 1, 6, 9, 9)
        former = RouterBoardWriter(shared).former
        assert reader.find(300) is None
        assert former.keys() == {*range(1, 201), 300} - {77}
        assert former[300] == RouterProgress(300, 1, 6, 9, 9)
    finally:
        unlink(shared.name)


def test_a_board_that_grows_is_read_once(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that looks for each router, before it is there and then, looks at each slot once."""
    shared = SharedObject.create(f"/topics-{identity}-routed-2", BOARD_BYTES, BOARD_RESERVE_BYTES)
    read, slots = 0, RouterBoard.slots

    def counted(board: RouterBoard, first: int = 0) -> dict[int, int]:
        nonlocal read
        found = slots(board, first)
        read += len(found)
        return found

    monkeypatch.setattr(RouterBoard, "slots", counted)
    writer, reader = RouterBoardWriter(shared), RouterBoard(shared)
    for router_id in range(1, 201):
        assert reader.find(router_id) is None
        writer.show(RouterProgress(router_id, 1, 7, 3, 0))
        assert reader.find(router_id) is not None
    assert read == 200
    unlink(shared.name)


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_of_a_board_finds_who_is_there(identity: str, seed: int) -> None:
    """Slots are given again, and the writer has several lives; each reader looks when it likes."""
    chance = random.Random(seed)
    shared = SharedObject.create(f"/topics-{identity}-routed-3", BOARD_BYTES, BOARD_RESERVE_BYTES)
    writer, readers = RouterBoardWriter(shared), [RouterBoard(shared) for _ in range(3)]
    shown: dict[int, RouterProgress] = {}
    for number in range(1500):
        match chance.randrange(20):
            case 0 if number % 7 == 0:
                writer = RouterBoardWriter(shared)
                for progress in chance.sample(list(shown.values()), len(shown)):
                    writer.show(progress)
            case 1 | 2 | 3 | 4 | 5 if shown:
                gone = chance.choice(list(shown))
                writer.remove(gone)
                del shown[gone]
            case _:
                progress = RouterProgress(chance.randrange(1, 60), 1, 7, number, 0)
                writer.show(progress)
                shown[progress.router_id] = progress
        for at, reader in enumerate(readers):
            if chance.randrange(1 + 10 * at) == 0:
                some = chance.sample(range(1, 60), 1 + 10 * at)
                assert [reader.find(id) for id in some] == [shown.get(id) for id in some]
    unlink(shared.name)


def test_routers_that_are_not_shown_are_looked_for_once(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader misses one that takes the slot of another."""
    shared = SharedObject.create(f"/topics-{identity}-routed-1", BOARD_BYTES, BOARD_RESERVE_BYTES)
    looks, slots = 0, RouterBoard.slots

    def counted(board: RouterBoard, first: int = 0) -> dict[int, int]:
        nonlocal looks
        looks += 1
        return slots(board, first)

    monkeypatch.setattr(RouterBoard, "slots", counted)
    writer, reader = RouterBoardWriter(shared), RouterBoard(shared)
    first, second = RouterProgress(1, 1, 7, 3, 0), RouterProgress(2, 1, 7, 3, 0)
    writer.show(first)
    assert [reader.find(id) for id in range(1, 50)] == [first] + [None] * 48
    assert looks == 1
    writer.show(first._replace(source_seq=4))
    assert reader.find(30) is None
    assert looks == 1
    writer.remove(1)
    writer.show(second)
    assert (reader.find(1), reader.find(2), looks) == (None, second, 2)
    RouterBoardWriter(shared).show(first)
    assert (reader.find(1), reader.find(2)) == (first, None)
    unlink(shared.name)
