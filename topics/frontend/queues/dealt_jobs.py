"""Jobs that shards deal to claims and streams, also after their first reply, and their records with leases (api §9)."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from functools import partial
from typing import Final, NamedTuple

from topics.core.errors import TopicsError
from topics.core.seq_set import runs_of
from topics.frontend.asgi import Receive, disconnected_before
from topics.frontend.entry.bodies import ClientGoneError
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.notices import JobListener
from topics.log import get_logger
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


ANSWER_BYTES_MAX: Final = 8 << 20
"""Longest answer to one claim, which has at least one job."""
_LEASE_ID: Final = re.compile(r"lease_([0-9a-f]{16})")
_COLD_TRIES: Final = 4


class RenderedJobs(NamedTuple):
    """`jobs` JSON objects joined by commas, but for deleted ones. The last `unsent` did not fit: give them back."""

    body: bytes
    jobs: int
    unsent: int


def lease_id(lease_no: int) -> str:
    return f"lease_{lease_no:016x}"


def lease_no(lease_id: str) -> int:
    """Return the number of a lease; -1, which no lease has, for a text that is no lease id."""
    found = _LEASE_ID.fullmatch(lease_id)
    return -1 if found is None else int(found[1], 16)


async def fetch_jobs(reader: TopicReader, name: str, dealt: Dealt) -> RenderedJobs:
    """Render jobs up to the first unreadable one. Raise `storage_unavailable` if it is the first, `topic_not_found`."""
    rendering = JobRendering(reader, name, dealt)
    missed_at, tries = -1, 0
    while True:
        try:
            return rendering.go_on()
        except ColdMissError as miss:
            tries = tries + 1 if missed_at == rendering.cursor else 1
            missed_at = rendering.cursor
            try:
                await reader.fetch(miss)
            except FileNotFoundError as error:  # it was moved, and a new view of the topic says where
                if tries > _COLD_TRIES:
                    raise _unreadable(name, missed_at + 1) from error
            except TopicsError:
                if not rendering.count:
                    raise
                return rendering.cut()


class JobRendering:
    """The rendering of some jobs. It stops at a record that has to be fetched from the cold tier, and goes on there."""

    def __init__(self, reader: TopicReader, name: str, dealt: Dealt) -> None:
        self._reader = reader
        self._name = name
        self._seqs = dealt.seqs
        self._left_bytes = ANSWER_BYTES_MAX
        self._runs = runs_of(dealt.seqs)
        self._extras = {
            seq: b',"lease_id":"%b","deadline":%d,"deliveries":%d'
            % (lease_id(number).encode(), dealt.deadline_ms, deliveries)
            for number, (seq, deliveries) in enumerate(
                zip(dealt.seqs, dealt.deliveries, strict=True), dealt.first_lease_no
            )
        }
        self._bodies: list[bytes] = []
        self.cursor = dealt.seqs[0] - 1  # seq of the last job that was looked at
        self.count = 0

    def go_on(self) -> RenderedJobs:
        """Render the rest. Raise as `fetch_jobs` does; after ColdMissError, fetch what is missing and go on."""
        ref = self._reader.get(self._name)
        for first_seq, last_seq in self._runs:
            self.cursor = max(self.cursor, first_seq - 1)
            while self.cursor < last_seq:
                if self.count and self._left_bytes <= 0:
                    return self.cut()
                options = PageOptions(
                    last_seq - self.cursor, max(1, self._left_bytes), include_tags=True, extras=self._extras
                )
                try:
                    page = self._reader.read_page(ref, self.cursor, options, last_seq)
                    if page.next_from_seq <= self.cursor:
                        raise _unreadable(self._name, self.cursor + 1)
                except TopicsError as error:
                    if error.code == "storage_unavailable" and self.count and not isinstance(error, ColdMissError):
                        return self.cut()
                    raise
                self.cursor = page.next_from_seq
                if page.count:
                    self._bodies.append(page.body)
                    self.count += page.count
                    self._left_bytes -= len(page.body)
        return RenderedJobs(b",".join(self._bodies), self.count, 0)

    def cut(self) -> RenderedJobs:
        """Return the jobs rendered so far. The others are to be given back."""
        return RenderedJobs(b",".join(self._bodies), self.count, sum(seq > self.cursor for seq in self._seqs))


def _unreadable(name: str, seq: int) -> TopicsError:
    return TopicsError(
        "storage_unavailable", f"job {seq} of topic {name!r} cannot be read", {"topic": name, "seq": seq}
    )


ASIDE_MS: Final = 30_000
"""The time that a job waits before it is tried again."""
_LOGGED_MAX: Final = 10_000

_log = get_logger()


class UnreadableJobs:
    """Jobs whose records cannot be read now: a corrupt segment, a cold directory that does not answer (api §9). Such a
    job is put aside for ASIDE_MS, which counts as no delivery, and logged once; the oldest are forgotten first.
    """

    def __init__(self) -> None:
        self._logged: OrderedDict[tuple[str, int], None] = OrderedDict()

    def is_unreadable(self, name: str, seq: int, error: TopicsError) -> bool:
        """Tell whether `error` means that this job cannot be read, and log that. False: the job is not the cause."""
        if error.code != "storage_unavailable":
            return False
        if (name, seq) not in self._logged:
            self._logged[name, seq] = None
            if len(self._logged) > _LOGGED_MAX:
                self._logged.popitem(last=False)
            _log.error(
                "a job cannot be read and is put aside", topic=name, seq=seq, retry_ms=ASIDE_MS, reason=error.message
            )
        return True
