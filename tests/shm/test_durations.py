"""Histograms of requests in shared memory: a block for each frontend, read as one."""

from __future__ import annotations

from array import array

import pytest

from topics.shm.control import LATENCY_BUCKETS, latency_bucket
from topics.shm.durations import Durations, Route


def durations(frontends: int) -> Durations:
    return Durations(memoryview(array("Q", bytes(Durations.size_bytes(frontends)))))


@pytest.mark.parametrize(
    ("latency_us", "bucket"),
    [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (1 << 25, 22), ((1 << 25) + 1, 23), (1 << 40, 23)],
)
def test_a_bucket_holds_its_upper_bound(latency_us: int, bucket: int) -> None:
    assert latency_bucket(latency_us) == bucket


def test_all_frontends_are_read_as_one_and_routes_apart() -> None:
    both = durations(2)
    both.observe(0, Route.APPEND, 8)
    both.observe(1, Route.APPEND, 100)
    both.observe(1, Route.APPEND, 10**9)
    both.observe(1, max(Route), 20)
    append = both.read()[Route.APPEND]
    assert (append.counts[0], append.counts[4], append.counts[LATENCY_BUCKETS - 1]) == (1, 1, 1)
    assert (sum(append.counts), append.sum_us) == (3, 10**9 + 108)
    assert (sum(both.read()[max(Route)].counts), both.read()[max(Route)].sum_us) == (1, 20)
    assert sum(both.read()[Route.DIFF].counts) == 0
