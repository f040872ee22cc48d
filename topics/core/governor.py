"""How hard a process is pressed, and what is done about it: pure, one sample every INTERVAL_MS.

    pressure      0 ─────── 0.2 ─────────── 0.4 ─────────── 0.6 ───── 0.8 ─────── 0.95 ─ 1
    frames        at once   │ coalesced, up to 20 ms ──────────────────────────────────▶
    commit window           .               │ 0.5 ms … 10 ms ─────────────────────────▶
    deferring               .               .               ◀─ ends   │ begins ────────▶   negative priorities paused
    pressed                 .               .               .         .           │ ─▶     429 soon when a ring is full

A process knows its own pressure (`Governor`); all act on that of the service, the greatest of all processes (`Ladder`).

Only waiting is pressure: a process that is busy all the time and keeps up gets 0.2 and no more, so nothing is throttled
for being well used.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

INTERVAL_MS: Final = 100
LATENCY_MS: Final = (5.0, 500.0)
"""Waiting that is no pressure yet, and that is all of it; between them by its logarithm."""
FULL_FROM: Final = 0.5
"""A queue that is less than half full says nothing."""
BUSY_FROM: Final = 0.5
BUSY_MOST: Final = 0.2
RISE: Final = 0.5
FALL: Final = 0.25
"""How much of the way to what was sampled the pressure goes at once."""

COALESCE_FROM: Final = 0.2
COALESCE_MS_MAX: Final = 20.0
WINDOW_FROM: Final = 0.4
WINDOW_US: Final = (500, 10_000)
DEFER_FROM: Final = 0.8
DEFER_UNTIL: Final = 0.6
PRESSED_FROM: Final = 0.95
RETRY_AFTER_MS: Final = (100, 1000)


class Sample(NamedTuple):
    """What one interval was like: how long what is served had waited, how full (0 to 1) the fullest queue is, and how
    much of the time was spent computing or waiting for the disk.
    """

    latency_ms: float
    fullness: float
    busy: float


def sampled_pressure(sample: Sample) -> float:
    """0 to 1, of one interval alone."""
    quick_ms, slow_ms = LATENCY_MS
    latency = math.log(max(sample.latency_ms, quick_ms) / quick_ms) / math.log(slow_ms / quick_ms)
    waiting = min(1.0, max(latency, _part(sample.fullness, FULL_FROM)))
    return waiting + BUSY_MOST * _part(sample.busy, BUSY_FROM) * (1 - waiting)


class Governor:
    """One process's pressure over time."""

    def __init__(self) -> None:
        self.pressure = 0.0

    def sample(self, sample: Sample) -> float:
        """The pressure after one more interval."""
        now = sampled_pressure(sample)
        self.pressure += (now - self.pressure) * (RISE if now > self.pressure else FALL)
        if self.pressure < 0.001:
            self.pressure = 0.0
        return self.pressure


class Ladder:
    """What a process does under the pressure of the service."""

    def __init__(self) -> None:
        self.coalesce_ms = 0.0
        """Frames of one topic are at least so far apart."""
        self.window_us = 0
        """Groups begin at least so far apart."""
        self.deferring = False
        self.pressed = False
        self.retry_after_ms = RETRY_AFTER_MS[0]
        """What is refused should not come again sooner."""

    def climb(self, pressure: float) -> None:
        """Up or down, as the pressure of the service is now."""
        self.coalesce_ms = COALESCE_MS_MAX * _part(pressure, COALESCE_FROM)
        least, most = WINDOW_US
        above = pressure > WINDOW_FROM
        self.window_us = least + round((most - least) * _part(pressure, WINDOW_FROM)) if above else 0
        self.deferring = pressure > (DEFER_UNTIL if self.deferring else DEFER_FROM)
        self.pressed = pressure >= PRESSED_FROM
        least, most = RETRY_AFTER_MS
        self.retry_after_ms = least + round((most - least) * pressure)


def _part(value: float, start: float) -> float:
    """How much of the way from `start` to 1."""
    return min(1.0, max(0.0, (value - start) / (1 - start)))
