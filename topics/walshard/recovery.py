"""From files to a shard at work: read the logs, fold them, build a new arena.

Nothing of the former incarnation's shared memory is trusted but the rings and the journal: topics and locations come
from the files. Until the new arena is complete, readers keep the old one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Final

from topics.core.fold import Fold
from topics.core.topic import LOCATION_IN_RAM_LOG
from topics.storage.frame import (
    FLAG_META,
    FLAG_NODE,
    FLAG_TAG,
    HEADER_LEN,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    FrameType,
)
from topics.storage.recovery import RecoveredFile

_LOCATION_FLAGS: Final = [
    (LOCATION_HAS_TAG if flags & FLAG_TAG else 0)
    | (LOCATION_HAS_NODE if flags & FLAG_NODE else 0)
    | (LOCATION_HAS_META if flags & FLAG_META else 0)
    for flags in range(256)
]
"""Frame flags → location flags."""


def fold_files(fold: Fold, files: Iterable[RecoveredFile], in_ram: bool, progress: Callable[[int], None]) -> None:
    """Feeds the frames of one log, in order; `progress` hears the number of frames after each file."""
    for file in files:
        _fold_file(fold, file, LOCATION_IN_RAM_LOG if in_ram else 0)
        progress(len(file.frames))


def _fold_file(fold: Fold, file: RecoveredFile, ram_flag: int) -> None:
    buffer = file.buffer
    runs: dict[int, array[int]] = {}
    words = [file.file_no | (flags | ram_flag) << 32 for flags in _LOCATION_FLAGS]
    last_topic_id = -1
    extend: Callable[[tuple[int, int, int, int]], None] | None = None
    for offset, total_len, type_, flags, topic_id, seq, ts, node_len, tag_len, data_len in file.frames:
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
            case FrameType.SESSION:
                fold.session(data)
            case FrameType.FILE_START | FrameType.FILE_END | FrameType.SYNC_MARK:
                pass
            case _:
                # Control frames see their topic with all records before them.
                for run_topic_id, run in runs.items():
                    fold.records(run_topic_id, run)
                runs = {}
                extend = None
                _fold_control(fold, type_, topic_id, seq, data)
    for run_topic_id, run in runs.items():
        fold.records(run_topic_id, run)


def _fold_control(fold: Fold, type_: int, topic_id: int, seq: int, data: bytes) -> None:
    match type_:
        case FrameType.TOPIC_CREATE:
            fold.topic_create(topic_id, data)
        case FrameType.CONFIG_UPDATE:
            fold.config_update(topic_id, data)
        case FrameType.TOPIC_DELETE:
            fold.topic_delete(topic_id)
        case FrameType.EVICT_WATERMARK:
            fold.evict_watermark(topic_id, seq, data)
        case FrameType.HEAD_WATERMARK:
            fold.head_watermark(topic_id, seq, data)
        case _:
            raise AssertionError(f"frame type {type_} has no meaning in this version")
