"""This module feeds a log's frames (`frame.py`) to the fold (`core/fold.py`).

Recovery folds a whole log with it, the compactor follows a log with it, and the offline check repeats the fold of a
start (`OfflineFold`). So all of them get the same topics.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import compress
from typing import Final, NamedTuple

from topics.core.fold import Fold
from topics.core.location import ENTRY_WORDS, LOCATION_IN_RAM_LOG, LOCATION_LOST, any_flagged, flags_of
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import SegmentInfo
from topics.core.shard_state import ShardState
from topics.core.topic import Topic
from topics.storage.frame import HEADER_LEN, FrameType
from topics.storage.frame_columns import HEAD_WORDS
from topics.storage.logfile import WalPosition
from topics.storage.recovery import RecoveredFile
from topics.storage.snapshot import ShardPart

_OF_TOPIC: Final[Mapping[int, Callable[[Fold, Topic, int, bytes], None]]] = {
    FrameType.CONFIG_UPDATE: lambda fold, topic, _seq, data: fold.config_update(topic, data),
    FrameType.DELETE: lambda fold, topic, _seq, data: fold.delete(topic, data),
    FrameType.EVICT_WATERMARK: lambda fold, topic, _seq, data: fold.evict_watermark(topic, data),
    FrameType.ACK: lambda fold, topic, _seq, data: fold.ack(topic, data),
    FrameType.CHECKPOINT_MARK: lambda fold, topic, seq, data: fold.checkpoint_mark(topic, seq, data),
    FrameType.HEAD_WATERMARK: lambda fold, topic, seq, data: fold.head_watermark(topic, seq, data),
    FrameType.LEASE: lambda fold, topic, _seq, data: fold.lease(topic, data),
    FrameType.CURSOR: lambda fold, topic, _seq, data: fold.cursor(topic, data),
}
"""Frames of a topic that the log has created. They change nothing if it was deleted."""
_OTHERS: Final[Mapping[int, Callable[[Fold, int, int, bytes, bool], None]]] = {
    FrameType.TOPIC_CREATE: lambda fold, topic_id, _seq, data, _ram: fold.topic_create(topic_id, data),
    FrameType.TOPIC_DELETE: lambda fold, topic_id, _seq, _data, _ram: fold.topic_delete(topic_id),
    FrameType.RAM_STATE: lambda fold, topic_id, _seq, data, _ram: fold.ram_state(topic_id, data),
    FrameType.JOB_ATTRIBUTES: lambda fold, topic_id, _seq, data, _ram: fold.job_attributes(topic_id, data),
    FrameType.SESSION: lambda fold, _id, _seq, data, _ram: fold.session(data),
    FrameType.ROUTER_CREATE: lambda fold, _id, _seq, data, _ram: fold.routers.created(data),
    FrameType.ROUTER_DELETE: lambda fold, _id, seq, _data, _ram: fold.routers.deleted(seq),
    FrameType.ROUTER_CURSOR: lambda fold, topic_id, seq, data, in_ram: fold.router_cursor(topic_id, seq, data, in_ram),
}
_APART_FROM_RECORDS: Final = frozenset(
    (FrameType.RAM_STATE, FrameType.JOB_ATTRIBUTES, FrameType.LEASE, FrameType.CURSOR, FrameType.SESSION)
)
"""Frames that may be applied before the records that precede them; all others need these records first."""
_NOT_FOLDED: Final = frozenset((FrameType.FILE_START, FrameType.FILE_END, FrameType.SYNC_MARK, FrameType.ROUTER_SOURCE))


def fold_frames(fold: Fold, batch: RecoveredFile, in_ram: bool) -> None:
    """Feed one batch of the durable or the RAM log, in order. Raise FoldError."""
    frames = batch.frames
    types, heads = frames.types, frames.heads
    entries: array[int] | None = None
    lengths = array("I", frames.offset_len.tobytes())[1::2]
    runs: dict[int, array[int]] = {}
    for first, behind in frames.stretches():
        if types[first] == FrameType.APPEND:
            at, last_at = first * HEAD_WORDS, (behind - 1) * HEAD_WORDS
            topic_id, first_seq, last_seq = heads[at], heads[at + 1], heads[last_at + 1]
            if not fold.is_located and topic_id not in runs and last_seq - first_seq == behind - first - 1:
                size_bytes = sum(lengths[first:behind]) if at != last_at else lengths[first]
                if fold.extended(topic_id, first_seq, last_seq, heads[last_at + 2], size_bytes):
                    continue
            if entries is None:
                entries = frames.entries(batch.file_no, LOCATION_IN_RAM_LOG if in_ram else 0)
            part = entries[first * ENTRY_WORDS : behind * ENTRY_WORDS]
            run = runs.setdefault(topic_id, part)
            if run is not part:
                run.extend(part)
            continue
        for offset, _, type_, _, topic_id, seq, ts, node_len, tag_len, data_len in frames[first:behind]:
            if type_ in _NOT_FOLDED:
                continue
            start = offset + HEADER_LEN + node_len + tag_len
            data = bytes(batch.buffer[start : start + data_len])
            if type_ == FrameType.IDEMPOTENCY:
                fold.idempotency(topic_id, seq, ts, data)
                continue
            if type_ not in _APART_FROM_RECORDS:
                for run_topic_id, run in runs.items():
                    fold.records(run_topic_id, run, in_ram)
                runs = {}
            apply = _OF_TOPIC.get(type_)
            if apply is None:
                _OTHERS[type_](fold, topic_id, seq, data, in_ram)
            elif (topic := fold.topic(topic_id)) is not None:
                apply(fold, topic, seq, data)
    for run_topic_id, run in runs.items():
        fold.records(run_topic_id, run, in_ram)


class LoggedTopic(NamedTuple):
    """A topic as one log has it.

    `deleted` are deleted seqs (ascending) that segments may not have marked yet. `live` counts the live records from
    `earliest_seq` to `head_seq`; None if the log cannot know (records were in RAM, or their log is lost).
    `live_behind` of them are in no segment. Without `has_end` the log may lack deletions that segments have.
    """

    segments: list[SegmentInfo]
    deleted: array[int]
    earliest_seq: int
    live: int | None
    live_behind: int
    has_end: bool


class _Index(UnlocatedIndex):
    """An index for the check. `lost` are the seqs that the log gives as lost, in its order."""

    __slots__ = ("lost",)

    def __init__(self) -> None:
        super().__init__()
        self.lost: array[int] = array("Q")

    def append_entries(self, entries: array[int]) -> None:
        super().append_entries(entries)
        if any_flagged(entries, LOCATION_LOST):
            is_lost = [flags & LOCATION_LOST for flags in flags_of(entries)]
            self.lost.extend(compress(entries[0::ENTRY_WORDS], is_lost))


class OfflineFold:
    """The fold of a start, from a snapshot's part or from nothing. Raise FoldError, msgspec.DecodeError."""

    def __init__(self, part: ShardPart | None) -> None:
        self._fold = Fold(lambda _topic_id: _Index(), is_located=False)
        self._position = WalPosition(1, 0) if part is None else part.position
        if part is not None:
            self._fold.restore(part.decoded())

    def add(self, batch: RecoveredFile) -> None:
        """Feed the next frames of the log; those that the snapshot covers are skipped."""
        position = self._position
        frames = batch.frames
        if batch.file_no < position.file_no:
            return
        if batch.file_no == position.file_no:
            frames = frames.from_offset(position.offset)
        if frames:
            fold_frames(self._fold, batch._replace(frames=frames), in_ram=False)

    def state(self) -> ShardState:
        """Return the state that a snapshot would hold. Raise FoldError if the log lacks records."""
        return self._fold.state()

    def topics(self, has_end: bool) -> dict[int, LoggedTopic]:
        """Return live topics by id. Raise FoldError if the log lacks records."""
        self._fold.state()
        return {topic.id: self._logged(topic, has_end) for topic in self._fold.topics.values()}

    def _logged(self, topic: Topic, has_end: bool) -> LoggedTopic:
        index = topic.index
        assert isinstance(index, _Index)
        deleted = frozenset(index.deleted)
        behind_seq = max(topic.earliest_seq, index.segments.last_seq + 1)
        gone = sum(1 for seq in deleted.union(index.lost) if behind_seq <= seq <= topic.head_seq)
        # After an accepted loss segments may reach beyond the end of the log, and records between may be missing.
        is_counted = (
            self._fold.is_counted(topic)
            and index.segments.last_seq <= topic.head_seq
            and index.segments.dense_from_seq <= topic.earliest_seq
        )
        return LoggedTopic(
            list(index.segments),
            array("Q", sorted(deleted)),
            topic.earliest_seq,
            topic.records if is_counted else None,
            max(0, topic.head_seq - behind_seq + 1) - gone,
            has_end,
        )

    @property
    def deleted_ids(self) -> set[int]:
        return self._fold.created_ids - self._fold.topics.keys()
