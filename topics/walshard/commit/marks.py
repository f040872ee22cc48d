"""Marks by which the durable log says what no record in it tells: floors that moved, and heads of records in RAM.

EVICT_WATERMARK says what ttl and caps took. A ttl takes nothing before the log says so. Caps evict as records come, and
the next commit says it; whoever reads the log without that works it out again.

HEAD_WATERMARK says how far the heads of `ephemeral` topics are. A ceiling is logged before seqs up to it are given out,
so that none is given out twice when the RAM log is lost. An exact one says that all seqs up to it were given out: where
the log goes on from, or what was lost with a RAM log.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from topics.core.control_bodies import EvictFrameBody, HeadFrameBody, encode_body
from topics.core.floors import Floors
from topics.storage import frame
from topics.storage.frame import FrameType
from topics.walshard.commit.draft import LogWrite
from topics.walshard.commit.logs import Logs
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted


def floor_frame(hosted: Hosted, floors: Floors, ts: int, flags: int = 0) -> bytes:
    """EVICT_WATERMARK: the floors as they are to be."""
    body = encode_body(EvictFrameBody(floors))
    return frame.encode(FrameType.EVICT_WATERMARK, flags, hosted.topic.id, floors.earliest_seq, ts, b"", b"", body)


def cap_operation(hosted: Hosted, ts: int) -> LogWrite:
    """The floors where caps have moved them."""
    floors = hosted.topic.floors()
    return LogWrite([floor_frame(hosted, floors, ts)], partial(_floors_logged, hosted, floors))


def _floors_logged(hosted: Hosted, floors: Floors, _file_no: int, _offset: int) -> None:
    hosted.topic.revision = floors.revision
    hosted.topic.logged_floor = floors.evict_floor


def head_mark(hosted: Hosted, head_seq: int, ts: int, flags: int) -> bytes:
    """HEAD_WATERMARK: every seq up to `head_seq` was given out, and none above it in RAM."""
    return _head_frame(hosted, head_seq, True, ts, flags)


def head_operation(hosted: Hosted, head_seq: int, ts: int) -> LogWrite:
    """Says the same by itself, before `head_seq` is the head."""
    return _head_operation(hosted, head_seq, head_mark(hosted, head_seq, ts, 0))


def ceiling_mark(hosted: Hosted, ceiling: int, ts: int) -> bytes:
    """HEAD_WATERMARK: seqs up to `ceiling` may be given out to records in RAM."""
    return _head_frame(hosted, ceiling, False, ts, 0)


def ceiling_operation(hosted: Hosted, ceiling: int, ts: int) -> LogWrite:
    """Says it by itself, before the first of them is given out."""
    return _head_operation(hosted, ceiling, ceiling_mark(hosted, ceiling, ts))


class LostHeads:
    """Topics whose heads nothing but a ceiling tells, since a RAM log was lost. Before there is a RAM log again the
    durable one has to say them: afterwards nobody could tell what was lost before it from what never was.
    """

    def __init__(self, catalog: Catalog, logs: Logs, topic_ids: Iterable[int]) -> None:
        self._catalog = catalog
        self._logs = logs
        self._topic_ids = tuple(topic_ids)

    def log(self, now_ms: int) -> None:
        """Between two groups. Raises TopicsError when the log cannot be written: then there must be no RAM log."""
        known = [hosted for hosted in map(self._catalog.find_id, self._topic_ids) if hosted is not None]
        marks = [
            head_operation(hosted, hosted.topic.head_seq, now_ms)
            for hosted in known
            if hosted.topic.config.durability == "ephemeral"
        ]
        if marks:
            self._logs.plan(marks, [])
            for _mark_operation, refusal in self._logs.commit(marks, []):
                raise refusal
        self._topic_ids = ()


def _head_frame(hosted: Hosted, seq: int, exact: bool, ts: int, flags: int) -> bytes:
    body = encode_body(HeadFrameBody(exact))
    return frame.encode(FrameType.HEAD_WATERMARK, flags, hosted.topic.id, seq, ts, b"", b"", body)


def _head_operation(hosted: Hosted, seq: int, mark: bytes) -> LogWrite:
    def apply(_file_no: int, _offset: int) -> None:
        hosted.topic.head_ceiling = seq

    return LogWrite([mark], apply, sync=True)
