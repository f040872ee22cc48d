"""Frames of a log into the fold: where the bytes of `frame.py` meet the rules of `core/fold.py`.

Recovery reads a whole log this way, the compactor follows one; both see the same topics.
"""

from __future__ import annotations

from array import array
from typing import Final

from topics.core.fold import Fold
from topics.core.location import ENTRY_WORDS, LOCATION_IN_RAM_LOG
from topics.storage.frame import HEADER_LEN, FrameTuple, FrameType
from topics.storage.frame_columns import HEAD_WORDS
from topics.storage.recovery import RecoveredFile

_APART_FROM_RECORDS: Final = frozenset(
    (
        FrameType.IDEMPOTENCY,
        FrameType.RAM_STATE,
        FrameType.JOB_ATTRIBUTES,
        FrameType.LEASE,
        FrameType.CURSOR,
        FrameType.SESSION,
        FrameType.FILE_START,
        FrameType.FILE_END,
        FrameType.SYNC_MARK,
        FrameType.ROUTER_SOURCE,
    )
)
"""What the fold takes of these has nothing to do with the records before them."""


def fold_frames(fold: Fold, batch: RecoveredFile, in_ram: bool) -> None:
    """Feeds one batch, in order. `in_ram`: it is of the RAM log. Raises FoldError."""
    frames = batch.frames
    entries = frames.entries(batch.file_no, LOCATION_IN_RAM_LOG if in_ram else 0)
    runs: dict[int, array[int]] = {}
    types, topic_ids = frames.types, frames.heads[0::HEAD_WORDS]
    for first, behind in frames.stretches():
        if types[first] == FrameType.APPEND:
            part = entries[first * ENTRY_WORDS : behind * ENTRY_WORDS]
            run = runs.setdefault(topic_ids[first], part)
            if run is not part:
                run.extend(part)
            continue
        for frame in frames[first:behind]:
            if frame[2] not in _APART_FROM_RECORDS:
                # Control frames see their topic with all records before them.
                for run_topic_id, run in runs.items():
                    fold.records(run_topic_id, run)
                runs = {}
            _fold_frame(fold, frame, batch.buffer, in_ram)
    for run_topic_id, run in runs.items():
        fold.records(run_topic_id, run)


def _fold_frame(fold: Fold, frame: FrameTuple, buffer: memoryview, in_ram: bool) -> None:
    offset, _, type_, _, topic_id, seq, ts, node_len, tag_len, data_len = frame
    start = offset + HEADER_LEN + node_len + tag_len
    data = bytes(buffer[start : start + data_len])
    match type_:
        case FrameType.IDEMPOTENCY:
            fold.idempotency(topic_id, seq, ts, data)
        case FrameType.RAM_STATE:
            fold.ram_state(topic_id, data)
        case FrameType.JOB_ATTRIBUTES:
            fold.job_attributes(topic_id, data)
        case FrameType.LEASE:
            fold.lease(topic_id, data)
        case FrameType.CURSOR:
            fold.cursor(topic_id, data)
        case FrameType.SESSION:
            fold.session(data)
        case FrameType.FILE_START | FrameType.FILE_END | FrameType.SYNC_MARK | FrameType.ROUTER_SOURCE:
            pass
        case _:
            _fold_control(fold, type_, topic_id, seq, data, in_ram)


def _fold_control(fold: Fold, type_: int, topic_id: int, seq: int, data: bytes, in_ram: bool) -> None:
    match type_:
        case FrameType.TOPIC_CREATE:
            fold.topic_create(topic_id, data)
        case FrameType.CONFIG_UPDATE:
            fold.config_update(topic_id, data)
        case FrameType.TOPIC_DELETE:
            fold.topic_delete(topic_id)
        case FrameType.DELETE:
            fold.delete(topic_id, data)
        case FrameType.EVICT_WATERMARK:
            fold.evict_watermark(topic_id, data)
        case FrameType.ACK:
            fold.ack(topic_id, data)
        case FrameType.CHECKPOINT_MARK:
            fold.checkpoint_mark(topic_id, seq, data)
        case FrameType.HEAD_WATERMARK:
            fold.head_watermark(topic_id, seq, data)
        case FrameType.ROUTER_CREATE:
            fold.routers.created(data)
        case FrameType.ROUTER_DELETE:
            fold.routers.deleted(seq)
        case FrameType.ROUTER_CURSOR:
            fold.router_cursor(topic_id, seq, data, in_ram)
        case _:
            raise AssertionError(f"frame type {type_} has no meaning in this version")
