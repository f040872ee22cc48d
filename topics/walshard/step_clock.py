"""What time it is in a step of the shard: one look at the clock for everything in it."""

from __future__ import annotations

from topics.core.clock import Clock
from topics.core.jobs import Now


class StepClock:
    """`now` is the same for all of a group: its writes have one commit time, its leases end together."""

    __slots__ = ("_clock", "now")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.look()

    def look(self) -> None:
        """A step begins."""
        self.now = Now(self._clock.now_ms(), self._clock.monotonic_ms())
