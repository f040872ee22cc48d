"""What time it is in a step of the shard: one look at the clock for everything in it."""

from __future__ import annotations

from topics.core.clock import Clock, ExpiryClock
from topics.core.job import Now


class StepClock:
    """`now` is the same for all of a group: its writes have one commit time, its leases end together.

    `expiry_ms` is the wall time by which records have outlived their `ttl_ms`.
    """

    __slots__ = ("_clock", "_expiry", "expiry_ms", "now")

    def __init__(self, clock: Clock, expiry: ExpiryClock) -> None:
        self._clock = clock
        self._expiry = expiry
        self.look()

    def look(self) -> None:
        """A step begins."""
        self.now = now = Now(self._clock.now_ms(), self._clock.monotonic_ms())
        self.expiry_ms = self._expiry.at(now.wall_ms, now.mono_ms)

    def look_at_expiry(self) -> None:
        """As late as can be: readers have their own clock, and may have been told since the step began."""
        self.expiry_ms = self._expiry.now_ms()

    @property
    def trusted_offset_ms(self) -> int:
        """Wall minus monotonic time, for the next life of this process."""
        return self._expiry.trusted_offset_ms()
