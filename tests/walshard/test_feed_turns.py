"""Dests of routers have their turn in the order in which something came for them."""

from __future__ import annotations

from topics.walshard.routers.feed_turns import FeedTurns


def taken(turns: FeedTurns) -> list[int]:
    found = []
    while turns:
        found.append(turns.take())
    return found


def test_first_come_first_served_and_each_once() -> None:
    turns = FeedTurns()
    assert not turns
    for dest_id in (3, 1, 3, 2):
        turns.line_up(dest_id)
    assert turns
    assert taken(turns) == [3, 1, 2]
    assert not turns


def test_who_waits_has_no_turn_before_its_time() -> None:
    turns = FeedTurns()
    turns.line_up(1)
    turns.defer(1, until_ms=50)
    turns.defer(2, until_ms=40)
    assert turns.some_wait
    assert not turns
    turns.wake_due(39)
    assert not turns
    turns.wake_due(40)
    assert taken(turns) == [2]
    turns.wake_due(50)
    assert taken(turns) == [1]
    assert not turns.some_wait


def test_waking_is_for_those_that_wait() -> None:
    turns = FeedTurns()
    turns.wake(1)
    assert not turns
    turns.defer(1, until_ms=1000)
    turns.wake(1)
    assert not turns.some_wait
    assert taken(turns) == [1]
    turns.defer(1, until_ms=1000)
    turns.line_up(1)
    turns.wake_due(2000)
    assert taken(turns) == [1]


def test_who_did_not_come_to_copy_is_next_and_in_the_same_order() -> None:
    turns = FeedTurns()
    for dest_id in (1, 2, 3, 4):
        turns.line_up(dest_id)
    first, second, third = (turns.take() for _ in range(3))
    turns.give_back([second, third])
    turns.line_up(first)
    assert taken(turns) == [2, 3, 4, 1]
