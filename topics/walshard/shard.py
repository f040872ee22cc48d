"""What a shard does, over and over: take what waits in its rings, prepare it, commit it, show it, answer it.

    take ──▶ prepare ──▶ commit ──▶ publish ──▶ notify ──▶ answer

Requests for records, jobs and cursors are gathered into a group: one write, one sync for all of them. Any other request
that writes ends the group before it and is committed by itself: it is rare, and then sees nothing half done. Copies of
routers come behind all of that, with drafts of their own.
"""

from __future__ import annotations

from typing import Any, Final

from topics.core.errors import TopicsError
from topics.log import get_logger
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendReply
from topics.shm.arena_heap import ArenaFullError
from topics.shm.control import ProcessCell
from topics.shm.messages import MessageKind, Reply
from topics.walshard.commit.commits import Commits
from topics.walshard.commit.draft import CommitFirst, Draft, GroupHandler, RingRequest, Steps, T
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.handlers.handlers import Handlers
from topics.walshard.publisher import Publisher
from topics.walshard.routers.routing import PAGES_PER_STEP, Routing
from topics.walshard.step_clock import StepClock
from topics.walshard.upkeep import Upkeep

REPLY_BYTES_PER_GROUP_MAX: Final = 64 * 1024
"""Replies of queue requests are as long as their clients want: a group ends before the journal is full of them."""
TRIES_MAX: Final = 4
"""So often a request of a group may ask for a commit before it."""

log = get_logger()


class Shard:
    """One shard at work. `step` is called for ever; nothing else takes requests, and nothing else commits."""

    def __init__(
        self,
        outbox: ShardRings,
        handlers: Handlers,
        routing: Routing,
        commits: Commits,
        publisher: Publisher,
        upkeep: Upkeep,
        cell: ProcessCell,
        time: StepClock,
    ) -> None:
        self._outbox = outbox
        self._handlers = handlers
        self.routing = routing
        self._commits = commits
        self._publisher = publisher
        self.upkeep = upkeep
        self._cell = cell
        self._time = time
        self._group = Draft()
        self._waiting: list[RingRequest] = []
        """Requests that are prepared and not answered."""
        self._requests = 0
        """In the last step."""

    def step(self) -> bool:
        """One turn of everything, as `main.py` does it. False when there was nothing to do."""
        served = self.serve()
        return self.copy(after_requests=served) or served

    def serve(self) -> bool:
        """One turn of the pipeline: all requests that wait, up to a bound. False when there were none."""
        self._time.look()
        if self._handlers.queues.is_due:
            self._run(self._handlers.queues.tick())
        requests = self._serve_requests()
        if requests or self._handlers.queues.stirred:
            self._finish_group()
        if self._handlers.frontends.end_dead(self._group):
            self._finish_group()
        if self.upkeep.ram_log_is_long:
            self._run(self.upkeep.trim_ram_log())
        return requests > 0

    def copy(self, after_requests: bool) -> bool:
        """Copies what routers have to copy, for a moment. False when that is nothing. While requests come it is a
        page at a time: copying comes behind the writes that clients wait for.
        """
        copied = self._run(self.routing.pump(1 if after_requests else PAGES_PER_STEP))
        if copied:
            self._publisher.show_figures()
            self._outbox.flush()
        return copied

    # -- take

    def _serve_requests(self) -> int:
        """Takes requests and prepares them; groups that are full are finished. Returns how many there were."""
        requests = reply_bytes = 0
        for frontend, message, position in self._outbox.requests():
            requests += 1
            kind, request_id, _count = messages.head(message)
            request = RingRequest(frontend, position, request_id)
            self._waiting.append(request)
            reply = self._outbox.replies.pop((frontend, position), None) if self._outbox.replies else None
            if reply is not None:
                request.reply = bytearray(reply)
                continue
            joined = self._prepare_guarded(kind, message, request)
            reply_bytes += len(request.reply or b"")
            if not joined or reply_bytes > REPLY_BYTES_PER_GROUP_MAX:
                # An answered request need not stay in the journal.
                self._finish_group()
                reply_bytes = 0
        if requests != self._requests:
            self._requests = requests
            self._cell.set("queue_depth", requests)
        if requests:
            self._cell.set("queue_depth_peak", max(requests, self._cell.get("queue_depth_peak")))
        return requests

    # -- prepare

    def _prepare_guarded(self, kind: int, message: memoryview, request: RingRequest) -> bool:
        """True when the request joined the group; False when it was a commit of its own, or none."""
        try:
            return self._prepare(kind, message, request)
        except TopicsError as error:
            request.reply = messages.encode_error(request.id, error)
        except ArenaFullError as error:
            request.reply = messages.encode_error(request.id, TopicsError("storage_unavailable", str(error)))
        except Exception:
            # One request must not take down its neighbours, nor come back after a restart to do it again.
            log.exception("request failed", kind=kind)
            request.reply = messages.encode_error(request.id, TopicsError("internal", "the request failed"))
        return False

    def _prepare(self, kind: int, message: memoryview, request: RingRequest) -> bool:
        if kind & messages.BY_REFERENCE:
            message = _read_spill(messages.decode_reference(message))
            kind &= ~messages.BY_REFERENCE
        call: Any
        in_group: GroupHandler
        if kind == MessageKind.APPEND:
            call, in_group = append_messages.decode_append(message), self._handlers.append
        else:
            assert kind == MessageKind.CALL
            call = messages.decode_call(message)
            found = self._handlers.in_group.get(type(call))
            if found is None:
                self._commit_group()
                self._run(self._handlers.alone[type(call)](call, request.frontend), request)
                return False
            in_group = found
        for _ in range(TRIES_MAX):
            self._group.next_request()
            try:
                reply = in_group(call, request.frontend, self._group)
            except CommitFirst as first:
                self._commit_group()
                self._run(first.steps)
                continue
            request.reply = _encoded(request.id, reply)
            if self._group.carrier is not None:
                self._group.carrier.request = request
            return True
        raise TopicsError("storage_unavailable", "the log cannot take what has to come before this request")

    # -- commit, publish, notify

    def _run(self, steps: Steps[T], request: RingRequest | None = None) -> T:
        """Commits and shows what a handler yields, draft by draft; `request` gets what the handler comes to."""
        while True:
            try:
                draft = next(steps)
            except StopIteration as end:
                result: T = end.value
                if request is not None and request.reply is None:
                    request.reply = _encoded(request.id, end.value)
                return result
            if request is not None and draft.reply is not None:
                # The journal has the reply before the log has what it speaks of.
                request.reply = _encoded(request.id, draft.reply)
                (draft.ram or draft.durable)[-1].request = request
            self._commit(draft)

    def _commit_group(self) -> None:
        """What is gathered is in the logs and shown, or its requests have errors; nothing is half done afterwards."""
        group = self._group
        if group or group.touched:
            self._group = Draft()
            self._commit(group)
        else:
            self._handlers.group_over()

    def _commit(self, draft: Draft) -> None:
        self._commits.commit(draft)
        self._handlers.group_over()
        self._publisher.show(draft)

    # -- answer

    def _finish_group(self) -> None:
        """Commits what is gathered, deals out jobs that are ready by it, and answers everything so far."""
        self._commit_group()
        if self._handlers.queues.stirred:
            self._handlers.queues.deal(self._group)
            self._commit_group()
        self._publisher.show_figures()
        for request in self._waiting:
            self._outbox.answer(request.frontend, request.reply, request.position)
        self._waiting.clear()
        self._outbox.flush()

    # -- between steps

    @property
    def next_tick_ms(self) -> int | None:
        """Monotonic: when `step` will have something to do though nobody asks; None: never."""
        return self._handlers.queues.next_tick_ms

    def sync_in_background(self) -> None:
        """Syncs what nobody waits for; shows what became durable by it to those who wait for that."""
        self._publisher.show_topics(self.upkeep.sync())
        self._outbox.flush()

    def sweep(self) -> None:
        """Once a second: what no request brings about."""
        self._time.look()
        self._cell.clock_offset_ms = self._time.trusted_offset_ms
        self._run(self.upkeep.sweep())
        self._run(self.routing.sweep())
        self._cell.set("router_lag_records", self.routing.lag_records)
        self._publisher.show_figures()
        self._outbox.flush()

    def close(self) -> None:
        """A clean end: everything as it is, and on the disk."""
        self._time.look()
        for steps in (self.routing.close(), self._handlers.cursors.settle(), self.upkeep.close()):
            self._run(steps)
        self._commits.close()


def _encoded(request_id: int, reply: Reply | AppendReply | None) -> bytearray | None:
    if reply is None:
        return None
    if isinstance(reply, AppendReply):
        return append_messages.encode_append_reply(request_id, reply)
    return messages.encode_reply(request_id, reply)


def _read_spill(path: str) -> memoryview:
    """A message too long for a ring; its frontend made the file and removes it."""
    try:
        with open(path, "rb") as spill:
            return memoryview(spill.read())
    except FileNotFoundError:
        raise TopicsError("shard_unavailable", "the frontend that sent this request is gone") from None
