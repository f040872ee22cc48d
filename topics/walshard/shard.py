"""What a shard does, over and over: take what waits in its rings, commit it as a group, show it, answer it.

Writes to records, jobs and cursors are gathered into the group (`appends.py`, `queue_writes.py`). Any other request
that writes ends the group before it and is a commit of its own: it is rare, and then sees nothing half done.
"""

from __future__ import annotations

from typing import Final

from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.log import get_logger
from topics.shm import append_messages, messages
from topics.shm.arena_heap import ArenaFullError
from topics.shm.control import ProcessCell
from topics.shm.messages import Call, Done, Kind
from topics.shm.topic_messages import (
    CatchUp,
    Checkpoint,
    DeleteRecords,
    DeleteRouter,
    DeleteTopic,
    EnsureTopic,
    Expire,
    Hello,
    MarkAgain,
    PutRouter,
    PutTopic,
    RemoveRouters,
    SessionAbandon,
    SessionClose,
    SessionLook,
    SessionOpen,
    SessionPut,
    StagePublish,
    StagesOver,
    SyncRouters,
    Trim,
    TxnBegin,
    TxnEnd,
    TxnForget,
    TxnLook,
    TxnPending,
    Unwatch,
    Watch,
)
from topics.walshard.appends import Appends
from topics.walshard.background_sync import BackgroundSync
from topics.walshard.catalog import Catalog
from topics.walshard.checkpoints import Checkpoints
from topics.walshard.commit import Logs
from topics.walshard.cursors import CURSOR_CALLS, NamedCursors
from topics.walshard.deaths import FrontendDeaths
from topics.walshard.deletes import Deletes
from topics.walshard.group_commit import GroupCommit
from topics.walshard.head_marks import head_mark
from topics.walshard.holdings import Holdings
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer, Operation, Steps, T
from topics.walshard.outbox import Outbox
from topics.walshard.queues.calls import QUEUE_CALLS, Queues
from topics.walshard.queues.queue_writes import QueueWrites
from topics.walshard.ram_log import RamTrim
from topics.walshard.room import MakeRoom
from topics.walshard.routers.routing import PAGES_PER_STEP, Routing
from topics.walshard.segment_files import SegmentFiles
from topics.walshard.session_calls import SessionCalls
from topics.walshard.sessions import Sessions
from topics.walshard.sinks import Sinks
from topics.walshard.step_clock import StepClock
from topics.walshard.tag_search import TagSearch
from topics.walshard.topic_calls import TopicCalls
from topics.walshard.trimming import LogTrim
from topics.walshard.watchers import Watchers

REPLY_BYTES_PER_GROUP_MAX: Final = 64 * 1024
"""Answers of queue requests are as long as their clients want: a group ends before the journal is full of them."""

log = get_logger()


class Shard:
    """One shard at work. `step` is called for ever; nothing else reads requests."""

    def __init__(
        self,
        catalog: Catalog,
        sessions: Sessions,
        sinks: Sinks,
        holdings: Holdings,
        logs: Logs,
        ram_trim: RamTrim,
        files: SegmentFiles,
        tags: TagSearch,
        log_trim: LogTrim,
        syncs: BackgroundSync,
        outbox: Outbox,
        watchers: Watchers,
        deaths: FrontendDeaths,
        commits: GroupCommit,
        routing: Routing,
        cell: ProcessCell,
        clock: Clock,
        time: StepClock,
        make_room: MakeRoom,
    ) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._sinks = sinks
        self._holdings = holdings
        self._logs = logs
        self._ram_trim = ram_trim
        self._files = files
        self._log_trim = log_trim
        self._syncs = syncs
        self._outbox = outbox
        self._watchers = watchers
        self._deaths = deaths
        self._commits = commits
        self.routing = routing
        self._cell = cell
        self._clock = clock
        self._time = time
        self._requests = 0
        """In the last group."""

        self._appends = Appends(
            self._find_to_append,
            catalog.make,
            catalog.abandon,
            self._host,
            holdings.claim_bytes,
            self._expire_for,
            self._give_way,
        )
        self._deletes = Deletes(catalog, tags, commits, time)
        self._queue_writes = QueueWrites(
            self._appends, self._commit_group, self._deletes.expire, commits.before_log, time
        )
        self._queues = Queues(catalog.find, self._queue_writes, outbox.push, time, lambda: cell.get("deferring"))
        self._cursors = NamedCursors(catalog.find, self._queue_writes, self._commit_group)
        self._topic_calls = TopicCalls(
            catalog, commits, self._deletes, self._host, self._queues, routing, watchers, time, self._run
        )
        self._session_calls = SessionCalls(sessions, holdings, commits, time)
        self._checkpoints = Checkpoints(catalog, files, logs, commits, time)
        commits.connect(self._queues, routing)

        make_room.expire_for, make_room.give_way_for = self._expire_for, self._give_way

        for hosted in catalog:
            self._queues.changed(hosted)
        committed = [entry for entry in outbox.committed_before() if logs.holds(entry)]
        outbox.take_over(committed)
        self._committed_before = {(entry.frontend, entry.ring_position): entry.reply for entry in committed}
        """Requests the former incarnation committed and did not answer: their answers."""

    # -- a step

    def step(self) -> bool:
        """One group: everything that waits, up to a bound. False when there was nothing to do."""
        self._time.look()
        self._queues.tick()
        requests = self._serve_requests()
        dead = self._deaths.take()
        for frontend in dead:
            self._frontend_died(frontend)
        if dead:
            self._answer([])
        # Under pressure what nobody waits for goes behind everything else.
        pages_max = 1 if requests and self._cell.get("deferring") else PAGES_PER_STEP
        forwarded = self._run(self.routing.pump(pages_max))
        if forwarded:
            self._holdings.settle(len(self._sessions))
            self._outbox.flush()
        if self._ram_trim.due:
            self._trim_ram_log()
        return forwarded or requests > 0

    def _serve_requests(self) -> int:
        """Takes, commits and answers them; returns how many there were."""
        answers: list[Answer] = []
        requests = reply_bytes = 0
        for frontend, message, position in self._outbox.requests():
            requests += 1
            kind, request_id, _count = messages.head(message)
            answer = Answer(frontend, position, request_id)
            answers.append(answer)
            known = self._committed_before.pop((frontend, position), None) if self._committed_before else None
            if known is not None:
                answer.reply = bytearray(known)
                continue
            joins = False
            try:
                joins = self._take(kind, message, answer)
            except TopicsError as error:
                answer.reply = messages.encode_error(request_id, error)
            except ArenaFullError as error:
                answer.reply = messages.encode_error(request_id, TopicsError("storage_unavailable", str(error)))
            except Exception:
                # One request must not take down its neighbours, nor come back after a restart to do it again.
                log.exception("request failed", kind=kind)
                answer.reply = messages.encode_error(request_id, TopicsError("internal", "the request failed"))
            reply_bytes += len(answer.reply or b"")
            if not joins or reply_bytes > REPLY_BYTES_PER_GROUP_MAX:
                # What is answered need not stay in the journal.
                self._answer(answers)
                reply_bytes = 0
        if requests != self._requests:
            self._requests = requests
            self._cell.set("queue_depth", requests)
        if requests or self._queues.stirred:
            self._answer(answers)
        if requests:
            self._cell.set("queue_depth_peak", max(requests, self._cell.get("queue_depth_peak")))
        return requests

    def _take(self, kind: int, message: memoryview, answer: Answer) -> bool:
        """Prepares the answer. True: it joined the group; False: it was a commit of its own, or none."""
        if kind & messages.BY_REFERENCE:
            message = _read_spill(messages.decode_reference(message))
            kind &= ~messages.BY_REFERENCE
        if kind == Kind.APPEND:
            self._appends.prepare(append_messages.decode_append(message), answer, self._time.now)
            return True
        assert kind == Kind.CALL
        call = messages.decode_call(message)
        if isinstance(call, QUEUE_CALLS):
            self._queues.take(call, answer)
            return True
        if isinstance(call, CURSOR_CALLS):
            self._cursors.take(call, answer)
            return True
        self._take_alone(call, answer)
        return False

    def _take_alone(self, call: Call, answer: Answer) -> None:
        match call:
            case PutTopic() | EnsureTopic() | DeleteTopic():
                self._commit_group()
                self._topic_calls.take(call, answer)
            case DeleteRecords() | Expire():
                self._commit_group()
                self._deletes.take(call, answer)
            case CatchUp():
                self._commit_group()
                answer.reply = messages.encode_reply(answer.request_id, self._run(self.routing.catch_up(call)))
            case SyncRouters():
                self._commit_group()
                answer.reply = messages.encode_reply(answer.request_id, self._run(self.routing.sync(call)))
            case PutRouter() | DeleteRouter() | RemoveRouters():
                self._commit_group()
                assert self.routing.registrar is not None, "only shard 0 is asked for that"
                match call:
                    case PutRouter():
                        self._run(self.routing.registrar.put(call, answer))
                    case DeleteRouter():
                        self._run(self.routing.registrar.delete(call, answer))
                    case RemoveRouters():
                        self._run(self.routing.registrar.remove(call, answer))
            case SessionPut() | SessionLook() | SessionOpen() | SessionClose() | SessionAbandon():
                self._commit_group()
                self._session_calls.take(call, answer)
            case Checkpoint():
                self._commit_group()
                self._checkpoints.take(call, answer)
            case MarkAgain():
                self._checkpoints.mark_again(call, answer)
            case Trim():
                self._log_trim.request(call.file_no)
                answer.reply = messages.encode_reply(answer.request_id, Done())
            case Watch():
                self._commit_group()
                self._watchers.watch(call, answer.frontend)
            case Unwatch():
                self._watchers.unwatch(call, answer.frontend)
            case Hello():
                self._commit_group()
                self._deaths.said_hello(answer.frontend, call.incarnation)
                self._frontend_died(answer.frontend)
            case StagePublish():
                self._appends.prepare(self._sinks.staged(call), answer, self._time.now)
            case StagesOver():
                hosted = self._catalog.find(call.name)
                if hosted is not None:
                    hosted.topic.idempotency.unpin(call.sink, call.batch)
            case TxnBegin() | TxnEnd() | TxnForget() | TxnLook() | TxnPending():
                self._sinks.take(call, answer)

    def _frontend_died(self, frontend: int) -> None:
        self._watchers.frontend_died(frontend)
        self._sessions.frontend_died(frontend, self._time.now.mono_ms)
        self._queues.frontend_died(frontend, list(self._catalog))
        self._cursors.frontend_died(frontend, self._catalog)

    def _run(self, steps: Steps[T]) -> T:
        """Commits and shows what a handler yields, draft by draft; returns what it comes to."""
        try:
            while True:
                draft = next(steps)
                draft.committed = self._commits.commit(draft.durable, draft.ram)
                self._commits.show_appended(draft.touched)
        except StopIteration as end:
            result: T = end.value
            return result

    def _answer(self, answers: list[Answer]) -> None:
        """Commits what is gathered, deals out jobs that are ready by it, and answers everything so far."""
        self._commit_group()
        if self._queues.deal():
            self._commit_group()
        for answer in answers:
            self._outbox.answer(answer.frontend, answer.reply, answer.position)
        answers.clear()
        self._outbox.flush()

    def _commit_group(self) -> None:
        """What is gathered is in the logs and shown, or answered with an error; nothing is half done afterwards."""
        appends = self._appends
        if appends.durable or appends.ram:
            self._commits.commit(appends.durable, appends.ram)
            appends.abandon_unhosted()
            self._commits.show_appended(appends.touched)
        appends.reset()
        self._queue_writes.committed()
        self._holdings.settle(len(self._sessions))

    def _trim_ram_log(self) -> None:
        try:
            operation = self._ram_trim.operation(self._time.now.wall_ms)
        except OSError as error:
            log.error("the RAM log cannot be trimmed", error=str(error))
            return
        if self._commits.commit([], [operation]):
            self._ram_trim.drop_files()

    # -- between steps

    @property
    def busy(self) -> bool:
        """Whether there is more to do at once, without a request."""
        return self._log_trim.busy

    @property
    def next_tick_ms(self) -> int | None:
        """Monotonic: when `step` will have something to do though nobody asks; None: never."""
        return self._queues.next_tick_ms()

    def idle(self) -> bool:
        """A little of what can wait, when there is nothing else to do; False: nothing waits."""
        return self._deletes.index_some()

    def sync_in_background(self) -> None:
        """What became durable meanwhile goes out to those who wait for that."""
        for hosted in self._syncs.poll(self._clock.monotonic_ms()):
            self._commits.show(hosted)
        self._log_trim.poll()
        self._outbox.flush()

    def sweep(self) -> None:
        """Once a second: expiry of topics nobody touches, memory that they used, collection of idle sessions."""
        self._time.look()
        self._cell.clock_offset_ms = self._time.trusted_offset_ms
        self._deletes.sweep()
        self._catalog.tighten()
        self._session_calls.collect()
        self._files.let_go()
        self._files.mark_again()
        self._files.count_some()
        self._run(self.routing.sweep())
        self._cell.set("router_lag_records", self.routing.lag_records)
        self._holdings.settle(len(self._sessions))
        self._outbox.flush()

    def close(self) -> None:
        """A clean end: heads of `ephemeral` topics and named cursors exactly as they are, everything on the disk."""
        self._time.look()
        self._run(self.routing.close())
        self._cursors.settle(self._catalog)
        self._commit_group()
        now_ms = self._time.now.wall_ms
        marks = [
            Operation([head_mark(hosted, hosted.topic.head_seq, now_ms, 0)], lambda _file_no, _offset: None)
            for hosted in self._catalog
            if hosted.topic.config.durability == "ephemeral" and hosted.topic.head_seq < hosted.topic.head_ceiling
        ]
        self._commits.commit(marks, [])
        self._logs.close()

    # -- for the appends of a group

    def _find_to_append(self, name: str) -> Hosted | None:
        """A topic that is going to be appended to: the log has to be as far as it is."""
        hosted = self._catalog.find(name)
        if hosted is not None:
            self._commits.before_log(hosted)
        return hosted

    def _expire_for(self, hosted: Hosted, records: int, size_bytes: int) -> bool:
        """Has expired what a cap would find in the way of so many more; True if there was any: the group so far was
        committed before.
        """
        if not hosted.topic.caps_see_expired(records, size_bytes, self._time.expiry_ms):
            return False
        self._commit_group()
        self._deletes.expire(hosted)
        return True

    def _give_way(self, hosted: Hosted, records: int, size_bytes: int) -> bool:
        return self._queue_writes.give_way(hosted, records, size_bytes)

    def _host(self, hosted: Hosted) -> None:
        """A topic's creation is logged."""
        self._catalog.host(hosted)
        self.routing.created(hosted)


def _read_spill(path: str) -> memoryview:
    """A message too long for a ring; its frontend made the file and removes it."""
    try:
        with open(path, "rb") as spill:
            return memoryview(spill.read())
    except FileNotFoundError:
        raise TopicsError("shard_unavailable", "the frontend that sent this request is gone") from None
