"""Writers are slowed by as much as the log outgrows its snapshots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics.core.governor import FROM_SHARE, FULL_SHARE, PAUSE_MAX_NS, PAUSE_PER_WORK, Brake


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 41), st.integers(0, 1 << 40))
def test_pauses_grow_with_the_lag_and_are_bounded(limit_bytes: int, lag_bytes: int, worked_ns: int) -> None:
    brake = Brake(limit_bytes)
    brake.update(lag_bytes)
    assert 0 <= brake.share <= 1
    assert (brake.share > 0) == (lag_bytes / limit_bytes > FROM_SHARE)
    assert (brake.share == 1) == (lag_bytes / limit_bytes >= FULL_SHARE)
    pause_ns = brake.pause_ns(worked_ns)
    assert 0 <= pause_ns <= min(PAUSE_MAX_NS, worked_ns * PAUSE_PER_WORK)
    more = Brake(limit_bytes)
    more.update(lag_bytes + 1)
    assert more.pause_ns(worked_ns) >= pause_ns


@given(st.integers(0, 1 << 60))
def test_without_a_limit_nobody_is_slowed(lag_bytes: int) -> None:
    brake = Brake(0)
    brake.update(lag_bytes)
    assert brake.pause_ns(1 << 40) == 0
