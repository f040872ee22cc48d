"""The arithmetic of docs/scale.md: which process is full first, and with how many of each most is done."""

from __future__ import annotations

import pytest

from bench.scale_model import Cost, best, growth, layout

READ = Cost("a read", 256, 200.0, 0.0, 0.0)
BATCH = Cost("a batch", 100, 60.0, 40.0, 100.0)
WRITE = Cost("a write", 1, 100.0, 100.0, 2.0)


def test_the_least_of_four_bounds_counts() -> None:
    assert layout(WRITE, 16, 1, 4).full == "frontends"
    assert layout(WRITE, 16, 4, 1).full == "shards"
    assert layout(BATCH, 16, 8, 8).full == "compactor"
    assert layout(WRITE, 2, 2, 2).full == "cores"
    assert layout(WRITE, 16, 1, 4).per_s == pytest.approx(10_000)
    assert layout(BATCH, 16, 8, 8).per_s == pytest.approx(10_000)
    assert layout(WRITE, 2, 2, 2).per_s == pytest.approx(2e6 / 202)


def test_reads_grow_with_the_cores_and_batches_end_at_the_compactor() -> None:
    assert [best(READ, cores).per_s for cores in (2, 4, 8)] == pytest.approx([10_000, 20_000, 40_000])
    assert best(READ, 8)[:3] == (8, 8, 1)
    assert best(READ, 8).full == "cores"
    assert [best(BATCH, cores).per_s for cores in (2, 4, 16)] == pytest.approx([10_000] * 3)
    assert best(BATCH, 16)[1:3] == (1, 1), "more processes than it takes"


def test_a_cost_that_only_falls_has_a_growth_below_one_and_a_hump_counts() -> None:
    assert growth([100.0, 90.0, 50.0]) == pytest.approx(0.9)
    assert growth([100.0, 150.0, 50.0]) == pytest.approx(1.5)
    assert growth([100.0]) == 1.0
