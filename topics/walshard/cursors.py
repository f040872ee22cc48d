"""What a shard does with requests about named cursors (api §10); `core/cursors.py` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from topics.core.control_bodies import encode_body
from topics.core.cursors import Cursor, CursorBody
from topics.core.errors import topic_not_found
from topics.shm import messages
from topics.shm.messages import Done
from topics.shm.queue_messages import (
    CursorAdvance,
    CursorCall,
    CursorDelete,
    CursorDeleted,
    CursorList,
    CursorLook,
    CursorMoved,
    CursorPassedOn,
    CursorPut,
    CursorReply,
)
from topics.storage.frame import FrameType
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer
from topics.walshard.queues.queue_writes import QueueWrites

CURSOR_CALLS: Final = (CursorPut, CursorDelete, CursorLook, CursorAdvance, CursorPassedOn)


class NamedCursors:
    """Of all topics of one shard. `commit` ends the group so far; `require_head` raises where a head is not known."""

    def __init__(
        self,
        find: Callable[[str], Hosted | None],
        writes: QueueWrites,
        commit: Callable[[], None],
    ) -> None:
        self._find = find
        self._writes = writes
        self._commit = commit

    def frontend_died(self, frontend: int, every: Iterable[Hosted]) -> None:
        """Answers that it had not passed on are lost."""
        for hosted in every:
            for cursor in hosted.topic.cursors:
                cursor.frontend_died(frontend)

    def settle(self, every: Iterable[Hosted]) -> None:
        """A clean end: each is logged where it is, behind every answer that was passed on and before all others."""
        for hosted in every:
            for cursor in hosted.topic.cursors:
                if cursor.unlogged:
                    body = cursor.body()
                    self._log(hosted, body, partial(cursor.persisted, body), None, None, sync=cursor.strict)

    def take(self, call: CursorCall, answer: Answer) -> None:
        """Prepares the answer, and what it has the group write; raises TopicsError, the group being as before."""
        hosted = self._find(call.name)
        if hosted is None:
            if isinstance(call, CursorDelete):  # api §0.9
                answer.reply = messages.encode_reply(answer.request_id, CursorDeleted(False))
                return
            raise topic_not_found(call.name)
        match call:
            case CursorPut():
                self._put(hosted, call, answer)
            case CursorDelete():
                self._delete(hosted, call, answer)
            case CursorLook():
                cursors = hosted.topic.cursors
                if call.cursor is None:
                    found = cursors.behind(call.after, call.most)
                else:
                    found = [cursors.get(call.name, call.cursor)]
                reply = CursorList([_shown(cursor, call.passed_seq) for cursor in found])
                answer.reply = messages.encode_reply(answer.request_id, reply)
            case CursorAdvance():
                self._advance(hosted, call, answer)
            case CursorPassedOn():
                self._passed_on(hosted, call, answer)

    def _put(self, hosted: Hosted, call: CursorPut, answer: Answer) -> None:
        self._commit()
        topic = hosted.topic
        topic.cursors.check_room(call.cursor)
        known = topic.cursors.find(call.cursor)
        if known is not None and call.seq is None and not call.tail:
            self._configure(hosted, known, call, answer)
            self._commit()
            return
        consistency = call.consistency or (known.consistency if known is not None else "at_least_once")
        persist_every = call.persist_every or (known.persist_every if known is not None else 1)
        seq = topic.head_seq if call.tail else call.seq or 0
        if seq > topic.head_seq:  # as a diff from there: it was never read from this topic
            seq = 0 if topic.recreated else topic.head_seq
        body = CursorBody(call.cursor, consistency, persist_every, seq)
        reply = CursorReply(call.cursor, consistency, persist_every, seq, seq, 0, known is None)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        self._log(hosted, body, lambda: topic.cursors.logged(body), None, answer, sync=True)
        self._commit()

    def _configure(self, hosted: Hosted, cursor: Cursor, call: CursorPut, answer: Answer) -> None:
        """It stays where it is, and so does what readers have under way."""
        consistency = call.consistency or cursor.consistency
        persist_every = call.persist_every or cursor.persist_every
        persisted_seq = cursor.persisted_seq
        if (consistency, persist_every) != (cursor.consistency, cursor.persist_every):
            body = msgspec.structs.replace(cursor.body(), consistency=consistency, persist_every=persist_every)
            persisted_seq = body.next_seq
            self._log(hosted, body, lambda: cursor.configured(body), None, answer, sync=True)
        reply = CursorReply(cursor.name, consistency, persist_every, cursor.seq, persisted_seq, cursor.revision)
        answer.reply = messages.encode_reply(answer.request_id, reply)

    def _delete(self, hosted: Hosted, call: CursorDelete, answer: Answer) -> None:
        self._commit()
        topic = hosted.topic
        known = topic.cursors.find(call.cursor)
        answer.reply = messages.encode_reply(answer.request_id, CursorDeleted(known is not None))
        if known is not None:
            body = CursorBody(call.cursor, None)
            self._log(hosted, body, lambda: topic.cursors.logged(body), None, answer, sync=True)
            self._commit()

    def _advance(self, hosted: Hosted, call: CursorAdvance, answer: Answer) -> None:
        cursor = hosted.topic.cursors.get(call.name, call.cursor)
        moved = cursor.advance(call.revision, call.from_seq, call.to_seq, answer.frontend, call.read)
        reply = CursorMoved(moved, cursor.seq, cursor.up_to_seq, cursor.revision, moved and not cursor.strict)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        if moved and cursor.strict:
            self._persist(hosted, cursor, answer, lambda: cursor.give_back([(call.from_seq, call.to_seq)]))

    def _passed_on(self, hosted: Hosted, call: CursorPassedOn, answer: Answer) -> None:
        answer.reply = messages.encode_reply(answer.request_id, Done())
        cursor = hosted.topic.cursors.find(call.cursor)
        if cursor is None:
            return
        if call.passed_on:
            cursor.passed_on(call.revision, answer.frontend, call.read)
        else:
            cursor.failed(call.revision, answer.frontend, call.read)
        self._persist(hosted, cursor, answer, cursor.not_persisted)

    def _persist(self, hosted: Hosted, cursor: Cursor, answer: Answer, undo: Callable[[], None]) -> None:
        if cursor.to_persist:
            cursor.persisting()
            body = cursor.body()
            self._log(hosted, body, lambda: cursor.persisted(body), undo, answer, sync=cursor.strict)

    def _log(
        self,
        hosted: Hosted,
        body: CursorBody,
        apply: Callable[[], None],
        undo: Callable[[], None] | None,
        answer: Answer | None,
        *,
        sync: bool,
    ) -> None:
        self._writes.add(hosted, [(FrameType.CURSOR, encode_body(body))], apply, undo, answer, sync=sync)


def _shown(cursor: Cursor, passed_seq: int) -> CursorReply:
    seq, up_to_seq = cursor.behind(passed_seq)
    return CursorReply(
        cursor.name,
        cursor.consistency,
        cursor.persist_every,
        seq,
        cursor.persisted_seq,
        cursor.revision,
        up_to_seq=up_to_seq,
    )
