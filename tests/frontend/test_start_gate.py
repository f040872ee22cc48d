"""Requests in the first moments of a service wait for its shards."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from topics.frontend.app import StartGate
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.shards.arenas import Arenas
from topics.shm.control import ProcessCell


class Shard:
    """The cell of a shard."""

    def __init__(self) -> None:
        self.generation = 0

    def get(self, field: str) -> int:
        assert field == "generation"
        return self.generation


async def nothing(*_: Any) -> Any:
    raise AssertionError("nobody asks for more")


class Renewed(Arenas):
    """The arenas of shards that were not restarted."""

    def __init__(self) -> None:
        """Nothing is mapped."""

    def is_behind(self) -> bool:
        return False

    def renewal(self, shard: int) -> asyncio.Task[None] | None:
        return None


RENEWED = Renewed()


async def learned() -> None:
    """There are no topics to learn of."""


def test_requests_wait_until_the_topics_are_learned_which_is_done_once() -> None:
    async def test() -> None:
        served: list[str] = []
        begun: list[None] = []
        known = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope["path"])

        async def learn() -> None:
            begun.append(None)
            await known.wait()

        shard = Shard()
        shard.generation = 1
        gate = StartGate(app, cast(list[ProcessCell], [shard]), wait_s=3600, learn=learn, arenas=RENEWED)
        gone, stays = (asyncio.ensure_future(gate({"path": "/v0/topics/a"}, nothing, nothing)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (served, len(begun)) == ([], 1)
        known.set()
        await stays
        assert (served, len(begun)) == (["/v0/topics/a"], 1)

    asyncio.run(test())


def test_requests_wait_until_all_shards_have_read_their_logs() -> None:
    async def test() -> None:
        served: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope["path"])

        shards = [Shard(), Shard()]
        gate = StartGate(app, cast(list[ProcessCell], shards), wait_s=3600, learn=learned, arenas=RENEWED)
        gated = ["/v0/topics/a", "/v0/stage/a", "/v0/ws"]
        waiting = [asyncio.ensure_future(gate({"path": path}, nothing, nothing)) for path in gated]
        probes = ["/v0/health", "/readyz", "/v0/metrics"]
        for path in probes:
            await gate({"path": path}, nothing, nothing)
        assert served == probes, "what says how the service is never waits"
        shards[0].generation = 1
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in waiting)
        shards[1].generation = 1
        await asyncio.gather(*waiting)
        assert served[-3:] == gated
        shards[0].generation = 0
        await gate({"path": "/v0/topics/b"}, nothing, nothing)
        assert served[-1] == "/v0/topics/b", "an open gate stays open"

    asyncio.run(test())


@pytest.mark.parametrize("wait_s", [0, 0.05])
def test_a_long_recovery_is_waited_for_no_further(wait_s: float) -> None:
    async def test() -> None:
        served: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope["path"])

        gate = StartGate(app, cast(list[ProcessCell], [Shard()]), wait_s, learned, RENEWED)
        await gate({"path": "/v0/topics/a"}, nothing, nothing)
        assert served == ["/v0/topics/a"], "the app says that it is not ready"

    asyncio.run(test())
