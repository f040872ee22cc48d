"""The scheduler under a test clock (architecture "Scheduler and pressure")."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.cost import lines_of
from topics.core.scheduler import (
    AGE_FULL_MS,
    BANDS,
    PROMOTIONS_MAX,
    TICK_MS,
    TURN_COST,
    WEIGHTS,
    Scheduler,
    age,
    band_of,
)

BASES = (1000, 600, 300, 100, -1000)
"""One priority in each band."""


class Server:
    """Serves for ever: a unit of cost takes a hundredth of a millisecond of the test's clock."""

    def __init__(self, bases: dict[str, int]) -> None:
        self.bases = bases
        self.scheduler: Scheduler[str] = Scheduler(self.bases.__getitem__)
        self.now = 1_000_000.0
        self.spent: Counter[str] = Counter()
        self.turns: dict[str, list[float]] = defaultdict(list)

    @property
    def now_ms(self) -> int:
        return int(self.now)

    def mark(self, *names: str) -> None:
        for name in names:
            self.scheduler.mark(name, self.now_ms)

    def serve(self, cost: int, *, more: bool = False, fresh: bool = False) -> str | None:
        name = self.scheduler.take(self.now_ms)
        if name is None:
            return None
        self.now += cost / 100
        self.spent[name] += cost
        self.turns[name].append(self.now)
        self.scheduler.served(cost, self.now_ms, more=more, fresh=fresh)
        return name

    def drain(self) -> list[str]:
        served = []
        while (name := self.serve(1)) is not None:
            served.append(name)
        return served


# --- shares


@pytest.mark.parametrize("topics_per_band", [1, 7])
@pytest.mark.parametrize("cost_max", [1, 64, 900])
def test_shares_of_the_bands_under_saturation(topics_per_band: int, cost_max: int) -> None:
    dice = random.Random(f"{topics_per_band} {cost_max}")
    bases = {f"{base} {n}": base for base in BASES for n in range(topics_per_band)}
    server = Server(bases)
    server.mark(*bases)
    for _ in range(60_000):
        # An item that is served has more to do again at once.
        server.serve(dice.randint(1, cost_max), more=True, fresh=True)
    waits = [after - before for turns in server.turns.values() for before, after in itertools.pairwise(turns)]
    assert max(waits) < 1_500, "the figures below are of bands that nobody has aged out of"
    by_band: Counter[int] = Counter()
    for name, spent in server.spent.items():
        by_band[band_of(bases[name])] += spent
    spent_in_all = sum(by_band.values())
    for band, weight in enumerate(WEIGHTS):
        assert by_band[band] / spent_in_all == pytest.approx(weight / sum(WEIGHTS), rel=0.05)


def test_what_a_band_does_not_need_goes_to_the_others_by_weight() -> None:
    server = Server({"second": 600, "third": 300, "last": -1})
    server.mark("second", "third", "last")
    for _ in range(20_000):
        server.serve(3, more=True, fresh=True)
    total = sum(server.spent.values())
    assert {name: round(spent / total, 2) for name, spent in server.spent.items()} == {
        "second": 0.57,
        "third": 0.29,
        "last": 0.14,
    }


def test_a_band_that_slept_has_saved_one_round_and_no_more() -> None:
    server = Server({"steady": 100, "sleeper": 1000})
    server.mark("steady")
    for _ in range(5_000):
        server.serve(8, more=True, fresh=True)
    server.mark("sleeper")
    at_first = [server.serve(8, more=True, fresh=True) for _ in range(136)]
    # A round of the first band is 512 units, which is 64 turns: what it has saved, and then the next one.
    assert at_first[:64] == ["sleeper"] * 64
    assert at_first.count("steady") == 8


def test_what_is_urgent_does_not_wait_for_the_round() -> None:
    bases = {f"{base} {n}": base for base in BASES[1:] for n in range(100)}
    server = Server({**bases, "urgent": 1000})
    server.mark(*bases)
    for _ in range(50):
        server.serve(20, more=True, fresh=True)
    server.mark("urgent")
    assert server.serve(1) == "urgent"


# --- order


def test_first_come_first_served_in_a_band() -> None:
    names = [f"t{n}" for n in range(50)]
    server = Server(dict.fromkeys(names, 300))
    server.mark(*names)
    assert server.drain() == names


def test_a_pass_is_finished_before_the_next_topic_unless_it_is_very_long() -> None:
    server = Server({"wide": 100, "short": 100, "endless": 100})
    server.mark("wide", "short")
    assert [server.serve(64, more=True) for _ in range(3)] == ["wide"] * 3
    server.serve(64)
    assert server.serve(1) == "short"
    server.mark("endless", "short")
    turns = 0
    while server.serve(64, more=True) == "endless":
        turns += 1
    assert turns == TURN_COST // 64


def test_one_that_is_ready_keeps_its_place() -> None:
    server = Server({"a": 0, "b": 0})
    server.mark("a", "b", "a")
    assert server.drain() == ["a", "b"]


def test_one_that_is_discarded_is_not_served() -> None:
    server = Server({"a": 0, "b": 0, "c": 0})
    server.mark("a", "b", "c")
    server.scheduler.discard("b")
    server.scheduler.discard("b")
    assert server.scheduler.take(server.now_ms) == "a"
    server.scheduler.discard("a")
    server.scheduler.served(5, server.now_ms, more=True)
    assert "a" not in server.scheduler
    assert server.drain() == ["c"]


# --- age


@given(
    st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 3000)), min_size=1, max_size=20), st.integers(20, 400)
)
def test_nobody_waits_more_than_10_s_for_the_first_band(arrivals: list[tuple[int, int]], step_ms: int) -> None:
    """The first band's own topics take all that is served: all others can be seen to age."""
    scheduler: Scheduler[int] = Scheduler(lambda n: arrivals[n][0])
    now_ms, pending = 5_000, list(enumerate(arrivals))
    since: dict[int, int] = {}
    while pending or any(scheduler.band(n) for n in since):
        while pending and pending[0][1][1] <= now_ms - 5_000:
            n, _ = pending.pop(0)
            scheduler.mark(n, now_ms)
            since[n] = now_ms
        scheduler.age(now_ms)
        for n, since_ms in since.items():
            waited_ms = now_ms - since_ms
            # A tick late at most, and never early.
            earlier_ms = max(0, waited_ms - TICK_MS)
            latest = band_of(arrivals[n][0] + age(earlier_ms), earlier_ms)
            assert band_of(arrivals[n][0] + age(waited_ms), waited_ms) <= scheduler.band(n) <= latest
            assert waited_ms < AGE_FULL_MS + TICK_MS or scheduler.band(n) == 0
        now_ms += step_ms
        pending.sort(key=lambda arrival: arrival[1][1])


def test_a_continuously_rewritten_topic_ages() -> None:
    hogs = [f"hog {n}" for n in range(3)]
    server = Server({"rewritten": -1000, **dict.fromkeys(hogs, 1000)})
    server.scheduler.paused = True
    server.mark("rewritten", *hogs)
    marked_ms = server.now_ms
    while not server.turns["rewritten"]:
        server.mark("rewritten")
        server.serve(40, more=True, fresh=True)
    assert AGE_FULL_MS <= server.now_ms - marked_ms <= AGE_FULL_MS + 2 * TICK_MS


def test_who_was_served_begins_anew() -> None:
    server = Server({"t": 0})
    server.mark("t")
    server.now += 6_000
    assert server.scheduler.waiting_ms("t", server.now_ms) == 6_000
    server.scheduler.age(server.now_ms)
    assert server.scheduler.band("t") == 1
    server.serve(1, more=True, fresh=True)
    assert server.scheduler.waiting_ms("t", server.now_ms) == 0
    assert server.scheduler.band("t") == 3


def test_recency_that_fades_meanwhile_is_seen() -> None:
    bases = {"t": 400}
    server = Server(bases)
    server.mark("t")
    bases["t"] = 300
    server.now += 1_000 + TICK_MS
    server.scheduler.age(server.now_ms)
    assert server.scheduler.band("t") == 2, "400 + 100 would have been enough, 300 + 105 are not"
    server.now += 1_000
    server.scheduler.age(server.now_ms)
    assert server.scheduler.band("t") == 1


def test_a_clock_that_leaps_ages_everybody_once() -> None:
    names = [f"t{n}" for n in range(10)]
    server = Server(dict.fromkeys(names, -1000))
    server.mark(*names)
    server.now += 10_000_000
    server.scheduler.age(server.now_ms)
    assert server.scheduler.depths() == [10, 0, 0, 0, 0]


# --- pause


def test_a_pause_holds_the_last_band_until_it_has_aged_out_of_it() -> None:
    server = Server({"negative": -100, "zero": 0})
    server.scheduler.paused = True
    server.mark("negative", "zero")
    assert server.drain() == ["zero"]
    assert not server.scheduler.eligible
    server.now += 1_000 + TICK_MS
    assert server.drain() == ["negative"]
    server.mark("negative")
    assert server.drain() == []
    server.scheduler.paused = False
    assert server.drain() == ["negative"]


def test_waits_count_who_should_not_wait() -> None:
    server = Server({"negative": -100, "zero": 0})
    server.mark("negative", "zero")
    server.now += 30
    server.drain()
    assert (server.scheduler.waits, server.scheduler.waited_ms) == (1, 30)


# --- cost


def most_lines(topics: int) -> dict[str, int]:
    """The dearest of some operations among so many ready topics, also while all of them come of age at one moment."""
    dice = random.Random(topics)
    scheduler: Scheduler[int] = Scheduler(lambda n: BASES[n % BANDS] if n < topics else 0)
    at = 1_000_000
    for n in range(topics):
        scheduler.mark(n, at)
    most: Counter[str] = Counter()

    def charge(what: str, action: Any) -> None:
        most[what] = max(most[what], lines_of(action))

    for step in range(600):
        at += dice.choice((0, 1, TICK_MS, 100))
        if step == 300:
            at += AGE_FULL_MS
        cost, more, gone = dice.randint(1, 5000), dice.random() < 0.5, dice.randrange(topics)
        charge("mark", partial(scheduler.mark, topics + step, at))
        charge("take", partial(scheduler.take, at))
        charge("served", partial(scheduler.served, cost, at, more=more, fresh=True))
        charge("discard", partial(scheduler.discard, gone))
    return most


@pytest.mark.parametrize("topics", [100, 100_000])
def test_every_operation_costs_the_same_among_100_and_among_100_000_topics(topics: int) -> None:
    most = most_lines(topics)
    bounds = {"mark": 40, "served": 45, "discard": 15, "take": 60 + 30 * PROMOTIONS_MAX}
    assert {operation: lines for operation, lines in most.items() if lines > bounds[operation]} == {}


def test_100_000_topics_that_come_of_age_together_are_all_lifted() -> None:
    scheduler: Scheduler[int] = Scheduler(lambda _: -1000)
    for n in range(100_000):
        scheduler.mark(n, 0)
    calls = 0
    while scheduler.depths()[0] < 100_000:
        scheduler.age(AGE_FULL_MS + TICK_MS)
        calls += 1
    assert calls == -(-100_000 // PROMOTIONS_MAX)
