"""Answers of writes to topics of class `archived`, which wait until the archive has the log."""

from __future__ import annotations

import asyncio

import pytest

from tests.frontend.live import until
from topics.core.errors import TopicsError
from topics.frontend.shards.archive_acks import ArchiveAcks
from topics.shm.control import ControlPage, Role
from topics.shm.instance import SharedMemory

SHARDS = 2


@pytest.fixture
def control(identity: str) -> ControlPage:
    return SharedMemory.create(identity, SHARDS, 1, 64 * 1024, 1).control


def commit(control: ControlPage, *words: int) -> None:
    for shard, word in enumerate(words):
        control.cell(Role.WALSHARD, shard).set("committed", word)


def ship(control: ControlPage, *words: int) -> None:
    for shard, word in enumerate(words):
        control.cell(Role.ARCHIVER, 0).set(f"shipped_{shard:02d}", word)


def waits(control: ControlPage) -> int:
    return control.cell(Role.FRONTEND, 0).get("archive_waits")


def test_shards_are_waited_for_side_by_side(control: ControlPage) -> None:
    """Each up to what it had at the begin: others go on writing meanwhile."""

    async def test() -> None:
        acks = ArchiveAcks(control, control.cell(Role.FRONTEND, 0), 10_000)
        commit(control, 10, 10)
        asked = asyncio.create_task(acks.wait_for([0, 1]))
        await until(lambda: waits(control) == 1)
        commit(control, 20, 20)
        ship(control, 10, 9)
        other = asyncio.create_task(acks.wait_for([0]))
        await until(lambda: waits(control) == 2)
        assert not asked.done()
        ship(control, 10, 10)
        await asked
        assert not other.done()
        ship(control, 20, 20)
        await other
        assert waits(control) == 0

    asyncio.run(test())


def test_a_time_that_is_over_is_over_for_all_shards(control: ControlPage) -> None:
    async def test() -> None:
        acks = ArchiveAcks(control, control.cell(Role.FRONTEND, 0), 1)
        commit(control, 10, 10)
        for _ in range(2):
            with pytest.raises(TopicsError, match="has not had it within 1 ms"):
                await acks.wait_for([0, 1])
        ship(control, 10, 10)
        await acks.wait_for([0, 1])
        assert waits(control) == 0

    asyncio.run(test())
