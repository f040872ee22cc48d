"""Budgets: never exceeded, first come, first served, and given back in every way a holder ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.frontend.entry.budget import AtLimit, Budget, Limit, Reservation

MOST_BYTES = 1 << 24
HALF = MOST_BYTES // 2
TURNS = 5
"""Turns of the loop: more than anything here takes from its cause to its effect."""


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Asking:
    """An answer that wants room."""

    def __init__(self, room: Budget, most_bytes: int) -> None:
        self.hold = Reservation(room)
        self.task = asyncio.create_task(self.hold.replace(most_bytes))

    @property
    def entered(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


def on_loop(test: Callable[[Budget], Awaitable[None]]) -> None:
    async def main() -> None:
        room = Budget(Limit("room", AtLimit.WAIT, "", MOST_BYTES))
        async with asyncio.timeout(10):
            await test(room)
        assert room.held_bytes == 0
        assert not room.waiting

    asyncio.run(main())


def test_who_finds_no_room_waits_in_the_order_of_coming() -> None:
    async def test(room: Budget) -> None:
        asking = [Asking(room, HALF) for _ in range(5)]
        await turns()
        assert [one.entered for one in asking] == [True, True, False, False, False]
        assert room.held_bytes == MOST_BYTES
        # Not first, however small it is: it would go before them again and again.
        small = Asking(room, 1)
        await turns()
        assert not small.entered
        for count, one in enumerate(asking):
            one.hold.close()
            await turns()
            assert [other.entered for other in asking] == [at < count + 3 for at in range(5)]
        assert small.entered
        small.hold.close()

    on_loop(test)


def test_what_it_took_too_much_is_for_others() -> None:
    async def test(room: Budget) -> None:
        asking = [Asking(room, most_bytes) for most_bytes in (HALF, HALF, HALF - 100, HALF - 100)]
        await turns()
        assert [one.entered for one in asking] == [True, True, False, False]
        asking[0].hold.resize(100)
        await turns()
        assert [one.entered for one in asking] == [True, True, True, False]
        asking[1].hold.resize(0)
        await turns()
        assert asking[3].entered
        assert room.held_bytes == 2 * HALF - 100
        asking[1].hold.resize(HALF)  # it has given its room back, and may say what it likes
        assert room.held_bytes == 2 * HALF - 100
        for one in asking:
            one.hold.close()

    on_loop(test)


def test_one_that_is_longer_than_the_room_is_made_alone() -> None:
    async def test(room: Budget) -> None:
        small, long, next_one = Asking(room, 10), Asking(room, 3 * MOST_BYTES), Asking(room, 10)
        await turns()
        assert [small.entered, long.entered, next_one.entered] == [True, False, False]
        small.hold.close()
        await turns()
        assert [long.entered, next_one.entered] == [True, False]
        long.hold.close()
        await turns()
        assert next_one.entered
        next_one.hold.close()

    on_loop(test)


@pytest.mark.parametrize("end", ["close", "cancel", "cancel in the moment of entering", "close before it asks"])
def test_who_ends_while_it_waits_is_in_nobody_s_way(end: str) -> None:
    async def test(room: Budget) -> None:
        first, ended, small = Asking(room, HALF), Asking(room, MOST_BYTES), Asking(room, HALF)
        if end == "close before it asks":
            ended.hold.close()
        await turns()
        assert not ended.entered
        if end == "close":
            ended.hold.close()
        elif end == "cancel":
            ended.task.cancel()
        elif end == "cancel in the moment of entering":
            first.hold.close()
            assert room.held_bytes == MOST_BYTES
            ended.task.cancel()
            await turns()
            ended.hold.close()
        await turns()
        assert small.entered
        if ended.task.cancelled():
            ended.hold.close()
        else:
            with pytest.raises(ConnectionResetError):
                ended.task.result()
        for one in (first, small):
            one.hold.close()

    on_loop(test)


def test_whatever_ends_in_whatever_order_the_room_is_free_in_the_end() -> None:
    async def test(room: Budget) -> None:
        asking = [Asking(room, MOST_BYTES // (1 + at % 7)) for at in range(60)]
        for at, one in enumerate(random.Random(7).sample(asking, len(asking))):
            await asyncio.sleep(0)
            assert room.held_bytes <= MOST_BYTES
            if at % 3 == 0:
                one.task.cancel()
            elif at % 3 == 1:
                one.hold.resize(at)
            one.hold.close()
        for one in asking:
            with contextlib.suppress(ConnectionResetError, asyncio.CancelledError):
                await one.task

    on_loop(test)


def test_who_waits_too_long_leaves_the_line() -> None:
    async def test(room: Budget) -> None:
        first, late, small = Reservation(room), Reservation(room), Reservation(room)
        await first.replace(HALF)
        waiting = asyncio.create_task(late.grow(MOST_BYTES, 0.001))
        await turns()
        behind = asyncio.create_task(small.grow(HALF))
        with pytest.raises(TimeoutError):
            await waiting
        await behind
        assert (late.held_bytes, small.held_bytes) == (0, HALF)
        for hold in (first, small):
            hold.close()

    on_loop(test)


def test_when_the_budget_is_closed_nobody_gets_room_that_comes_back() -> None:
    async def test(room: Budget) -> None:
        first = Reservation(room)
        await first.replace(MOST_BYTES)
        asking = [Asking(room, 1) for _ in range(5)]
        await turns()
        room.close_waiting()
        first.close()
        for one in asking:
            with pytest.raises(ConnectionResetError):
                await one.task

    on_loop(test)


def test_where_nobody_may_wait_what_is_larger_than_all_of_it_never_fits() -> None:
    for at_limit in AtLimit:
        assert Budget(Limit("room", at_limit, "", 10)).fits(11) is (at_limit is AtLimit.WAIT)


SIZES = st.integers(1, 14)
STEPS = st.lists(st.tuples(st.sampled_from(["ask", "first", "grow", "keep", "close"]), SIZES, st.integers(0, 9)))


@given(STEPS)
@settings(max_examples=400, deadline=None)
def test_a_budget_against_a_list_of_holders(steps: list[tuple[str, int, int]]) -> None:
    """Ten holders do anything in any order: the sum is what they hold, the line is served in its order."""
    budget = Budget(Limit("room", AtLimit.WAIT, "", 10))
    holds = [Reservation(budget) for _ in range(10)]
    held = [0] * 10
    line: list[tuple[int, int]] = []
    told: list[tuple[int, bool]] = []
    expected: list[tuple[int, bool]] = []

    def fits(size_bytes: int) -> bool:
        return sum(held) + size_bytes <= 10 or not sum(held)

    def tell(who: int, entered: bool) -> None:
        told.append((who, entered))

    def serve() -> None:
        while line and fits(line[0][1]):
            who, size_bytes = line.pop(0)
            held[who] += size_bytes
            expected.append((who, True))

    for what, size_bytes, who in steps:
        hold, waits = holds[who], any(who == other for other, _ in line)
        if what in ("ask", "first") and not (waits or hold.closed) and not fits(size_bytes):
            hold.enqueue(size_bytes, partial(tell, who), what == "first")
            line.insert(0 if what == "first" else len(line), (who, size_bytes))
        elif what == "grow":
            entered = not (hold.closed or line) and fits(size_bytes)
            assert hold.try_grow(size_bytes) is entered
            held[who] += size_bytes * entered
        elif what == "keep":
            hold.resize(size_bytes)
            held[who] = size_bytes if held[who] else 0
            serve()
        elif what == "close":
            hold.close()
            if waits:
                line[:] = [one for one in line if one[0] != who]
                serve()
                expected.append((who, False))
            held[who] = 0
            serve()
        assert [one.held_bytes for one in holds] == held
        assert budget.held_bytes == sum(held)
        assert list(budget.waiting.items()) == [(holds[at], waiting_bytes) for at, waiting_bytes in line]
        assert told == expected
    for hold in holds:
        hold.close()
    assert (budget.held_bytes, len(budget.waiting)) == (0, 0)
