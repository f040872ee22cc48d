"""The pressure of a process (one sample every INTERVAL_MS), its consequences, and the brake of a shard. Pure.

    pressure      0 ─────── 0.2 ─────────── 0.4 ─────────── 0.6 ───── 0.8 ─────── 0.95 ─ 1
    frames        at once   │ coalesced, up to 20 ms ──────────────────────────────────▶
    commit window           .               │ 0.5 ms … 10 ms ─────────────────────────▶
    deferring               .               .               ◀─ ends   │ begins ────────▶   negative priorities paused
    pressed                 .               .               .         .           │ ─▶     429 soon when a ring is full

A process measures its own pressure (`Governor`). All processes act on the pressure of the service, which is the
greatest of theirs (`Ladder`). Only waiting is pressure: a process that is always busy but keeps up has 0.2 at most, so
high use alone throttles nothing.

The brake is independent of pressure. It slows a shard that writes faster than the compactor can follow, so that a start
never has much log to read.

    log behind the last snapshot    0 ──────── 4/5 of the limit ───────── the limit ────── 6/5 of the limit ──────▶
    pause for each ms of work       none       │ 0 ms … 4 ms ─────────────────── … 8 ms ─│ 8 ms ──────────────────▶

The pause comes behind the answers of a group. A client that writes now and then does not notice it. A client that
writes without a break is slowed to the pace of the compactor, which gets the processor meanwhile.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

INTERVAL_MS: Final = 100
LATENCY_MS: Final = (5.0, 500.0)
"""Latency of pressure 0 and of pressure 1; between them the pressure is linear in its logarithm."""
FULL_FROM: Final = 0.5
"""Fullness of a queue up to which it is no pressure."""
BUSY_FROM: Final = 0.5
BUSY_MOST: Final = 0.2
RISE: Final = 0.5
FALL: Final = 0.25
"""Share of the way to the sampled pressure that one sample goes, up (RISE) or down (FALL)."""

COALESCE_FROM: Final = 0.2
COALESCE_MS_MAX: Final = 20.0
WINDOW_FROM: Final = 0.4
WINDOW_US: Final = (500, 10_000)
DEFER_FROM: Final = 0.8
DEFER_UNTIL: Final = 0.6
PRESSED_FROM: Final = 0.95
RETRY_AFTER_MS: Final = (100, 1000)


class Sample(NamedTuple):
    """One interval: the wait of the served requests, the fullness (0 to 1) of the fullest queue, the busy share of
    time.
    """

    latency_ms: float
    fullness: float
    busy: float


def sampled_pressure(sample: Sample) -> float:
    """Return the pressure, 0 to 1, of one interval alone."""
    quick_ms, slow_ms = LATENCY_MS
    latency = math.log(max(sample.latency_ms, quick_ms) / quick_ms) / math.log(slow_ms / quick_ms)
    waiting = min(1.0, max(latency, _part(sample.fullness, FULL_FROM)))
    return waiting + BUSY_MOST * _part(sample.busy, BUSY_FROM) * (1 - waiting)


class Governor:
    """One process's pressure over time."""

    def __init__(self) -> None:
        self.pressure = 0.0

    def sample(self, sample: Sample) -> float:
        """Return the pressure after one more interval."""
        now = sampled_pressure(sample)
        self.pressure += (now - self.pressure) * (RISE if now > self.pressure else FALL)
        if self.pressure < 0.001:
            self.pressure = 0.0
        return self.pressure


class Ladder:
    """The measures that a process takes under the pressure of the service."""

    def __init__(self) -> None:
        self.coalesce_ms = 0.0
        """Least time between two frames of one topic."""
        self.window_us = 0
        """Least time between the beginnings of two groups."""
        self.deferring = False
        """True while topics of negative priority are paused."""
        self.pressed = False
        """True while a request that finds a full ring is refused soon."""
        self.retry_after_ms = RETRY_AFTER_MS[0]
        """Time after which a refused request may be repeated."""

    def update(self, pressure: float) -> None:
        """Adapt the measures to the pressure of the service now."""
        self.coalesce_ms = COALESCE_MS_MAX * _part(pressure, COALESCE_FROM)
        least, most = WINDOW_US
        above = pressure > WINDOW_FROM
        self.window_us = least + round((most - least) * _part(pressure, WINDOW_FROM)) if above else 0
        self.deferring = pressure > (DEFER_UNTIL if self.deferring else DEFER_FROM)
        self.pressed = pressure >= PRESSED_FROM
        least, most = RETRY_AFTER_MS
        self.retry_after_ms = least + round((most - least) * pressure)


def _part(value: float, start: float) -> float:
    """Return the share of the way from `start` to 1 that `value` has gone."""
    return min(1.0, max(0.0, (value - start) / (1 - start)))


FROM_SHARE: Final = 0.8
"""The share of the limit from which on there are pauses."""
PAUSE_PER_WORK: Final = 8.0
"""The pause for each unit of work under full braking: a ninth of the time is work then."""
FULL_SHARE: Final = 1.2
"""The share of the limit from which on the brake is full."""
PAUSE_MAX_NS: Final = 200_000_000


class Brake:
    """The pauses of one shard. `share` is the part of full braking that is in force, 0 to 1."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` of log may lie behind the last snapshot; 0: any number."""
        self._limit_bytes = limit_bytes
        self.share = 0.0

    def update(self, lag_bytes: int) -> None:
        """Adapt to the bytes that lie behind the last snapshot now."""
        if self._limit_bytes:
            above = lag_bytes / self._limit_bytes - FROM_SHARE
            self.share = min(1.0, max(0.0, above / (FULL_SHARE - FROM_SHARE)))

    def pause_ns(self, worked_ns: int) -> int:
        """Return the pause after so much work."""
        return min(PAUSE_MAX_NS, round(worked_ns * PAUSE_PER_WORK * self.share))
