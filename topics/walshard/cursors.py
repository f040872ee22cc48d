"""What a shard does with requests about named cursors (api §10); `core/cursors.py` has the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics.core.control_bodies import encode_body
from topics.core.cursors import Cursor, CursorBody
from topics.core.errors import topic_not_found
from topics.shm import messages
from topics.shm.cursor_messages import (
    CursorAdvance,
    CursorCall,
    CursorDelete,
    CursorDeleted,
    CursorList,
    CursorLook,
    CursorMoved,
    CursorPut,
    CursorReply,
)
from topics.storage.frame import FrameType
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer
from topics.walshard.queue_writes import QueueWrites

CURSOR_CALLS: Final = (CursorPut, CursorDelete, CursorLook, CursorAdvance)


class NamedCursors:
    """Of all topics of one shard. `commit` ends the group so far."""

    def __init__(self, find: Callable[[str], Hosted | None], writes: QueueWrites, commit: Callable[[], None]) -> None:
        self._find = find
        self._writes = writes
        self._commit = commit

    def take(self, call: CursorCall, answer: Answer) -> None:
        """Prepares the answer, and what it has the group write; raises TopicsError, the group being as before."""
        hosted = self._find(call.name)
        if hosted is None:
            raise topic_not_found(call.name)
        match call:
            case CursorPut():
                self._put(hosted, call, answer)
            case CursorDelete():
                self._delete(hosted, call, answer)
            case CursorLook():
                cursors = hosted.topic.cursors
                found = cursors.every() if call.cursor is None else [cursors.get(call.name, call.cursor)]
                reply = CursorList([_shown(cursor) for cursor in found])
                answer.reply = messages.encode_reply(answer.request_id, reply)
            case CursorAdvance():
                self._advance(hosted, call, answer)

    def _put(self, hosted: Hosted, call: CursorPut, answer: Answer) -> None:
        self._commit()
        topic = hosted.topic
        topic.cursors.check_room(call.cursor)
        known = topic.cursors.find(call.cursor)
        seq = call.seq
        if call.tail:
            seq = topic.head_seq
        elif seq is None:
            seq = 0 if known is None else known.seq
        body = CursorBody(call.cursor, call.consistency, call.persist_every, seq)
        reply = CursorReply(call.cursor, call.consistency, call.persist_every, seq, seq, 0, known is None)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        if known is None or known.body() != body or known.persisted_seq != seq:
            self._log(hosted, body, lambda: topic.cursors.logged(body), None, answer, sync=True)
        self._commit()

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
        moved = cursor.advance(call.revision, call.from_seq, call.to_seq)
        reply = CursorMoved(moved, cursor.seq, cursor.revision)
        answer.reply = messages.encode_reply(answer.request_id, reply)
        if moved and cursor.to_persist:
            cursor.persisting()
            seq = cursor.seq
            self._log(
                hosted,
                cursor.body(),
                lambda: cursor.persisted(seq),
                lambda: cursor.take_back(call.from_seq),
                answer,
                sync=cursor.strict,
            )

    def _log(
        self,
        hosted: Hosted,
        body: CursorBody,
        apply: Callable[[], None],
        undo: Callable[[], None] | None,
        answer: Answer,
        *,
        sync: bool,
    ) -> None:
        self._writes.add(hosted, [(FrameType.CURSOR, encode_body(body))], apply, undo, answer, sync=sync)


def _shown(cursor: Cursor) -> CursorReply:
    return CursorReply(
        cursor.name, cursor.consistency, cursor.persist_every, cursor.seq, cursor.persisted_seq, cursor.revision
    )
