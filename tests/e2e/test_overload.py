"""A real service that is asked for more than it can do: nothing is lost, nothing odd is answered, and it gives way in
steps. Figures of the same loads are the cases `overload`, `slow_reader` and `idle` of `make bench`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.idle_streams import LATE_MAX, IdleStreams, run_idle_streams
from bench.overload import Overload, OverloadOutcome, run_overload
from bench.slow_reader import SlowReader, SlowReaderOutcome, run_slow_reader
from tests.harness import Service, poll
from topics.frontend.shards.pending_requests import ROOM_WAIT_S

IDLE_BYTES_MAX = 30_000
HELD_SLACK_BYTES = 6 << 20
REFUSAL_SLACK_MS = 2000
"""Time that a refusal may take beyond the time that its request waited for room: for a machine that is busy with other
work, and far from the 5 s after which nothing would be waited for any more.
"""
HELD_UP_MAX_US = 1_000_000
"""No client that does nothing may cost another one so much: for a machine that is busy, and far from the 30 s for which
a client may read nothing."""


@pytest.fixture
def small() -> Iterator[Service]:
    """One process of each kind, rings of 64 KiB."""
    with Service(shards=1, frontends=1, wal_file_bytes=None, env={"TOPICS_RING_BYTES": "65536"}) as service:
        yield service


@pytest.fixture
def pair() -> Iterator[Service]:
    """Two frontends and two shards."""
    with Service(shards=2, frontends=2, wal_file_bytes=None, env={"TOPICS_RING_BYTES": "65536"}) as service:
        yield service


def nothing_but_what_is_documented(outcome: OverloadOutcome) -> None:
    assert outcome.odd == []
    assert outcome.missing == []
    assert set(outcome.statuses) <= {200, 201, 429}


def gave_way_and_recovered(outcome: OverloadOutcome) -> None:
    """Up the ladder while it lasted, down again afterwards, all of it to be seen in the metrics."""
    assert outcome.before.pressure < 0.2
    assert max(sight.pressure for sight in outcome.during) > 0.4
    assert max(sight.coalesce_ms for sight in outcome.during) > 5
    assert max(sight.window_ms for sight in outcome.during) >= 0.5
    after = outcome.after
    assert (after.pressure < 0.05, after.deferring, after.coalesce_ms, after.window_ms) == (True, False, 0, 0)


def overload_looked_at(service: Service, plan: Overload) -> tuple[OverloadOutcome, list[dict[str, Any]]]:
    """The plan run, and what `status` said again and again meanwhile."""
    over = threading.Event()

    def look() -> list[dict[str, Any]]:
        found = []
        while not over.is_set():
            found.append(service.status())
        return found

    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(look)
        try:
            outcome = run_overload(plan)
        finally:
            over.set()
        return outcome, looks.result()


def steps_shown(statuses: list[dict[str, Any]]) -> set[str]:
    """Return the steps that `status` showed at some time: each frontend and each shard takes its own by itself."""
    shown = set[str]()
    for status in statuses:
        shown |= {"pressure"} if status["pressure"] > 0.8 else set()
        shown |= {"deferring"} if status["deferring"] else set()
        shown |= {f"frontend {n} coalesces" for n, one in enumerate(status["frontends"]) if one["coalesce_ms"] > 5}
        shown |= {f"shard {n} waits" for n, one in enumerate(status["shards"]) if one["commit_window_ms"] >= 0.5}
    return shown


def test_more_than_two_frontends_and_two_shards_can_do(pair: Service) -> None:
    """The case `overload` of `make bench` measures by how much the last priority is later than the first."""
    steps = {
        "urgent first",
        "pressure",
        "deferring",
        *(f"frontend {n} coalesces" for n in (0, 1)),
        "shard 0 waits",
        "shard 1 waits",
    }
    shown = set[str]()
    for name in ("load", "again", "once-more"):
        topics = ((1000, 4), (None, 4), (-1000, 4))
        plan = Overload(pair.port, topics, watchers=30, floods=48, seconds=4.0, frontends=2, name=name)
        outcome, statuses = overload_looked_at(pair, plan)
        nothing_but_what_is_documented(outcome)
        last, first = (outcome.delivery_us[priority][0] for priority in (-1000, 1000))
        shown |= steps_shown(statuses) | ({"urgent first"} if last > first else set())
        if shown == steps:
            break  # else it has not had the time of the machine that it takes
    assert shown == steps
    gave_way_and_recovered(outcome)


def test_more_to_write_than_fits_is_refused_in_time(small: Service) -> None:
    plan = Overload(small.port, ((1000, 2), (-1000, 2)), watchers=4, floods=600, seconds=4.0)
    plan = plan._replace(pids=tuple(small.family()), shared_objects=tuple(small.shared_memory()))
    # The first time it may grow to what it needs for such a load; the second time it has that.
    runs = [run_overload(plan), run_overload(plan._replace(name="again"))]
    if grown_bytes(*runs) > HELD_SLACK_BYTES:
        # The first one may have been held up before it had grown. What grows with each load does so again.
        runs.append(run_overload(plan._replace(name="once-more")))
    refused = 0
    for outcome in runs:
        nothing_but_what_is_documented(outcome)
        gave_way_and_recovered(outcome)
        assert outcome.statuses.get(429, 0) > 0
        # Somebody else's, whose own service has ended and who looks for it on its port: the other tests run meanwhile.
        strangers = outcome.after.requests - outcome.before.requests - outcome.asked
        counted = outcome.after.throttled - outcome.before.throttled
        assert 0 <= counted - outcome.statuses[429] <= strangers, f"{strangers} requests were not of this test"
        assert any(sight.deferring for sight in outcome.during)
        refused += counted
    # The longest of all, so that one process that is held up is enough to exceed it: in one run, and not in each.
    assert min(outcome.refused_max_ms for outcome in runs) <= ROOM_WAIT_S * 1000 + REFUSAL_SLACK_MS
    grown = grown_bytes(*runs[-2:])
    assert grown <= HELD_SLACK_BYTES, f"{grown / runs[-1].asked:.0f} bytes for each of {runs[-1].asked} requests"

    def quiet() -> dict[str, Any] | None:
        status = small.status()
        return status if status["pressure"] < 0.2 and status["deferring"] is False else None

    assert poll("no pressure", quiet)["frontends"][0]["throttled"] == refused


def grown_bytes(former: OverloadOutcome, later: OverloadOutcome) -> int:
    """Return how much more the service held, at most, while the same load was repeated."""
    return max(later.held_bytes) - max(former.held_bytes)


def test_one_that_stops_reading_among_200_that_do(small: Service) -> None:
    held_up: list[SlowReaderOutcome] = []
    # What is longest of all is judged: the machine may hold up one run, the slow reader would hold up each.
    while len(held_up) < 3:
        found = run_slow_reader(SlowReader(small.port, seconds=2.0, name=f"read.by.many.{len(held_up)}"))
        assert found.odd == []
        assert found.missing == []
        assert found.held_back < found.records == found.caught_up, "it was never behind"
        assert found.record_frames < (found.records - found.held_back) / 2, "what it missed came in few frames"
        if served_as_before(found):
            return
        held_up.append(found)
    pytest.fail("\n".join(f"{one.before_us} {one.meanwhile_us} {one.write_max_ms}" for one in held_up))


def served_as_before(found: SlowReaderOutcome) -> bool:
    """Return whether readers and writers were served as before: one slow client for 30 s costs the others nothing."""
    return found.write_max_ms <= HELD_UP_MAX_US / 1000 and all(
        meanwhile_us <= 3 * before_us + HELD_UP_MAX_US
        for before_us, meanwhile_us in zip(found.before_us, found.meanwhile_us, strict=True)
    )


def test_2000_idle_streams(small: Service) -> None:
    found = run_idle_streams(IdleStreams(small.port, small.family(), small.shared_memory(), streams=2016, seconds=3.0))
    assert found.odd == []
    assert found.closed == 0
    assert found.bytes_each <= IDLE_BYTES_MAX
    assert found.heartbeats.silence_max_ms < 2000, "a heartbeat was left out"
    assert found.heartbeats.count_min >= 2
    assert found.heartbeats.interval_mean_ms == pytest.approx(1000, rel=LATE_MAX)
    for alone_us, beside_us in zip(found.alone_us, found.delivery_us, strict=True):
        assert beside_us <= 3 * alone_us + HELD_UP_MAX_US, (found.alone_us, found.delivery_us)
