"""The answer to a lone write, taken without a turn of the event loop.

A write that is the only request of its frontend has its answer within 100 to 300 µs. To fall asleep for that time and
to wake up again takes longer. So the frontend looks at the ring of answers instead, for LOOK_NS at most:

    push ─▶ signal the shard ─▶ look … answer is there ─▶ take it, the task goes on at once
                                  └ LOOK_NS are over ───▶ wait as all requests do; no more looks for PAUSE_NS

A look needs a core of its own beside the shard's. If it finds nothing, there was none, or the shard had more to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Final

from topics.shm.memory import FENCE_IS_FULL
from topics.shm.ring import Ring, Wake

LOOK_NS: Final = 500_000
SHORT_BYTES: Final = 16 * 1024
"""A longer write keeps its shard busy for about as long as a look, or longer."""
PAUSE_NS: Final = 100_000_000
"""Looks that never find anything cost a busy frontend half a percent of its time."""


class LoneWrites:
    """Says which write is alone, and looks for its answer. While it looks, shards do not signal this frontend."""

    def __init__(self, wake: Wake, arrived: Callable[[], int], now_ns: Callable[[], int] = perf_counter_ns) -> None:
        """`arrived` returns how many requests this frontend has had so far."""
        self._wake = wake
        self._arrived = arrived
        self._now_ns = now_ns
        self._can_look = FENCE_IS_FULL and len(os.sched_getaffinity(0)) > 1
        self._arrived_before = 0
        self._paused_until_ns = 0

    def is_alone(self, unanswered: int, size_bytes: int) -> bool:
        """Return whether to look for the answer to a write of `size_bytes` that is about to be sent: it is short, no
        request is `unanswered`, and no other one has come since the write before it.
        """
        arrived = self._arrived()
        before, self._arrived_before = self._arrived_before, arrived
        is_alone = arrived == before + 1 and not unanswered and size_bytes <= SHORT_BYTES
        return is_alone and self._can_look and self._now_ns() >= self._paused_until_ns

    def begin(self) -> None:
        """Begin a look, before the write is pushed. `look` ends it."""
        self._wake.begin_look()

    def look(self, answers: Ring, every_ring: Sequence[Ring]) -> bool:
        """Look until `answers` has a message or LOOK_NS are over, and end the look. Return whether any ring has a
        message now: shards do not signal messages that come during a look.
        """
        ends_ns = self._now_ns() + LOOK_NS
        while answers.empty and self._now_ns() < ends_ns:
            pass
        if answers.empty:
            self._paused_until_ns = ends_ns + PAUSE_NS
        self._wake.end_look()
        return any(not ring.empty for ring in every_ring)
