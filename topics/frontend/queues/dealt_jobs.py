"""Jobs that shards deal to claims and streams, at once or later, and their records with leases (api §9)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from topics.core.errors import TopicsError, storage_unavailable
from topics.core.seq_set import runs_of
from topics.frontend.asgi import Receive, disconnected_before
from topics.frontend.entry.bodies import ClientGoneError
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Slices
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.notices import JobListener
from topics.log import LASTING_EVERY_S, SparseLines
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
        """Return the jobs of a claim, at once or at the end of its window. Fails as `Gateway.call` does, and with
        ClientGoneError if the client, by `receive`, leaves before that: its place in the window is free then.
        """
        shard = self._gateway.owner(name)
        claim = Claim(name, node, most, lease_ms, self.listeners.new_number())
        repeated = False
        while True:
            late = partial(self._undo, shard, claim)
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
                    late(reply)
                return dealt
            except _RestartedError:
                # The shard may have the first claim after all, and deal jobs to it before the repeated one arrives.
                repeated = True
            except BaseException as error:
                for answer in (asked, gathered):  # one may have come at the moment of the cancellation
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

    def _undo(self, shard: int, claim: Claim, reply: Dealt | Waiting) -> None:
        """Give back the jobs of a claim that came too late for its client. A claim that waits for a window leaves it.
        If the shard deals jobs to it before it knows that, they are given back as well.
        """
        if isinstance(reply, Waiting):
            self.leave(shard, claim.name, claim.stream, partial(self._undo, shard, claim), reply.wait_ms)
            return
        self.give_back(claim.name, claim.node, reply)
        if reply.dead:
            self._gateway.post(shard, Release(claim.name, reply.dead, reply.topic_id))

    def give_back(
        self, name: str, node: str, dealt: Dealt, start: int = 0, end: int | None = None, delay_ms: int = 0
    ) -> None:
        """Give back the jobs start..end of `dealt`. Nobody waits for it: a full ring must fail no claim."""
        seqs, first = dealt.seqs[start:end], dealt.first_lease_no + start
        if seqs:
            leases = list(range(first, first + len(seqs)))
            self._gateway.post(self._gateway.owner(name), Unclaim(name, node, seqs, leases, delay_ms))

    def _repeat_claims(self, shard: int) -> None:
        """Repeat the claims that waited for a window at a shard that was restarted: it has forgotten them."""
        for claim in self._claims.values():
            # A claim without its first reply gets that from the restarted shard.
            if claim.shard == shard and claim.answer.done() and not claim.gathered.done():
                claim.gathered.set_exception(_RestartedError())
                claim.gathered.exception()


ANSWER_BYTES_MAX: Final = 8 << 20
"""Longest answer to one claim, which has at least one job."""
PAGE_JOBS: Final = 128
"""Jobs that are read before others have their turn: each has members of its own."""
_LEASE_ID: Final = re.compile(r"lease_([0-9a-f]{16})")


def lease_no(lease_id: str) -> int:
    """Return the number of a lease; -1, which no lease has, for a text that is no lease id."""
    found = _LEASE_ID.fullmatch(lease_id)
    return -1 if found is None else int(found[1], 16)


def lease_members(dealt: Dealt) -> dict[int, bytes]:
    """Return the members that each job has besides its record, by seq (`PageOptions.extras`)."""
    jobs = enumerate(zip(dealt.seqs, dealt.deliveries, strict=True), dealt.first_lease_no)
    members = b',"lease_id":"lease_%016x","deadline":%d,"deliveries":%d'
    return {seq: members % (lease_no, dealt.deadline_ms, deliveries) for lease_no, (seq, deliveries) in jobs}


def read_job(reader: TopicReader, name: str, seq: int, members: Mapping[int, bytes]) -> bytes:
    """Return one job as a JSON object; empty if it is deleted. Raise as `TopicReader.read_page` does."""
    page = reader.read_page(reader.get(name), seq - 1, PageOptions(1, 1, include_tags=True, extras=members), seq)
    if page.next_from_seq < seq:
        raise _unreadable(name, seq)
    return page.body


class ReadJobs:
    """Jobs as JSON objects joined by commas (`body`), without deleted ones. Jobs behind `up_to_seq` are not read."""

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        self.count = 0
        self.up_to_seq = 0

    @property
    def body(self) -> bytes:
        return b",".join(self._bodies)

    async def read(self, reader: TopicReader, name: str, members: Mapping[int, bytes]) -> None:
        """Read the jobs that `members` names, in order, as many as an answer may hold. Raise TopicsError at the first
        one that cannot be read; those before it are there.
        """
        left_bytes = ANSWER_BYTES_MAX
        slices = Slices()
        for first_seq, last_seq in runs_of(members):
            self.up_to_seq = first_seq - 1
            while self.up_to_seq < last_seq:
                if left_bytes <= 0:
                    return
                count = min(PAGE_JOBS, last_seq - self.up_to_seq)
                options = PageOptions(count, left_bytes, include_tags=True, extras=members)
                page = await reader.fetch_page(reader.get(name), self.up_to_seq, options, last_seq)
                if page.next_from_seq <= self.up_to_seq:
                    raise _unreadable(name, self.up_to_seq + 1)
                self.up_to_seq = page.next_from_seq
                if page.count:
                    self._bodies.append(page.body)
                    self.count += page.count
                    left_bytes -= len(page.body)
                await slices.yield_if_over()


def _unreadable(name: str, seq: int) -> TopicsError:
    return storage_unavailable(f"job {seq} of topic {name!r} cannot be read", topic=name, seq=seq)


ASIDE_MS: Final = 30_000
"""The time that a job waits before it is tried again."""


class UnreadableJobs:
    """Jobs whose records cannot be read now: a corrupt segment, a cold directory that does not answer (api §9). Such a
    job is put aside for ASIDE_MS, which counts as no delivery, and logged.
    """

    def __init__(self) -> None:
        self._lines = SparseLines(LASTING_EVERY_S, asyncio.get_running_loop().time)

    def is_unreadable(self, name: str, seq: int, error: TopicsError) -> bool:
        """Tell whether `error` means that this job cannot be read, and log that. False: the job is not the cause."""
        if error.code != "storage_unavailable":
            return False
        where = {"topic": name, "seq": seq}
        self._lines.error("a job cannot be read and is put aside", **where, retry_ms=ASIDE_MS, reason=error.message)
        return True
