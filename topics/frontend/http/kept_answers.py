"""Answers that the clients of one process have not read to the end: counted together, and bounded.

    add ─▶ too many bytes: cut the client that has read nothing for longest ─▶ check again every CHECK_S until they fit
      └─▶ remove: it is read, or its client is gone

An answer counts with its whole length until then, however much of it is read: transports and frames refer to the bytes
that were written, and all of them are in memory as long as one is still to be sent.

These answers exist already, so nobody can be asked to wait for room. Those that can are asked elsewhere: handlers of
long answers on HTTP/2 (`responses.reserve_room`), and event streams (`live/channels.py`).
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from topics.core.clock import Clock
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.entry.stalled_clients import StalledClients

COUNTED_FROM_BYTES: Final = 128 * 1024
"""Shorter answers are not counted: they are little more than the 64 KiB that may wait for any client."""
CHECK_S: Final = 1.0


class AnswerHolder(Protocol):
    """A connection, or stream of HTTP/2, that keeps an answer for its client."""

    @property
    def buffered_bytes(self) -> int: ...

    def abort(self) -> None:
        """Cut it. What waits for the client is lost."""


class KeptAnswers:
    """The answers that the clients of one process have not read to the end. Used on its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.budget = Budget(limits.KEPT_ANSWERS)
        self.high_bytes = self.budget.most_bytes // 2
        self._len_bytes: dict[AnswerHolder, int] = {}
        self._stalled = StalledClients[AnswerHolder](
            self.budget, self._len_bytes.__getitem__, lambda holder: -holder.buffered_bytes
        )
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """Length of all answers that are not read to the end."""
        return self.budget.held_bytes

    def add(self, holder: AnswerHolder, written_bytes: int = 0) -> None:
        """Count the answer of a client that is behind. `written_bytes` is the length of the last write, partly read."""
        len_bytes = max(holder.buffered_bytes, written_bytes)
        if len_bytes >= COUNTED_FROM_BYTES and holder not in self._len_bytes:
            self._len_bytes[holder] = len_bytes
            self._stalled.add(holder, self._clock.monotonic_ms())
            self._bound()

    def remove(self, holder: AnswerHolder) -> None:
        """Forget an answer (read to its end, or its client is gone). Idempotent."""
        self._stalled.remove(holder)
        self._len_bytes.pop(holder, None)

    def _bound(self) -> None:
        """Cut clients while their answers are too long together, longest without progress first.

        Above `high_bytes` those are cut that have read nothing for STALL_CUT_MS. Above the whole budget others are cut
        as well: all of them may have come a moment ago, or read a byte now and then.
        """
        budget = self.budget
        most_bytes, high_bytes = budget.most_bytes, self.high_bytes
        # A check is of all answers, maybe thousands: below the whole budget there is one in CHECK_S.
        if budget.held_bytes > most_bytes or (budget.held_bytes > high_bytes and self._timer is None):
            now_ms = self._clock.monotonic_ms()
            self._stalled.timed_out(now_ms)  # notices who has made progress
            self._cut(self._stalled.to_cut(budget.held_bytes - high_bytes, now_ms))
            if budget.held_bytes > most_bytes:
                # A little more than needed, so that the next answer does not cause the next check.
                self._cut(self._stalled.to_cut(budget.held_bytes - most_bytes // 16 * 15, now_ms, stalled_ms=0))
        if budget.held_bytes > high_bytes and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer = None
        self._bound()

    def _cut(self, holders: list[AnswerHolder]) -> None:
        for holder in holders:
            self.remove(holder)
            holder.abort()
