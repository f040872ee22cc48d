"""Watches are renewed and ended in turns, between which others are served."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.notices import LINGER_S, RENEWED_AT_ONCE, SWEPT_AT_ONCE, Watches
from topics.shm.asks import Message
from topics.shm.topic_messages import Unwatch


class Shard:
    """A shard that has no topics, and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Message] = []

    def watches(self) -> Watches:
        arenas = cast(Arenas, SimpleNamespace(of=lambda _shard: None))
        return Watches(
            asyncio.get_running_loop(), arenas, lambda _, message: self.told.append(message), lambda _: False
        )


def test_many_watches_are_renewed_while_others_have_their_turns() -> None:
    count, fired, seen = 3 * RENEWED_AT_ONCE + 1, list[int](), list[int]()

    async def test() -> None:
        watches = Shard().watches()
        handles = [watches.add(0, f"t{n}", None, partial(fired.append, n)) for n in range(count)]
        watches.add(1, "elsewhere", None, lambda: fired.append(-1))
        watches.renew(0)
        handles[-1].cancel()
        seen.append(len(fired))
        while len(fired) < count - 1:
            await asyncio.sleep(0)
            seen.append(len(fired))
        await asyncio.sleep(0)

    asyncio.run(test())
    assert fired == list(range(count - 1)), "one was no longer wanted, another is of a shard that was not restarted"
    assert seen[0] == RENEWED_AT_ONCE
    assert max(after - before for before, after in pairwise(seen)) <= RENEWED_AT_ONCE


def test_one_sweep_ends_so_many_watches() -> None:
    async def test() -> None:
        shard = Shard()
        watches = shard.watches()
        for number in range(SWEPT_AT_ONCE + 1):
            watches.add(0, f"t{number}", None, lambda: None).cancel()
        later_s = asyncio.get_running_loop().time() + LINGER_S + 1
        watches.sweep(later_s)
        assert len(shard.told) == SWEPT_AT_ONCE
        watches.sweep(later_s)
        watches.sweep(later_s)
        assert [message.name for message in shard.told if isinstance(message, Unwatch)] == [
            f"t{number}" for number in range(SWEPT_AT_ONCE + 1)
        ]

    asyncio.run(test())
