"""The pipeline of a shard. The shard repeats these steps for ever:

    take ──▶ prepare ──▶ commit ──▶ publish ──▶ notify ──▶ answer

It takes requests from its rings. It gathers requests about records, jobs and cursors, and those that make topics, into
a group, which gets one write and one sync. Any other request first ends the group, then commits by itself: such
requests are rare, and so they see nothing half done. Routers copy after all of that, with drafts of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from topics.core.errors import TopicsError, storage_unavailable
from topics.log import get_logger
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendReply
from topics.shm.arena_heap import ArenaFullError
from topics.shm.asks import Message
from topics.shm.control import ProcessCell
from topics.shm.messages import MessageKind
from topics.walshard.commit.commits import Commits
from topics.walshard.commit.draft import AloneHandler, CommitFirst, Draft, GroupHandler, RingRequest, Steps, T
from topics.walshard.commit.logs import MOVED_MAX
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.handlers.frontends import Frontends
from topics.walshard.handlers.named_cursors import NamedCursors
from topics.walshard.handlers.queues import Queues
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers.routing import Routing
from topics.walshard.step_clock import StepClock
from topics.walshard.upkeep import Upkeep

REPLY_BYTES_PER_GROUP_MAX: Final = 64 * 1024
"""Bytes of replies with which a group ends: clients choose their length, and the journal must hold all of a group."""
TURN_MS: Final = 100
"""Time after which a request that commits by itself ends the turn, so that the shard's other work is done, too."""
TRIES_MAX: Final = 4
"""Times that a request of a group may ask for a commit before it."""

log = get_logger()


class Handlers(NamedTuple):
    """The handlers of one shard. `in_group` and `alone` are keyed by the type of the request: the first prepare a
    request in a group with others, the second carry it out by itself. The other three also have work that no request
    asks for.
    """

    in_group: Mapping[type, GroupHandler]
    alone: Mapping[type, AloneHandler]
    queues: Queues
    cursors: NamedCursors
    frontends: Frontends


@dataclass(eq=False)
class Shard:
    """One shard at work. `serve` and `copy` are called for ever; nothing else takes requests or commits."""

    _rings: ShardRings
    handlers: Handlers
    routing: Routing
    _commits: Commits
    _holdings: Holdings
    upkeep: Upkeep
    _cell: ProcessCell
    _time: StepClock
    _group: Draft = field(default_factory=Draft)
    _unanswered: list[RingRequest] = field(default_factory=list)
    """Requests that were taken and are not answered yet, in the order of the rings."""

    def serve(self) -> bool:
        """Take one turn of the pipeline with all requests that wait, up to a bound. Return whether there were any."""
        self._time.look()
        self.tick()
        requests = self._serve_requests()
        if requests or self.handlers.queues.have_changed:
            self._finish_group()
        if self.handlers.frontends.some_died:
            self.handlers.frontends.end_dead(self._group)
            self._finish_group()
        if self._run(self.upkeep.step()):
            self._holdings.publish()
            self._rings.flush()
        return requests > 0

    def tick(self) -> None:
        """Carry out the timers of queues that are due."""
        if self.handlers.queues.is_due:
            self._run(self.handlers.queues.tick())

    def copy(self) -> bool:
        """Copy for routers for a bounded time, so that requests have their turn again. False if nothing was copied."""
        if not self.routing.has_work:
            return False
        copied = self._run(self.routing.pump())
        if copied:
            self._holdings.publish()
            self._rings.flush()
        return copied

    # -- take

    def _serve_requests(self) -> int:
        """Take requests and prepare them; finish groups that are full. Return how many there were."""
        requests = reply_bytes = 0
        for frontend, message, position in self._rings.requests():
            requests += 1
            kind, request_id, _count = messages.head(message)
            request = RingRequest(frontend, position, request_id)
            self._unanswered.append(request)
            reply = self._rings.replies.pop((frontend, position), None) if self._rings.replies else None
            if reply is not None:
                request.reply = bytearray(reply)
                continue
            joined = self._prepare_guarded(kind, message, request)
            reply_bytes += len(request.reply or b"")
            if not joined or reply_bytes > REPLY_BYTES_PER_GROUP_MAX:
                # An answered request need not stay in the journal.
                self._finish_group()
                reply_bytes = 0
                self._rings.turn_is_over = self._time.has_taken(TURN_MS)
        self._cell.set("queue_depth", requests)
        if requests:
            self._cell.set("queue_depth_peak", max(requests, self._cell.get("queue_depth_peak")))
        return requests

    # -- prepare

    def _prepare_guarded(self, kind: int, message: memoryview, request: RingRequest) -> bool:
        """Prepare a request, or answer it with an error. True if it joined the group; else the group has ended."""
        try:
            return self._prepare(kind, message, request)
        except TopicsError as error:
            request.reply = messages.encode_error(request.id, error)
        except ArenaFullError as error:
            request.reply = messages.encode_error(
                request.id, storage_unavailable(str(error), cause="ENOSPC", read_only=False)
            )
        except Exception:
            # One bad request must not stop the shard for all others, and again after each restart.
            log.exception("request failed", kind=kind)
            request.reply = messages.encode_error(request.id, TopicsError("internal", "the request failed"))
        return False

    def _prepare(self, kind: int, message: memoryview, request: RingRequest) -> bool:
        if kind & messages.BY_REFERENCE:
            message = _read_spill(messages.decode_reference(message))
            kind &= ~messages.BY_REFERENCE
        call: Any
        if kind == MessageKind.APPEND:
            call = append_messages.decode_append(message)
        else:
            assert kind == MessageKind.CALL
            call = messages.decode(message)
        in_group = self.handlers.in_group.get(type(call))
        if in_group is None:
            self._commit_group()
            self._run(self.handlers.alone[type(call)](call, request.frontend), request)
            return False
        for _ in range(TRIES_MAX):
            try:
                reply = in_group(call, request.frontend, self._group)
            except CommitFirst as first:
                self._commit_group()
                if first.steps is not None:
                    self._run(first.steps, request if first.all else None)
                if first.all:
                    return False
                continue
            request.reply = _encoded(request.id, reply)
            carrier = self._group.take_carrier()
            if carrier is not None:
                carrier.request = request
            return True
        raise storage_unavailable("the log cannot take what has to come before this request")

    # -- commit

    def _run(self, steps: Steps[T], request: RingRequest | None = None) -> T:
        """Commit and publish what a handler yields, draft by draft. `request` gets the handler's reply."""
        while True:
            try:
                draft = next(steps)
            except StopIteration as end:
                result: T = end.value
                if request is not None and request.reply is None:
                    request.reply = _encoded(request.id, end.value)
                return result
            if request is not None and draft.reply is not None:
                # The reply goes into the journal before the write that it reports goes into the log.
                request.reply = _encoded(request.id, draft.reply)
                (draft.ram or draft.durable)[-1].request = request
            self._commit(draft)

    def _commit_group(self) -> None:
        """Commit and publish the group. A request whose write the logs refuse is answered with an error."""
        group, self._group = self._group, Draft()
        if group or group.touched:
            self._commit(group)

    def _commit(self, draft: Draft) -> None:
        self._commits.commit(draft)
        for hosted in draft.made.values():
            self.routing.created(hosted)
        self._publish(draft.touched.values())
        if draft.is_logged:
            self._notify(draft.touched.values())
        for hosted in draft.deleted:
            self.routing.deleted(hosted)
            self.handlers.queues.topic_deleted(hosted)
            self._rings.notify(hosted.watchers)

    # -- publish, notify

    def _publish(self, changed: Iterable[Hosted]) -> None:
        """Let readers see topics as they are now."""
        for hosted in changed:
            hosted.publish()
            if hosted.topic.queue is not None:
                self.handlers.queues.changed(hosted)

    def _notify(self, changed: Iterable[Hosted]) -> None:
        """Tell watching frontends and routers that topics have changed."""
        for hosted in changed:
            if hosted.watchers:
                self._rings.notify(hosted.watchers)
            self.routing.changed(hosted)

    # -- answer

    def _finish_group(self) -> None:
        """Commit the group, deal out the jobs that it made ready, and answer all requests taken so far."""
        self._commit_group()
        if self.handlers.queues.have_changed:
            self.handlers.queues.deal(self._group)
            self._commit_group()
        self._holdings.publish()
        for request in self._unanswered:
            self._rings.answer(request.frontend, request.reply, request.position)
        self._unanswered.clear()
        self._rings.flush()

    # -- between steps

    @property
    def is_idle(self) -> bool:
        """Return whether routers have nothing to do now."""
        return self.routing.idle

    @property
    def is_stuck(self) -> bool:
        """Return whether a router waits, not for long, for something that no signal announces."""
        return self.routing.stuck

    @property
    def next_tick_ms(self) -> int | None:
        """Monotonic ms at which the next timer of a queue is due, which `serve` carries out; None without timers."""
        return self.handlers.queues.next_tick_ms

    def sync_in_background(self) -> bool:
        """Start and end background syncs, and publish topics that became durable by them. True if more may follow."""
        durable = self.upkeep.sync()
        self._publish(durable)
        self._notify(durable)
        self._rings.flush()
        return len(durable) == MOVED_MAX

    def sweep(self) -> None:
        """Do the upkeep that is due once a second: expiry, idle sessions, missed changes of routers, gauges."""
        self._time.look()
        self._cell.clock_offset_ms = self._time.trusted_offset_ms
        self._run(self.upkeep.sweep())
        self._run(self.routing.sweep())
        self._cell.set("router_lag_records", self.routing.lag_records)
        self._holdings.publish()
        self._rings.flush()

    def close(self) -> None:
        """End cleanly: log the exact heads and cursors, sync the logs, and mark them as complete."""
        self._time.look()
        for steps in (self.routing.feeds.log_ephemeral(), self.handlers.cursors.log_all(), self.upkeep.close()):
            self._run(steps)
        self._commits.close()


def _encoded(request_id: int, reply: Message | AppendReply | None) -> bytearray | None:
    if reply is None:
        return None
    if isinstance(reply, AppendReply):
        return append_messages.encode_append_reply(request_id, reply)
    return messages.encode_reply(request_id, reply)


def _read_spill(path: str) -> memoryview:
    """Read a message that was too long for a ring. The frontend made the file, and removes it."""
    try:
        with open(path, "rb") as spill:
            return memoryview(spill.read())
    except FileNotFoundError:
        raise TopicsError("shard_unavailable", "the frontend that sent this request is gone") from None
