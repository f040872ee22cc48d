"""Time in which this process was there for its clients: what deadlines of clients are counted in.

A process that was stopped (SIGSTOP, a paused machine), or whose event loop was held up, finds its timers overdue when
it wakes, and what clients sent meanwhile still unread behind them: by any other clock it would cut those who have done
all that they had to.

    loop       │ ·  ·  ·  ·  │ (stopped) ………………………… │ ·  ·  ·        looked at every LOOK_S
    attended   0  .5  1  1.5 2                         2  .5  3        the gap is left out: `missed_s`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 0.5
GAP_S: Final = 1.5
"""So long between two looks: nobody was there. A loop that is always that slow gives nobody up."""


class AttendedClock:
    """A `Clock` whose monotonic time stands still while nobody looks at it; `attend` does, for as long as it runs.

    `time_s` is a monotonic time in seconds, the event loop's. Who reads it anyhow, and often, takes `missed_s` from it:
    that is the attended time, or for a moment after a gap a later one. Whoever judges asks `now_s` or `monotonic_ms`.
    """

    def __init__(self, time_s: Callable[[], float]) -> None:
        self.time_s = time_s
        self.missed_s = 0.0
        self._looked_s = time_s()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """A look: a gap that ends here is found."""
        time_s = self.time_s()
        if time_s - self._looked_s > GAP_S:
            self.missed_s += time_s - self._looked_s
        self._looked_s = time_s
        return int((time_s - self.missed_s) * 1000)

    def now_s(self) -> float:
        """`monotonic_ms`, not rounded."""
        self.monotonic_ms()
        return self._looked_s - self.missed_s

    async def attend(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self.monotonic_ms()
            await asyncio.sleep(LOOK_S)
