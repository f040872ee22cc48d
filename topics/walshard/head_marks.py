"""HEAD_WATERMARK: how far the durable log knows the heads of topics whose records are in RAM.

A ceiling is logged before seqs up to it are given out, so that none is given out twice when the RAM log is lost. An
exact one says that all seqs up to it were given out: where the log goes on from, or what was lost with a RAM log.
"""

from __future__ import annotations

from collections.abc import Iterable

from topics.core.control_bodies import HeadBody, encode_body
from topics.storage import frame
from topics.storage.frame import FrameType
from topics.walshard.catalog import Catalog
from topics.walshard.commit import Logs
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation


def head_mark(hosted: Hosted, head_seq: int, ts: int, flags: int) -> bytes:
    """Every seq up to `head_seq` was given out, and none above it in RAM."""
    return _mark(hosted, head_seq, True, ts, flags)


def head_operation(hosted: Hosted, head_seq: int, ts: int) -> Operation:
    """Says the same by itself, before `head_seq` is the head."""
    return _operation(hosted, head_seq, head_mark(hosted, head_seq, ts, 0))


def ceiling_operation(hosted: Hosted, ceiling: int, ts: int) -> Operation:
    """Seqs up to `ceiling` may be given out to records in RAM."""
    return _operation(hosted, ceiling, _mark(hosted, ceiling, False, ts, 0))


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


def _mark(hosted: Hosted, seq: int, exact: bool, ts: int, flags: int) -> bytes:
    body = encode_body(HeadBody(exact))
    return frame.encode(FrameType.HEAD_WATERMARK, flags, hosted.topic.id, seq, ts, b"", b"", body)


def _operation(hosted: Hosted, seq: int, mark: bytes) -> Operation:
    def apply(_file_no: int, _offset: int) -> None:
        hosted.topic.head_ceiling = seq

    return Operation([mark], apply, sync=True)
