"""Room for the long answers of one connection: taken before they are made, given back in every way they end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest

from topics.frontend.http.answer_room import KEPT_MAX_BYTES, AnswerRoom, Place

HALF = KEPT_MAX_BYTES // 2
TURNS = 5
"""Of the loop: more than anything here takes from its cause to its effect."""


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Asking:
    """An answer that wants room."""

    def __init__(self, room: AnswerRoom, most_bytes: int) -> None:
        self.place = Place(room)
        self.task = asyncio.create_task(self.place.take(most_bytes))

    @property
    def entered(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


def on_loop(test: Callable[[AnswerRoom], Awaitable[None]]) -> None:
    async def main() -> None:
        room = AnswerRoom()
        async with asyncio.timeout(10):
            await test(room)
        assert room.held_bytes == 0
        assert not room.waiting

    asyncio.run(main())


def test_who_finds_no_room_waits_in_the_order_of_coming() -> None:
    async def test(room: AnswerRoom) -> None:
        asking = [Asking(room, HALF) for _ in range(5)]
        await turns()
        assert [one.entered for one in asking] == [True, True, False, False, False]
        assert room.held_bytes == KEPT_MAX_BYTES
        # Not first, however small it is: it would go before them again and again.
        small = Asking(room, 1)
        await turns()
        assert not small.entered
        for count, one in enumerate(asking):
            one.place.close()
            await turns()
            assert [other.entered for other in asking] == [at < count + 3 for at in range(5)]
        assert small.entered
        small.place.close()

    on_loop(test)


def test_what_it_took_too_much_is_for_others() -> None:
    async def test(room: AnswerRoom) -> None:
        asking = [Asking(room, most_bytes) for most_bytes in (HALF, HALF, HALF - 100, HALF - 100)]
        await turns()
        assert [one.entered for one in asking] == [True, True, False, False]
        asking[0].place.made(100)
        await turns()
        assert [one.entered for one in asking] == [True, True, True, False]
        asking[1].place.give_back()
        await turns()
        assert asking[3].entered
        assert room.held_bytes == 2 * HALF - 100
        asking[1].place.made(HALF)  # it has given its room back, and may say what it likes
        assert room.held_bytes == 2 * HALF - 100
        for one in asking:
            one.place.close()

    on_loop(test)


def test_one_that_is_longer_than_the_room_is_made_alone() -> None:
    async def test(room: AnswerRoom) -> None:
        small, long, next_one = Asking(room, 10), Asking(room, 3 * KEPT_MAX_BYTES), Asking(room, 10)
        await turns()
        assert [small.entered, long.entered, next_one.entered] == [True, False, False]
        small.place.close()
        await turns()
        assert [long.entered, next_one.entered] == [True, False]
        long.place.close()
        await turns()
        assert next_one.entered
        next_one.place.close()

    on_loop(test)


@pytest.mark.parametrize("end", ["close", "cancel", "cancel in the moment of entering", "close before it asks"])
def test_who_ends_while_it_waits_is_in_nobody_s_way(end: str) -> None:
    async def test(room: AnswerRoom) -> None:
        first, ended, small = Asking(room, HALF), Asking(room, KEPT_MAX_BYTES), Asking(room, HALF)
        if end == "close before it asks":
            ended.place.close()
        await turns()
        assert not ended.entered
        if end == "close":
            ended.place.close()
        elif end == "cancel":
            ended.task.cancel()
        elif end == "cancel in the moment of entering":
            first.place.close()
            assert room.held_bytes == KEPT_MAX_BYTES
            ended.task.cancel()
            await turns()
            ended.place.close()
        await turns()
        assert small.entered
        if ended.task.cancelled():
            ended.place.close()
        else:
            with pytest.raises(ConnectionResetError):
                ended.task.result()
        for one in (first, small):
            one.place.close()

    on_loop(test)


def test_whatever_ends_in_whatever_order_the_room_is_free_in_the_end() -> None:
    async def test(room: AnswerRoom) -> None:
        asking = [Asking(room, KEPT_MAX_BYTES // (1 + at % 7)) for at in range(60)]
        for at, one in enumerate(random.Random(7).sample(asking, len(asking))):
            await asyncio.sleep(0)
            assert room.held_bytes <= KEPT_MAX_BYTES
            if at % 3 == 0:
                one.task.cancel()
            elif at % 3 == 1:
                one.place.made(at)
            one.place.close()
        for one in asking:
            with contextlib.suppress(ConnectionResetError, asyncio.CancelledError):
                await one.task

    on_loop(test)
