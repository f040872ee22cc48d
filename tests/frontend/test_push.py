"""Push over plain ASGI: bounded, in order, and over when the client or the writer says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.frontend.live import until
from topics.frontend.live import event_streams as module
from topics.frontend.live.event_streams import HIGH_WATER_BYTES, AsgiPush

DEADLINE_S = 60.0


class Server:
    """The ASGI server's side: takes a message when `take` is set, is disconnected when told to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.take = asyncio.Event()
        self.gone = asyncio.Event()
        self.push = AsgiPush(self.send)
        self.closes = 0
        self.push.on_close = self._count_close

    def _count_close(self) -> None:
        self.closes += 1

    async def send(self, message: Any) -> None:
        await self.take.wait()
        self.messages.append(dict(message))

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def data(self) -> bytes:
        return b"".join(message["body"] for message in self.messages)


def on_loop(test: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test(Server())

    asyncio.run(main())


def test_writes_are_joined_and_in_order() -> None:
    async def test(server: Server) -> None:
        running = asyncio.create_task(server.push.run(server.receive))
        for piece in (b"a", b"", b"b", b"c"):
            server.push.write(piece)
        assert server.push.buffered_bytes == 3
        server.take.set()
        await until(lambda: server.data == b"abc")
        assert len(server.messages) == 1
        server.push.write(b"d")
        server.push.close()
        server.push.write(b"dropped")
        await running
        assert server.data == b"abcd"
        assert [message["more_body"] for message in server.messages] == [True, True, False]
        assert server.closes == 0, "the writer closed it"

    on_loop(test)


def test_a_writer_that_heeds_writable_keeps_it_bounded() -> None:
    async def test(server: Server) -> None:
        push = server.push
        running = asyncio.create_task(push.run(server.receive))
        piece = bytes(1000)
        written = highest = 0

        def write_on() -> None:
            nonlocal written, highest
            while push.writable and written < 1_000_000:
                push.write(piece)
                written += len(piece)
                highest = max(highest, push.buffered_bytes)

        push.on_writable = write_on
        write_on()
        assert written < 2 * HIGH_WATER_BYTES, "nothing was taken yet"
        server.take.set()
        await until(lambda: len(server.data) == 1_000_000)
        assert highest < HIGH_WATER_BYTES + len(piece)
        push.close()
        await running

    on_loop(test)


def test_a_long_frame_goes_in_pieces_so_that_it_is_seen_how_far_it_is_taken() -> None:
    async def test(server: Server) -> None:
        push = server.push
        running = asyncio.create_task(push.run(server.receive))
        left: list[int] = []
        send = server.send

        async def take(message: Any) -> None:
            left.append(push.buffered_bytes)
            await send(message)

        push._send = take
        server.take.set()
        frame = bytes(range(256)) * 1024
        push.write(frame)
        await until(lambda: server.data == frame)
        assert left == [len(frame) - start for start in range(0, len(frame), module.PIECE_BYTES_MAX)]
        push.close()
        await running

    on_loop(test)


def test_a_client_that_goes_is_told_of_once() -> None:
    async def test(server: Server) -> None:
        running = asyncio.create_task(server.push.run(server.receive))
        server.push.write(b"never taken")
        await asyncio.sleep(0)
        server.gone.set()
        await running
        assert server.closes == 1
        assert not server.push.writable

    on_loop(test)


def test_a_client_that_takes_no_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.01)

    async def test(server: Server) -> None:
        running = asyncio.create_task(server.push.run(server.receive))
        server.push.write(b"never taken")
        await asyncio.sleep(0)
        server.push.close()
        await running
        assert server.messages == []

    on_loop(test)


def test_a_failing_send_ends_it() -> None:
    async def test(server: Server) -> None:
        async def refuse(_: Any) -> None:
            raise ConnectionResetError("the client is gone")

        push = AsgiPush(refuse)
        closed = []
        push.on_close = lambda: closed.append(True)
        push.write(b"x")
        await push.run(server.receive)
        assert closed == [True]

    on_loop(test)
