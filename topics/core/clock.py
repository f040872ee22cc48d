"""Clocks (passed in, so that tests own the time), the time by which records expire, the pause before a retry. Pure.

Commit times and schedules use the wall clock. Only expiry uses `ExpiryClock`: the wall clock may jump forward, because
a virtual machine was resumed or somebody set it wrong, and every topic with a `ttl_ms` would lose its records at once
and for good. The monotonic clock tells a jump from time that has passed:

    wall            ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄╭──────────────── jumps forward by more than STEP_MAX_MS
                                    │        ╭─────── after SETTLE_MS: the jump is trusted
    expires by      ────────────────┴────────╯        in between: the monotonic clock goes on

If somebody puts the wall clock back within SETTLE_MS, nothing has expired. Steps back and small steps count at once.

A service that starts compares the wall clock with the time that the service before it trusted (`offset_at_start`). On
the same boot of the machine the monotonic clock kept running, so the time without a service counts as time that has
passed. After another boot nobody can tell: a wall clock more than AWAY_MAX_MS ahead of the last known time is not
trusted for SETTLE_MS either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return milliseconds since the epoch; the value may step in either direction."""

    def monotonic_ms(self) -> int:
        """Return milliseconds since some start; the value never steps."""


class SystemClock:
    """The clock that production uses."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


def iso(ts_ms: int) -> str:
    """Return a time as people write it, in UTC."""
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


_DOUBLINGS_MAX: Final = 32


def doubled_ms(first_ms: int, failures: int, longest_ms: int) -> int:
    """Return the pause before a retry: `first_ms`, doubled for each of the `failures` before, at most `longest_ms`."""
    return min(longest_ms, first_ms << min(failures, _DOUBLINGS_MAX))


STEP_MAX_MS: Final = 60_000
"""The most that the two clocks may drift apart between two calls; NTP corrects a larger error by a step only."""
SETTLE_MS: Final = 600_000
"""Time for somebody to notice a wrong clock and put it right."""
AWAY_MAX_MS: Final = 600_000
"""Time for a machine to boot, or for data to move to another one. To expire records this much too early costs little.
"""


class TrustedTime(NamedTuple):
    """The last time that a service trusted, on both clocks of one boot of its machine."""

    boot_id: str
    wall_ms: int
    monotonic_ms: int


def offset_at_start(last: TrustedTime | None, boot_id: str, clock: Clock) -> int | None:
    """Return the offset (wall minus monotonic time) that a new service trusts, None if it trusts the wall clock."""
    if last is None:
        return None
    mono_ms = clock.monotonic_ms()
    if last.boot_id == boot_id and last.monotonic_ms <= mono_ms:
        return last.wall_ms - last.monotonic_ms
    if clock.now_ms() - last.wall_ms <= AWAY_MAX_MS:
        return None
    return last.wall_ms - mono_ms


class ExpiryClock:
    """A `Clock` for expiry. Ask it regularly: everything between two calls counts as one step.

    `offset_ms` is the trusted wall time minus monotonic time. It is None before the first call, which trusts the clock.
    A restarted process passes in the offset that it trusted before.
    """

    def __init__(self, clock: Clock, warn: Callable[..., object], offset_ms: int | None = None) -> None:
        self.offset_ms = offset_ms
        self._clock = clock
        self._warn = warn
        self._ahead_offset_ms = 0
        """Offset of a wall clock that was put forward and is not trusted yet."""
        self._ahead_since_ms: int | None = None
        """Monotonic ms at which it was put forward; None while the wall clock is trusted."""

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def trusted_offset_ms(self) -> int:
        """Return the trusted wall time minus monotonic time, for this process after a restart."""
        self.now_ms()
        assert self.offset_ms is not None
        return self.offset_ms

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""
        return self.at(self._clock.now_ms(), self._clock.monotonic_ms())

    def at(self, wall_ms: int, mono_ms: int) -> int:
        """Return `now_ms` for a caller that has just read both clocks."""
        offset_ms = wall_ms - mono_ms
        trusted_ms = offset_ms if self.offset_ms is None else self.offset_ms
        forward_ms = offset_ms - trusted_ms
        if forward_ms <= STEP_MAX_MS:
            if self._ahead_since_ms is not None:
                self._warn("the wall clock was put back in time: nothing has expired by the later time")
        elif self._ahead_since_ms is None or abs(offset_ms - self._ahead_offset_ms) > STEP_MAX_MS:
            self._ahead_offset_ms, self._ahead_since_ms = offset_ms, mono_ms
            self._warn("the wall clock was put forward: nothing expires by it yet", by_ms=forward_ms, wait_ms=SETTLE_MS)
            return mono_ms + trusted_ms
        elif mono_ms - self._ahead_since_ms < SETTLE_MS:
            return mono_ms + trusted_ms
        else:
            self._warn("the wall clock stayed forward: records expire by it now", by_ms=forward_ms)
        self.offset_ms, self._ahead_since_ms = offset_ms, None
        return wall_ms
