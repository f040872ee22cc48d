"""Clocks, passed in so that tests own the time, and the time by which records expire. Pure.

Commit times and schedules go by the wall clock. Only expiry goes by `ExpiryClock`: the wall clock may jump forward,
because a virtual machine was resumed or somebody set it wrong, and every topic with a `ttl_ms` would lose its records
at once and for good. The monotonic clock tells a jump from time that has passed:

    wall            ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄╭──────────────── forward by more than STEP_MAX_MS
                                    │        ╭─────── after SETTLE_MS: this is the time
    expires by      ────────────────┴────────╯        in between: as the monotonic clock has it

If somebody puts the wall clock back within that time, nothing has happened. The clock follows steps back and small
steps at once.

A service that starts compares the wall clock with the time that the one before it trusted (`offset_at_start`). On the
same boot of the machine the monotonic clock went on meanwhile, so the time without a service counts as time that has
passed. After another boot nobody can tell: a wall clock more than AWAY_MAX_MS ahead of the last known time is held for
SETTLE_MS as well.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple, Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch; may step in either direction."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; never steps."""
        ...


class SystemClock:
    """The one clock of production."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


STEP_MAX_MS: Final = 60_000
"""The two clocks may drift apart so far between two looks; NTP corrects a larger error by a step only."""
SETTLE_MS: Final = 600_000
"""Time for somebody to notice a wrong clock and put it right."""
AWAY_MAX_MS: Final = 600_000
"""A machine needs time to boot, and data need time to move to another one. Expiry that comes too early by so much is
little beside a hold at each boot.
"""


class TrustedTime(NamedTuple):
    """The time that a service trusted: `wall_ms` when the monotonic clock of that boot of its machine was at
    `monotonic_ms`.
    """

    boot_id: str
    wall_ms: int
    monotonic_ms: int


def offset_at_start(last: TrustedTime | None, boot_id: str, clock: Clock) -> int | None:
    """Returns the offset that a service trusts when it begins: wall minus monotonic time. None: it trusts the clock as
    it is.
    """
    if last is None:
        return None
    mono_ms = clock.monotonic_ms()
    if last.boot_id == boot_id and last.monotonic_ms <= mono_ms:
        return last.wall_ms - last.monotonic_ms
    if clock.now_ms() - last.wall_ms <= AWAY_MAX_MS:
        return None
    return last.wall_ms - mono_ms


class Warn(Protocol):
    """A function that logs a warning, such as `structlog`'s."""

    def __call__(self, event: str, **values: object) -> object: ...


class ExpiryClock:
    """A `Clock` for expiry. Look at it now and then: everything between two looks counts as one step.

    `offset_ms` is the trusted wall time minus monotonic time. It is None before the first look, which trusts the clock.
    A process that is started again is given the offset that it trusted before.
    """

    def __init__(self, clock: Clock, warn: Warn, offset_ms: int | None = None) -> None:
        self.offset_ms = offset_ms
        self._clock = clock
        self._warn = warn
        self._ahead_offset_ms = 0
        """The offset at which somebody put the wall clock. The next field is when that was (monotonic), None while it
        is trusted.
        """
        self._ahead_since_ms: int | None = None

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def look(self) -> int:
        """Returns the trusted wall time minus monotonic time, for the next life of this process."""
        self.now_ms()
        assert self.offset_ms is not None
        return self.offset_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return self.at(self._clock.now_ms(), self._clock.monotonic_ms())

    def at(self, wall_ms: int, mono_ms: int) -> int:
        """`now_ms`, for a caller that has just looked at both clocks."""
        offset_ms = wall_ms - mono_ms
        trusted_ms = offset_ms if self.offset_ms is None else self.offset_ms
        forward_ms = offset_ms - trusted_ms
        if forward_ms <= STEP_MAX_MS:
            if self._ahead_since_ms is not None:
                self._warn("the wall clock was put back, nothing has expired by the time it had")
        elif self._ahead_since_ms is None or abs(offset_ms - self._ahead_offset_ms) > STEP_MAX_MS:
            self._ahead_offset_ms, self._ahead_since_ms = offset_ms, mono_ms
            self._warn("the wall clock was put forward, nothing expires by it yet", by_ms=forward_ms, yet_ms=SETTLE_MS)
            return mono_ms + trusted_ms
        elif mono_ms - self._ahead_since_ms < SETTLE_MS:
            return mono_ms + trusted_ms
        else:
            self._warn("the wall clock has stayed where it was put, records expire by it now", by_ms=forward_ms)
        self.offset_ms, self._ahead_since_ms = offset_ms, None
        return wall_ms
