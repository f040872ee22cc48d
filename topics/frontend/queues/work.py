"""`GET …/work` (api §9): a connection that always has up to `max` jobs leased, as server-sent events.

    retry: 2000 LF LF
    event: job LF data: {"topic":…,"$seq":…,"lease_id":…,…} LF id: <seq> LF LF
    event: topic-deleted | error                                                       the end of the stream

The queue's shard knows the stream and deals jobs to it. An acknowledgement through any frontend makes room there for
the next job. The stream of a client that does not keep up asks for no jobs until the client has taken the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import QueryParams

from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.access import Access
from topics.frontend.entry.responses import encode_json
from topics.frontend.entry.stalled_clients import STALL_MAX_MS, ReadProgress
from topics.frontend.entry.wire import count, parameter
from topics.frontend.live import event_streams
from topics.frontend.live.event_streams import HEARTBEAT_MAX_MS, Push, StreamSlots
from topics.frontend.live.wording import EVENT_STREAM, in_lines
from topics.frontend.queues.dealt_jobs import ASIDE_MS, ReadJobs, lease_members, read_job
from topics.frontend.queues.queue_routes import JOB_CODES, QueueServices, checked_node, clamped_lease_ms
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.routes import operations as api
from topics.frontend.shards.gateway import stopping
from topics.frontend.shards.pending_requests import is_outcome_unknown
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.queue_messages import Dealt, WorkOpen

HEARTBEAT_MS: Final = 15_000
REOPEN_S: Final = 1.0
"""Time between attempts to open a stream at its restarted shard."""
STALL_CHECK_S: Final = 1.0
"""Time between two checks of a client that does not keep up."""
_NEEDED: Final = KeyScope.READ | KeyScope.WRITE
_EVENTS: Final = api.ok("Events: job, topic-deleted, error", None, api.EVENTS)
_ABOUT_HEARTBEATS: Final = "a comment when nothing else was sent for so long"
_DELETED: Final = b"event: topic-deleted\ndata: %b\n\n"
_WRITE_BYTES: Final = 64 * 1024
"""Size of one write. Before each, the client may turn out not to keep up."""


@dataclass(eq=False)
class WorkRoutes:
    """All `/work` streams of this frontend."""

    services: QueueServices
    access: Access
    settings: Settings
    slots: StreamSlots
    cell: ProcessCell
    clock: Clock
    _streams: set[WorkStream] = field(default_factory=set)
    _draining: bool = False

    def __post_init__(self) -> None:
        self.services.gateway.on_restart(self._reopen)

    # The key may be in the query, so it is checked here.
    @api.asgi_route("GET", f"{api.TOPIC_PATH}/work", None, None, "queues")
    @api.describe("A stream that keeps a worker in jobs", _EVENTS, *JOB_CODES, "not_acceptable")
    @api.takes(
        api.Query("node", api.STRING | {"minLength": 1}, "who works; required"),
        api.Query("max", api.COUNT | {"default": 1}, "jobs at any time"),
        api.Query("lease_ms", api.COUNT, "instead of the queue's own"),
        api.Query("heartbeat_ms", api.COUNT | {"default": HEARTBEAT_MS}, _ABOUT_HEARTBEATS),
        api.Query("token", api.STRING, "the key, for who cannot send a header"),
    )
    async def work(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = check_topic_name(scope["path_params"]["topic"])
        caller = self.access.authenticate(scope, token=True)
        caller.require(_NEEDED, (name,))
        self.access.require_leader(_NEEDED)
        event_streams.check_accept(dict(scope["headers"]))
        stream = WorkStream(self, name, caller.digest, QueryParams(scope["query_string"]))
        with self.slots.hold(caller):
            await self._work(stream, scope, receive, send)

    def drain(self) -> None:
        """End all streams, as the process is to stop. Their jobs are free for workers elsewhere."""
        self._draining = True
        for stream in list(self._streams):
            stream.end(EVENT_STREAM.shutting_down)

    async def _work(self, stream: WorkStream, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.add(stream)
        self.access.on_change(stream.end_if_forbidden)
        try:
            if self._draining:
                raise stopping()
            await stream.open()
            self.cell.add("work_streams")
            try:
                push = await event_streams.begin_stream(scope, send)
                stream.begin(push)
                stream.end_if_forbidden()  # the keys may have changed since the request was admitted
                await event_streams.run_stream(push, receive)
            finally:
                self.cell.add("work_streams", -1)
        finally:
            self._streams.discard(stream)
            self.access.forget(stream.end_if_forbidden)
            stream.release()

    def _reopen(self, shard: int) -> None:
        for stream in self._streams:
            if stream.shard == shard:
                stream.reopen()


class WorkStream:
    """One connection. It writes the jobs that the shard deals to it, at once; the shard counts them."""

    def __init__(self, routes: WorkRoutes, name: str, key_digest: bytes, query: QueryParams) -> None:
        """Raise `400 invalid_request` for a wrong parameter in `query`."""
        services, settings = routes.services, routes.settings
        self._routes = routes
        self._gateway, self._reader = services.gateway, services.reader
        self._channel = services.channel
        self._dead_letters, self._unreadable = services.dead_letters, services.unreadable
        self._loop = asyncio.get_running_loop()
        self.name = name
        self._key_digest = key_digest
        self._node = checked_node(parameter(query, "node") or "", settings)
        self._most = max(1, min(count(query, "max", 1), settings.max_claim))
        lease_ms = clamped_lease_ms(max(1, count(query, "lease_ms", 0)))
        self._lease_ms = lease_ms if "lease_ms" in query else None
        heartbeat_ms = min(count(query, "heartbeat_ms", HEARTBEAT_MS), HEARTBEAT_MAX_MS)
        self._heartbeat_ms = max(settings.test_min_heartbeat_ms, heartbeat_ms)
        self.shard = services.gateway.owner(name)
        self._number = services.channel.listeners.new_number()
        self._push: Push | None = None
        self._early: list[Dealt] = []
        """Jobs that came before the head of the answer was sent, or while a record is fetched."""
        self._fetching: asyncio.Task[None] | None = None
        self._announced = False  # true if the shard knows of the stream, or may
        self._reopened = False
        """True if the stream was opened at the shard again; that may succeed even if the first request fails."""
        self._closed = False
        self._last_words = b""  # the last event of a stream that ended before it began
        self._heartbeat: asyncio.TimerHandle | None = None
        self._stall: ReadProgress | None = None  # the stall of a client that does not keep up, and is dealt no jobs

    async def open(self) -> None:
        """Open the stream at the shard. Fails with the shard's refusal."""
        self._channel.listeners.listen(self._number, self._take_dealt)
        self._announced = True
        try:
            await self._gateway.call(self.shard, self._opening(self._most))
        except TopicsError as error:
            self._announced = self._reopened or is_outcome_unknown(error)
            raise

    def begin(self, push: Push) -> None:
        self._push = push
        push.on_writable = self._end_stall
        push.on_close = self._stop
        push.write(EVENT_STREAM.opening)
        if self._closed:
            push.write(self._last_words)
            push.close()
            return
        self._beat_later()
        self._send_early()

    def reopen(self) -> None:
        """Open the stream at its shard again, which was restarted."""
        if self._closed:
            return
        try:
            future = self._gateway.submit(self.shard, self._opening(0 if self._stall else self._most))
        except TopicsError:
            self._loop.call_later(REOPEN_S, self.reopen)
        else:
            self._reopened = True
            future.add_done_callback(self._check_reopened)

    def _check_reopened(self, done: asyncio.Future[object]) -> None:
        error = done.exception()
        if isinstance(error, TopicsError) and not self._closed:
            if error.code in ("topic_not_found", "not_a_queue"):
                self._end_deleted()
            else:
                self._loop.call_later(REOPEN_S, self.reopen)

    def end(self, last_words: bytes) -> None:
        if not self._closed:
            self._last_words = last_words
            if self._push is not None:
                self._push.write(last_words)
        self._stop()
        if self._push is not None:
            self._push.close()

    def end_if_forbidden(self) -> None:
        error = self._routes.access.why_not(self._key_digest, _NEEDED, (self.name,), of_leader=True)
        if error is not None:
            self.end(EVENT_STREAM.final(error.code, error.message))

    def release(self) -> None:
        self._stop()
        if self._announced:
            self._channel.leave(self.shard, self.name, self._number, self._move_dead)
        else:
            self._channel.listeners.forget(self._number, self._take_dealt)
        self._push = None  # breaks a reference cycle, which would be left to the garbage collector

    def _stop(self) -> None:
        self._closed = True
        for pending in (self._heartbeat, self._fetching):
            if pending is not None:
                pending.cancel()

    def _take_dealt(self, dealt: Dealt) -> None:
        self._move_dead(dealt)
        self._send(dealt)

    def _move_dead(self, dealt: Dealt) -> None:
        if dealt.dead:
            self._dead_letters.start_move(self.name, dealt)

    def _send(self, dealt: Dealt) -> None:
        if self._closed:
            return  # `release` frees it
        if self._push is None or self._fetching is not None:
            self._early.append(dealt)
            return
        if dealt.ended:
            self._end_deleted()
            return
        try:
            self._write(dealt, self._push)
        except TopicsError as error:
            # The leases of the jobs end with the stream, and the client comes back.
            self.end(EVENT_STREAM.final(error.code, error.message))

    def _end_deleted(self) -> None:
        self.end(_DELETED % encode_json({"topic": self.name, "reason": "deleted"}))

    def _write(self, dealt: Dealt, push: Push) -> None:
        members = lease_members(dealt)
        pieces: list[bytes] = []
        size_bytes = 0
        for at, seq in enumerate(dealt.seqs):
            if not push.writable or size_bytes > _WRITE_BYTES:
                push.write(b"".join(pieces))
                pieces, size_bytes = [], 0
                if not push.writable:
                    self._pause(dealt, at, push)
                    break
            try:
                job = read_job(self._reader, self.name, seq, members)
            except ColdMissError:
                self._fetching = self._loop.create_task(self._fetch(_from(dealt, at), push))
                break
            except TopicsError as error:
                if not self._put_aside(dealt, at, error):
                    raise
                continue
            if job:
                pieces.append(self._event(job, seq))
                size_bytes += len(pieces[-1])
        if pieces:
            push.write(b"".join(pieces))
        self._beat_later()

    async def _fetch(self, dealt: Dealt, push: Push) -> None:
        """Fetch the first of these jobs from the cold tier, then send all. Jobs dealt meanwhile wait behind them."""
        seq, jobs = dealt.seqs[0], ReadJobs()
        failure: TopicsError | None = None
        try:
            await jobs.read(self._reader, self.name, {seq: lease_members(dealt)[seq]})
        except TopicsError as error:
            failure = error.with_traceback(None)  # the traceback would make a reference cycle with this call
        self._fetching = None  # an end of the stream from here on must not cancel this task
        if self._closed:
            return
        if failure is not None and not self._put_aside(dealt, 0, failure):
            self.end(EVENT_STREAM.final(failure.code, failure.message))
            return
        if jobs.count:
            push.write(self._event(jobs.body, seq))
        self._early.insert(0, _from(dealt, 1))
        self._send_early()

    def _put_aside(self, dealt: Dealt, at: int, error: TopicsError) -> bool:
        """Put a job aside that cannot be read, so that the next one is dealt. False: the job is not the cause."""
        if not self._unreadable.is_unreadable(self.name, dealt.seqs[at], error):
            return False
        self._channel.give_back(self.name, self._node, dealt, at, at + 1, ASIDE_MS)
        return True

    def _send_early(self) -> None:
        early, self._early = self._early, []
        for dealt in early:
            self._send(dealt)

    def _event(self, job: bytes, seq: int) -> bytes:
        self._routes.cell.add("records_out")
        return b'event: job\ndata: {"topic":"%b",%b\nid: %d\n\n' % (self.name.encode(), in_lines(job[1:]), seq)

    def _pause(self, dealt: Dealt, from_at: int, push: Push) -> None:
        """Give back the jobs that cannot be sent, as the client does not keep up."""
        if self._stall is None:
            self._stall = stall = ReadProgress(push.progress_bytes, self._routes.clock.monotonic_ms())
            self._loop.call_later(STALL_CHECK_S, self._check_stall, stall, push)
        self._gateway.post(self.shard, self._opening(0))
        self._channel.give_back(self.name, self._node, dealt, from_at)

    def _end_stall(self) -> None:
        if self._stall is not None and not self._closed:
            self._stall = None
            self._gateway.post(self.shard, self._opening(self._most))

    def _check_stall(self, stall: ReadProgress, push: Push) -> None:
        if self._stall is not stall or self._closed:
            return
        if stall.timed_out(push.progress_bytes, self._routes.clock.monotonic_ms()):
            self.end(EVENT_STREAM.final("throttled", f"nothing was taken for {STALL_MAX_MS} ms"))
        else:
            self._loop.call_later(STALL_CHECK_S, self._check_stall, stall, push)

    def _opening(self, most: int) -> WorkOpen:
        """Return the message that opens the stream, or changes its number of jobs to `most`."""
        return WorkOpen(self.name, self._number, self._node, most, self._lease_ms)

    def _beat_later(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._heartbeat = self._loop.call_later(self._heartbeat_ms / 1000, self._beat)

    def _beat(self) -> None:
        if self._push is not None and not self._closed:
            self._push.write(EVENT_STREAM.heartbeat(self._routes.clock.now_ms()))
            self._beat_later()


def _from(dealt: Dealt, start: int) -> Dealt:
    first_lease_no = dealt.first_lease_no + start
    return Dealt(dealt.stream, dealt.seqs[start:], first_lease_no, dealt.deadline_ms, dealt.deliveries[start:], 0)
