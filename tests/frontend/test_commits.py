"""Batches that are carried to their end over real rings, the test itself being the shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.frontend.live import until
from topics.core.names import owner_shard
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.txn.commits import Commits
from topics.frontend.txn.stages import Stages
from topics.shm import messages
from topics.shm.arena import ArenaWriter
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.messages import Call, Kind
from topics.shm.txn_messages import StagePublish, TxnPending, TxnPendingReply

SHARDS = 2
RING_BYTES = 64 * 1024
DEADLINE_S = 20.0
STAGE_TTL_MS = 60_000

CallT = TypeVar("CallT", TxnPending, StagePublish)


class Shards:
    """The other ends of the rings. None is ready before the test says so."""

    def __init__(self, identity: str) -> None:
        self.shared = SharedMemory.create(identity, SHARDS, 1, RING_BYTES)
        self.arenas = Arenas(self.shared)
        self._identity = identity
        self._read = [0] * SHARDS
        self._held: list[ArenaWriter] = []

    def ready(self, shard: int) -> None:
        self._held.append(ArenaWriter(self._identity, shard, 1))
        self.shared.control.cell(Role.WALSHARD, shard).set("generation", 1)

    def calls(self, shard: int) -> list[tuple[int, Call]]:
        """New ones, with their request ids."""
        found = []
        for message, position in self.shared.rings[0][shard].requests.peek(self._read[shard]):
            self._read[shard] = position
            kind, request_id, _count = messages.head(message)
            if kind == Kind.CALL:
                found.append((request_id, messages.decode_call(message)))
        return found

    async def told(self, shard: int, kind: type[CallT]) -> tuple[int, CallT]:
        """The next call of this kind, with its request id."""
        found: list[tuple[int, CallT]] = []

        def look() -> bool:
            found.extend((request_id, call) for request_id, call in self.calls(shard) if isinstance(call, kind))
            return bool(found)

        await until(look)
        return found[0]

    def answer(self, shard: int, request_id: int, reply: messages.Reply) -> None:
        self._send(shard, messages.encode_reply(request_id, reply))

    def _send(self, shard: int, message: bytearray) -> None:
        assert self.shared.rings[0][shard].replies.push(message)
        self.shared.frontend_wakes[0].signal_always()


@pytest.fixture
def shards(identity: str) -> Iterator[Shards]:
    shards = Shards(identity)
    yield shards
    shards.arenas.close()


def on_loop(
    shards: Shards, data_dir: Path, test: Callable[[Commits], Awaitable[None]], shard_wait_ms: int = 10_000
) -> None:
    async def main() -> None:
        cell = shards.shared.control.cell(Role.FRONTEND, 0)
        gateway = Gateway(shards.shared, 0, 1, shards.arenas, cell, shard_wait_ms)
        gateway.start()
        commits = Commits(gateway, Stages(str(data_dir), STAGE_TTL_MS))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(commits)
        finally:
            commits.close()
            gateway.close()

    asyncio.run(main())


def owned_by(shard: int) -> str:
    """A name of that shard's."""
    return next(name for name in map("t{}".format, range(100)) if owner_shard(name, SHARDS) == shard)


def test_a_batch_of_one_shard_does_not_wait_for_another_that_still_replays(shards: Shards, tmp_path: Path) -> None:
    async def test(commits: Commits) -> None:
        commits.start(janitor=False)
        request_id, _ = await shards.told(1, TxnPending)
        shards.answer(1, request_id, TxnPendingReply([(owned_by(1), 7, [("stage", owned_by(1))])]))
        _, publish = await shards.told(1, StagePublish)
        assert publish == StagePublish(owned_by(1), "stage", owned_by(1), 7)
        shards.ready(0)
        await shards.told(0, TxnPending)

    shards.ready(1)
    on_loop(shards, tmp_path, test)
