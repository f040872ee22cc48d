"""The time of a step of the shard: one look at the clock for everything in it."""

from __future__ import annotations

from topics.core.clock import Clock, ExpiryClock
from topics.core.job import Now


class StepClock:
    """The time of the current step. All writes of a group have one commit time, its leases end together.

    `now` is the moment of the step on both clocks, `expiry_ms` the wall time by which records have outlived `ttl_ms`.
    """

    __slots__ = ("_clock", "_expiry", "_kept_ids", "expiry_ms", "now")

    def __init__(self, clock: Clock, expiry: ExpiryClock) -> None:
        self._clock = clock
        self._expiry = expiry
        self._kept_ids: set[int] = set()
        self.look()

    def look(self) -> None:
        """Begin a step."""
        self.now = now = Now(self._clock.now_ms(), self._clock.monotonic_ms())
        self.expiry_ms = self._expiry.at(now.wall_ms, now.mono_ms)
        if self._kept_ids:
            self._kept_ids.clear()

    def has_taken(self, most_ms: int) -> bool:
        """Return whether the step has taken `most_ms` or more."""
        return self._clock.monotonic_ms() - self.now.mono_ms >= most_ms

    def look_at_expiry(self) -> None:
        """Renew `expiry_ms`. Readers have their own clock, and may have been told of a later time since `look`."""
        self.expiry_ms = self._expiry.now_ms()

    def keep_expired(self, topic_id: int) -> None:
        """Let nothing of a topic expire for the rest of the step: the log has refused it, and requests go on."""
        self._kept_ids.add(topic_id)

    def expiry_ms_of(self, topic_id: int) -> int:
        """Return `expiry_ms`, or 0 (nothing has expired) for a topic whose expiry the log has refused in this step."""
        return 0 if topic_id in self._kept_ids else self.expiry_ms

    @property
    def trusted_offset_ms(self) -> int:
        """Wall minus monotonic time, for the next life of this process."""
        return self._expiry.trusted_offset_ms()
