"""Nothing expires by a wall clock that was put forward until it has stayed there for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics.core.clock import AWAY_MAX_MS, SETTLE_MS, STEP_MAX_MS, ExpiryClock, TrustedTime, offset_at_start

DAY_MS = 86_400_000


class Clocks:
    """Both of a machine."""

    def __init__(self) -> None:
        self.mono_ms = 5_000_000
        self.offset_ms = 1_700_000_000_000
        self.warnings: list[str] = []

    def now_ms(self) -> int:
        return self.mono_ms + self.offset_ms

    def monotonic_ms(self) -> int:
        return self.mono_ms

    def warn(self, event: str, **values: object) -> None:
        self.warnings.append(f"{event} {values}")


def make() -> tuple[Clocks, ExpiryClock]:
    clocks = Clocks()
    expiry = ExpiryClock(clocks, clocks.warn)
    assert expiry.now_ms() == clocks.now_ms()
    return clocks, expiry


def test_forward_and_back_is_as_if_nothing_had_been() -> None:
    clocks, expiry = make()
    right_ms = clocks.now_ms()
    clocks.offset_ms += DAY_MS
    for _ in range(5):
        clocks.mono_ms += SETTLE_MS // 6
        right_ms += SETTLE_MS // 6
        assert expiry.now_ms() == right_ms
    clocks.offset_ms -= DAY_MS
    assert expiry.now_ms() == right_ms
    assert len(clocks.warnings) == 2
    assert f"{DAY_MS}" in clocks.warnings[0]
    clocks.mono_ms += 2 * SETTLE_MS
    assert expiry.now_ms() == right_ms + 2 * SETTLE_MS
    assert len(clocks.warnings) == 2


def test_forward_and_there_counts_after_the_settle_time() -> None:
    clocks, expiry = make()
    clocks.offset_ms += STEP_MAX_MS + 1
    held_ms = clocks.now_ms() - STEP_MAX_MS - 1
    assert expiry.now_ms() == held_ms
    clocks.mono_ms += SETTLE_MS - 1
    assert expiry.now_ms() == held_ms + SETTLE_MS - 1
    clocks.mono_ms += 1
    assert expiry.now_ms() == clocks.now_ms()
    assert len(clocks.warnings) == 2
    assert expiry.offset_ms == clocks.offset_ms


def test_another_step_begins_the_settle_time_anew() -> None:
    clocks, expiry = make()
    for step_ms in (DAY_MS, DAY_MS, -DAY_MS):
        clocks.offset_ms += step_ms
        clocks.mono_ms += SETTLE_MS - 1
        assert expiry.now_ms() < clocks.now_ms() - STEP_MAX_MS
        clocks.mono_ms += SETTLE_MS - 1
        assert expiry.now_ms() < clocks.now_ms() - STEP_MAX_MS
    clocks.mono_ms += 1
    assert expiry.now_ms() == clocks.now_ms()


def test_small_steps_and_steps_back_are_followed_in_silence() -> None:
    clocks, expiry = make()
    for step_ms in (STEP_MAX_MS, -17, 3, -DAY_MS, STEP_MAX_MS, 0, -1):
        clocks.offset_ms += step_ms
        clocks.mono_ms += 1000
        assert expiry.now_ms() == clocks.now_ms()
    assert clocks.warnings == []


def test_the_next_life_of_a_process_knows_what_the_former_one_trusted() -> None:
    clocks, expiry = make()
    clocks.offset_ms += DAY_MS
    held_ms = expiry.now_ms()
    again = ExpiryClock(clocks, clocks.warn, expiry.offset_ms)
    assert again.now_ms() == held_ms
    assert ExpiryClock(clocks, clocks.warn).now_ms() == clocks.now_ms(), "nothing to compare with"


def test_the_next_service_on_the_same_boot_knows_how_long_there_was_none() -> None:
    clocks, expiry = make()
    last = TrustedTime("boot", expiry.now_ms(), clocks.mono_ms)
    clocks.mono_ms += DAY_MS
    again = ExpiryClock(clocks, clocks.warn, offset_at_start(last, "boot", clocks))
    assert again.now_ms() == clocks.now_ms(), "time has passed"
    assert clocks.warnings == []
    clocks.offset_ms += STEP_MAX_MS + 1
    again = ExpiryClock(clocks, clocks.warn, offset_at_start(last, "boot", clocks))
    assert again.now_ms() == clocks.now_ms() - STEP_MAX_MS - 1, "the clock was put forward"
    clocks.offset_ms -= DAY_MS
    again = ExpiryClock(clocks, clocks.warn, offset_at_start(last, "boot", clocks))
    assert again.now_ms() == clocks.now_ms(), "or back"


def test_after_another_boot_what_is_far_ahead_has_to_settle() -> None:
    clocks, expiry = make()
    last = TrustedTime("boot", expiry.now_ms(), clocks.mono_ms)
    for mono_ms, boot_id in ((1000, "another"), (last.monotonic_ms - 1, "boot")):
        clocks.mono_ms = mono_ms
        clocks.offset_ms = last.wall_ms + AWAY_MAX_MS - mono_ms
        assert offset_at_start(last, boot_id, clocks) is None, "a boot takes its time"
        clocks.offset_ms += 1
        again = ExpiryClock(clocks, clocks.warn, offset_at_start(last, boot_id, clocks))
        assert again.now_ms() == last.wall_ms
        clocks.mono_ms += SETTLE_MS
        assert again.now_ms() == clocks.now_ms()
    assert offset_at_start(None, "boot", clocks) is None, "nothing to compare with"


@given(
    st.lists(
        st.tuples(st.integers(0, 2 * SETTLE_MS), st.sampled_from([0, 0, 1, -1, 5000, -5000, DAY_MS, -DAY_MS])),
        max_size=30,
    )
)
def test_time_never_runs_ahead_of_both_clocks(steps: list[tuple[int, int]]) -> None:
    """It is the wall clock, or what has passed by the monotonic one since the wall was trusted. Of what is ahead of
    that by more than the bound, nothing counts before it has stayed for the settle time.
    """
    clocks, expiry = make()
    trusted_ms, since_ms = clocks.offset_ms, None
    for wait_ms, step_ms in steps:
        clocks.mono_ms += wait_ms
        ahead_before = clocks.offset_ms - trusted_ms > STEP_MAX_MS
        clocks.offset_ms += step_ms
        now_ms = expiry.now_ms()
        assert now_ms <= clocks.now_ms()
        is_ahead = clocks.offset_ms - trusted_ms > STEP_MAX_MS
        if not is_ahead:
            since_ms = None
        elif not ahead_before or abs(step_ms) == DAY_MS or since_ms is None:
            since_ms = clocks.mono_ms
        if since_ms is not None and clocks.mono_ms - since_ms < SETTLE_MS:
            assert now_ms == clocks.mono_ms + trusted_ms
        else:
            assert now_ms == clocks.now_ms()
            trusted_ms, since_ms = clocks.offset_ms, None
