"""Memory of long bodies together: within its bound whatever comes, taken in turn, and given back at the end."""

from __future__ import annotations

import asyncio
import gc
import gzip
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from topics.core.errors import TopicsError
from topics.frontend.entry import limits
from topics.frontend.entry.bodies import ClientGoneError, long_bodies, medium_bodies, read_body, read_request, reserve
from topics.frontend.entry.budget import Budget

MIB = 1 << 20
MOST = 10 * MIB
JSON = {b"content-type": b"application/json"}
GZIP = JSON | {b"content-encoding": b"gzip"}


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    for one in (long_bodies, medium_bodies):
        monkeypatch.setattr(one, "most_bytes", MOST)
    return long_bodies


def wait_only(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    monkeypatch.setattr(long_bodies, "limit", limits.LONG_BODIES._replace(wait_s=wait_s))


class Request:
    """A request that holds so much until it is released."""

    def __init__(self, budget: Budget, size_bytes: int) -> None:
        self.held = False
        self._go = asyncio.Event()
        self._budget = budget
        self.task = asyncio.create_task(self._run(size_bytes))

    async def _run(self, size_bytes: int) -> None:
        await reserve(self._budget, size_bytes)
        self.held = True
        await self._go.wait()

    async def end(self) -> None:
        self._go.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing_to_the_collector(budget: Budget) -> None:
    async def test() -> None:
        held = Request(budget, MOST)
        waiting = asyncio.create_task(reserve(budget, MOST))
        await settle()
        gc.disable()
        try:
            gone = weakref.ref(waiting)
            waiting.cancel()
            del waiting
            await settle()
            assert gone() is None
        finally:
            gc.enable()
        await held.end()

    on_loop(test)


def test_room_is_given_in_turn_and_given_back(budget: Budget) -> None:
    async def test() -> None:
        requests = [Request(budget, size * MIB) for size in (6, 4, 5, 1)]
        await settle()
        assert [request.held for request in requests] == [True, True, False, False], "the last does not overtake"
        assert budget.held_bytes == MOST
        await requests[1].end()
        await settle()
        assert [request.held for request in requests[2:]] == [False, False], "4 MiB are not enough for the first"
        await requests[0].end()
        await settle()
        assert [request.held for request in requests[2:]] == [True, True]
        for request in requests[2:]:
            await request.end()
        await settle()
        assert budget.held_bytes == 0

    on_loop(test)


def test_who_waits_too_long_is_throttled_and_makes_room_for_the_next(
    budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_only(monkeypatch, 0.05)

    async def test() -> None:
        first = Request(budget, 6 * MIB)
        await settle()
        large = Request(budget, 5 * MIB)
        await settle()
        with pytest.raises(TopicsError) as refused:
            await large.task
        assert refused.value.code == "throttled"
        assert refused.value.detail == {"limit": "body_bytes", "max": MOST, "retry_after_ms": 1000}
        small = Request(budget, 4 * MIB)
        await settle()
        assert small.held
        await first.end()
        await small.end()
        await settle()
        assert budget.held_bytes == 0

    on_loop(test)


def test_who_is_cancelled_while_it_waits_holds_nothing_and_blocks_nobody(budget: Budget) -> None:
    async def test() -> None:
        first = Request(budget, 6 * MIB)
        await settle()
        large, small = Request(budget, 5 * MIB), Request(budget, 4 * MIB)
        await settle()
        large.task.cancel()
        await settle()
        assert small.held
        # Let in and cancelled in one turn of the loop.
        last = Request(budget, 6 * MIB)
        await settle()
        budget.release(6 * MIB)
        last.task.cancel()
        await settle()
        assert (last.held, budget.held_bytes) == (False, 4 * MIB)
        budget.held_bytes += 6 * MIB
        await first.end()
        await small.end()
        await settle()
        assert budget.held_bytes == 0

    on_loop(test)


def pieces(body: bytes, size_bytes: int = 65_536, gone: bool = False) -> Callable[[], Awaitable[Any]]:
    """ASGI `receive` of a body in pieces; `gone`: the client closes instead of the last."""
    messages = [
        {"type": "http.request", "body": body[at : at + size_bytes], "more_body": at + size_bytes < len(body)}
        for at in range(0, len(body), size_bytes)
    ]
    if gone:
        messages[-1] = {"type": "http.disconnect"}

    async def receive() -> Any:
        return messages.pop(0)

    return receive


def reading(
    budget: Budget,
    body: bytes,
    headers: dict[bytes, bytes],
    gone: bool = False,
    max_bytes: int = 2 * MIB,
    piece_bytes: int = 65_536,
) -> tuple[int, int, int]:
    """(bytes of the body, bytes held when it was read: with the long ones, with the medium ones); nothing is held after
    its request.
    """
    seen: list[tuple[int, int, int]] = []

    async def test() -> None:
        async def request() -> None:
            read = await read_body(pieces(body, piece_bytes, gone), headers, max_bytes)
            seen.append((len(read), budget.held_bytes, medium_bodies.held_bytes))

        await asyncio.create_task(request())

    try:
        on_loop(test)
    finally:
        assert budget.held_bytes == medium_bodies.held_bytes == 0
    return seen[0]


def of_length(len_bytes: int) -> dict[bytes, bytes]:
    return JSON | {b"content-length": b"%d" % len_bytes}


def test_bodies_are_counted_from_64_kib_on(budget: Budget) -> None:
    assert reading(budget, b"x" * 65_536, JSON) == (65_536, 0, 0)
    assert reading(budget, b"x" * 65_536, of_length(65_536)) == (65_536, 0, 0)
    assert reading(budget, b"x" * 65_537, JSON) == (65_537, 0, 65_536), "in chunks: 64 KiB for each begun but the first"
    assert reading(budget, b"x" * 100_000, of_length(100_000)) == (100_000, 0, 100_000)
    assert reading(budget, b"x" * 100_000, of_length(100_000), piece_bytes=MIB) == (100_000, 0, 100_000)
    assert reading(budget, b"x" * MIB, of_length(MIB)) == (MIB, 0, MIB)
    with pytest.raises(ClientGoneError):
        reading(budget, b"x" * 100_000, of_length(100_000), gone=True)


def test_bodies_are_counted_apart_from_a_mib_on(budget: Budget) -> None:
    length = of_length(1_500_000)
    assert reading(budget, b"x" * 1_500_000, length) == (1_500_000, 1_500_000, 0)
    assert reading(budget, b"x" * 1_500_000, JSON) == (1_500_000, MIB, MIB - 65_536), "in chunks: by the MiB"
    in_long_pieces = reading(budget, b"x" * 1_500_000, JSON, piece_bytes=320_000)
    assert in_long_pieces == (1_500_000, MIB, MIB - 65_536), "the same, however long the messages are"
    assert reading(budget, b"x" * 320_000, JSON, piece_bytes=319_999) == (320_000, 0, 4 * 65_536), "the last one's, too"
    with pytest.raises(ClientGoneError):
        reading(budget, b"x" * 1_500_000, length, gone=True)


def test_a_zipped_body_is_counted_before_it_is_unpacked(budget: Budget) -> None:
    packed = gzip.compress(b" " * 2 * MIB)
    assert len(packed) < 10_000
    assert reading(budget, packed, GZIP) == (2 * MIB, 2 * MIB, 0)
    tiny = gzip.compress(b" " * 500_000)
    assert len(tiny) < 1000
    assert reading(budget, tiny, GZIP) == (500_000, 0, 500_000)
    with pytest.raises(TopicsError) as refused:
        reading(budget, gzip.compress(b" " * (2 * MIB + 1)), GZIP)
    assert refused.value.code == "payload_too_large"


def test_a_zipped_body_that_states_less_than_it_holds_is_not_unpacked_beyond_that(budget: Budget) -> None:
    packed = gzip.compress(b" " * 2 * MIB)
    lying = packed[:-4] + (5).to_bytes(4, "little")
    with pytest.raises(TopicsError) as refused:
        reading(budget, lying, GZIP)
    assert refused.value.code == "invalid_request"
    assert "more than the 5 bytes" in refused.value.message


def test_a_body_that_is_decoded_to_something_short_is_counted_no_longer(budget: Budget) -> None:
    async def test() -> None:
        async def request() -> None:
            held: list[int] = []

            def decode(body: bytes) -> int:
                held.append(budget.held_bytes)
                return len(body)

            assert await read_request(pieces(b" " * 1_500_000), JSON, 2 * MIB, decode) == 1_500_000
            assert (held, budget.held_bytes, medium_bodies.held_bytes) == ([MIB], 0, 0)
            await reserve(budget, MIB)  # and what is held from then on is, to the end
            assert budget.held_bytes == MIB

        await asyncio.create_task(request())

    on_loop(test)
    assert budget.held_bytes == 0


def test_many_bombs_at_once_stay_within_the_bound(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits with what it sent, unpacked are as many as there is room for."""
    wait_only(monkeypatch, 0.2)
    packed = gzip.compress(b" " * 2 * MIB)
    most = 0
    outcomes: list[str] = []
    go = asyncio.Event()

    async def request() -> None:
        nonlocal most
        try:
            body = await read_body(pieces(packed), GZIP, 2 * MIB)
        except TopicsError as error:
            outcomes.append(error.code)
            return
        most = max(most, budget.held_bytes)
        outcomes.append("read")
        await go.wait()
        assert len(body) == 2 * MIB

    async def test() -> None:
        tasks = [asyncio.create_task(request()) for _ in range(100)]
        while len(outcomes) < 100:
            await asyncio.sleep(0.01)
        go.set()
        await asyncio.gather(*tasks)

    on_loop(test)
    assert most == MOST
    assert sorted(set(outcomes)) == ["read", "throttled"]
    assert outcomes.count("read") == MOST // (2 * MIB)
    assert budget.held_bytes == 0
