"""`GET …/work` (api §9): a connection that always has up to `max` jobs, as server-sent events.

    retry: 2000 LF LF
    event: job LF data: {"$seq":…,"lease_id":…,…} LF id: <seq> LF LF
    event: topic-deleted | error                                                       the end of the stream

The queue's shard knows the stream and deals to it: what is acknowledged through whatever frontend makes room for the
next job there. A client that does not take what it was sent gets no more: its stream asks for nothing until it does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec
from starlette.datastructures import QueryParams

from topics.api import answers as answer
from topics.api.requests import (
    ClaimBody,
    ExtendBody,
    JobsBody,
    NackBody,
    PeekBody,
    RedriveBody,
)
from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name, owner_shard
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.access import Access
from topics.frontend.entry.query import count
from topics.frontend.entry.stalled_clients import STALL_MAX_MS, ReadProgress
from topics.frontend.live.push import AsgiPush, Push, until_disconnect
from topics.frontend.live.watch import EVENT_STREAM_HEADERS, HEARTBEAT_MAX_MS, accepts_event_stream
from topics.frontend.live.wording import EVENT_STREAM, in_lines
from topics.frontend.queues.job_records import ASIDE_MS, JobRendering, RenderedJobs, fetch_jobs
from topics.frontend.queues.queue_access import QueueAccess, QueueRoutes, checked_node, clamped_lease_ms
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.routes.operations import (
    EVENTS,
    LOST,
    Answer,
    ApiOperation,
    Binding,
    Query,
    json_answer,
)
from topics.frontend.shards.pending_calls import is_outcome_unknown
from topics.settings import Settings
from topics.shm.cap import Cap, Counted
from topics.shm.control import ProcessCell
from topics.shm.durations import Route
from topics.shm.queue_messages import Dealt, Unclaim, WorkOpen

HEARTBEAT_MS: Final = 15_000
ASK_AGAIN_S: Final = 1.0
"""A stream that a restarted shard could not be told of is asked for again."""
LOOK_S: Final = 1.0
"""Between two looks at a client that is behind."""
_NEEDED: Final = KeyScope.READ | KeyScope.WRITE


class WorkWish(msgspec.Struct, frozen=True):
    """The stream that a client asked for. `lease_ms` None is the queue's own."""

    name: str
    node: str
    most: int
    lease_ms: int | None
    heartbeat_ms: int
    key_digest: bytes


class WorkRoutes:
    """All `/work` streams of this frontend. `places`: how many streams the whole service may have open."""

    def __init__(
        self, jobs: QueueAccess, access: Access, settings: Settings, places: Cap, cell: ProcessCell, clock: Clock
    ) -> None:
        self.jobs = jobs
        self.cell = cell
        self.clock = clock
        self._access = access
        self._settings = settings
        self._places = places
        self._streams: set[WorkStream] = set()
        self._draining = False
        access.on_change(self._end_forbidden)
        jobs.gateway.on_restart.append(self._restarted)

    async def work(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = check_topic_name(scope["path_params"]["topic"])
        caller = self._access.authenticate(scope, token=True)
        caller.require(_NEEDED, (name,))
        wish = self._wish(name, caller.digest, scope)
        self._access.limits.acquire(caller, Counted.STREAMS)
        try:
            if not self._places.claim():
                raise self._places.reached()
            try:
                await self._work(wish, scope, receive, send)
            finally:
                self._places.release()
        finally:
            self._access.limits.release(caller, Counted.STREAMS)

    def drain(self) -> None:
        """The process is to stop: the jobs are free for workers elsewhere."""
        self._draining = True
        for stream in list(self._streams):
            stream.close()

    def _wish(self, name: str, key_digest: bytes, scope: Scope) -> WorkWish:
        accept = dict(scope["headers"]).get(b"accept")
        if accept is not None and not accepts_event_stream(accept):
            shown = accept[:100].decode("latin-1")
            raise TopicsError("not_acceptable", f"this is a text/event-stream, which Accept: {shown} rules out")
        query = QueryParams(scope["query_string"])
        heartbeat_ms = min(count(query, "heartbeat_ms", HEARTBEAT_MS), HEARTBEAT_MAX_MS)
        return WorkWish(
            name,
            checked_node(query.get("node", ""), self._settings),
            max(1, min(count(query, "max", 1), self._settings.max_claim)),
            clamped_lease_ms(max(1, count(query, "lease_ms", 0))) if "lease_ms" in query else None,
            max(self._settings.test_min_heartbeat_ms, heartbeat_ms),
            key_digest,
        )

    async def _work(self, wish: WorkWish, scope: Scope, receive: Receive, send: Send) -> None:
        stream = WorkStream(self, wish)
        self._streams.add(stream)
        try:
            if self._draining:
                raise TopicsError("shutting_down", "the service is stopping; ask again when it is back")
            await stream.open()
            self.cell.add("work_streams")
            try:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                extension = scope.get("extensions", {}).get("topics.push")
                push: Push = AsgiPush(send) if extension is None else extension()
                stream.begin(push)
                # Other keys may count since it was admitted.
                self._end_if_forbidden(stream)
                await (push.run(receive) if isinstance(push, AsgiPush) else until_disconnect(receive))
            finally:
                self.cell.add("work_streams", -1)
        finally:
            self._streams.discard(stream)
            stream.release()

    def _restarted(self, shard: int) -> None:
        for stream in self._streams:
            if stream.shard == shard:
                stream.ask()

    def _end_forbidden(self) -> None:
        for stream in list(self._streams):
            self._end_if_forbidden(stream)

    def _end_if_forbidden(self, stream: WorkStream) -> None:
        wish = stream.wish
        if not self._access.still_allows(wish.key_digest, _NEEDED, (wish.name,)):
            stream.end(EVENT_STREAM.final("forbidden", "the key of this stream is no longer valid for it"))


class WorkStream:
    """One connection: what it is dealt goes out at once, and is the shard's to count."""

    def __init__(self, routes: WorkRoutes, wish: WorkWish) -> None:
        self._routes = routes
        self._jobs = routes.jobs
        self._loop = asyncio.get_running_loop()
        self.wish = wish
        self.shard = owner_shard(wish.name, routes.jobs.gateway.shards)
        self._number = routes.jobs.channel.number()
        self._push: Push | None = None
        self._early: list[Dealt] = []
        """Jobs that came before the head of the answer was out, or while a record was fetched."""
        self._fetching: asyncio.Task[None] | None = None
        self._announced = False
        """The shard knows of it, or may."""
        self._asked_more = False
        """Its shard was asked a second time, which may reach it though the first did not."""
        self._closed = False
        self._last_words = b""
        """The last event of a stream that ended before it began."""
        self._heartbeat: asyncio.TimerHandle | None = None
        self._stall: ReadProgress | None = None
        """The client does not keep up, and is dealt nothing."""
        self._look_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Tell the shard of the stream; fails as the shard refuses."""
        self._jobs.channel.listen(self._number, self._dealt)
        self._announced = True
        try:
            await self._jobs.gateway.call(self.shard, self._asked(self.wish.most))
        except TopicsError as error:
            self._announced = self._asked_more or is_outcome_unknown(error)
            raise

    def begin(self, push: Push) -> None:
        """Write what it gets from now on."""
        self._push = push
        push.on_writable = self._writable
        push.on_close = self._gone
        push.write(EVENT_STREAM.opening)
        if self._closed:
            push.write(self._last_words)
            push.close()
            return
        self._beat_later()
        self._take_early()

    def ask(self) -> None:
        """Ask a shard that was started again."""
        if self._closed:
            return
        try:
            future = self._jobs.gateway.submit(self.shard, self._asked(0 if self._stall else self.wish.most))
        except TopicsError:
            self._loop.call_later(ASK_AGAIN_S, self.ask)
        else:
            self._asked_more = True
            future.add_done_callback(self._asked_again)

    def _asked_again(self, done: asyncio.Future[object]) -> None:
        error = done.exception()
        if isinstance(error, TopicsError) and not self._closed:
            if error.code in ("topic_not_found", "not_a_queue"):
                self._deleted()
            else:
                self._loop.call_later(ASK_AGAIN_S, self.ask)

    def end(self, last_words: bytes) -> None:
        """Ends the stream in order."""
        if not self._closed:
            self._last_words = last_words
            if self._push is not None:
                self._push.write(last_words)
        self.close()

    def close(self) -> None:
        self._gone()
        if self._push is not None:
            self._push.close()

    def release(self) -> None:
        """The connection is over: whatever it has is free again."""
        self._gone()
        jobs, name = self._jobs, self.wish.name
        if self._announced:
            jobs.channel.leave(self.shard, name, self._number, partial(jobs.dead_letters.take, name))
        else:
            jobs.channel.forget(self._number)

    def _gone(self) -> None:
        self._closed = True
        for pending in (self._heartbeat, self._look_timer, self._fetching):
            if pending is not None:
                pending.cancel()

    def _dealt(self, dealt: Dealt) -> None:
        self._jobs.dead_letters.take(self.wish.name, dealt)
        self._take(dealt)

    def _take(self, dealt: Dealt) -> None:
        if self._closed:
            return  # `release` frees it
        if self._push is None or self._fetching is not None:
            self._early.append(dealt)
            return
        if dealt.ended:
            self._deleted()
            return
        try:
            self._write(dealt, self._push)
        except TopicsError as error:
            # The jobs' leases end with the stream; the client comes back.
            self.end(EVENT_STREAM.final(error.code, error.message))

    def _deleted(self) -> None:
        self.end(_DELETED % msgspec.json.encode({"topic": self.wish.name, "reason": "deleted"}))

    def _write(self, dealt: Dealt, push: Push) -> None:
        pieces: list[bytes] = []
        size_bytes = 0
        for at, seq in enumerate(dealt.seqs):
            if not push.writable or size_bytes > _WRITE_BYTES:
                push.write(b"".join(pieces))
                pieces, size_bytes = [], 0
                if not push.writable:
                    self._pause(dealt, at, push)
                    break
            one = _part(dealt, at, at + 1)
            try:
                rendered = JobRendering(self._jobs.reader, self.wish.name, one).go_on()
            except ColdMissError:
                self._fetching = self._loop.create_task(self._fetch(_part(dealt, at, len(dealt.seqs)), push))
                break
            except TopicsError as error:
                if not self._put_aside(one, error):
                    raise
                continue
            if rendered.jobs:
                pieces.append(self._event(rendered, seq))
                size_bytes += len(pieces[-1])
        if pieces:
            push.write(b"".join(pieces))
        self._beat_later()

    async def _fetch(self, dealt: Dealt, push: Push) -> None:
        """The first of these is in the cold tier only; what is dealt meanwhile waits behind them."""
        first = _part(dealt, 0, 1)
        rendered = failure = None
        try:
            rendered = await fetch_jobs(self._jobs.reader, self.wish.name, first)
        except TopicsError as error:
            failure = error
        self._fetching = None  # whatever ends the stream from here on is not to cancel this
        if self._closed:
            return
        if failure is not None and not self._put_aside(first, failure):
            self.end(EVENT_STREAM.final(failure.code, failure.message))
            return
        if rendered is not None and rendered.jobs:
            push.write(self._event(rendered, dealt.seqs[0]))
        self._early.insert(0, _part(dealt, 1, len(dealt.seqs)))
        self._take_early()

    def _put_aside(self, one: Dealt, error: TopicsError) -> bool:
        """The job cannot be read: it makes room for the next. False: that is not the job's fault."""
        wish = self.wish
        if not self._jobs.unreadable.concerns(wish.name, one.seqs[0], error):
            return False
        unclaim = Unclaim(wish.name, wish.node, one.seqs, [one.first_lease_no], ASIDE_MS)
        self._jobs.gateway.post(self.shard, unclaim)
        return True

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for dealt in early:
            self._take(dealt)

    def _event(self, rendered: RenderedJobs, seq: int) -> bytes:
        self._routes.cell.add("records_out")
        return b"event: job\ndata: %b\nid: %d\n\n" % (in_lines(rendered.body), seq)

    def _pause(self, dealt: Dealt, from_at: int, push: Push) -> None:
        """Give back what cannot be sent: the client does not keep up."""
        first = dealt.first_lease_no + from_at
        seqs = dealt.seqs[from_at:]
        unclaim = Unclaim(self.wish.name, self.wish.node, seqs, list(range(first, first + len(seqs))))
        if self._stall is None:
            self._stall = ReadProgress(push.progress_bytes, self._routes.clock.monotonic_ms())
            self._look_timer = self._loop.call_later(LOOK_S, self._look, push)
        self._jobs.gateway.post(self.shard, self._asked(0))
        self._jobs.gateway.post(self.shard, unclaim)

    def _writable(self) -> None:
        if self._stall is not None and not self._closed:
            self._stall = None
            if self._look_timer is not None:
                self._look_timer.cancel()
            self._jobs.gateway.post(self.shard, self._asked(self.wish.most))

    def _look(self, push: Push) -> None:
        if self._stall is None or self._closed:
            return
        if self._stall.timed_out(push.progress_bytes, self._routes.clock.monotonic_ms()):
            self.end(EVENT_STREAM.final("throttled", f"nothing was taken for {STALL_MAX_MS} ms"))
        else:
            self._look_timer = self._loop.call_later(LOOK_S, self._look, push)

    def _asked(self, most: int) -> WorkOpen:
        return WorkOpen(self.wish.name, self._number, self.wish.node, most, self.wish.lease_ms)

    def _beat_later(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._heartbeat = self._loop.call_later(self.wish.heartbeat_ms / 1000, self._beat)

    def _beat(self) -> None:
        if self._push is not None and not self._closed:
            self._push.write(EVENT_STREAM.heartbeat(self._routes.clock.now_ms()))
            self._beat_later()


def _part(dealt: Dealt, start: int, end: int) -> Dealt:
    """Return these of its jobs, and nothing else."""
    first_lease_no = dealt.first_lease_no + start
    return Dealt(dealt.stream, dealt.seqs[start:end], first_lease_no, dealt.deadline_ms, dealt.deliveries[start:end], 0)


_DELETED: Final = b"event: topic-deleted\ndata: %b\n\n"
_WRITE_BYTES: Final = 64 * 1024
"""The size of one write; between two of them the client may turn out to be slow."""


_TOPIC: Final = "/v0/topics/{topic}"
_JOBS: Final = ("topic_not_found", "not_a_queue", *LOST)
_COUNT: Final = {"type": "integer", "minimum": 0}


def queue_operations(queue: QueueRoutes, work: WorkRoutes) -> list[ApiOperation]:
    """Jobs and their leases."""
    both, write = KeyScope.READ | KeyScope.WRITE, KeyScope.WRITE
    jobs = (*_JOBS, "batch_too_large")
    return [
        ApiOperation(
            Binding("POST", f"{_TOPIC}/claim", queue.claim, Route.CLAIM, both, "queues"),
            "Lease jobs",
            {200: json_answer("Jobs, or none", answer.ClaimAnswer)},
            _JOBS,
            body=ClaimBody,
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/ack", queue.ack, Route.ACK, write, "queues"),
            "Jobs are done",
            {200: json_answer("Which of them", answer.AckAnswer)},
            jobs,
            body=JobsBody,
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/nack", queue.nack, Route.NACK, write, "queues"),
            "Give jobs back",
            {200: json_answer("Which of them", answer.NackAnswer)},
            jobs,
            body=NackBody,
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/extend", queue.extend, Route.EXTEND, write, "queues"),
            "Keep jobs for longer",
            {200: json_answer("Until when", answer.ExtendAnswer)},
            jobs,
            body=ExtendBody,
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/redrive", queue.redrive, Route.REDRIVE, KeyScope.ADMIN, "queues"),
            "Bring dead letters back",
            {200: json_answer("How many", answer.RedriveAnswer)},
            (*_JOBS, "topic_full", "record_too_large"),
            body=RedriveBody,
        ),
        ApiOperation(
            Binding("POST", f"{_TOPIC}/peek", queue.peek, Route.PEEK, KeyScope.READ, "queues"),
            "Look at jobs without claiming them",
            {200: json_answer("Jobs, and where each stands", answer.PeekAnswer)},
            _JOBS,
            body=PeekBody,
            body_required=False,
        ),
        ApiOperation(
            # It takes its key from the query as well, so it looks for it itself.
            Binding("GET", f"{_TOPIC}/work", work.work, None, None, "queues"),
            "A stream that keeps a worker in jobs",
            {200: Answer("Events: job, topic-deleted, error", {EVENTS: None})},
            (*_JOBS, "not_acceptable"),
            query=(
                Query("node", {"type": "string", "minLength": 1}, "who works; required"),
                Query("max", _COUNT | {"default": 1}, "jobs at any time"),
                Query("lease_ms", _COUNT, "instead of the queue's own"),
                Query("heartbeat_ms", _COUNT | {"default": 15_000}, "a comment when nothing else was sent for so long"),
                Query("token", {"type": "string"}, "the key, for who cannot send a header"),
            ),
        ),
    ]
