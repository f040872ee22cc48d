"""Waiting for a turn at a named cursor has an end, and the refusal says why the turn did not come (api §10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from topics.core.errors import TopicsError
from topics.frontend.queues.cursor_routes import STUCK_RETRY_AFTER_MS, CursorLocks

WAIT_S = 0.3
DEADLINE_S = 60.0


class Readers:
    """Readers of one cursor. Each has its turn until `leave`."""

    def __init__(self) -> None:
        self.locks = CursorLocks(WAIT_S)
        self.leave = [asyncio.Event() for _ in range(3)]
        self.on_leave: Callable[[], object] = lambda: None
        self.inside: list[int] = []

    def start(self, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._read(number))

    async def _read(self, number: int) -> None:
        async with self.locks.hold("t", "c"):
            self.inside.append(number)
            await self.leave[number].wait()
            self.on_leave()

    async def waiting(self, count: int) -> None:
        while self.locks._locks["t", "c"].readers < count:
            await asyncio.sleep(0)


def run(test: Callable[[Readers], Awaitable[None]]) -> None:
    async def main() -> None:
        readers = Readers()
        async with asyncio.timeout(DEADLINE_S):
            await test(readers)
        assert not len(readers.locks)

    asyncio.run(main())


async def refusal(reader: asyncio.Task[None]) -> tuple[str, object]:
    with pytest.raises(TopicsError) as refused:
        await reader
    return refused.value.code, (refused.value.detail or {})["retry_after_ms"]


def test_who_comes_between_two_turns_waits_no_longer_than_others() -> None:
    """The first has given its turn back, the second has not taken it yet, and then does not give it back."""

    async def test(readers: Readers) -> None:
        first = readers.start(0)
        second = readers.start(1)
        await asyncio.sleep(0)
        await readers.waiting(2)
        third: list[asyncio.Task[None]] = []
        readers.on_leave = lambda: third.append(readers.start(2))  # it runs before the second does
        readers.leave[0].set()
        await first
        readers.on_leave = lambda: None
        assert await refusal(third[0]) == ("throttled", STUCK_RETRY_AFTER_MS), "nobody was served while it waited"
        assert readers.inside == [0, 1]
        readers.leave[1].set()
        await second

    run(test)


def test_who_waits_in_vain_while_others_are_served_is_one_too_many() -> None:
    async def test(readers: Readers) -> None:
        tasks = [readers.start(number) for number in range(3)]
        await asyncio.sleep(0)
        await readers.waiting(3)
        readers.leave[0].set()
        assert await refusal(tasks[2]) == ("throttled", 10)
        readers.leave[1].set()
        await asyncio.gather(*tasks[:2])

    run(test)


def test_who_waits_behind_one_that_was_not_served_is_not_too_many() -> None:
    async def test(readers: Readers) -> None:
        tasks = [readers.start(number) for number in range(3)]
        await asyncio.sleep(0)
        await readers.waiting(3)
        tasks[0].cancel()
        assert await refusal(tasks[2]) == ("throttled", STUCK_RETRY_AFTER_MS)
        readers.leave[1].set()
        await tasks[1]

    run(test)
