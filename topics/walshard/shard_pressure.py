"""A shard's pressure: the shard samples it, publishes it in its cell, and reacts as the ladder says.

While `deferring` is set in the cell, the shard does work for which nobody waits after everything else. Copies of
routers always come last.

Without pressure a group begins as soon as there is a request. Under pressure groups begin at least a commit window
apart, so that each has more requests for one write, one sync and one wake-up of a frontend. The first request after a
quiet time, such as a lone durable write, is still served at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from topics.core.governor import FULL_FROM, INTERVAL_MS, Brake, Governor, Ladder, Sample
from topics.log import get_logger
from topics.shm.control import ControlPage, ProcessCell
from topics.walshard.commit.shard_rings import ShardRings

log = get_logger()
T = TypeVar("T")

GATHERED_BYTES: Final = 256 * 1024
"""Waiting bytes from which on a group is large enough, as with a ring that is half full: it begins at once."""
LOOK_NS: Final = 1_000_000
"""Interval at which a waiting shard checks how much waits: a small ring is full long before a window ends."""
INTERVALS_MAX: Final = 50


@dataclass(eq=False)
class ShardPressure:
    """Samples the pressure of one shard and spaces its groups. `now_ns` is monotonic; `sleep` takes seconds."""

    _control: ControlPage
    _cell: ProcessCell
    _rings: ShardRings
    _brake: Brake
    _lag_bytes: Callable[[], int]
    _now_ns: Callable[[], int] = time.monotonic_ns
    _sleep: Callable[[float], None] = time.sleep
    _governor: Governor = field(default_factory=Governor)
    _ladder: Ladder = field(default_factory=Ladder)
    _slept_ns: int = 0
    _longest_ns: int = 0
    _fullest: float = 0.0

    def __post_init__(self) -> None:
        self._sampled_ns = self._group_ns = self._now_ns()

    def gather(self) -> None:
        """Wait for the rest of the commit window, if there is one and it is worth it."""
        window_ns, rings = self._ladder.window_us * 1000, self._rings
        if window_ns and not rings.idle:
            self._pause(
                self._group_ns + window_ns, lambda: rings.pending_bytes >= GATHERED_BYTES or rings.fullness >= FULL_FROM
            )

    def group(self, step: Callable[[], bool]) -> bool:
        """Time one step of the shard. Return whether it did something."""
        fullness = self._rings.fullness
        began_ns = self._now_ns()
        worked = step()
        if worked:
            self._fullest = max(self._fullest, fullness)
            self._group_ns = began_ns
            took_ns = self._now_ns() - began_ns
            self._longest_ns = max(self._longest_ns, took_ns)
            if self._brake.share:
                # No pause while the compactor waits for an answer: its work is what ends the pauses.
                self._pause(self._now_ns() + self._brake.pause_ns(took_ns), lambda: self._rings.compactor_asks)
        return worked

    def _pause(self, ends_ns: int, is_over: Callable[[], bool]) -> None:
        """Sleep until then, or until `is_over`."""
        began_ns = now_ns = self._now_ns()
        while now_ns < ends_ns and not is_over():
            self._sleep(min(ends_ns - now_ns, LOOK_NS) / 1e9)
            now_ns = self._now_ns()
        self._slept_ns += now_ns - began_ns

    def aside(self, step: Callable[[], T]) -> T:
        """Sleep, or do work for which nobody waits. Its time does not count as pressure."""
        began_ns = self._now_ns()
        result = step()
        self._slept_ns += self._now_ns() - began_ns
        return result

    def sample(self) -> None:
        """Take a sample once in INTERVAL_MS. To be called often."""
        now_ns = self._now_ns()
        elapsed_ns = now_ns - self._sampled_ns
        if elapsed_ns < INTERVAL_MS * 1_000_000:
            return
        busy = min(1.0, max(0.0, 1 - self._slept_ns / elapsed_ns))
        sample = Sample(self._longest_ns / 1e6, self._fullest, busy)
        # After a long sleep, make up for the samples that it left out.
        for _ in range(min(INTERVALS_MAX, elapsed_ns // (INTERVAL_MS * 1_000_000))):
            pressure = self._governor.sample(sample)
        self._sampled_ns = now_ns
        self._slept_ns = self._longest_ns = 0
        self._fullest = 0.0
        cell = self._cell
        self._update_brake()
        cell.set("pressure_ppm", round(pressure * 1e6))  # first: the service's pressure is that of all cells
        self._ladder.update(max(pressure, self._control.pressure()))
        cell.set("busy_ppm", round(busy * 1e6))
        cell.set("commit_window_us", self._ladder.window_us)
        cell.set("deferring", int(self._ladder.deferring))

    def _update_brake(self) -> None:
        was_on = self._brake.share > 0
        lag_bytes = self._lag_bytes()
        self._brake.update(lag_bytes)
        self._cell.set("brake_ppm", round(self._brake.share * 1e6))
        if was_on != (self._brake.share > 0):
            note = "the compactor keeps pace again" if was_on else "writers are slowed: the compactor is behind"
            log.info(note, lag_bytes=lag_bytes)
