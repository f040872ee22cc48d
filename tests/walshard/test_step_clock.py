"""All that happens in one step of a shard happens at one moment."""

from __future__ import annotations

from topics.core.clock import ExpiryClock
from topics.core.job import Now
from topics.log import get_logger
from topics.walshard.step_clock import StepClock

OFFSET_MS = 1_700_000_000_000


class Running:
    """A clock that goes on with each look at it."""

    def __init__(self) -> None:
        self._ms = 0

    def now_ms(self) -> int:
        return OFFSET_MS + self.monotonic_ms()

    def monotonic_ms(self) -> int:
        self._ms += 1
        return self._ms


def test_what_expires_in_a_step_is_what_is_old_when_it_writes() -> None:
    clock = Running()
    time = StepClock(clock, ExpiryClock(clock, get_logger().warning))
    for step in range(3):
        time.look()
        assert time.now == Now(OFFSET_MS + 2 * step + 3, 2 * step + 4)
        assert time.expiry_ms == time.now.wall_ms


def test_the_look_that_is_as_late_as_can_be_is_another_one() -> None:
    clock = Running()
    time = StepClock(clock, ExpiryClock(clock, get_logger().warning))
    before_ms = time.expiry_ms
    time.look_at_expiry()
    assert time.expiry_ms > before_ms
    assert time.now.wall_ms == before_ms
