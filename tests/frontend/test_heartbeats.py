"""Heartbeats against a clock that is a number."""

from __future__ import annotations

import weakref
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from topics.frontend.live.channels import HeartbeatQueue, StreamConnection
from topics.frontend.live.event_streams import Push
from topics.frontend.live.stream import StreamState

MANY = 1_000


class Beater(StreamConnection):
    """A connection without a client, written to at 0."""

    def __init__(self, heartbeat_ms: int) -> None:
        super().__init__(cast(Push, None), cast(StreamState, None), heartbeat_ms, 0)


def test_a_heartbeat_only_when_idle() -> None:
    heartbeats = HeartbeatQueue()
    quiet, busy = Beater(1000), Beater(1000)
    heartbeats.add(quiet)
    heartbeats.add(busy)
    busy.idle_since_ms = 600  # written to
    assert heartbeats.pop_due(999, MANY) == []
    assert heartbeats.pop_due(1000, MANY) == [quiet]
    assert heartbeats.next_ms == 1600
    assert heartbeats.pop_due(1600, MANY) == [busy]
    assert heartbeats.pop_due(1999, MANY) == []
    assert heartbeats.pop_due(2000, MANY) == [quiet]


def test_who_is_closed_is_forgotten_at_once() -> None:
    heartbeats = HeartbeatQueue()
    gone = Beater(60_000)
    heartbeats.add(gone)
    reference = weakref.ref(gone)
    del gone
    assert reference() is None, "it is kept until it would have been due"
    closed = Beater(60_000)
    heartbeats.add(closed)
    closed.closed = True
    assert heartbeats.pop_due(60_000, MANY) == []
    assert heartbeats.next_ms is None


def test_many_that_are_due_at_once_are_taken_some_at_a_time() -> None:
    heartbeats = HeartbeatQueue()
    beaters = [Beater(1000) for _ in range(100)]
    for one in beaters:
        heartbeats.add(one)
    busy = beaters[:50]
    for one in busy:
        one.idle_since_ms = 500
    assert heartbeats.pop_due(1000, 40) == [], "to look at one is work, too"
    assert heartbeats.pop_due(1000, 40) == beaters[50:80]
    assert heartbeats.next_ms == 1000, "the others are still due"
    assert heartbeats.pop_due(1000, 40) == beaters[80:]
    assert heartbeats.next_ms == 1500


@given(
    st.lists(st.integers(20, 200), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 30), st.sets(st.integers(0, 4))), max_size=60),
)
def test_silence_is_never_longer_than_the_heartbeat(intervals_ms: list[int], turns: list[tuple[int, set[int]]]) -> None:
    """Time goes in small steps; at each, some are written to and the due ones beat."""
    heartbeats = HeartbeatQueue()
    beaters = [Beater(interval_ms) for interval_ms in intervals_ms]
    for one in beaters:
        heartbeats.add(one)
    heard_ms = [0] * len(beaters)
    now_ms = 0
    for step_ms, written in turns:
        now_ms += step_ms
        for index in written & set(range(len(beaters))):
            beaters[index].idle_since_ms = heard_ms[index] = now_ms
        for due in heartbeats.pop_due(now_ms, MANY):
            index = [one is due for one in beaters].index(True)
            assert now_ms - heard_ms[index] >= due.heartbeat_ms, "it was not idle"
            heard_ms[index] = now_ms
        for one, heard in zip(beaters, heard_ms, strict=True):
            assert now_ms - heard < one.heartbeat_ms
