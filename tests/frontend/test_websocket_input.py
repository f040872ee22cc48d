"""Messages of WebSockets as they come: counted while anybody has them, dropped where there is no room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from wsproto.events import TextMessage

from topics.frontend.asgi import DROPPED, RESERVATION
from topics.frontend.entry.bodies import COUNTED_FROM_BYTES, LONG_BYTES, long_bodies, medium_bodies
from topics.frontend.http.frame_budget import ClientAddresses
from topics.frontend.http.websocket_input import IncomingMessages, MessageTooLongError

MOST = 4 * LONG_BYTES
PIECE = "x" * 10_000


@pytest.fixture(autouse=True)
def _budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in (medium_bodies, long_bodies):
        monkeypatch.setattr(budget, "most_bytes", MOST)


def held() -> tuple[int, int]:
    return medium_bodies.held_bytes, long_bodies.held_bytes


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


def incoming(max_len: int) -> IncomingMessages:
    return IncomingMessages(max_len, ClientAddresses(lambda: 0.0, lambda _why: None).budget(("127.0.0.1", 1)))


def come(messages: IncomingMessages, len_chars: int, piece: str = PIECE) -> dict[str, Any]:
    """One message in pieces, as wsproto hands them out."""
    message = None
    while len_chars:
        data = piece[:len_chars]
        len_chars -= len(data)
        assert message is None
        message = messages.take(TextMessage(data=data, message_finished=not len_chars))
    assert message is not None
    return dict(message)


async def settle() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_a_message_counts_until_nobody_has_it() -> None:
    async def test() -> None:
        messages = incoming(10 * LONG_BYTES)
        short = come(messages, 50_000)
        assert (short["text"], RESERVATION in short, held()) == ("x" * 50_000, False, (0, 0))
        medium = come(messages, 200_000)
        assert len(medium["text"]) == 200_000
        assert 200_000 <= held()[0] <= 200_000 + 2 * COUNTED_FROM_BYTES
        assert held()[1] == 0
        long = come(messages, 1_500_000)
        assert len(long["text"]) == 1_500_000
        assert held()[1] == LONG_BYTES
        del long
        await settle()
        assert held()[1] == 0
        medium.pop("text")
        await settle()
        assert held()[0] >= 200_000, "who has the text has the message"
        del medium
        await settle()
        assert held() == (0, 0)

    on_loop(test)


def test_one_that_never_ends_counts_until_its_socket_is_gone() -> None:
    async def test() -> None:
        messages = incoming(10 * LONG_BYTES)
        for _ in range(10):
            messages.take(TextMessage(data=PIECE, message_finished=False))
        assert held()[0] >= 100_000
        del messages
        await settle()
        assert held() == (0, 0)

    on_loop(test)


def test_where_there_is_no_room_it_is_dropped_and_the_next_one_is_not() -> None:
    async def test() -> None:
        messages = incoming(10 * LONG_BYTES)
        kept = [come(messages, 1_000_000) for _ in range(4)]
        assert all(RESERVATION in one for one in kept)
        dropped = come(messages, 1_000_000)
        assert (dropped["text"], dropped[DROPPED], RESERVATION in dropped) == (None, True, False)
        assert come(messages, 50_000)["text"], "short ones need none"
        await settle()
        kept.pop()
        await settle()
        assert come(messages, 1_000_000)["text"] is not None
        kept.clear()
        await settle()
        assert held() == (0, 0)

    on_loop(test)


def test_wide_characters_take_what_they_take() -> None:
    async def test() -> None:
        message = come(incoming(LONG_BYTES), 100_000, "\N{GRINNING FACE}" * 10_000)
        assert held()[0] >= 400_000
        assert len(message["text"]) == 100_000

    on_loop(test)


def test_one_that_is_too_long_is_refused_and_nothing_of_it_kept() -> None:
    """The same holds for a client that goes on with it after it was told."""

    async def test() -> None:
        messages = incoming(200_000)
        refused = 0
        for _ in range(100):
            try:
                messages.take(TextMessage(data=PIECE, message_finished=False))
            except MessageTooLongError:
                refused += 1
        assert refused == 80
        await settle()
        assert held() == (0, 0)

    on_loop(test)
