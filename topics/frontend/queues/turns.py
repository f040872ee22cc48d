"""Whose turn it is, of the readers that one frontend has at a named cursor (api §10).

Only one of them can have what is next: the others would read the same page and throw it away. So they wait for each
other, first come, first served, from looking where the cursor is until it is moved; the answers go out side by side.
Readers at other frontends are not waited for: no more can be in each other's way than there are frontends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from topics.core.errors import TopicsError
from topics.frontend import limits
from topics.shm.cursor_messages import CursorMoved

STUCK_RETRY_AFTER_MS: Final = 1000


class Turn:
    """At one cursor, for as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.readers = 0
        self.served = 0
        """Readers that had it, and were not stuck in it."""
        self.left_at: CursorMoved | None = None
        """Where the reader before left the cursor. Another frontend's, or a `PUT`, may have moved it since."""


class Turns:
    """Of all cursors at one frontend."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s`: how long one may wait."""
        self._wait_s = wait_s
        self._turns: dict[tuple[str, str], Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @asynccontextmanager
    async def of(self, topic: str, cursor: str) -> AsyncIterator[Turn]:
        """Waits for it; `throttled` when too many do, or it does not come though others had theirs."""
        turn = self._turns.get((topic, cursor))
        if turn is None:
            turn = self._turns[topic, cursor] = Turn()
        elif turn.readers >= limits.CURSOR_READERS.most_count:
            raise too_many_readers(topic, cursor)
        turn.readers += 1
        try:
            if turn.readers > 1:  # between two of them the lock seems to be free
                await self._wait(turn, topic, cursor)
            else:
                await turn.lock.acquire()  # at once
            try:
                yield turn
                turn.served += 1
            finally:
                turn.lock.release()
        finally:
            turn.readers -= 1
            if not turn.readers:
                del self._turns[topic, cursor]

    async def _wait(self, turn: Turn, topic: str, cursor: str) -> None:
        served = turn.served
        try:
            async with asyncio.timeout(self._wait_s):
                await turn.lock.acquire()
        except TimeoutError:
            if turn.served == served:
                # They are not too many: the shard or the cold store does not answer. Nothing of this read was done,
                # and that has to be said: another code leaves it open, and a client must not ask again by itself.
                raise TopicsError(
                    "throttled",
                    f"who reads cursor {cursor!r} of topic {topic!r} before this one gets no answer; nothing of this"
                    " read was done",
                    {"retry_after_ms": STUCK_RETRY_AFTER_MS},
                ) from None
            raise too_many_readers(topic, cursor) from None


def too_many_readers(topic: str, cursor: str) -> TopicsError:
    """To be asked again a moment later."""
    return TopicsError(
        "throttled", f"too many readers move cursor {cursor!r} of topic {topic!r}", {"retry_after_ms": 10}
    )
