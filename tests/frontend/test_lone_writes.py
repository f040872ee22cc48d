"""Answers to lone writes, taken without a turn of the loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from tests.frontend.test_gateway import REPLY, Shard, append, on_loop
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.lone_writes import LOOK_NS, PAUSE_NS, SHORT_BYTES, LoneWrites
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendReply
from topics.shm.memory import FENCE_IS_FULL

FIRST_ID = (1 << 40) + 2  # behind Hello
pytestmark = pytest.mark.usefixtures("two_cores")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FENCE_IS_FULL
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


@pytest.fixture
def shard(identity: str) -> Shard:
    return Shard(identity)


def lone(shard: Shard, test: Callable[[Gateway, Callable[[], asyncio.Future[AppendReply]]], Awaitable[None]]) -> None:
    """Run a test with a function that sends a write as the only request since the last one."""

    async def main(gateway: Gateway) -> None:
        def write() -> asyncio.Future[AppendReply]:
            shard.arrived += 1
            return append(gateway)

        await test(gateway, write)

    on_loop(shard, main)


def signals(shard: Shard) -> int:
    """Return how often this frontend was signalled, and forget it."""
    try:
        return os.eventfd_read(shard.shared.frontend_wakes[0].fd)
    except BlockingIOError:
        return 0


def test_an_answer_that_is_there_in_time_is_taken_at_once(shard: Shard) -> None:
    async def test(gateway: Gateway, write: Callable[[], asyncio.Future[AppendReply]]) -> None:
        shard.answer(append_messages.encode_append_reply(FIRST_ID, REPLY))
        future = write()
        assert future.done()
        assert future.result() == REPLY
        assert shard.pair.replies.empty
        assert not gateway.pending

    lone(shard, test)


def test_what_comes_before_the_answer_is_left_to_the_loop(shard: Shard) -> None:
    async def test(_gateway: Gateway, write: Callable[[], asyncio.Future[AppendReply]]) -> None:
        shard.answer(messages.encode_notify([7]))
        shard.answer(append_messages.encode_append_reply(FIRST_ID, REPLY))
        future = write()
        assert not future.done()
        await asyncio.sleep(0)
        assert future.done(), "the loop takes both in its next turn, without a signal"

    lone(shard, test)


def test_what_comes_behind_the_answer_is_left_to_the_loop(shard: Shard) -> None:
    async def test(_gateway: Gateway, write: Callable[[], asyncio.Future[AppendReply]]) -> None:
        shard.answer(append_messages.encode_append_reply(FIRST_ID, REPLY))
        shard.answer(messages.encode_notify([7]))
        assert write().done()
        assert not shard.pair.replies.empty
        await asyncio.sleep(0)
        assert shard.pair.replies.empty

    lone(shard, test)


def test_a_look_without_an_answer_ends_with_a_wait_for_the_signal(shard: Shard) -> None:
    async def test(_gateway: Gateway, write: Callable[[], asyncio.Future[AppendReply]]) -> None:
        wake = shard.shared.frontend_wakes[0]
        future = write()
        assert not future.done()
        wake.signal_unless_looking()
        assert signals(shard) == 1, "shards signal again"
        shard.answer(append_messages.encode_append_reply(FIRST_ID, REPLY))
        shard.wake()
        assert (await future) == REPLY

    lone(shard, test)


def test_a_frontend_that_was_killed_while_it_looked_is_signalled_in_its_next_life(shard: Shard) -> None:
    wake = shard.shared.frontend_wakes[0]
    wake.begin_look()
    wake.signal_unless_looking()
    assert signals(shard) == 0

    async def test(_gateway: Gateway) -> None:
        wake.signal_unless_looking()
        assert signals(shard) == 1

    on_loop(shard, test)


class Clock:
    """A clock that goes on by a tenth of a look each time it is read."""

    def __init__(self) -> None:
        self.ns = 10 * PAUSE_NS
        self.on_read: Callable[[], None] = lambda: None

    def __call__(self) -> int:
        self.ns += LOOK_NS // 10
        self.on_read()
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writes(shard: Shard, clock: Clock) -> LoneWrites:
    return LoneWrites(shard.shared.frontend_wakes[0], lambda: shard.arrived, clock)


def test_a_write_is_alone_if_no_request_came_since_the_last_one(shard: Shard, writes: LoneWrites) -> None:
    shard.arrived += 1
    assert writes.is_alone(0, 100)
    shard.arrived += 1
    assert not writes.is_alone(1, 100), "another one has no answer yet"
    shard.arrived += 2
    assert not writes.is_alone(0, 100), "another one came with it, or meanwhile"
    assert not writes.is_alone(0, 100), "a message of a WebSocket is no request"
    shard.arrived += 1
    assert not writes.is_alone(0, SHORT_BYTES + 1), "it takes longer than a look"
    shard.arrived += 1
    assert writes.is_alone(0, SHORT_BYTES)


def test_on_one_core_nobody_looks(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    shard.arrived += 1
    assert not LoneWrites(shard.shared.frontend_wakes[0], lambda: shard.arrived).is_alone(0, 100)


def test_a_look_ends_with_the_answer(shard: Shard, clock: Clock, writes: LoneWrites) -> None:
    began_ns, reads = clock.ns, 0

    def arrive() -> None:
        nonlocal reads
        reads += 1
        if reads == 4:
            shard.answer(append_messages.encode_append_reply(FIRST_ID, REPLY))

    clock.on_read = arrive
    writes.begin()
    assert writes.look(shard.pair.replies, [shard.pair.replies])
    assert clock.ns - began_ns < LOOK_NS
    assert signals(shard) == 0


def test_after_a_look_without_an_answer_there_is_a_pause(shard: Shard, clock: Clock, writes: LoneWrites) -> None:
    shard.arrived += 1
    assert writes.is_alone(0, 100)
    writes.begin()
    assert not writes.look(shard.pair.replies, [shard.pair.replies])
    shard.arrived += 1
    assert not writes.is_alone(0, 100)
    clock.ns += PAUSE_NS
    shard.arrived += 1
    assert writes.is_alone(0, 100)
