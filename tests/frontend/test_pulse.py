"""Heartbeats and stalls against a clock that is a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics.frontend.pulse import STALL_MAX_MS, Heartbeats, Stall, Stalls


class Beater:
    def __init__(self, heartbeat_ms: int, idle_since_ms: int = 0) -> None:
        self.heartbeat_ms = heartbeat_ms
        self.idle_since_ms = idle_since_ms
        self.closed = False


def test_a_heartbeat_only_when_idle() -> None:
    heartbeats: Heartbeats[Beater] = Heartbeats()
    quiet, busy = Beater(1000), Beater(1000)
    heartbeats.add(quiet)
    heartbeats.add(busy)
    busy.idle_since_ms = 600  # written to
    assert heartbeats.take_due(999) == []
    assert heartbeats.take_due(1000) == [quiet]
    assert heartbeats.next_ms == 1600
    assert heartbeats.take_due(1600) == [busy]
    assert heartbeats.take_due(1999) == []
    assert heartbeats.take_due(2000) == [quiet]


def test_who_is_closed_is_forgotten() -> None:
    heartbeats: Heartbeats[Beater] = Heartbeats()
    gone = Beater(1000)
    heartbeats.add(gone)
    gone.closed = True
    assert heartbeats.take_due(5000) == []
    assert heartbeats.next_ms is None


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
        for beater in heartbeats.take_due(now_ms):
            index = beaters.index(beater)
            assert now_ms - heard_ms[index] >= beater.heartbeat_ms, "it was not idle"
            heard_ms[index] = now_ms
        for beater, heard in zip(beaters, heard_ms, strict=True):
            assert now_ms - heard < beater.heartbeat_ms


def test_a_stall_ends_only_without_progress() -> None:
    stall = Stall(buffered_bytes=100, now_ms=0)
    assert not stall.over(100, STALL_MAX_MS - 1)
    assert not stall.over(99, STALL_MAX_MS), "one byte is progress"
    assert not stall.over(99, 2 * STALL_MAX_MS - 1)
    assert not stall.over(120, 2 * STALL_MAX_MS - 1)
    assert stall.over(120, 2 * STALL_MAX_MS)


def test_what_is_kept_for_all_that_stand_still() -> None:
    buffered = {"a": 100, "b": 200, "socket": -5_000}
    stalls: Stalls[str] = Stalls(buffered.__getitem__)
    for now_ms, one in enumerate(buffered):
        stalls.note(one, now_ms)
    stalls.note("a", 10)
    assert stalls.held_bytes == 300
    buffered["b"] = 50
    assert stalls.over(STALL_MAX_MS) == ["a"]
    assert stalls.held_bytes == 150
    stalls.end("b")
    stalls.end("b")
    assert stalls.held_bytes == 100
    assert stalls.take_longest() == "a"
    assert stalls.held_bytes == 0
    assert stalls.over(STALL_MAX_MS + 2) == ["socket"]
