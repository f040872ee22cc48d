"""How jobs come to this frontend that nobody asked for at that moment: to streams, and to claims that gather."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from topics.core.names import owner_shard
from topics.frontend.asgi import Receive
from topics.frontend.entry.bodies import ClientGoneError
from topics.frontend.live.push import gone_before
from topics.frontend.shards.gateway import Gateway
from topics.shm.queue_messages import Claim, Dealt, Release, Unclaim, Waiting, WorkClose


class _RestartedError(Exception):
    """The shard was started again and knows of nobody who waits."""


class _Asked(NamedTuple):
    """A claim that its shard was asked for; `gathered` is what the end of its window brings, after a first answer."""

    shard: int
    answer: asyncio.Future[Dealt | Waiting]
    gathered: asyncio.Future[Dealt]


class JobChannel:
    """Numbers for streams and claims, and who is behind each of them."""

    def __init__(self, gateway: Gateway, incarnation: int) -> None:
        self._gateway = gateway
        self._last_number = incarnation << 32
        self._listeners: dict[int, Callable[[Dealt], None]] = {}
        self._claims: dict[int, _Asked] = {}
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

    def leave(self, shard: int, name: str, number: int, listener: Callable[[Dealt], None], window_ms: int = 0) -> None:
        """Tells `shard` that it is over; `listener` gets what it may be dealt before that is known there."""
        self.listen(number, listener)
        asyncio.get_running_loop().call_later(self._longest_s(window_ms), self.forget, number)
        self._gateway.post(shard, WorkClose(name, number))

    async def claim(self, name: str, node: str, most: int, lease_ms: int | None, receive: Receive) -> Dealt:
        """What a claim gets, at once or at the end of its window. Fails as `Gateway.call` does; ClientGoneError when
        its client, as `receive` says, goes away before that: it leaves the window, for those who are still there.
        """
        shard = owner_shard(name, self._gateway.shards)
        claim = Claim(name, node, most, lease_ms, self.number())
        again = False
        while True:
            late = partial(self._answered_late, shard, claim)
            asked = self._gateway.submit(shard, claim, late)
            gathered: asyncio.Future[Dealt] = asyncio.get_running_loop().create_future()
            self._claims[claim.stream] = _Asked(shard, asked, gathered)
            try:
                reply = await asked
                if isinstance(reply, Dealt):
                    return reply
                assert isinstance(reply, Waiting)
                async with asyncio.timeout(self._longest_s(reply.wait_ms)):
                    if await gone_before(gathered, receive):
                        raise ClientGoneError
                    dealt = gathered.result()
                if again:
                    self._leave(shard, claim, reply)
                return dealt
            except _RestartedError:
                # Where the shard knew it nevertheless, and its window ended before it came again, it is dealt to twice.
                again = True
            except BaseException as error:
                for answer in (asked, gathered):  # which may have come in this very moment
                    if answer.done() and not answer.cancelled() and answer.exception() is None:
                        late(answer.result())
                if isinstance(error, TimeoutError):
                    raise self._gateway.no_answer(shard) from None
                raise
            finally:
                del self._claims[claim.stream]

    def _longest_s(self, window_ms: int) -> float:
        return window_ms / 1000 + self._gateway.shard_wait_s

    def _answered_late(self, shard: int, claim: Claim, reply: Dealt | Waiting) -> None:
        """Its client has been told that there was no answer, or is gone."""
        if isinstance(reply, Dealt):
            self._give_back(shard, claim, reply)
        else:
            self._leave(shard, claim, reply)

    def _leave(self, shard: int, claim: Claim, waiting: Waiting) -> None:
        """Out of the window; what it may be dealt before the shard knows is given back."""
        self.leave(shard, claim.name, claim.stream, partial(self._give_back, shard, claim), waiting.wait_ms)

    def _give_back(self, shard: int, claim: Claim, dealt: Dealt) -> None:
        if dealt.seqs:
            leases = list(range(dealt.first_lease_no, dealt.first_lease_no + len(dealt.seqs)))
            self._gateway.post(shard, Unclaim(claim.name, claim.node, dealt.seqs, leases))
        if dealt.dead:
            self._gateway.post(shard, Release(claim.name, dealt.dead, 0))

    def _take(self, dealt: Dealt) -> None:
        listener = self._listeners.get(dealt.stream)
        if listener is not None:
            listener(dealt)
            return
        claim = self._claims.get(dealt.stream)
        if claim is not None and not claim.gathered.done():
            claim.gathered.set_result(dealt)

    def _restarted(self, shard: int) -> None:
        for asked in self._claims.values():
            # Whoever still waits for the first answer gets that one from the restarted shard.
            if asked.shard == shard and asked.answer.done() and not asked.gathered.done():
                asked.gathered.set_exception(_RestartedError())
                asked.gathered.exception()
