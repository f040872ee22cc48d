"""A process has the garbage collector look at all objects while few wait for it, or before a leak is large."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.core.collector import FEW, GROWN_BYTES, WORTH, FullLooks, collect_only_young


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
        self.own_bytes = 40 << 20
        self.garbage_bytes = 0
        self.looks = 0
        self.full = FullLooks(self.look, lambda: self.worth, lambda: self.own_bytes)

    def look(self) -> None:
        self.looks += 1
        self.worth = 0
        self.own_bytes -= self.garbage_bytes
        self.garbage_bytes = 0


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


@pytest.mark.parametrize("worth", [0, 1])
def test_a_leak_is_bounded_however_many_are_connected(worth: int) -> None:
    """The collector hardly counts a few large objects: their bytes do."""
    process = Process()
    for _ in range(10):
        before = process.looks
        while process.looks == before:
            process.worth += worth
            process.own_bytes += 1 << 20
            process.garbage_bytes += 1 << 20
            assert process.garbage_bytes <= GROWN_BYTES
            process.full.beat(10_000)


def test_what_is_in_use_is_looked_at_the_less_often_the_more_there_is() -> None:
    """A look at what grew because many connected is no reason for the next one."""
    process = Process()
    process.own_bytes += GROWN_BYTES
    process.full.beat(10_000)
    assert process.looks == 1
    process.worth = WORTH
    process.full.beat(10_000)
    assert process.looks == 1


@given(st.lists(st.tuples(st.integers(0, 2 * FEW), st.integers(0, WORTH), st.integers(0, GROWN_BYTES // 3))))
def test_nobody_waits_for_a_look_without_a_reason(beats: list[tuple[int, int, int]]) -> None:
    process = Process()
    grown = 0
    for connected, worth, more_bytes in beats:
        process.worth += worth
        process.own_bytes += more_bytes
        grown += more_bytes
        before, had = process.looks, process.worth
        process.full.beat(connected)
        is_wanted = (connected <= FEW and had >= WORTH) or grown >= GROWN_BYTES
        assert process.looks - before == is_wanted
        if is_wanted:
            grown = 0
