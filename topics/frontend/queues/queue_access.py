"""`POST …/claim | ack | nack | extend | redrive | peek` (api §9). The owner shard decides; records are read here."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec

from topics.api.requests import ClaimBody, ExtendBody, JobsBody, NackBody, PeekBody, RedriveBody
from topics.core.config import LEASE_MS
from topics.core.errors import TopicsError, invalid, not_a_queue
from topics.core.job import JobView
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name, owner_shard
from topics.core.seq_set import runs_of
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import limits, wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import Headers, read_body, read_request
from topics.frontend.entry.responses import elapsed_ms, reserve_room, room_of, send_json, send_object
from topics.frontend.entry.wire import BodyT
from topics.frontend.queues.dead_letter_moves import PATIENCE_S, DeadLetters
from topics.frontend.queues.job_channel import JobChannel
from topics.frontend.queues.job_records import (
    ANSWER_BYTES_MAX,
    ASIDE_MS,
    RenderedJobs,
    UnreadableJobs,
    fetch_jobs,
    lease_no,
)
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.queue_messages import Ack, AckReply, Dealt, Extend, Nack, Peek, Unclaim

SEQS_MAX: Final = 1000
"""Jobs of one ack, nack or extend."""
ROOM_WAIT_S: Final = 2.0
"""For room for the answer of a claim, whose jobs are leased by then; half their lease, if that is less."""
DELAY_MS_MAX: Final = 365 * 86_400_000
LOOKS_MAX: Final = 16
"""Questions to the shard for one answer: it looks at few records at a time, for others wait behind it."""
RUNS_AT_ONCE: Final = 32
"""Pages that are read before the loop goes on with somebody else."""


_encode = msgspec.json.Encoder().encode


class QueueAccess:
    """The way of one frontend to the jobs of all queues: it owns what the routes of claims and of streams share."""

    def __init__(self, gateway: Gateway, reader: TopicReader, incarnation: int) -> None:
        self.gateway = gateway
        self.reader = reader
        self.channel = JobChannel(gateway, incarnation)
        self.unreadable = UnreadableJobs()
        self.dead_letters = DeadLetters(gateway, reader, self.unreadable)


class QueueRoutes:
    """The requests to a queue that have one answer, a method for each. The shard decides; records are read here."""

    def __init__(self, jobs: QueueAccess, catching_up: CatchingUp, settings: Settings, cell: ProcessCell) -> None:
        self._gateway = jobs.gateway
        self._reader = jobs.reader
        self._channel = jobs.channel
        self._dead_letters = jobs.dead_letters
        self._unreadable = jobs.unreadable
        self._catching_up = catching_up
        self._settings = settings
        self._cell = cell

    async def claim(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        # Nothing of it is kept that is long: it may wait for its window and for dead letters.
        request = await read_request(receive, headers, self._settings.max_body_bytes, self._wish)
        node = request.node
        most = max(1, min(request.max, self._settings.max_claim))
        await self._catching_up.one(name)
        lease_ms = clamped_lease_ms(request.lease_ms)
        dealt = await self._claim(name, node, most, lease_ms, receive)
        try:
            count, body, ready = 0, b"", dealt.ready
            if dealt.seqs:
                rendered = await self._fetch(scope, name, node, dealt, lease_ms)
                count, body = rendered.jobs, rendered.body
                room = room_of(scope)
                if room is not None and room.closed:  # what is sent to it goes nowhere, and says nothing
                    raise ConnectionResetError("the client is gone")
                if rendered.unsent:
                    # Not awaited: a full ring would refuse the whole claim, whose jobs are leased.
                    unclaim = Unclaim(name, node, rendered.unsent, rendered.unsent_leases)
                    self._gateway.post(self._owner(name), unclaim)
                    ready += len(rendered.unsent)
                del rendered
                self._cell.add("records_out", count)
            answer = b'{"topic":"%b","claimed":[%b],"count":%d,"ready":%d,"performance":{"server_total_ms":%b}}' % (
                name.encode(),
                body,
                count,
                ready,
                str(elapsed_ms(started_ns)).encode(),
            )
            answering = send_json(send, headers, 200, answer)
            del body, answer  # as `DiffRoute`
            await answering
        except (ConnectionError, asyncio.CancelledError):
            self._unclaim(name, node, dealt, 0)
            raise

    def _wish(self, body: bytes) -> ClaimBody:
        request = wire.decode_as(ClaimBody, body)
        checked_node(request.node, self._settings)
        return request

    async def _claim(self, name: str, node: str, most: int, lease_ms: int | None, receive: Receive) -> Dealt:
        """Jobs, if any are ready: also those that waited behind nothing but dead letters, as long as there is time."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + PATIENCE_S
        while True:
            dealt = await self._channel.claim(name, node, most, lease_ms, receive)
            if dealt.ended:
                raise TopicsError("topic_not_found", f"topic {name!r} was deleted meanwhile", {"topic": name})
            if dealt.refused:
                raise TopicsError(
                    "storage_unavailable",
                    "the log cannot be written now, nothing was claimed; see the service's log",
                    {"topic": name},
                )
            if not dealt.dead:
                return dealt
            try:
                await self._dead_letters.carried(name, dealt)
            except asyncio.CancelledError:
                self._unclaim(name, node, dealt, 0)
                raise
            if dealt.seqs or loop.time() >= give_up_s:
                return dealt

    async def _fetch(self, scope: Scope, name: str, node: str, dealt: Dealt, lease_ms: int | None) -> RenderedJobs:
        try:
            if lease_ms is None:
                lease_ms = self._reader.get(name).config.lease_ms
            async with asyncio.timeout(min(ROOM_WAIT_S, lease_ms / 2000)):
                await reserve_room(scope, min(ANSWER_BYTES_MAX, len(dealt.seqs) * self._settings.max_record_bytes))
        except (TopicsError, TimeoutError) as error:
            self._unclaim(name, node, dealt, 0)
            if not isinstance(error, TimeoutError):
                raise
            raise limits.CONNECTION_ANSWERS.refused(
                "the answers that this connection has not taken leave no room for the jobs; take them, and claim again",
                limits.CONNECTION_ANSWERS.most_bytes,
            ) from None
        try:
            return await fetch_jobs(self._reader, name, dealt)
        except TopicsError as error:
            aside = 0
            if self._unreadable.concerns(name, dealt.seqs[0], error):
                aside = 1
                unclaim = Unclaim(name, node, dealt.seqs[:aside], [dealt.first_lease_no], ASIDE_MS)
                self._gateway.post(self._owner(name), unclaim)
            self._unclaim(name, node, dealt, aside)
            raise

    def _unclaim(self, name: str, node: str, dealt: Dealt, but: int) -> None:
        """Give back all jobs but the first so many: they were claimed in vain."""
        if dealt.seqs[but:]:
            end = dealt.first_lease_no + len(dealt.seqs)
            leases = list(range(dealt.first_lease_no + but, end))
            self._gateway.post(self._owner(name), Unclaim(name, node, dealt.seqs[but:], leases))

    async def ack(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        request = await self._body(JobsBody, receive, headers)
        call = Ack(name, request.node, request.seqs, _lease_nos(request))
        reply = await self._gateway.call(self._owner(name), call)
        await _send_ended(send, headers, name, "acked", reply, started_ns)

    async def nack(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        request = await self._body(NackBody, receive, headers)
        delay_ms = min(request.delay_ms, DELAY_MS_MAX)
        call = Nack(name, request.node, request.seqs, _lease_nos(request), delay_ms)
        reply = await self._gateway.call(self._owner(name), call)
        await _send_ended(send, headers, name, "nacked", reply, started_ns)

    async def extend(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        request = await self._body(ExtendBody, receive, headers)
        lease_ms = clamped_lease_ms(request.lease_ms)
        assert lease_ms is not None
        call = Extend(name, request.node, request.seqs, _lease_nos(request), lease_ms)
        reply = await self._gateway.call(self._owner(name), call)
        answer: dict[str, Any] = {
            "topic": name,
            "extended": len(reply.seqs),
            "skipped": reply.skipped,
            "deadlines": {str(seq): reply.deadline_ms for seq in reply.seqs},
        }
        await send_object(send, headers, 200, answer, started_ns)

    async def redrive(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        request = await self._body(RedriveBody, receive, headers)
        source = check_topic_name(request.source, "from")
        caller_of(scope).require(KeyScope.ADMIN, (source,))
        if source == name:
            raise invalid("from must be another topic than the queue itself", field="from")
        if self._reader.get(name).config.type != "queue":
            raise not_a_queue(name)
        most = max(1, min(request.max, self._settings.max_claim))
        redriven = await self._dead_letters.redrive(name, source, request.from_seq, most)
        answer: dict[str, Any] = {"topic": name, "from": source, "redriven": redriven.moved}
        if redriven.next_from_seq is not None:
            answer["next_from_seq"] = redriven.next_from_seq
        await send_object(send, headers, 200, answer, started_ns)

    async def peek(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = _topic_name(scope), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = wire.decode_as(PeekBody, body or b"{}")
        await self._catching_up.one(name)
        jobs, next_from_seq = await self._look_at(name, request)
        await reserve_room(scope, ANSWER_BYTES_MAX)
        bodies, count, cut_seq = await self._read_jobs(name, jobs)
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

    async def _look_at(self, name: str, request: PeekBody) -> tuple[list[JobView], int | None]:
        """Return the jobs, and the seq behind which there may be more."""
        owner = self._reader.owner(name)
        most = max(1, min(request.max, self._settings.max_claim))
        jobs: list[JobView] = []
        from_seq, more = request.from_seq, True
        for _ in range(LOOKS_MAX):
            peek = Peek(name, from_seq, request.state, most - len(jobs))
            peeked = await self._gateway.call(owner, peek)
            jobs += peeked.jobs
            from_seq, more = peeked.up_to_seq, peeked.more
            if not more or len(jobs) >= most:
                break
        return jobs, from_seq if more else None

    async def _read_jobs(self, name: str, jobs: list[JobView]) -> tuple[list[bytes], int, int | None]:
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

    async def _body(self, body_type: type[BodyT], receive: Receive, headers: Headers) -> BodyT:
        request = wire.decode_as(body_type, await read_body(receive, headers, self._settings.max_body_bytes))
        if isinstance(request, JobsBody):
            self._check_jobs(request)
        return request

    def _check_jobs(self, request: JobsBody) -> None:
        checked_node(request.node, self._settings)
        most = max(SEQS_MAX, self._settings.max_claim)
        if not request.seqs:
            raise invalid("seqs must name at least one job", field="seqs")
        if len(request.seqs) > most:
            raise TopicsError(
                "batch_too_large", f"seqs names at most {most} jobs, not {len(request.seqs)}", {"max_claim": most}
            )
        if max(request.seqs) >= 1 << 64:
            raise invalid("seqs must be integers from 0 to 2^64-1", field="seqs")
        if request.lease_ids is not None and len(request.lease_ids) != len(request.seqs):
            raise invalid(
                f"lease_ids must have one for each of the {len(request.seqs)} seqs, not {len(request.lease_ids)}",
                field="lease_ids",
            )

    def _owner(self, name: str) -> int:
        return owner_shard(name, self._gateway.shards)


def checked_node(node: str, settings: Settings) -> str:
    """Return the name of the consumer; `400` for none, or one that is too long."""
    if not 1 <= len(node.encode()) <= settings.max_node_bytes:
        raise invalid(f"node must have 1 to {settings.max_node_bytes} bytes", field="node")
    return node


def clamped_lease_ms(lease_ms: int | None) -> int | None:
    """None: the queue's own."""
    return None if lease_ms is None else max(LEASE_MS[0], min(LEASE_MS[1], lease_ms))


def _lease_nos(request: JobsBody) -> list[int] | None:
    return None if request.lease_ids is None else [lease_no(one) for one in request.lease_ids]


async def _send_ended(send: Send, headers: Headers, name: str, word: str, reply: AckReply, started_ns: int) -> None:
    answer: dict[str, Any] = {
        "topic": name,
        word: reply.count,
        "skipped": reply.skipped,
        "ready": reply.ready,
        "in_flight": reply.in_flight,
    }
    await send_object(send, headers, 200, answer, started_ns)


def _topic_name(scope: Scope) -> str:
    return check_topic_name(scope["path_params"]["topic"])


def _members(job: JobView) -> bytes:
    """The members of a job beside its record."""
    members = b',"state":"%b","deliveries":%d' % (job.state.encode(), job.deliveries)
    if job.state == "leased":
        members += b',"node":%b,"deadline":%d' % (_encode(job.node), job.at_ms)
    if job.state == "scheduled":
        members += b',"deliver_at":%d' % job.at_ms
    if job.order_key:
        members += b',"order_key":%b' % _encode(job.order_key)
    return members
