"""Stalled clients against a clock that is a number."""

from __future__ import annotations

from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.entry.stalled_clients import STALL_CUT_MS, STALL_MAX_MS, ReadProgress, StalledClients


def test_a_stall_ends_only_without_progress() -> None:
    stall = ReadProgress(progress_bytes=-100, since_ms=0)
    assert not stall.timed_out(-100, STALL_MAX_MS - 1)
    assert not stall.timed_out(-99, STALL_MAX_MS), "one byte is progress"
    assert not stall.timed_out(-99, 2 * STALL_MAX_MS - 1)
    assert not stall.timed_out(-120, 2 * STALL_MAX_MS - 1)
    assert stall.timed_out(-120, 2 * STALL_MAX_MS)


def test_what_is_kept_for_all_that_stand_still() -> None:
    buffered = {"a": 100, "b": 200, "socket": 0}
    kept = Budget(limits.KEPT_FRAMES)
    stalls: StalledClients[str] = StalledClients(kept, buffered.__getitem__, lambda client: -buffered[client])
    for now_ms, one in enumerate(buffered):
        stalls.add(one, now_ms)
    stalls.add("a", 10)
    assert kept.held_bytes == 300
    buffered["b"] = 50
    assert stalls.timed_out(STALL_MAX_MS) == ["a"]
    assert kept.held_bytes == 150
    stalls.remove("b")
    stalls.remove("b")
    assert kept.held_bytes == 100
    stalls.remove("a")
    assert kept.held_bytes == 0
    assert stalls.timed_out(STALL_MAX_MS + 2) == ["socket"]


def test_what_is_kept_may_stay_while_the_client_takes_what_others_say() -> None:
    taken = {"topic": 0}
    kept = Budget(limits.KEPT_FRAMES)
    stalls: StalledClients[str] = StalledClients(kept, lambda _: 100, taken.__getitem__)
    stalls.add("topic", 0)
    taken["topic"] = 1
    assert stalls.timed_out(STALL_MAX_MS) == []
    assert kept.held_bytes == 100
    assert stalls.to_cut(1, STALL_MAX_MS) == []
    assert stalls.to_cut(1, STALL_MAX_MS + STALL_CUT_MS) == ["topic"]
    assert stalls.timed_out(2 * STALL_MAX_MS) == ["topic"]


def test_who_is_cut_when_memory_is_wanted() -> None:
    buffered = {"first": 100, "second": 200, "third": 400, "moving": 800, "fresh": 1600, "socket": 0}
    kept = Budget(limits.KEPT_FRAMES)
    stalls: StalledClients[str] = StalledClients(kept, buffered.__getitem__, lambda client: -buffered[client])
    for one in ("moving", "socket", "first", "second", "third"):
        stalls.add(one, 0)
    now_ms = STALL_CUT_MS
    buffered["moving"] -= 1
    assert stalls.timed_out(now_ms) == []
    stalls.add("fresh", now_ms)
    assert stalls.to_cut(0, now_ms) == []
    assert stalls.to_cut(-1, now_ms) == []
    assert stalls.to_cut(1, now_ms - 1) == [], "they have had no time yet"
    assert stalls.to_cut(1, now_ms) == ["first"]
    assert stalls.to_cut(101, now_ms) == ["first", "second"]
    assert stalls.to_cut(10_000, now_ms) == ["first", "second", "third"]
    assert stalls.to_cut(10_000, now_ms, stalled_ms=0) == ["first", "second", "third", "moving", "fresh"]
    buffered["first"] -= 1
    stalls.timed_out(now_ms + 1)
    assert stalls.to_cut(10_000, 2 * now_ms) == ["second", "third", "moving", "fresh"], "one byte is progress"
