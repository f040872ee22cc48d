"""Frames of a log into the fold: where the bytes of `frame.py` meet the rules of `core/fold.py`.

Recovery reads a whole log this way, the compactor follows one; both see the same topics.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from topics.core.fold import Fold
from topics.core.location import LOCATION_IN_RAM_LOG
from topics.storage.frame import (
    HEADER_LEN,
    LOCATION_FLAGS,
    FrameType,
)
from topics.storage.recovery import RecoveredFile


def fold_frames(fold: Fold, batch: RecoveredFile, in_ram: bool) -> None:
    """Feeds one batch, in order. `in_ram`: it is of the RAM log. Raises FoldError."""
    ram_flag = LOCATION_IN_RAM_LOG if in_ram else 0
    buffer = batch.buffer
    runs: dict[int, array[int]] = {}
    words = [batch.file_no | (flags | ram_flag) << 32 for flags in LOCATION_FLAGS]
    last_topic_id = -1
    extend: Callable[[tuple[int, int, int, int]], None] | None = None
    for offset, total_len, type_, flags, topic_id, seq, ts, node_len, tag_len, data_len in batch.frames:
        if type_ == FrameType.APPEND:
            if topic_id != last_topic_id or extend is None:
                run = runs.get(topic_id)
                if run is None:
                    run = runs[topic_id] = array("Q")
                extend = run.extend
                last_topic_id = topic_id
            extend((seq, ts, offset | total_len << 32, words[flags]))
            continue
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
            case FrameType.FILE_START | FrameType.FILE_END | FrameType.SYNC_MARK | FrameType.ROUTER_COPY:
                pass
            case _:
                # Control frames see their topic with all records before them.
                for run_topic_id, run in runs.items():
                    fold.records(run_topic_id, run)
                runs = {}
                extend = None
                _fold_control(fold, type_, topic_id, seq, data, in_ram)
    for run_topic_id, run in runs.items():
        fold.records(run_topic_id, run)


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
        case FrameType.ROUTER_SOURCE:
            fold.router_source(topic_id, seq)
        case _:
            raise AssertionError(f"frame type {type_} has no meaning in this version")
