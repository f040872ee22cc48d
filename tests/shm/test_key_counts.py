"""Counts of what keys have open in several frontends together: never more than granted, slots used again."""

from __future__ import annotations

import hashlib
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from topics.shm import quotas as module
from topics.shm.quotas import Counted, KeyCounts

STREAMS, REQUESTS = Counted.STREAMS, Counted.REQUESTS


def digest(key: int) -> bytes:
    return hashlib.sha256(b"%d" % key).digest()


def memory(frontends: int) -> memoryview:
    return memoryview(array("Q", bytes(KeyCounts.size_bytes(frontends))))


def frontends_of(words: memoryview, count: int) -> list[KeyCounts]:
    return [KeyCounts(words, count, own) for own in range(count)]


def test_a_key_counts_over_all_frontends_and_each_thing_by_itself() -> None:
    left, right = frontends_of(memory(2), 2)
    assert left.claim(digest(1), STREAMS, 2)
    assert right.claim(digest(1), STREAMS, 2)
    assert not left.claim(digest(1), STREAMS, 2)
    assert not right.claim(digest(1), STREAMS, 2)
    assert left.claim(digest(2), STREAMS, 2)
    assert left.claim(digest(1), REQUESTS, 1)
    assert not right.claim(digest(1), REQUESTS, 1)
    right.release(digest(1), STREAMS)
    assert left.claim(digest(1), STREAMS, 2)


def test_a_new_life_of_a_frontend_has_nothing_open() -> None:
    words = memory(2)
    left, right = frontends_of(words, 2)
    assert left.claim(digest(1), STREAMS, 1)
    assert not right.claim(digest(1), STREAMS, 1)
    again = KeyCounts(words, 2, 0)
    assert right.claim(digest(1), STREAMS, 1)
    assert not again.claim(digest(1), STREAMS, 1)


def test_slots_of_idle_keys_are_used_again() -> None:
    left, right = frontends_of(memory(2), 2)
    assert left.claim(digest(-1), STREAMS, 1)
    for key in range(3 * module.SLOTS):
        assert left.claim(digest(key), REQUESTS, 1), key
        assert not right.claim(digest(key), REQUESTS, 1), key
        left.release(digest(key), REQUESTS)
        assert right.claim(digest(key), REQUESTS, 1), key
        right.release(digest(key), REQUESTS)
    assert not right.claim(digest(-1), STREAMS, 1)


def test_more_busy_keys_than_slots_are_refused() -> None:
    (only,) = frontends_of(memory(1), 1)
    for key in range(module.SLOTS):
        assert only.claim(digest(key), STREAMS, 5)
    assert not only.claim(digest(-1), STREAMS, 5)
    only.release(digest(7), STREAMS)
    assert only.claim(digest(-1), STREAMS, 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=120))
def test_it_is_the_sum_that_counts(steps: list[tuple[int, int, bool]]) -> None:
    fronts = frontends_of(memory(3), 3)
    held: dict[tuple[int, int], int] = {}
    for frontend, key, take in steps:
        mine = held.get((frontend, key), 0)
        total = sum(count for (_, other), count in held.items() if other == key)
        if take:
            assert fronts[frontend].claim(digest(key), STREAMS, 4) is (total < 4)
            held[frontend, key] = mine + (total < 4)
        elif mine:
            fronts[frontend].release(digest(key), STREAMS)
            held[frontend, key] = mine - 1
