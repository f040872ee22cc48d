"""The outbox of a WebSocket: its bound, its turns, its ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from tests.frontend.hosting import TestClock
from topics.frontend.asgi import WRITE_BUFFER
from topics.frontend.entry.limits import SOCKET_MESSAGES
from topics.frontend.live import websocket as module
from topics.frontend.live.event_streams import HIGH_WATER_BYTES
from topics.frontend.live.socket_outbox import SocketOutbox, Subscription
from topics.frontend.live.wording import MESSAGE_END

MESSAGES_MAX = SOCKET_MESSAGES.most_count


class Client:
    """Takes a message whenever `take` is called."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self._permits = asyncio.Semaphore(0)

    async def send(self, message: Any) -> None:
        await self._permits.acquire()
        self.taken.append(message["text"])

    async def take(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()
        for _ in range(20):
            await asyncio.sleep(0)


def with_outbox(test: Callable[[SocketOutbox, Client], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        client = Client()
        outbox = SocketOutbox(client.send, None)
        carrier = asyncio.create_task(outbox.send_all())
        try:
            async with asyncio.timeout(10):
                await test(outbox, client)
        finally:
            carrier.cancel()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_no_more_than_its_bound_ever_waits() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        puts = [asyncio.create_task(outbox.put(b"%d" % n)) for n in range(20)]
        await settle()
        # One is on its way, MESSAGES_MAX wait.
        assert sum(put.done() for put in puts) == MESSAGES_MAX + 1
        for taken in range(1, 15):
            await client.take()
            assert sum(put.done() for put in puts) == MESSAGES_MAX + 1 + taken
        await client.take(20)
        assert client.taken == [str(n) for n in range(20)]

    with_outbox(test)


def test_who_gives_up_gives_its_room_back() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        puts = [asyncio.create_task(outbox.put(b"%d" % n)) for n in range(8)]
        await settle()
        puts[5].cancel()
        puts[6].cancel()
        await client.take()
        late = asyncio.create_task(outbox.put(b"late"))
        await client.take(20)
        await late
        assert client.taken == ["0", "1", "2", "3", "4", "7", "late"]

    with_outbox(test)


def test_cancelled_in_the_moment_room_was_given() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        puts = [asyncio.create_task(outbox.put(b"%d" % n)) for n in range(MESSAGES_MAX + 2)]
        await settle()
        waiting = puts[-1]
        room = outbox._answers[0]
        outbox._queue.popleft()
        outbox._give_turns()
        assert room.done()
        waiting.cancel()
        await settle()
        assert waiting.cancelled()
        assert outbox._promised == 0

    with_outbox(test)


def ended() -> None:
    raise AssertionError("the hub did not end it")


async def with_room(outbox: SocketOutbox, subscription: Subscription, said: list[bytes]) -> None:
    """Writes whenever it may, as the hub does."""
    more = asyncio.Event()
    subscription.on_writable = more.set
    while said:
        if subscription.writable:
            subscription.write(said.pop(0) + MESSAGE_END)
            await asyncio.sleep(0)
        else:
            await more.wait()
            more.clear()


def test_a_step_is_written_only_when_all_of_it_has_room() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        subscription = Subscription(outbox, ended, ended)
        for n in range(2):
            await outbox.put(b"%d" % n)
        await settle()
        assert subscription.writable  # one is on its way, one waits: three have room
        await outbox.put(b"2")
        assert not subscription.writable
        told = asyncio.Event()
        subscription.on_writable = told.set
        await client.take()
        assert told.is_set()
        subscription.write(b"a" + MESSAGE_END + b"b" + MESSAGE_END + b"c" + MESSAGE_END)
        await client.take(20)
        assert client.taken == ["0", "1", "2", "a", "b", "c"]

    with_outbox(test)


def test_subscriptions_and_answers_take_turns() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        answers = [asyncio.create_task(outbox.put(b"answer")) for _ in range(60)]
        await settle()
        names = (b"left", b"right")
        writers = [
            asyncio.create_task(with_room(outbox, Subscription(outbox, ended, ended), [name] * 20)) for name in names
        ]
        for _ in range(100):
            await client.take()
        await asyncio.gather(*answers, *writers)
        middle = client.taken[10:50]
        for kind in ("answer", "left", "right"):
            assert middle.count(kind) >= 5, middle

    with_outbox(test)


def test_a_subscription_that_has_ended_is_not_asked_again() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        first, second = Subscription(outbox, lambda: None, ended), Subscription(outbox, ended, ended)
        for n in range(4):
            await outbox.put(b"%d" % n)
        assert not first.writable
        assert not second.writable
        told: list[str] = []
        first.on_writable = lambda: told.append("first")
        second.on_writable = lambda: told.append("second")
        first.close()
        await client.take(4)
        assert told == ["second"]

    with_outbox(test)


def test_a_long_step_leaves_nobody_room_until_it_is_taken() -> None:
    """Few messages may be many bytes: who writes them is counted with them, and told when there is room again."""

    async def test(outbox: SocketOutbox, client: Client) -> None:
        large, small = Subscription(outbox, ended, ended), Subscription(outbox, ended, ended)
        told: list[str] = []
        large.on_writable = lambda: told.append("large")
        small.on_writable = lambda: told.append("small")
        assert small.write(b"s" + MESSAGE_END)
        assert large.writable
        assert not large.write(b"x" * HIGH_WATER_BYTES + MESSAGE_END + b"y" + MESSAGE_END)
        assert (large.buffered_bytes, small.buffered_bytes) == (HIGH_WATER_BYTES + 1, 1)
        answer = asyncio.create_task(outbox.put(b"answer"))
        await client.take()
        assert (client.taken, small.buffered_bytes) == (["s"], 0)
        assert not small.writable
        assert not answer.done()
        await client.take()
        assert answer.done()
        assert large.buffered_bytes == 1
        await client.take(2)
        assert large.buffered_bytes == 0
        assert told == ["large", "small"], "it has nothing more to say, and is told all the same"
        assert client.taken[2:] == ["y", "answer"]

    with_outbox(test)


def test_who_enters_has_the_room_that_was_promised() -> None:
    async def test(outbox: SocketOutbox, client: Client) -> None:
        for n in range(MESSAGES_MAX + 1):
            await outbox.put(b"%d" % n)
            await settle()
        entered = asyncio.create_task(outbox.wait_for_turn())
        late = asyncio.create_task(outbox.put(b"late"))
        await settle()
        assert not entered.done()
        await client.take()
        assert entered.done()
        assert not late.done()
        outbox.add(b"mine")
        await client.take(20)
        assert client.taken[-2:] == ["mine", "late"]

    with_outbox(test)


@pytest.mark.parametrize("takes", [False, True])
def test_a_client_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    """30 s by the service's clock; a byte taken now and then is enough to stay."""
    monkeypatch.setattr(module, "TICK_S", 0.001)

    class Transport:
        def __init__(self) -> None:
            self.unsent = 1_000_000
            self.aborted = asyncio.Event()

        def get_write_buffer_size(self) -> int:
            return self.unsent

        def abort(self) -> None:
            self.aborted.set()

    class Route:
        clock = TestClock()

    async def main() -> None:
        transport = Transport()

        async def receive() -> Any:
            await transport.aborted.wait()
            return {"type": "websocket.disconnect", "code": 1006}

        async def never(_: object) -> None:
            await asyncio.Event().wait()

        scope = {"headers": [], "extensions": {WRITE_BUFFER: transport}}
        socket = module.Socket(cast(Any, Route()), b"", scope, receive, never)
        running = asyncio.create_task(socket.run())
        for _ in range(70):
            await asyncio.sleep(0.003)
            if running.done():
                break
            Route.clock.ms += 1000
            transport.unsent -= takes
        assert transport.aborted.is_set() is running.done() is not takes
        running.cancel()

    asyncio.run(main())
