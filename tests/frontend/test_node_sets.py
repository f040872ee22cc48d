"""The writers that readers name: one set for equal ones, bounded together, counted exactly as long as they live."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from topics.core.errors import TopicsError
from topics.frontend.reads.node_sets import COUNTED_FROM_BYTES, Nodes, NodeSets


def named(what: str, count: int = 1000) -> Nodes:
    return frozenset(f"{what}-{number:05d}".encode() for number in range(count))


def memory_bytes(nodes: Nodes) -> int:
    return sys.getsizeof(nodes) + sum(map(sys.getsizeof, nodes))


def test_what_is_counted_is_the_memory_that_they_take() -> None:
    sets = NodeSets()
    kept = sets.keep(named("a"))
    assert memory_bytes(kept) <= sets.held_bytes <= 1.3 * memory_bytes(kept)


def test_equal_ones_are_one() -> None:
    sets = NodeSets()
    kept = sets.keep(named("a"))
    one_bytes = sets.held_bytes
    assert sets.keep(named("a")) is kept
    assert sets.held_bytes == one_bytes
    other = sets.keep(named("b"))
    assert sets.held_bytes == 2 * one_bytes
    del kept
    assert sets.held_bytes == one_bytes
    again = sets.keep(named("a"))
    assert (len(again), sets.held_bytes) == (1000, 2 * one_bytes)
    del again, other
    assert sets.held_bytes == 0


def test_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = NodeSets()
    first = sets.keep(named("a"))
    monkeypatch.setattr(sets.budget, "most_bytes", 2 * sets.held_bytes)
    second = sets.keep(named("b"))
    for _ in range(3):
        with pytest.raises(TopicsError) as refused:
            sets.keep(named("c"))
    assert refused.value.code == "throttled"
    assert refused.value.detail is not None
    assert refused.value.detail["limit"] == "node_bytes"
    assert sets.keep(named("a")) is first, "it is there already"
    admitted = sets.keep(named("d"), admitted=True)
    assert sets.keep(named("d"), admitted=True) is admitted
    assert sets.held_bytes > sets.budget.most_bytes, "it counts: others are refused for it"
    del admitted
    short = sets.keep(frozenset([b"me"]))
    assert short == {b"me"}
    del second, refused
    gc.collect()
    third = sets.keep(named("c"))
    del first, third
    gc.collect()
    assert sets.held_bytes == 0


def test_few_names_are_not_counted() -> None:
    sets = NodeSets()
    few = sets.keep(named("a", 20))
    assert memory_bytes(few) < COUNTED_FROM_BYTES
    assert sets.held_bytes == 0


def test_they_may_be_freed_by_any_thread() -> None:
    """A thread that reads a page frees its sets; here four do at once, while the loop's thread goes on counting."""
    sets = NodeSets()
    with ThreadPoolExecutor(4) as pool:
        for turn in range(200):
            kept = [sets.keep(named(f"{turn}-{number}", 100)) for number in range(4)]
            barrier = threading.Barrier(4)
            freed = [pool.submit(free, [kept.pop()], barrier) for _ in range(4)]
            assert sets.held_bytes >= 0
            for one in freed:
                one.result()
    assert sets.held_bytes == 0


def free(kept: list[Nodes], barrier: threading.Barrier) -> None:
    barrier.wait(20)
    kept.clear()
