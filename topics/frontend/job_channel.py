"""How jobs come to this frontend that nobody asked for at that moment: to streams, and to claims that gather."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topics.core.names import owner_shard
from topics.frontend.gateway import Gateway
from topics.shm.queue_messages import Claim, Dealt, Waiting


class _RestartedError(Exception):
    """The shard was started again and knows of nobody who waits."""


class JobChannel:
    """Numbers for streams and claims, and who is behind each of them."""

    def __init__(self, gateway: Gateway, incarnation: int) -> None:
        self._gateway = gateway
        self._last_number = incarnation << 32
        self._listeners: dict[int, Callable[[Dealt], None]] = {}
        self._claims: dict[int, tuple[int, asyncio.Future[Dealt]]] = {}
        gateway.on_dealt = self._take
        gateway.on_restart.append(self._restarted)

    def number(self) -> int:
        """One that was never used, by a former life neither."""
        self._last_number += 1
        return self._last_number

    def listen(self, number: int, listener: Callable[[Dealt], None]) -> None:
        """`listener` gets what is dealt to this stream until `forget`."""
        self._listeners[number] = listener

    def forget(self, number: int) -> None:
        self._listeners.pop(number, None)

    async def claim(self, name: str, node: str, most: int, lease_ms: int | None) -> Dealt:
        """What a claim gets, at once or at the end of its window. Fails as `Gateway.call` does."""
        shard = owner_shard(name, self._gateway.shards)
        number = self.number()
        while True:
            future: asyncio.Future[Dealt] = asyncio.get_running_loop().create_future()
            self._claims[number] = (shard, future)
            try:
                reply = await self._gateway.submit(shard, Claim(name, node, most, lease_ms, number))
                if isinstance(reply, Dealt):
                    return reply
                assert isinstance(reply, Waiting)
                async with asyncio.timeout(reply.wait_ms / 1000 + self._gateway.shard_wait_s):
                    return await future
            except _RestartedError:
                continue
            except TimeoutError:
                raise self._gateway.no_answer(shard) from None
            finally:
                del self._claims[number]

    def _take(self, dealt: Dealt) -> None:
        listener = self._listeners.get(dealt.stream)
        if listener is not None:
            listener(dealt)
            return
        claim = self._claims.get(dealt.stream)
        if claim is not None and not claim[1].done():
            claim[1].set_result(dealt)

    def _restarted(self, shard: int) -> None:
        for waits_for, future in self._claims.values():
            if waits_for == shard and not future.done():
                future.set_exception(_RestartedError())
                # Whoever still waits for the first answer gets that one from the restarted shard.
                future.exception()
