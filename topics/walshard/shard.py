"""What a shard does with requests: prepare a group, commit it, show it, answer it.

Appends are gathered into a group (`appends.py`). Any other request that writes ends the group before it and is a
commit of its own: it is rare, and then sees nothing half done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain
from typing import Final, Literal

import msgspec

from topics.core.clock import Clock
from topics.core.config import TopicConfig, incompatible_type
from topics.core.errors import TopicsError, topic_not_found
from topics.core.fold import ConfigBody, DeleteBody, EvictBody, SessionBody, encode_body
from topics.core.jobs import Now
from topics.core.runs import encode_runs
from topics.core.shard_state import Floors
from topics.core.tags import Match
from topics.core.topic import EvictReason
from topics.log import get_logger
from topics.shm import messages
from topics.shm.arena import ArenaFullError
from topics.shm.control import ProcessCell
from topics.shm.messages import (
    CatchUp,
    Checkpoint,
    CheckpointReply,
    DeleteRecords,
    DeleteRecordsReply,
    DeleteRouter,
    DeleteTopic,
    DeleteTopicReply,
    Done,
    EnsureTopic,
    Expire,
    Hello,
    PutRouter,
    PutTopic,
    PutTopicReply,
    RemoveRouters,
    SessionAbandon,
    SessionClose,
    SessionLook,
    SessionOpen,
    SessionPut,
    StagePublish,
    StagesOver,
    SyncRouters,
    TopicCheckpoint,
    Trim,
    TxnBegin,
    TxnEnd,
    TxnForget,
    TxnLook,
    TxnPending,
    Unwatch,
    Watch,
)
from topics.storage import frame
from topics.storage.frame import FLAG_MORE, FrameType
from topics.storage.kill_points import reached
from topics.storage.postings import CorruptPostings
from topics.storage.segment import CorruptSegment
from topics.storage.wal import WalWriteError
from topics.walshard.appends import Appends, create_frame
from topics.walshard.background_sync import BackgroundSync
from topics.walshard.catalog import Catalog
from topics.walshard.checkpoints import Marks
from topics.walshard.commit import Logs
from topics.walshard.cursors import CURSOR_CALLS, NamedCursors
from topics.walshard.head_marks import LostHeads, head_mark
from topics.walshard.holdings import Holdings
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer, Operation
from topics.walshard.outbox import Outbox
from topics.walshard.queue_writes import QueueWrites
from topics.walshard.queues import QUEUE_CALLS, Queues
from topics.walshard.ram_log import RamTrim
from topics.walshard.routing import Routing
from topics.walshard.segment_files import SegmentFiles
from topics.walshard.sessions import Sessions
from topics.walshard.sinks import Sinks
from topics.walshard.tag_search import TagSearch
from topics.walshard.trimming import LogTrim

REPLY_BYTES_PER_GROUP_MAX: Final = 64 * 1024
"""Answers of queue requests are as long as their clients want: a group ends before the journal is full of them."""

_ROWS_PER_FRAME: Final = 4096

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
        routing: Routing,
        cell: ProcessCell,
        clock: Clock,
        lost_heads: LostHeads,
    ) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._sinks = sinks
        self._holdings = holdings
        self._logs = logs
        self._ram_trim = ram_trim
        self._files = files
        self._tags = tags
        self._log_trim = log_trim
        self._syncs = syncs
        self._outbox = outbox
        self.routing = routing
        self._cell = cell
        self._clock = clock
        self._now_ms = clock.now_ms()
        self._requests = 0
        self._lost_heads = lost_heads
        self._capped: dict[int, Hosted] = {}
        """Topics whose caps evicted something that the log does not say yet."""
        self._appends = Appends(
            self._find_to_append, self._make_topic, self._abandon_topic, self._host, holdings.claim_bytes
        )
        writes = QueueWrites(self._appends, self._commit_appends, self._expire, self._before_log)
        self._queues = Queues(catalog.find, writes, outbox.push)
        self._cursors = NamedCursors(catalog.find, writes, self._commit_appends)
        self._queue_writes = writes
        for hosted in catalog:
            self._queues.changed(hosted)
        committed = [entry for entry in outbox.committed_before() if logs.holds(entry)]
        outbox.take_over(committed)
        self._committed_before = {(entry.frontend, entry.ring_position): entry.reply for entry in committed}
        """Requests the former incarnation committed and did not answer: their answers."""

    def step(self) -> bool:
        """One group: everything that waits, up to a bound. False when there was nothing to do."""
        self._look_at_clock()
        self._queues.tick()
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
        # Under pressure what nobody waits for goes behind everything else.
        forwarded = self.routing.pump(1) if requests and self._cell.get("deferring") else self.routing.pump()
        if forwarded:
            self._holdings.settle(len(self._sessions))
            self._outbox.flush()
        if self._ram_trim.due:
            self._trim_ram_log()
        return forwarded or requests > 0

    def _answer(self, answers: list[Answer]) -> None:
        """Commits what is gathered, deals out jobs that are ready by it, and answers everything so far."""
        self._commit_appends()
        if self._queues.deal():
            self._commit_appends()
        for answer in answers:
            self._outbox.answer(answer.frontend, answer.reply, answer.position)
        answers.clear()
        self._outbox.flush()

    def sync_in_background(self) -> None:
        """What became durable meanwhile goes out to those who wait for that."""
        for hosted in self._syncs.poll(self._clock.monotonic_ms()):
            self.show(hosted)
        self._log_trim.poll()
        self._outbox.flush()

    @property
    def busy(self) -> bool:
        """Whether there is more to do at once, without a request."""
        return self._log_trim.busy

    @property
    def next_tick_ms(self) -> int | None:
        """Monotonic: when `step` will have something to do though nobody asks; None: never."""
        return self._queues.next_tick_ms()

    def _look_at_clock(self) -> None:
        self._now_ms = self._clock.now_ms()
        now = Now(self._now_ms, self._clock.monotonic_ms())
        self._queues.at(now)
        self._queue_writes.at(now)

    def sweep(self) -> None:
        """Once a second: expiry of topics nobody touches, collection of idle sessions."""
        self._look_at_clock()
        for hosted in list(self._catalog):
            if hosted.topic.config.ttl_ms:
                self._expire(hosted)
        for wid in self._sessions.overdue(self._clock.monotonic_ms()):
            self._collect_session(wid)
        self._files.mark_again()
        self.routing.sweep()
        self._holdings.settle(len(self._sessions))
        self._outbox.flush()

    def close(self) -> None:
        """A clean end: heads of `ephemeral` topics exactly as they are, everything on the disk."""
        self._now_ms = self._clock.now_ms()
        self.routing.close()
        marks = [
            Operation(
                [head_mark(hosted, hosted.topic.head_seq, self._now_ms, 0)], lambda _file_no, _offset: None, sync=True
            )
            for hosted in self._catalog
            if hosted.topic.config.durability == "ephemeral" and hosted.topic.head_seq < hosted.topic.head_ceiling
        ]
        self.commit_group(marks, [])
        self._logs.close()

    # -- requests

    def _take(self, kind: int, message: memoryview, answer: Answer) -> bool:
        """Prepares the answer. True: it joined the group; False: it was a commit of its own, or none."""
        if kind & messages.BY_REFERENCE:
            message = _read_spill(messages.decode_reference(message))
            kind &= ~messages.BY_REFERENCE
        if kind == messages.Kind.APPEND:
            self._appends.prepare(messages.decode_append(message), answer, self._now_ms)
            return True
        assert kind == messages.Kind.CALL
        call = messages.decode_call(message)
        if isinstance(call, QUEUE_CALLS):
            self._queues.take(call, answer)
            return True
        if isinstance(call, CURSOR_CALLS):
            self._cursors.take(call, answer)
            return True
        match call:
            case PutTopic():
                self._put_topic(call, answer)
            case EnsureTopic():
                self._ensure_topic(call, answer)
            case PutRouter() | DeleteRouter() | RemoveRouters() | SyncRouters() | CatchUp():
                self._commit_appends()
                self.routing.take(call, answer)
            case DeleteTopic():
                self._delete_topic(call, answer)
            case DeleteRecords():
                self._delete_records(call, answer)
            case Expire():
                self._commit_appends()
                hosted = self._catalog.find(call.name)
                if hosted is not None:
                    self._expire(hosted)
                answer.reply = messages.encode_reply(answer.request_id, Done())
            case Watch():
                self._watch(call, answer.frontend)
            case Unwatch():
                hosted = self._catalog.find(call.name)
                if hosted is not None and hosted.watchers.get(answer.frontend) == call.token:
                    del hosted.watchers[answer.frontend]
            case SessionPut():
                self._put_session(call, answer)
            case SessionLook():
                answer.reply = messages.encode_reply(answer.request_id, self._sessions.look(call.wid))
            case SessionOpen():
                reply = self._sessions.open(call.wid, answer.frontend, call.stream)
                answer.reply = messages.encode_reply(answer.request_id, reply)
            case SessionClose():
                self._close_session(call, answer)
            case SessionAbandon():
                self._sessions.abandoned(call.wid, answer.frontend, call.stream, self._clock.monotonic_ms())
            case StagePublish():
                self._appends.prepare(self._sinks.staged(call), answer, self._now_ms)
            case StagesOver():
                hosted = self._catalog.find(call.name)
                if hosted is not None:
                    hosted.topic.idempotency.unpin(call.sink, call.batch)
            case TxnBegin() | TxnEnd() | TxnForget() | TxnLook() | TxnPending():
                self._sinks.take(call, answer)
            case Hello():
                self._hello(answer.frontend)
            case Checkpoint():
                self._checkpoint(call, answer)
            case Trim():
                self._log_trim.request(call.file_no)
                answer.reply = messages.encode_reply(answer.request_id, Done())
        return False

    def _ensure_topic(self, call: EnsureTopic, answer: Answer) -> None:
        self._commit_appends()
        hosted = self._catalog.find(call.name)
        if hosted is None:
            self._put_topic(PutTopic(call.name, TopicConfig(), type_given=False), answer)
        else:
            answer.reply = messages.encode_reply(answer.request_id, PutTopicReply(False, hosted.topic.config))

    def _put_topic(self, call: PutTopic, answer: Answer) -> None:
        self._commit_appends()
        hosted = self._catalog.find(call.name)
        if hosted is None:
            hosted = self._make_topic(call.name, call.config)
            answer.reply = messages.encode_reply(answer.request_id, PutTopicReply(True, call.config))
            made = hosted
            if not self._commit(
                Operation(
                    [create_frame(hosted, self._now_ms, 0)],
                    lambda _file_no, _offset: self._host(made),
                    sync=True,
                    answer=answer,
                )
            ):
                self._abandon_topic(hosted)
            return
        topic = hosted.topic
        config = call.config
        if not call.type_given:
            config = _with_type(config, topic.config.type)
        elif config.type != topic.config.type:
            raise incompatible_type(call.name, topic.config.type, config.type)
        answer.reply = messages.encode_reply(answer.request_id, PutTopicReply(False, config))
        if config == topic.config:
            return
        self._before_log(hosted)
        descriptor = hosted.prepare_config(config)
        body = encode_body(ConfigBody(config))
        update = frame.encode(FrameType.CONFIG_UPDATE, 0, topic.id, 0, self._now_ms, b"", b"", body)
        buffers: list[frame.Bytes] = [update]
        if topic.config.durability == "ephemeral":
            # What follows in the durable log begins behind the records that are only in RAM.
            head = head_mark(hosted, topic.head_seq, self._now_ms, FLAG_MORE)
            buffers[:0] = [head, *_attributes(hosted, self._now_ms)]
        updated = hosted

        def apply(_file_no: int, _offset: int) -> None:
            if len(buffers) > 1:  # the exact head took back what was reserved above it
                updated.topic.head_ceiling = updated.topic.head_seq
            updated.configured(config, descriptor)

        if self._commit(Operation(buffers, apply, sync=True, answer=answer)):
            self._log_evicted_for_ram([updated])
            self.show(updated)

    def _delete_topic(self, call: DeleteTopic, answer: Answer) -> None:
        self._commit_appends()
        hosted = self._catalog.find(call.name)
        if hosted is None:
            answer.reply = messages.encode_reply(answer.request_id, DeleteTopicReply(False))
            return
        self._expire(hosted)
        topic = hosted.topic
        if call.if_empty and topic.records:
            raise TopicsError(
                "topic_not_empty",
                f"topic {call.name!r} holds {topic.records} records",
                {"topic": call.name, "count": topic.records},
            )
        answer.reply = messages.encode_reply(answer.request_id, DeleteTopicReply(True))
        gone = hosted

        def apply(_file_no: int, _offset: int) -> None:
            self._syncs.forget(gone)
            self._capped.pop(gone.topic.id, None)
            self.routing.gone(gone)
            self._catalog.retire(gone)
            self._queues.topic_gone(gone)
            self._notify(gone)

        end = frame.encode(FrameType.TOPIC_DELETE, 0, topic.id, 0, self._now_ms, b"", b"", b"")
        self._commit(Operation([end], apply, sync=True, answer=answer))

    def _delete_records(self, call: DeleteRecords, answer: Answer) -> None:
        self._commit_appends()
        hosted = self._catalog.find(call.name)
        if hosted is None:
            raise topic_not_found(call.name)
        self._expire(hosted)
        self.routing.before_log(hosted)
        topic = hosted.topic
        match = None if call.op is None else Match(call.op, call.pattern)
        try:
            deletion = topic.plan_delete(call.before_seq, match, self._tags.of(topic, hosted.index))
        except (OSError, CorruptSegment, CorruptPostings) as error:
            log.error("a delete could not find its records", topic=call.name, reason=str(error))
            raise TopicsError(
                "storage_unavailable",
                f"the records of topic {call.name!r} cannot be read to delete them; see the service's log",
                {"topic": call.name},
            ) from error
        answer.reply = messages.encode_reply(
            answer.request_id,
            DeleteRecordsReply(
                deletion.records,
                deletion.earliest_seq,
                topic.head_seq,
                topic.records - deletion.records,
                topic.live_bytes - deletion.size_bytes,
            ),
        )
        if not deletion.records and deletion.earliest_seq == topic.earliest_seq:
            return
        floors = topic.floors_without(deletion)
        body = encode_body(DeleteBody(deletion.below_seq, encode_runs(deletion.seqs), floors))
        entry = frame.encode(FrameType.DELETE, 0, topic.id, topic.head_seq, self._now_ms, b"", b"", body)

        def apply(_file_no: int, _offset: int) -> None:
            topic.deleted(deletion, floors)
            self.show(hosted)

        sync = topic.config.durability == "fsync"
        self._commit(Operation([entry], apply, sync=sync, answer=answer), {topic.id})

    def _expire(self, hosted: Hosted) -> None:
        """Moves the floors over what has outlived its ttl; logged, so that they never move back."""
        topic = hosted.topic
        if topic.expired_below(self._now_ms) <= topic.earliest_seq:
            return
        self.routing.before_log(hosted)
        floors = topic.plan_eviction(topic.expired_below(self._now_ms), EvictReason.TTL)
        if floors is not None:
            self._commit(
                Operation([_floor_frame(hosted, floors, self._now_ms)], partial(self._evicted, hosted, floors)),
                {topic.id},
            )

    def _evicted(self, hosted: Hosted, floors: Floors, _file_no: int, _offset: int) -> None:
        hosted.topic.logged(floors)
        self.show(hosted)

    def _checkpoint(self, call: Checkpoint, answer: Answer) -> None:
        self._commit_appends()
        self._files.mark_again()
        if not self._files.is_marked:
            # A snapshot would take for done what only the log says.
            raise TopicsError("storage_unavailable", "deletions cannot be marked in their segments now")
        held: list[int] = []
        due: list[tuple[TopicCheckpoint, Hosted | None]] = []
        for checkpoint in call.topics:
            hosted = self._catalog.find_id(checkpoint.topic_id)
            if hosted is not None:
                self.routing.before_log(hosted)
                if not self.routing.lets_go(hosted, checkpoint.up_to_seq):
                    reached("mark.held")
                    held.append(checkpoint.topic_id)
                    continue
            due.append((checkpoint, hosted))
        # Only now: what is logged for one topic may say floors of another, and marks have floors as well.
        marks = Marks(self._files, self._now_ms)
        for checkpoint, hosted in due:
            marks.add(checkpoint, hosted)
        if marks.operations:
            if not self.commit_group(marks.operations, [], marks.marked.keys()):
                marks.undo()
        elif not self._logs.sync():
            raise TopicsError("storage_unavailable", "the log cannot be synced now; see the service's log")
        answer.reply = messages.encode_reply(answer.request_id, CheckpointReply(marks.gone, marks.refused, held))

    def _floor_marks(self, capped: Iterable[Hosted]) -> list[Operation]:
        """What caps evicted since the last commit: floors are in the log before anything else is done to the topic."""
        marks = []
        for hosted in capped:
            floors = hosted.topic.floors()
            marks.append(
                Operation([_floor_frame(hosted, floors, self._now_ms)], partial(_floor_logged, hosted, floors))
            )
        return marks

    # -- watchers and sessions

    def _watch(self, call: Watch, frontend: int) -> None:
        self._commit_appends()
        hosted = self._catalog.find(call.name)
        if hosted is None:
            self._outbox.notify(frontend, call.token)
            return
        hosted.watchers[frontend] = call.token
        if (hosted.topic.id, hosted.topic.head_seq) != (call.seen_topic_id, call.seen_head_seq):
            self._outbox.notify(frontend, call.token)

    def _hello(self, frontend: int) -> None:
        for hosted in self._catalog:
            hosted.watchers.pop(frontend, None)
        self._outbox.forget_notices(frontend)
        self._sessions.frontend_died(frontend, self._clock.monotonic_ms())
        self._queues.frontend_died(frontend, list(self._catalog))
        self._cursors.frontend_died(frontend, self._catalog)

    def _put_session(self, call: SessionPut, answer: Answer) -> None:
        self._commit_appends()
        self._holdings.claim_session()
        answer.reply = messages.encode_reply(answer.request_id, Done())
        body = SessionBody(call.wid, call.body)
        now_ms = self._clock.monotonic_ms()
        self._commit_session(body, lambda _file_no, _offset: self._sessions.put(call.wid, call.body, now_ms), answer)

    def _close_session(self, call: SessionClose, answer: Answer) -> None:
        self._commit_appends()
        answer.reply = messages.encode_reply(answer.request_id, Done())
        body = self._sessions.closing(call.wid, answer.frontend, call.stream, call.positions)
        if body is not None:
            now_ms = self._clock.monotonic_ms()
            self._commit_session(
                body, lambda _file_no, _offset: self._sessions.closed(call.wid, call.positions, now_ms), answer
            )

    def _collect_session(self, wid: str) -> None:
        self._commit_session(SessionBody(wid, None), lambda _file_no, _offset: self._sessions.remove(wid), None)

    def _commit_session(self, body: SessionBody, apply: Callable[[int, int], None], answer: Answer | None) -> None:
        entry = frame.encode(FrameType.SESSION, 0, 0, 0, self._now_ms, b"", b"", encode_body(body))
        self.commit_group([], [Operation([entry], apply, answer=answer)])

    # -- commits

    def _commit_appends(self) -> None:
        appends = self._appends
        if appends.durable or appends.ram:
            self.commit_group(appends.durable, appends.ram)
            appends.abandon_unhosted()
            durable = {id: hosted for id, hosted in appends.touched.items() if not _in_ram(hosted)}
            self._log_evicted_for_ram(appends.touched.values())
            for hosted in chain(appends.touched.values(), self._syncs.committed(durable)):
                self.show(hosted)
        appends.reset()
        self._queue_writes.committed()
        self._holdings.settle(len(self._sessions))

    def _trim_ram_log(self) -> None:
        try:
            operation = self._ram_trim.operation(self._now_ms)
        except OSError as error:
            log.error("the RAM log cannot be trimmed", error=str(error))
            return
        if self.commit_group([], [operation]):
            self._ram_trim.drop_files()

    def _commit(self, operation: Operation, floors_of: Collection[int] = ()) -> bool:
        return self.commit_group([operation], [], floors_of)

    def copied(self, hosted: Hosted) -> None:
        """Records of a topic came from a router, or are as durable as they can be."""
        self._log_evicted_for_ram([hosted])
        self.show(hosted)

    def logged(self, hosted: Hosted) -> None:
        """Records of a topic came into the durable log on another way than by an append."""
        for other in self._syncs.committed({hosted.topic.id: hosted}):
            self.show(other)

    def commit_group(self, durable: list[Operation], ram: list[Operation], floors_of: Collection[int] = ()) -> bool:
        """True when all of it was committed; what was not is answered with an error. `floors_of`: topics of which the
        group says what their floors are.
        """
        told: dict[int, Hosted] = {}
        if durable:
            told = {id: hosted for id, hosted in self._capped.items() if id in floors_of or _is_logged(hosted)}
            for topic_id in told:
                del self._capped[topic_id]
            durable = self._floor_marks(hosted for id, hosted in told.items() if id not in floors_of) + durable
        try:
            if ram and self._logs.ram is None:
                self._lost_heads.log(self._now_ms)
            self._outbox.journal(self._logs.plan(durable, ram))
        except WalWriteError as error:  # the RAM log cannot be made
            failed = [(operation, self._logs.refusal(error)) for operation in chain(durable, ram)]
        except TopicsError as error:
            failed = [(operation, error) for operation in chain(durable, ram)]
        else:
            failed = self._logs.commit(durable, ram)
        for operation, refusal in failed:
            if operation.undo is not None:
                operation.undo()
            if operation.answer is not None:
                operation.answer.reply = messages.encode_error(operation.answer.request_id, refusal)
        if failed:
            self._capped = told | self._capped
        return not failed

    def _log_evicted_for_ram(self, changed: Iterable[Hosted]) -> None:
        """Says before any reader sees it what could not be worked out again. If that fails, the next commit says it."""
        due = {hosted.topic.id: hosted for hosted in changed if hosted.has_evicted_for_ram}
        if not due:
            return
        self._capped |= due
        try:
            for hosted in due.values():
                self._before_log(hosted)
        except TopicsError as error:
            log.error("what caps evicted cannot be logged now", reason=error.message)
            return
        self.commit_group(self._floor_marks(due.values()), [], due.keys())

    def show(self, hosted: Hosted) -> None:
        """What a topic is now is known to all."""
        if hosted.has_unlogged_floor:
            self._capped[hosted.topic.id] = hosted
        hosted.publish()
        self._queues.changed(hosted)
        self._notify(hosted)
        self.routing.changed(hosted)

    def _notify(self, hosted: Hosted) -> None:
        for frontend, token in hosted.watchers.items():
            self._outbox.notify(frontend, token)

    def _find_to_append(self, name: str) -> Hosted | None:
        """A topic that is going to be appended to: the log has to be as far as it is."""
        hosted = self._catalog.find(name)
        if hosted is not None:
            self._before_log(hosted)
        return hosted

    def _before_log(self, hosted: Hosted) -> None:
        """Something is going to be logged for a topic: what is not logged yet comes first."""
        if hosted.has_unlogged_floor:
            self._capped[hosted.topic.id] = hosted
        if hosted.ring.unlogged_seq <= hosted.topic.head_seq:
            self.routing.before_log(hosted)

    def _host(self, hosted: Hosted) -> None:
        self._catalog.host(hosted)
        self.routing.came(hosted)

    def _make_topic(self, name: str, config: TopicConfig) -> Hosted:
        """A topic nobody sees yet, or `throttled` when the service may not have one more."""
        self._holdings.claim_topic()
        try:
            return self._catalog.make(name, config, self._now_ms)
        except Exception:
            self._holdings.release_topic()
            raise

    def _abandon_topic(self, hosted: Hosted) -> None:
        hosted.abandon()
        self._holdings.release_topic()


def _floor_frame(hosted: Hosted, floors: Floors, ts: int) -> bytes:
    body = encode_body(EvictBody(floors))
    return frame.encode(FrameType.EVICT_WATERMARK, 0, hosted.topic.id, floors.earliest_seq, ts, b"", b"", body)


def _floor_logged(hosted: Hosted, floors: Floors, _file_no: int, _offset: int) -> None:
    hosted.topic.revision = floors.revision
    hosted.topic.logged_floor = floors.evict_floor


def _is_logged(hosted: Hosted) -> bool:
    """Whether the log has all copies of a topic. Floors count them, so those of any other topic have to wait."""
    return hosted.logged_head_seq == hosted.topic.head_seq


def _in_ram(hosted: Hosted) -> bool:
    return hosted.topic.config.durability == "ephemeral"


def _attributes(hosted: Hosted, ts: int) -> list[bytes]:
    """What only the RAM log says of jobs that go on in a durable queue."""
    queue = hosted.topic.queue
    rows = [] if queue is None else queue.attributes().attributes
    bodies = [encode_body(rows[at : at + _ROWS_PER_FRAME]) for at in range(0, len(rows), _ROWS_PER_FRAME)]
    return [
        frame.encode(FrameType.JOB_ATTRIBUTES, FLAG_MORE, hosted.topic.id, 0, ts, b"", b"", body) for body in bodies
    ]


def _with_type(config: TopicConfig, type: Literal["log", "queue"]) -> TopicConfig:
    return msgspec.structs.replace(config, type=type)


def _read_spill(path: str) -> memoryview:
    """A message too long for a ring; its frontend made the file and removes it."""
    try:
        with open(path, "rb") as spill:
            return memoryview(spill.read())
    except FileNotFoundError:
        raise TopicsError("shard_unavailable", "the frontend that sent this request is gone") from None
