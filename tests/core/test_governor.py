"""Pressure and the ladder (architecture "Scheduler and pressure")."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.core.governor import INTERVAL_MS, Governor, Ladder, Sample, sampled_pressure

IDLE = Sample(0, 0, 0)
SWAMPED = Sample(5_000, 1, 1)
FRACTIONS = st.floats(0, 1)
SAMPLES = st.builds(Sample, st.floats(0, 1e6), FRACTIONS, FRACTIONS)


def ladder_at(*pressures: float) -> Ladder:
    ladder = Ladder()
    for pressure in pressures:
        ladder.update(pressure)
    return ladder


@pytest.mark.parametrize(
    ("sample", "pressure"),
    [
        (IDLE, 0.0),
        (Sample(5, 0.5, 0.5), 0.0),
        (Sample(0, 0, 1), 0.2),
        (Sample(50, 0, 0), 0.5),
        (Sample(500, 0, 0), 1.0),
        (Sample(0, 0.75, 0), 0.5),
        (Sample(0, 1, 0), 1.0),
        (Sample(50, 0, 1), 0.6),
        (SWAMPED, 1.0),
    ],
)
def test_one_interval(sample: Sample, pressure: float) -> None:
    assert sampled_pressure(sample) == pytest.approx(pressure)


def test_a_process_that_is_busy_and_keeps_up_throttles_nobody() -> None:
    governor = Governor()
    for _ in range(1_000):
        governor.sample(Sample(5, 0.5, 1))
    ladder = ladder_at(governor.pressure)
    assert (ladder.coalesce_ms, ladder.window_us, ladder.deferring, ladder.pressed) == (0, 0, False, False)


@given(SAMPLES, SAMPLES)
def test_more_of_anything_is_no_less_pressure(a: Sample, b: Sample) -> None:
    worst = Sample(*map(max, a, b))
    assert 0 <= max(sampled_pressure(a), sampled_pressure(b)) <= sampled_pressure(worst) + 1e-12 <= 1 + 2e-12


@given(st.lists(SAMPLES, max_size=50))
def test_pressure_stays_between_0_and_1(samples: list[Sample]) -> None:
    governor = Governor()
    for sample in samples:
        assert 0 <= governor.sample(sample) <= 1


def test_it_rises_within_half_a_second_and_is_gone_after_three() -> None:
    governor = Governor()
    rising = [governor.sample(SWAMPED) for _ in range(500 // INTERVAL_MS)]
    assert rising == sorted(rising)
    assert governor.pressure > 0.95
    falling = [governor.sample(IDLE) for _ in range(3_000 // INTERVAL_MS)]
    assert falling == sorted(falling, reverse=True)
    assert governor.pressure == 0


def test_a_single_spike_defers_nothing() -> None:
    governor = Governor()
    ladder = ladder_at(governor.sample(SWAMPED))
    assert not ladder.deferring


@pytest.mark.parametrize(
    ("pressure", "coalesce_ms", "window_us"),
    [(0.0, 0, 0), (0.2, 0, 0), (0.4, 5, 0), (0.6, 10, 3667), (0.7, 12.5, 5250), (1.0, 20, 10_000)],
)
def test_the_rungs(pressure: float, coalesce_ms: float, window_us: int) -> None:
    ladder = ladder_at(pressure)
    assert ladder.coalesce_ms == pytest.approx(coalesce_ms)
    assert ladder.window_us == window_us


def test_the_window_opens_with_half_a_millisecond() -> None:
    assert ladder_at(0.4001).window_us == pytest.approx(500, abs=5)


def test_deferring_begins_above_08_and_ends_at_06() -> None:
    ladder = Ladder()
    seen = []
    for pressure in (0.79, 0.8, 0.81, 0.7, 0.61, 0.6, 0.7, 0.8, 0.9):
        ladder.update(pressure)
        seen.append(ladder.deferring)
    assert seen == [False, False, True, True, True, False, False, False, True]


def test_the_top_rung_is_for_the_very_end() -> None:
    assert not ladder_at(1.0, 0.94).pressed
    assert ladder_at(0.95).pressed
    assert (ladder_at(0).retry_after_ms, ladder_at(1).retry_after_ms) == (100, 1000)
