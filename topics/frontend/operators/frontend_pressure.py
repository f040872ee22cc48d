"""Samples a frontend's pressure, publishes it in the cell, and slows delivery and writes as the ladder says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from topics.core.governor import INTERVAL_MS, Governor, Ladder, Sample
from topics.core.scheduler import LAST
from topics.frontend.live.delivery import Hub
from topics.frontend.shards.gateway import Gateway
from topics.shm.control import ControlPage, ProcessCell

READY_FULL: Final = 10_000
"""Number of topics that wait to be delivered at which the queue counts as full."""


def ready_fullness(depths: Sequence[int]) -> float:
    """Return the fullness of the queue of topics, 0 to 1; `depths` are the topics that wait in each band. The last band
    does not count: its topics wait without need, and pressure that pauses them would keep itself up.
    """
    return min(1.0, sum(depths[:LAST]) / READY_FULL)


class FrontendPressure:
    """The pressure of one frontend. It runs on the event loop that it measures: its delay is the delay of all tasks."""

    def __init__(self, control: ControlPage, cell: ProcessCell, hub: Hub, gateway: Gateway) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._cell = cell
        self._hub = hub
        self._gateway = gateway
        self._governor = Governor()
        self._ladder = Ladder()
        self._due_s = self._sampled_s = self._loop.time()
        self._cpu_s = time.process_time()

    def start(self) -> None:
        """Sample until the loop ends."""
        self._due_s = self._loop.time() + INTERVAL_MS / 1000
        self._loop.call_at(self._due_s, self._sample)

    def _sample(self) -> None:
        now_s, cpu_s = self._loop.time(), time.process_time()
        lag_ms = max(0.0, now_s - self._due_s) * 1000
        ready = self._hub.ready
        waited_ms = ready.waited_ms / ready.waits if ready.waits else 0.0  # the mean since the last sample
        ready.waits = ready.waited_ms = 0
        busy = min(1.0, (cpu_s - self._cpu_s) / max(0.001, now_s - self._sampled_s))
        depths = ready.depths()
        fullness = max(ready_fullness(depths), self._gateway.fullness)
        pressure = self._governor.sample(Sample(max(lag_ms, waited_ms), fullness, busy))
        cell = self._cell
        cell.set("pressure_ppm", round(pressure * 1e6))  # first: the service's pressure is that of all cells
        ladder = self._ladder
        ladder.update(max(pressure, self._control.pressure()))
        self._hub.coalesce_ms = ladder.coalesce_ms
        self._hub.pause(ladder.deferring)
        self._gateway.pressed = ladder.pressed
        self._gateway.retry_after_ms = ladder.retry_after_ms
        cell.set("coalesce_us", round(ladder.coalesce_ms * 1000))
        cell.set("deferring", int(ladder.deferring))
        cell.set("busy_ppm", round(busy * 1e6))
        cell.set("loop_lag_us", round(lag_ms * 1000))
        cell.set("scheduling_us", round(waited_ms * 1000))
        cell.set("ready_topics", len(ready))
        for band, depth in enumerate(depths):
            cell.set(f"ready_band_{band}", depth)
        self._sampled_s, self._cpu_s = now_s, cpu_s
        self.start()
