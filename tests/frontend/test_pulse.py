"""Heartbeats and stalls against a clock that is a number."""

from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.live.pulse import STALL_CUT_MS, STALL_MAX_MS, Heartbeats, Stall, Stalls

MANY = 1_000


class Beater:
    def __init__(self, heartbeat_ms: int, idle_since_ms: int = 0) -> None:
        self.heartbeat_ms = heartbeat_ms
        self.idle_since_ms = idle_since_ms


def test_a_heartbeat_only_when_idle() -> None:
    heartbeats: Heartbeats[Beater] = Heartbeats()
    quiet, busy = Beater(1000), Beater(1000)
    heartbeats.add(quiet)
    heartbeats.add(busy)
    busy.idle_since_ms = 600  # written to
    assert heartbeats.take_due(999, MANY) == []
    assert heartbeats.take_due(1000, MANY) == [quiet]
    assert heartbeats.next_ms == 1600
    assert heartbeats.take_due(1600, MANY) == [busy]
    assert heartbeats.take_due(1999, MANY) == []
    assert heartbeats.take_due(2000, MANY) == [quiet]


def test_who_is_closed_is_forgotten_at_once() -> None:
    heartbeats: Heartbeats[Beater] = Heartbeats()
    gone = Beater(60_000)
    heartbeats.add(gone)
    heartbeats.end(gone)
    heartbeats.end(gone)
    reference = weakref.ref(gone)
    del gone
    assert reference() is None, "it is kept until it would have been due"
    assert heartbeats.take_due(60_000, MANY) == []
    assert heartbeats.next_ms is None


def test_many_that_are_due_at_once_are_taken_some_at_a_time() -> None:
    heartbeats: Heartbeats[Beater] = Heartbeats()
    beaters = [Beater(1000) for _ in range(100)]
    for beater in beaters:
        heartbeats.add(beater)
    busy = beaters[:50]
    for beater in busy:
        beater.idle_since_ms = 500
    assert heartbeats.take_due(1000, 40) == [], "to look at one is work, too"
    assert heartbeats.take_due(1000, 40) == beaters[50:80]
    assert heartbeats.next_ms == 1000, "the others are still due"
    assert heartbeats.take_due(1000, 40) == beaters[80:]
    assert heartbeats.next_ms == 1500


@given(
    st.lists(st.integers(20, 200), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 30), st.sets(st.integers(0, 4))), max_size=60),
)
def test_silence_is_never_longer_than_the_heartbeat(intervals_ms: list[int], turns: list[tuple[int, set[int]]]) -> None:
    """Time goes in small steps; at each, some are written to and the due ones beat."""
    heartbeats: Heartbeats[Beater] = Heartbeats()
    beaters = [Beater(interval_ms) for interval_ms in intervals_ms]
    for beater in beaters:
        heartbeats.add(beater)
    heard_ms = [0] * len(beaters)
    now_ms = 0
    for step_ms, written in turns:
        now_ms += step_ms
        for index in written & set(range(len(beaters))):
            beaters[index].idle_since_ms = heard_ms[index] = now_ms
        for beater in heartbeats.take_due(now_ms, MANY):
            index = beaters.index(beater)
            assert now_ms - heard_ms[index] >= beater.heartbeat_ms, "it was not idle"
            heard_ms[index] = now_ms
        for beater, heard in zip(beaters, heard_ms, strict=True):
            assert now_ms - heard < beater.heartbeat_ms


def test_a_stall_ends_only_without_progress() -> None:
    stall = Stall(taken_bytes=-100, now_ms=0)
    assert not stall.over(-100, STALL_MAX_MS - 1)
    assert not stall.over(-99, STALL_MAX_MS), "one byte is progress"
    assert not stall.over(-99, 2 * STALL_MAX_MS - 1)
    assert not stall.over(-120, 2 * STALL_MAX_MS - 1)
    assert stall.over(-120, 2 * STALL_MAX_MS)


def test_what_is_kept_for_all_that_stand_still() -> None:
    buffered = {"a": 100, "b": 200, "socket": 0}
    kept = Budget(limits.KEPT_FRAMES)
    stalls: Stalls[str] = Stalls(kept, buffered.__getitem__)
    for now_ms, one in enumerate(buffered):
        stalls.note(one, now_ms)
    stalls.note("a", 10)
    assert kept.held_bytes == 300
    buffered["b"] = 50
    assert stalls.over(STALL_MAX_MS) == ["a"]
    assert kept.held_bytes == 150
    stalls.end("b")
    stalls.end("b")
    assert kept.held_bytes == 100
    stalls.end("a")
    assert kept.held_bytes == 0
    assert stalls.over(STALL_MAX_MS + 2) == ["socket"]


def test_what_is_kept_may_stay_while_the_client_takes_what_others_say() -> None:
    taken = {"topic": 0}
    kept = Budget(limits.KEPT_FRAMES)
    stalls: Stalls[str] = Stalls(kept, lambda _: 100, taken.__getitem__)
    stalls.note("topic", 0)
    taken["topic"] = 1
    assert stalls.over(STALL_MAX_MS) == []
    assert kept.held_bytes == 100
    assert stalls.holding(1, STALL_MAX_MS) == []
    assert stalls.holding(1, STALL_MAX_MS + STALL_CUT_MS) == ["topic"]
    assert stalls.over(2 * STALL_MAX_MS) == ["topic"]


def test_who_is_cut_when_memory_is_wanted() -> None:
    buffered = {"first": 100, "second": 200, "third": 400, "moving": 800, "fresh": 1600, "socket": 0}
    kept = Budget(limits.KEPT_FRAMES)
    stalls: Stalls[str] = Stalls(kept, buffered.__getitem__)
    for one in ("moving", "socket", "first", "second", "third"):
        stalls.note(one, 0)
    now_ms = STALL_CUT_MS
    buffered["moving"] -= 1
    assert stalls.over(now_ms) == []
    stalls.note("fresh", now_ms)
    assert stalls.holding(0, now_ms) == []
    assert stalls.holding(-1, now_ms) == []
    assert stalls.holding(1, now_ms - 1) == [], "they have had no time yet"
    assert stalls.holding(1, now_ms) == ["first"]
    assert stalls.holding(101, now_ms) == ["first", "second"]
    assert stalls.holding(10_000, now_ms) == ["first", "second", "third"]
    assert stalls.holding(10_000, now_ms, still_ms=0) == ["first", "second", "third", "moving", "fresh"]
    buffered["first"] -= 1
    stalls.over(now_ms + 1)
    assert stalls.holding(10_000, 2 * now_ms) == ["second", "third", "moving", "fresh"], "one byte is progress"
