"""Percentiles of `topics bench`, and the table that `topics top` draws: pure functions."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from topics.api.answers import TopicList
from topics.cli.bench import figures_of, quantile
from topics.cli.top import Look, rates, render


@given(st.lists(st.integers(0, 100), min_size=1), st.sampled_from((0.5, 0.9, 0.99, 0.999, 1.0)))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[int], share: float) -> None:
    found = quantile(sorted(values), share)
    needed = math.ceil(round(len(values) * share, 6))
    assert sum(value <= found for value in values) >= needed
    assert sum(value < found for value in values) < needed


def test_a_median_is_the_usual_one() -> None:
    assert quantile([1, 2, 3], 0.5) == statistics.median([1, 2, 3])
    assert quantile([1, 2, 3, 4], 0.5) == statistics.median_low([1, 2, 3, 4])


def test_figures_of_a_phase() -> None:
    figures = figures_of("write", [(2.0, 10), (1.0, 10), (9.0, 10)], 2.0)
    assert figures == {
        "phase": "write",
        "requests": 3,
        "records": 30,
        "records_per_s": 15.0,
        "p50_ms": 2.0,
        "p90_ms": 9.0,
        "p99_ms": 9.0,
        "p999_ms": 9.0,
        "max_ms": 9.0,
    }
    nothing = figures_of("read", [], 2.0)
    assert (nothing["requests"], nothing["records_per_s"], nothing["p50_ms"]) == (0, 0.0, None)


def look(at_s: float, written: int, **more: Any) -> Look:
    metrics = {
        "topics": 2,
        "topics_build_info": {"0.2.0": 1},
        "topics_uptime_ms": 65_000,
        "topics_records_written_total": written,
        "topics_pressure": 0.25,
        **more,
    }
    entry = {"head_seq": 9, "earliest_seq": 1, "count": 9, "bytes": 12_345, "durable": False, "effective_priority": 0}
    queue = {"queue": {"ready": 4, "in_flight": 2, "dead_lettered": 0}, "lag": 4}
    topics = [
        {"topic": "orders", "type": "log", "last_write_ts": 99_000, "rate": 1234.56, **entry},
        {"topic": "mails", "type": "queue", "last_write_ts": None, **entry, **queue},
    ]
    answer = {"topics": topics, "performance": {"server_total_ms": 0.1}}
    return Look(metrics, msgspec.convert(answer, TopicList), at_s)


def test_rates_are_between_two_looks() -> None:
    assert rates(None, look(5.0, 100))["written"] is None
    assert rates(look(5.0, 100), look(7.0, 300))["written"] == 100.0
    assert rates(look(5.0, 300), look(7.0, 100))["written"] == 0, "the service was restarted"
    assert rates(look(5.0, 100), look(5.0, 300))["written"] is None


def test_the_live_table() -> None:
    assert render(look(5.0, 100), look(7.0, 300), 100_000).splitlines() == [
        "topics 0.2.0  up 1 min 5 s  2 topics  pressure 0.25  compactor 0 s behind",
        "written 100/s  delivered 0/s  requests 0/s  throttled 0/s",
        "",
        "TOPIC   TYPE   WRITES/S  RECORDS   BYTES  LAG  LEASED  WRITTEN",
        "orders  log     1,234.6        9  12,345    -       -  1 s ago",
        "mails   queue         -        9  12,345    4       2        -",
    ]
    assert "READ-ONLY" in render(None, look(7.0, 300, topics_wal_read_only=1), 100_000)
