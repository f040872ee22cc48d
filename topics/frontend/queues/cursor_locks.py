"""The locks of named cursors: the readers of one cursor at one frontend have it one after the other (api §10).

A reader holds its lock from looking where the cursor is until the cursor is moved. Only one reader can have the next
page, so others that read at the same time would throw theirs away. Readers at other frontends do not wait for each
other: there are never more of those in conflict than there are frontends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from topics.core.errors import TopicsError
from topics.frontend.entry import limits
from topics.shm.queue_messages import CursorMoved

STUCK_RETRY_AFTER_MS: Final = 1000


@dataclass(eq=False)
class CursorLock:
    """The lock of one cursor, for as long as a reader has it or waits for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    readers: int = 0
    served: int = 0
    """The number of readers that had the lock and got an answer."""
    left_at: CursorMoved | None = None
    """The cursor as the last reader left it. A reader at another frontend, or a `PUT`, may have moved it since."""


class CursorLocks:
    """The locks of all cursors that are read at one frontend: first come, first served."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s` is the longest time that a reader waits."""
        self.wait_s = wait_s
        self._locks: dict[tuple[str, str], CursorLock] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, topic: str, cursor: str) -> AsyncIterator[CursorLock]:
        """Hold the lock of a cursor. `throttled` if too many readers wait, or if the wait is too long."""
        held = self._locks.get((topic, cursor))
        if held is None:
            held = self._locks[topic, cursor] = CursorLock()
        elif held.readers >= limits.CURSOR_READERS.most_count:
            raise too_many_readers(topic, cursor)
        held.readers += 1
        try:
            if held.readers > 1:  # the lock is free for a moment between two readers
                await self._wait(held, topic, cursor)
            else:
                await held.lock.acquire()  # at once
            try:
                yield held
                held.served += 1
            finally:
                held.lock.release()
        finally:
            held.readers -= 1
            if not held.readers:
                del self._locks[topic, cursor]

    async def _wait(self, wanted: CursorLock, topic: str, cursor: str) -> None:
        served = wanted.served
        try:
            async with asyncio.timeout(self.wait_s):
                await wanted.lock.acquire()
        except TimeoutError:
            if wanted.served == served:
                # The shard or the cold store does not answer. Nothing of this read was done, which the code has to
                # say: after another code a client must not repeat the read by itself.
                raise TopicsError(
                    "throttled",
                    f"the reader of cursor {cursor!r} of topic {topic!r} before this one gets no answer; nothing of"
                    " this read was done",
                    {"retry_after_ms": STUCK_RETRY_AFTER_MS},
                ) from None
            raise too_many_readers(topic, cursor) from None


def too_many_readers(topic: str, cursor: str) -> TopicsError:
    """Return the refusal of a reader that may ask again a moment later."""
    return TopicsError(
        "throttled", f"too many readers move cursor {cursor!r} of topic {topic!r}", {"retry_after_ms": 10}
    )
