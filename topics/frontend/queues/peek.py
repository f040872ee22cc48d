"""`POST …/peek` (api §9): jobs and where each of them stands, for a console. Looking touches no lease."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from topics.api.requests import PeekBody
from topics.core.job import JobView
from topics.core.names import check_topic_name
from topics.core.seq_set import runs_of
from topics.frontend import wire
from topics.frontend.answers import elapsed_ms, send_json, take_room
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.bodies import read_body
from topics.frontend.queues.job_records import ANSWER_BYTES_MAX
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.queue_messages import Peek, Peeked

LOOKS_MAX: Final = 16
"""How often the shard is asked for one answer: it looks at few records at a time, for others wait behind it."""
RUNS_AT_ONCE: Final = 32
"""Pages that are read before the loop goes on with somebody else."""


_encode = msgspec.json.Encoder().encode


class PeekRoute:
    """The shard says which jobs; their records are read here."""

    def __init__(self, gateway: Gateway, reader: TopicReader, catching_up: CatchingUp, settings: Settings) -> None:
        self._gateway = gateway
        self._reader = reader
        self._catching_up = catching_up
        self._settings = settings

    async def peek(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = check_topic_name(scope["path_params"]["topic"]), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = wire.decode_as(PeekBody, body or b"{}")
        await self._catching_up.one(name)
        jobs, next_from_seq = await self._look(name, request)
        await take_room(scope, ANSWER_BYTES_MAX)
        bodies, count, cut_seq = await self._read(name, jobs)
        if cut_seq is not None:
            next_from_seq = cut_seq
        answer = b'{"topic":"%b","jobs":[%b],"count":%d,%b"performance":{"server_total_ms":%b}}' % (
            name.encode(),
            b",".join(bodies),
            count,
            b"" if next_from_seq is None else b'"next_from_seq":%d,' % next_from_seq,
            str(elapsed_ms(started_ns)).encode(),
        )
        answering = send_json(send, headers, 200, answer)
        del bodies, answer, jobs  # as `DiffRoute`
        await answering

    async def _look(self, name: str, request: PeekBody) -> tuple[list[JobView], int | None]:
        """The jobs, and behind which seq there may be more."""
        owner = self._reader.owner(name)
        most = max(1, min(request.max, self._settings.max_claim))
        jobs: list[JobView] = []
        from_seq, more = request.from_seq, True
        for _ in range(LOOKS_MAX):
            peek = Peek(name, from_seq, request.state, most - len(jobs))
            peeked = await self._gateway.call(owner, peek, Peeked)
            jobs += peeked.jobs
            from_seq, more = peeked.up_to_seq, peeked.more
            if not more or len(jobs) >= most:
                break
        return jobs, from_seq if more else None

    async def _read(self, name: str, jobs: list[JobView]) -> tuple[list[bytes], int, int | None]:
        """Their records, how many; and behind which seq they are left out, which would make the answer too long. Those
        that have gone since are left out, too.
        """
        extras = {job.seq: _members(job) for job in jobs}
        bodies: list[bytes] = []
        count, left_bytes = 0, ANSWER_BYTES_MAX
        for number, (first_seq, last_seq) in enumerate(runs_of(extras), 1):
            cursor = first_seq - 1
            while cursor < last_seq:
                if left_bytes <= 0:
                    return bodies, count, cursor
                ref = self._reader.get(name)
                options = PageOptions(last_seq - cursor, left_bytes, include_tags=True, extras=extras)
                page = await self._reader.fetch_page(ref, cursor, options, self._reader.now_ms(), last_seq)
                cursor = max(page.next_from_seq, cursor + 1)
                if page.count:
                    bodies.append(page.body)
                    count += page.count
                    left_bytes -= len(page.body)
            if not number % RUNS_AT_ONCE:
                await asyncio.sleep(0)
        return bodies, count, None


def _members(job: JobView) -> bytes:
    """What is said of a job beside its record."""
    members = b',"state":"%b","deliveries":%d' % (job.state.encode(), job.deliveries)
    if job.state == "leased":
        members += b',"node":%b,"deadline":%d' % (_encode(job.node), job.at_ms)
    if job.state == "scheduled":
        members += b',"deliver_at":%d' % job.at_ms
    if job.order_key:
        members += b',"order_key":%b' % _encode(job.order_key)
    return members
