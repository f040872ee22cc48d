"""`POST …/claim | ack | nack | extend | redrive | peek` (api §9). The owner shard decides; records are read here."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from topics.api import answers
from topics.api.requests import ClaimBody, ExtendBody, JobsBody, NackBody, PeekBody, RedriveBody
from topics.core.config import LEASE_MS
from topics.core.errors import TopicsError, invalid, not_a_queue, storage_unavailable
from topics.core.job import JobView
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import limits, wire
from topics.frontend.entry.bodies import read_request
from topics.frontend.entry.responses import elapsed_ms, encode_json, reserve_room, room_of, send_json
from topics.frontend.queues.dead_letter_moves import MOVE_WAIT_S, DeadLetters
from topics.frontend.queues.dealt_jobs import (
    ANSWER_BYTES_MAX,
    ASIDE_MS,
    JobChannel,
    ReadJobs,
    UnreadableJobs,
    lease_members,
    lease_no,
)
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicReader
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.durations import Route
from topics.shm.queue_messages import Ack, AckReply, Dealt, Extend, Nack, Peek

SEQS_MAX: Final = 1000
"""Jobs of one ack, nack or extend."""
ROOM_WAIT_S: Final = 2.0
"""Longest wait for room for the answer to a claim, or half of its lease if that is shorter: the jobs are leased."""
DELAY_MS_MAX: Final = 365 * 86_400_000
LOOKS_MAX: Final = 16
"""Requests to the shard for one peek: each examines few records, as other requests wait behind it."""
JOB_CODES: Final = ("topic_not_found", "not_a_queue", *api.LOST)
_REDRIVE_CODES: Final = (*JOB_CODES, "topic_full", "record_too_large")

JobsBodyT = TypeVar("JobsBodyT", bound=JobsBody)
_CLAIMED: Final = b'{"topic":"%b","claimed":[%b],"count":%d,"ready":%d,"performance":{"server_total_ms":%b}}'


class QueueServices:
    """The parts of one frontend that the routes of claims and of streams share."""

    def __init__(self, gateway: Gateway, reader: TopicReader) -> None:
        self.gateway = gateway
        self.reader = reader
        self.channel = JobChannel(gateway)
        self.unreadable = UnreadableJobs()
        self.dead_letters = DeadLetters(gateway, reader, self.unreadable)


@dataclass(eq=False)
class QueueRoutes:
    """The requests to a queue that have one answer, a method for each. The shard decides; records are read here."""

    services: QueueServices
    catching_up: CatchingUp
    settings: Settings
    cell: ProcessCell

    @api.asgi_route("POST", f"{api.TOPIC_PATH}/claim", Route.CLAIM, KeyScope.READ | KeyScope.WRITE, "queues")
    @api.describe("Lease jobs", api.ok("Jobs, or none", answers.ClaimAnswer), *JOB_CODES)
    @api.takes(body=ClaimBody)
    async def claim(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = check_topic_name(scope["path_params"]["topic"]), dict(scope["headers"])
        # No long part of the body is kept, as the claim may wait for its window and for dead letters.
        request = await read_request(receive, headers, self.settings.max_command_bytes, self._wish)
        node = request.node
        most = max(1, min(request.max, self.settings.max_claim))
        await self.catching_up.wait_for(name)
        lease_ms = None if request.lease_ms is None else clamped_lease_ms(request.lease_ms)
        dealt = await self._claim(name, node, most, lease_ms, receive)
        try:
            count, body, ready = 0, b"", dealt.ready
            if dealt.seqs:
                jobs = await self._read_jobs(scope, name, node, dealt, lease_ms)
                count, body = jobs.count, jobs.body
                room = room_of(scope)
                if room is not None and room.closed:  # sending to it would do nothing, without an error
                    raise ConnectionResetError("the client closed the connection")
                sent = bisect_right(dealt.seqs, jobs.up_to_seq)
                self.services.channel.give_back(name, node, dealt, sent)
                ready += len(dealt.seqs) - sent
                del jobs
                self.cell.add("records_out", count)
            answer = _CLAIMED % (name.encode(), body, count, ready, str(elapsed_ms(started_ns)).encode())
            answering = send_json(send, headers, 200, answer)
            del body, answer  # as in `DiffRoute`
            await answering
        except (ConnectionError, asyncio.CancelledError):
            self.services.channel.give_back(name, node, dealt)
            raise

    def _wish(self, body: bytes) -> ClaimBody:
        request = wire.decode_as(ClaimBody, body)
        checked_node(request.node, self.settings)
        return request

    async def _claim(self, name: str, node: str, most: int, lease_ms: int | None, receive: Receive) -> Dealt:
        """Claim jobs. If only dead letters were dealt, claim again while there is time: jobs may wait behind them."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + MOVE_WAIT_S
        while True:
            dealt = await self.services.channel.claim(name, node, most, lease_ms, receive)
            if dealt.ended:
                raise TopicsError("topic_not_found", f"topic {name!r} was deleted in the meantime", {"topic": name})
            if dealt.refused:
                raise storage_unavailable(
                    "the log cannot be written now, nothing was claimed; see the service's log", topic=name
                )
            if not dealt.dead:
                return dealt
            try:
                await asyncio.wait((self.services.dead_letters.start_move(name, dealt),), timeout=MOVE_WAIT_S)
            except asyncio.CancelledError:
                self.services.channel.give_back(name, node, dealt)
                raise
            if dealt.seqs or loop.time() >= give_up_s:
                return dealt

    async def _read_jobs(self, scope: Scope, name: str, node: str, dealt: Dealt, lease_ms: int | None) -> ReadJobs:
        """Read jobs up to the first unreadable one; if none can be read, give all of them back."""
        try:
            if lease_ms is None:
                lease_ms = self.services.reader.get(name).config.lease_ms
            async with asyncio.timeout(min(ROOM_WAIT_S, lease_ms / 2000)):
                await reserve_room(scope, min(ANSWER_BYTES_MAX, len(dealt.seqs) * self.settings.max_record_bytes))
        except (TopicsError, TimeoutError) as error:
            self.services.channel.give_back(name, node, dealt)
            if not isinstance(error, TimeoutError):
                raise
            raise limits.CONNECTION_ANSWERS.refused(
                "the answers that this connection has not taken leave no room for the jobs; take them, and claim again",
                limits.CONNECTION_ANSWERS.most_bytes,
            ) from None
        jobs = ReadJobs()
        try:
            await jobs.read(self.services.reader, name, lease_members(dealt))
        except TopicsError as error:
            if jobs.count and error.code == "storage_unavailable":
                return jobs
            aside = int(self.services.unreadable.is_unreadable(name, dealt.seqs[0], error))
            self.services.channel.give_back(name, node, dealt, 0, aside, ASIDE_MS)
            self.services.channel.give_back(name, node, dealt, aside)
            raise
        return jobs

    @api.json_route("POST", f"{api.TOPIC_PATH}/ack", Route.ACK, KeyScope.WRITE, "queues")
    @api.describe("Jobs are done", api.ok("Which of them", answers.AckAnswer), *JOB_CODES, "batch_too_large")
    @api.takes(body=JobsBody)
    async def ack(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        given = await self._jobs_body(request, JobsBody)
        call = Ack(name, given.node, given.seqs, _lease_nos(given))
        return _settled(name, "acked", await self.services.gateway.ask(call))

    @api.json_route("POST", f"{api.TOPIC_PATH}/nack", Route.NACK, KeyScope.WRITE, "queues")
    @api.describe("Give jobs back", api.ok("Which of them", answers.NackAnswer), *JOB_CODES, "batch_too_large")
    @api.takes(body=NackBody)
    async def nack(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        given = await self._jobs_body(request, NackBody)
        call = Nack(name, given.node, given.seqs, _lease_nos(given), min(given.delay_ms, DELAY_MS_MAX))
        return _settled(name, "nacked", await self.services.gateway.ask(call))

    @api.json_route("POST", f"{api.TOPIC_PATH}/extend", Route.EXTEND, KeyScope.WRITE, "queues")
    @api.describe("Keep jobs for longer", api.ok("Until when", answers.ExtendAnswer), *JOB_CODES, "batch_too_large")
    @api.takes(body=ExtendBody)
    async def extend(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        given = await self._jobs_body(request, ExtendBody)
        call = Extend(name, given.node, given.seqs, _lease_nos(given), clamped_lease_ms(given.lease_ms))
        reply = await self.services.gateway.ask(call)
        deadlines = {str(seq): reply.deadline_ms for seq in reply.seqs}
        return JsonReply({"topic": name, "extended": len(reply.seqs), "skipped": reply.skipped, "deadlines": deadlines})

    @api.json_route("POST", f"{api.TOPIC_PATH}/redrive", Route.REDRIVE, KeyScope.ADMIN, "queues")
    @api.describe("Bring dead letters back", api.ok("How many", answers.RedriveAnswer), *_REDRIVE_CODES)
    @api.takes(body=RedriveBody)
    async def redrive(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        given = await request.decoded(RedriveBody, self.settings.max_command_bytes)
        source = check_topic_name(given.source, "from")
        request.caller.require(KeyScope.ADMIN, (source,))
        if source == name:
            raise invalid("from must be another topic than the queue itself", field="from")
        if self.services.reader.get(name).config.type != "queue":
            raise not_a_queue(name)
        most = max(1, min(given.max, self.settings.max_claim))
        redriven, next_from_seq = await self.services.dead_letters.redrive(name, source, given.from_seq, most)
        answer: dict[str, Any] = {"topic": name, "from": source, "redriven": redriven}
        if next_from_seq is not None:
            answer["next_from_seq"] = next_from_seq
        return JsonReply(answer)

    @api.json_route("POST", f"{api.TOPIC_PATH}/peek", Route.PEEK, KeyScope.READ, "queues")
    @api.describe(
        "Look at jobs without claiming them", api.ok("Jobs, and where each stands", answers.PeekAnswer), *JOB_CODES
    )
    @api.takes(body=PeekBody, body_required=False)
    async def peek(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        given = await request.decoded(PeekBody, self.settings.max_command_bytes, b"{}")
        await self.catching_up.wait_for(name)
        found, next_from_seq = await self._peek_jobs(name, given)
        await reserve_room(request.scope, ANSWER_BYTES_MAX)
        jobs = ReadJobs()
        await jobs.read(self.services.reader, name, {job.seq: _members(job) for job in found})
        if found and jobs.up_to_seq < found[-1].seq:
            next_from_seq = jobs.up_to_seq
        answer: dict[str, Any] = {"topic": name, "jobs": msgspec.Raw(b"[%b]" % jobs.body), "count": jobs.count}
        if next_from_seq is not None:
            answer["next_from_seq"] = next_from_seq
        return JsonReply(answer)

    async def _peek_jobs(self, name: str, request: PeekBody) -> tuple[list[JobView], int | None]:
        """Return the jobs, and the seq behind which there may be more."""
        most = max(1, min(request.max, self.settings.max_claim))
        jobs: list[JobView] = []
        from_seq, more = request.from_seq, True
        for _ in range(LOOKS_MAX):
            peek = Peek(name, from_seq, request.state, most - len(jobs))
            peeked = await self.services.gateway.ask(peek)
            jobs += peeked.jobs
            from_seq, more = peeked.up_to_seq, peeked.more
            if not more or len(jobs) >= most:
                break
        return jobs, from_seq if more else None

    async def _jobs_body(self, request: ApiRequest, body_type: type[JobsBodyT]) -> JobsBodyT:
        """Read and check the body of an ack, nack or extend."""
        given = await request.decoded(body_type, self.settings.max_command_bytes)
        checked_node(given.node, self.settings)
        most = max(SEQS_MAX, self.settings.max_claim)
        if not given.seqs:
            raise invalid("seqs must name at least one job", field="seqs")
        if len(given.seqs) > most:
            raise TopicsError(
                "batch_too_large", f"seqs names at most {most} jobs, not {len(given.seqs)}", {"max_claim": most}
            )
        if max(given.seqs) >= 1 << 64:
            raise invalid("seqs must be integers from 0 to 2^64-1", field="seqs")
        if given.lease_ids is not None and len(given.lease_ids) != len(given.seqs):
            message = f"lease_ids must have one for each of the {len(given.seqs)} seqs, not {len(given.lease_ids)}"
            raise invalid(message, field="lease_ids")
        return given


def checked_node(node: str, settings: Settings) -> str:
    """Return the name of the consumer. `400` if it is empty or too long."""
    if not 1 <= len(node.encode()) <= settings.max_node_bytes:
        raise invalid(f"node must have 1 to {settings.max_node_bytes} bytes", field="node")
    return node


def clamped_lease_ms(lease_ms: int) -> int:
    return max(LEASE_MS[0], min(LEASE_MS[1], lease_ms))


def _lease_nos(request: JobsBody) -> list[int] | None:
    return None if request.lease_ids is None else [lease_no(one) for one in request.lease_ids]


def _settled(name: str, word: str, reply: AckReply) -> JsonReply:
    counts = {"skipped": reply.skipped, "ready": reply.ready, "in_flight": reply.in_flight}
    return JsonReply({"topic": name, word: reply.count, **counts})


def _members(job: JobView) -> bytes:
    """Return the members of a job besides its record, each with a comma before it."""
    members = b',"state":"%b","deliveries":%d' % (job.state.encode(), job.deliveries)
    if job.state == "leased":
        members += b',"node":%b,"deadline":%d' % (encode_json(job.node), job.at_ms)
    if job.state == "scheduled":
        members += b',"deliver_at":%d' % job.at_ms
    if job.order_key:
        members += b',"order_key":%b' % encode_json(job.order_key)
    return members
