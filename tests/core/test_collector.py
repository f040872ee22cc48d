"""A process has the garbage collector look at all objects while few wait for it, or before a leak is large."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.core.collector import FEW, GROWN_BLOCKS, WORTH, FullLooks, collect_only_young


@pytest.fixture
def as_before() -> Iterator[None]:
    """Leave the collector as the other tests expect it."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("as_before")
def test_old_objects_are_not_looked_at() -> None:
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looks.append(info["generation"])

    collect_only_young()
    gc.callbacks.append(note)
    try:
        kept: list[list[object]] = []
        for _ in range(200_000):
            kept.append([kept])
    finally:
        gc.callbacks.remove(note)
    assert {0, 1} == set(looks)


class Process:
    """A process as its collector sees it."""

    def __init__(self) -> None:
        self.worth = 0
        self.blocks = 500_000
        self.garbage = 0
        self.looks = 0
        self.asked = 0
        self.full = FullLooks(self.look, lambda: self.worth, self.count)

    def look(self) -> None:
        self.looks += 1
        self.worth = 0
        self.blocks -= self.garbage
        self.garbage = 0

    def count(self) -> int:
        self.asked += 1
        return self.blocks


def test_while_few_are_connected_all_is_looked_at_once_there_is_something_new() -> None:
    process = Process()
    process.worth = WORTH - 1
    process.full.beat(FEW)
    assert process.looks == 0
    process.worth = WORTH
    process.full.beat(FEW)
    assert process.looks == 1
    process.full.beat(0)
    assert process.looks == 1, "nothing is new"


def test_while_many_are_connected_nothing_is_looked_at_until_few_are() -> None:
    process = Process()
    for _ in range(100):
        process.worth += WORTH
        process.full.beat(FEW + 1)
    assert process.looks == 0
    process.full.beat(FEW)
    assert process.looks == 1


def test_a_leak_is_bounded_however_many_are_connected() -> None:
    process = Process()
    for _ in range(10):
        before = process.looks
        while process.looks == before:
            process.worth += 1
            process.blocks += 10_000
            process.garbage += 10_000
            assert process.garbage < GROWN_BLOCKS + 10_000 * (WORTH + 1)
            process.full.beat(10_000)


def test_what_is_in_use_is_looked_at_the_less_often_the_more_there_is() -> None:
    """A look at what grew because many connected is no reason for the next one."""
    process = Process()
    process.worth, process.blocks = WORTH, process.blocks + GROWN_BLOCKS
    process.full.beat(10_000)
    assert process.looks == 1
    process.worth = WORTH
    process.full.beat(10_000)
    assert process.looks == 1


def test_blocks_are_counted_only_now_and_then() -> None:
    """It takes as long as there is memory."""
    process = Process()
    asked = process.asked
    for _ in range(1000):
        process.worth += WORTH // 10
        process.full.beat(10_000)
    assert process.asked - asked <= 1000 // 10


@given(st.lists(st.tuples(st.integers(0, 2 * FEW), st.integers(0, WORTH), st.integers(0, 100_000))))
def test_nobody_waits_for_a_look_without_a_reason(beats: list[tuple[int, int, int]]) -> None:
    process = Process()
    grown = 0
    for connected, worth, blocks in beats:
        process.worth += worth
        process.blocks += blocks
        grown += blocks
        before = process.looks
        had = process.worth
        process.full.beat(connected)
        if process.looks > before:
            assert had >= WORTH
            assert connected <= FEW or grown >= GROWN_BLOCKS
            grown = 0
        elif connected <= FEW:
            assert had < WORTH
