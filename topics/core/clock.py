"""Time as the rules see it: passed in, so that tests own it."""

from __future__ import annotations

import time
from typing import Protocol


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
