"""What the clients of one process have not taken of their answers: counted together, and bounded.

    hold ─▶ too much of it: cut who has taken nothing for longest ─▶ and again every LOOK_S, while it is too much
      └─▶ let_go: it is taken, or its client is gone

An answer counts whole until then, however much of it is taken: transports and frames refer to the bytes that were
written, and as long as one of them is to be sent all of them are in memory.

It is there already, whoever made it: nobody can be asked to wait for room, as those are who make long answers beside
others on one connection (`responses.reserve_room`) or write into event streams (`live/pulse.py`).
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from topics.core.clock import Clock
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget
from topics.frontend.live.pulse import Stalls

COUNTED_FROM_BYTES: Final = 128 * 1024
"""What is shorter is not counted: it is little more than the 64 KiB that wait for any client."""
LOOK_S: Final = 1.0


class AnswerHolder(Protocol):
    """Who keeps an answer for its client: a connection, or a stream of HTTP/2."""

    @property
    def buffered_bytes(self) -> int: ...

    def abort(self) -> None:
        """Cut, whatever waits for the client is gone."""
        ...


class KeptAnswers:
    """What all clients of one process have not taken of their answers. Called on its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.budget = Budget(limits.KEPT_ANSWERS)
        self.high_bytes = self.budget.most_bytes // 2
        self._len_bytes: dict[AnswerHolder, int] = {}
        self._stalls = Stalls[AnswerHolder](
            self.budget, self._len_bytes.__getitem__, lambda holder: -holder.buffered_bytes
        )
        self._look_timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """All answers that are not taken to their end."""
        return self.budget.held_bytes

    def hold(self, holder: AnswerHolder, written_bytes: int = 0) -> None:
        """Its client is behind; `written_bytes` is the length of what was written last, of which it has some."""
        len_bytes = max(holder.buffered_bytes, written_bytes)
        if len_bytes >= COUNTED_FROM_BYTES and holder not in self._len_bytes:
            self._len_bytes[holder] = len_bytes
            self._stalls.note(holder, self._clock.monotonic_ms())
            self._bound()

    def let_go(self, holder: AnswerHolder) -> None:
        """Its client has caught up, or is gone. Can be repeated."""
        self._stalls.end(holder)
        self._len_bytes.pop(holder, None)

    def _bound(self) -> None:
        """Cut whose answers are too much, longest without progress first, and look again while they still are.

        Beyond `high_bytes` those are cut who have taken nothing for STALL_CUT_MS; beyond the whole budget others, too:
        all may have come a moment ago, or take a byte now and then.
        """
        budget = self.budget
        most_bytes, high_bytes = budget.most_bytes, self.high_bytes
        # There may be thousands, and a look is at all of them: below the most there may be, once in LOOK_S.
        if budget.held_bytes > most_bytes or (budget.held_bytes > high_bytes and self._look_timer is None):
            now_ms = self._clock.monotonic_ms()
            self._stalls.over(now_ms)
            self._cut(self._stalls.holding(budget.held_bytes - high_bytes, now_ms))
            if budget.held_bytes > most_bytes:
                # A little more than must be: the next answer is not to be the reason for the next look.
                self._cut(self._stalls.holding(budget.held_bytes - most_bytes // 16 * 15, now_ms, still_ms=0))
        if budget.held_bytes > high_bytes and self._look_timer is None:
            self._look_timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._look_timer = None
        self._bound()

    def _cut(self, holders: list[AnswerHolder]) -> None:
        for holder in holders:
            self.let_go(holder)
            holder.abort()
