"""Claims and streams of queues as the shards know them: by number, with jobs that come after the first reply."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple

from topics.frontend.asgi import Receive, disconnected_before
from topics.frontend.entry.bodies import ClientGoneError
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.notices import JobListener
from topics.shm.queue_messages import Claim, Dealt, Release, Unclaim, Waiting, WorkClose


class _RestartedError(Exception):
    """The shard was restarted and has forgotten the claims that wait."""


class _PendingClaim(NamedTuple):
    """A claim that was sent to its shard. `gathered` gets the jobs at the end of its window, after a first reply."""

    shard: int
    answer: asyncio.Future[Dealt | Waiting]
    gathered: asyncio.Future[Dealt]

    def take(self, dealt: Dealt) -> None:
        if not self.gathered.done():
            self.gathered.set_result(dealt)


class JobChannel:
    """The claims of one frontend that wait for jobs, and the ends of its claims and streams."""

    def __init__(self, gateway: Gateway) -> None:
        self.listeners = gateway.job_listeners
        self._gateway = gateway
        self._claims: dict[int, _PendingClaim] = {}
        gateway.on_restart(self._repeat_claims)

    def leave(self, shard: int, name: str, number: int, listener: JobListener, window_ms: int = 0) -> None:
        """Tell `shard` that a claim or stream is over. `listener` gets the jobs that it is dealt before it knows."""
        self.listeners.listen(number, listener)
        loop = asyncio.get_running_loop()
        loop.call_later(self._longest_s(window_ms), self.listeners.forget, number, listener)
        self._gateway.post(shard, WorkClose(name, number))

    async def claim(self, name: str, node: str, most: int, lease_ms: int | None, receive: Receive) -> Dealt:
        """Return the jobs of a claim, at once or at the end of its window. Fails as `Gateway.call` does.

        Raise ClientGoneError if the client, by `receive`, leaves before that: its place in the window is free then.
        """
        shard = self._gateway.owner(name)
        claim = Claim(name, node, most, lease_ms, self.listeners.new_number())
        repeated = False
        while True:
            late = partial(self._answered_late, shard, claim)
            asked = self._gateway.submit(shard, claim, late)
            gathered: asyncio.Future[Dealt] = asyncio.get_running_loop().create_future()
            pending = self._claims[claim.stream] = _PendingClaim(shard, asked, gathered)
            self.listeners.listen(claim.stream, pending.take)
            try:
                reply = await asked
                if isinstance(reply, Dealt):
                    return reply
                assert isinstance(reply, Waiting)
                async with asyncio.timeout(self._longest_s(reply.wait_ms)):
                    if await disconnected_before(gathered, receive):
                        raise ClientGoneError
                    dealt = gathered.result()
                if repeated:
                    self._leave(shard, claim, reply)
                return dealt
            except _RestartedError:
                # If the shard had the claim after all, and its window ends before the repeated claim, it deals twice.
                repeated = True
            except BaseException as error:
                for answer in (asked, gathered):  # one may have come in this very moment
                    if answer.done() and not answer.cancelled() and answer.exception() is None:
                        late(answer.result())
                if isinstance(error, TimeoutError):
                    raise self._gateway.no_answer(shard) from None
                raise
            finally:
                del self._claims[claim.stream]
                self.listeners.forget(claim.stream, pending.take)

    def _longest_s(self, window_ms: int) -> float:
        return window_ms / 1000 + self._gateway.shard_wait_s

    def _answered_late(self, shard: int, claim: Claim, reply: Dealt | Waiting) -> None:
        """Undo a claim whose client has an answer by now, or has left."""
        if isinstance(reply, Dealt):
            self._give_back(shard, claim, reply)
        else:
            self._leave(shard, claim, reply)

    def _leave(self, shard: int, claim: Claim, waiting: Waiting) -> None:
        """Leave the window, and give back the jobs that are dealt before the shard knows."""
        self.leave(shard, claim.name, claim.stream, partial(self._give_back, shard, claim), waiting.wait_ms)

    def give_back(
        self, name: str, node: str, dealt: Dealt, start: int = 0, end: int | None = None, delay_ms: int = 0
    ) -> None:
        """Give back the jobs start..end of `dealt`. Nobody waits for it: a full ring must fail no claim."""
        seqs, first = dealt.seqs[start:end], dealt.first_lease_no + start
        if seqs:
            leases = list(range(first, first + len(seqs)))
            self._gateway.post(self._gateway.owner(name), Unclaim(name, node, seqs, leases, delay_ms))

    def _give_back(self, shard: int, claim: Claim, dealt: Dealt) -> None:
        self.give_back(claim.name, claim.node, dealt)
        if dealt.dead:
            self._gateway.post(shard, Release(claim.name, dealt.dead, 0))

    def _repeat_claims(self, shard: int) -> None:
        """Have the claims repeated that wait for the end of their window at a shard that was restarted."""
        for claim in self._claims.values():
            # A claim without its first reply gets that from the restarted shard.
            if claim.shard == shard and claim.answer.done() and not claim.gathered.done():
                claim.gathered.set_exception(_RestartedError())
                claim.gathered.exception()
