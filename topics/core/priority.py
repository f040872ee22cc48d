"""The priority of a topic, by which delivery is scheduled and which clients are shown (api §1). Pure.

effective priority = manual (−1000 … 1000), or by recency (500 halved every 30 s, 0 after 5 min)
                   + age (100 for each second it waits to be delivered, at most 1000 after 10 s)

band       0        1        2        3       4
priority   ≥ 750    ≥ 500    ≥ 250    ≥ 0     < 0
weight     8        4        2        1       1
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from topics.core.config import TopicConfig

RECENT_PRIORITY: Final = 500
RECENT_HALF_LIFE_MS: Final = 30_000
RECENT_MS_MAX: Final = 300_000
AGE_MAX: Final = 1000
AGE_FULL_MS: Final = 10_000
"""Wait after which anything is in the first band whatever its priority: even −1000 is not starved."""
AGE_MS_PER_POINT: Final = AGE_FULL_MS // AGE_MAX

FLOORS: Final = (750, 500, 250, 0)
"""Least priority of each band but the last."""
WEIGHTS: Final = (8, 4, 2, 1, 1)
BANDS: Final = len(WEIGHTS)
TOP: Final = 0
LAST: Final = BANDS - 1
_ASCENDING: Final = sorted(FLOORS)


def base_priority(config: TopicConfig, last_read_ms: int, now_ms: int) -> int:
    """Return the priority without age: manual, or by the time of the last read (wall clock, 0 = never)."""
    if config.priority is not None:
        return config.priority
    idle_ms = max(0, now_ms - last_read_ms)
    if not config.auto_priority or not last_read_ms or idle_ms >= RECENT_MS_MAX:
        return 0
    return round(RECENT_PRIORITY * 2 ** (-idle_ms / RECENT_HALF_LIFE_MS))


def age(waited_ms: int) -> int:
    """Return what a wait adds to a priority."""
    return min(AGE_MAX, max(0, waited_ms) // AGE_MS_PER_POINT)


def below_zero_ms(base: int) -> int:
    """Return the wait after which age has raised this base priority to zero."""
    return max(0, -base) * AGE_MS_PER_POINT


def band_of(priority: int, waited_ms: int = 0) -> int:
    """Return the band of an effective priority, after a wait (0 for one that does not wait)."""
    if waited_ms >= AGE_FULL_MS:
        return TOP
    return LAST - bisect_right(_ASCENDING, priority)
