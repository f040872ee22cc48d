"""Requests about named cursors (api §10); `core/cursors.py` has the rules."""

from __future__ import annotations

from functools import partial
from weakref import WeakSet

import msgspec

from topics.core.control_bodies import encode_body
from topics.core.cursors import CursorFrameBody, NamedCursor
from topics.shm.asks import Deleted, Done
from topics.shm.queue_messages import (
    CursorAdvance,
    CursorDelete,
    CursorGet,
    CursorList,
    CursorMoved,
    CursorPassedOn,
    CursorPut,
    CursorReply,
)
from topics.storage.frame import FrameType
from topics.walshard.commit.draft import Draft, LogWrite, Steps, Then, control_write
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


class NamedCursors:
    """Handles requests about the named cursors of one shard's topics, and logs their positions."""

    def __init__(self, catalog: Catalog, time: StepClock) -> None:
        self._catalog = catalog
        self._time = time
        self.being_read: WeakSet[NamedCursor] = WeakSet()
        """All cursors with reads under way, and maybe some others. Deleted ones drop out by themselves."""

    def frontend_died(self, frontend: int) -> None:
        """Take back the reads whose answers a dead frontend had not passed on to its clients."""
        for cursor in self.being_read:
            cursor.frontend_died(frontend)

    def log_all(self) -> Steps[None]:
        """Log each cursor at a clean end: behind all answers that reached their clients, before all that did not."""
        yield Draft(
            self._write(hosted, body := cursor.body(), partial(cursor.persisted, body), sync=cursor.strict)
            for hosted in self._catalog
            for cursor in hosted.topic.cursors
            if cursor.unlogged
        )

    def look(self, call: CursorGet, _frontend: int, _group: Draft) -> CursorList:
        """Return one cursor, or a page of them."""
        cursors = self._catalog.require(call.name).topic.cursors
        one = call.cursor
        found = cursors.behind(call.after, call.most) if one is None else [cursors.get(call.name, one)]
        return CursorList([_shown(cursor, call.passed_seq) for cursor in found])

    def put(self, call: CursorPut, _frontend: int) -> Steps[CursorReply]:
        """Make a cursor, or move or configure one that is there."""
        hosted = self._catalog.require(call.name)
        topic = hosted.topic
        topic.cursors.check_room(call.cursor)
        known = topic.cursors.find(call.cursor)
        if known is not None and call.seq is None and not call.tail:
            return (yield from self._configure(hosted, known, call))
        consistency = call.consistency or (known.consistency if known is not None else "at_least_once")
        persist_every = call.persist_every or (known.persist_every if known is not None else 1)
        seq = topic.head_seq if call.tail else call.seq or 0
        if seq > topic.head_seq:  # a diff from such a seq is refused as well: the topic never gave it out
            seq = 0 if topic.recreated else topic.head_seq
        body = CursorFrameBody(call.cursor, consistency, persist_every, seq)
        reply = CursorReply(call.cursor, consistency, persist_every, seq, seq, 0, known is None)
        write = self._write(hosted, body, partial(topic.cursors.logged, body), sync=True)
        yield Draft([write], reply=reply, touched=(hosted,))
        return reply

    def _configure(self, hosted: Hosted, cursor: NamedCursor, call: CursorPut) -> Steps[CursorReply]:
        """Configure a cursor. Its position stays, and so do the reads that are under way."""
        config = call.consistency or cursor.consistency, call.persist_every or cursor.persist_every
        if config == (cursor.consistency, cursor.persist_every):
            return CursorReply(cursor.name, *config, cursor.seq, cursor.persisted_seq, cursor.revision)
        body = msgspec.structs.replace(cursor.body(), consistency=config[0], persist_every=config[1])
        reply = CursorReply(cursor.name, *config, cursor.seq, body.next_seq, cursor.revision)
        yield Draft([self._write(hosted, body, partial(cursor.configured, body), sync=True)], reply=reply)
        return reply

    def delete(self, call: CursorDelete, _frontend: int) -> Steps[Deleted]:
        """Delete a cursor. If it or its topic does not exist, the reply says that it was deleted before (api §0.9)."""
        hosted = self._catalog.find(call.name)
        known = None if hosted is None else hosted.topic.cursors.find(call.cursor)
        if hosted is None or known is None:
            return Deleted(False)
        body, reply = CursorFrameBody(call.cursor, None), Deleted(True)
        write = self._write(hosted, body, partial(hosted.topic.cursors.logged, body), sync=True)
        yield Draft([write], reply=reply, touched=(hosted,))
        return reply

    def advance(self, call: CursorAdvance, frontend: int, group: Draft) -> CursorMoved:
        """Move a cursor over records that a frontend reads, unless another read has moved it meanwhile."""
        hosted = self._catalog.require(call.name)
        cursor = hosted.topic.cursors.get(call.name, call.cursor)
        moved = cursor.advance(call.revision, call.from_seq, call.to_seq, frontend, call.read)
        reply = CursorMoved(moved, cursor.seq, cursor.up_to_seq, cursor.revision, moved and not cursor.strict)
        if moved and not cursor.strict:
            self.being_read.add(cursor)
        elif moved:
            self._persist(group, hosted, cursor, partial(cursor.mark_missing, [(call.from_seq, call.to_seq)]))
        return reply

    def passed_on(self, call: CursorPassedOn, frontend: int, group: Draft) -> Done:
        """Note that the records of a read were sent to its client, or could not be."""
        hosted = self._catalog.require(call.name)
        cursor = hosted.topic.cursors.find(call.cursor)
        if cursor is None:
            return Done()
        if call.passed_on:
            cursor.passed_on(call.revision, frontend, call.read)
        else:
            cursor.failed(call.revision, frontend, call.read)
        if not cursor.is_being_read:
            self.being_read.discard(cursor)
        self._persist(group, hosted, cursor, cursor.persist_failed)
        return Done()

    def _persist(self, group: Draft, hosted: Hosted, cursor: NamedCursor, undo: Then) -> None:
        if cursor.to_persist:
            cursor.persisting()
            body = cursor.body()
            group.add(self._write(hosted, body, partial(cursor.persisted, body), undo, sync=cursor.strict))

    def _write(self, hosted: Hosted, body: CursorFrameBody, apply: Then, undo: Then = None, *, sync: bool) -> LogWrite:
        bodies = [(FrameType.CURSOR, encode_body(body))]
        return control_write(hosted.topic, self._time.now.wall_ms, bodies, apply, undo, sync=sync)


def _shown(cursor: NamedCursor, passed_seq: int) -> CursorReply:
    seq, up_to_seq = cursor.behind(passed_seq)
    config = cursor.name, cursor.consistency, cursor.persist_every
    return CursorReply(*config, seq, cursor.persisted_seq, cursor.revision, up_to_seq=up_to_seq)
