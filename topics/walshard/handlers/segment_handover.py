"""Handover of segments from the compactor: the shard logs its `Checkpoint` as marks, one for each topic.

A mark counts once it is on the disk, behind all frames that its segments contain. Only then does the shard drop the
locations of those frames. So a shard that is killed meanwhile finds both frames and segments, or the segments. The
compactor repeats a request that was not answered; a mark that the log has already changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from topics.core.control_bodies import MarkFrameBody, encode_body
from topics.core.errors import storage_unavailable
from topics.core.floors import Floors
from topics.core.segment_list import SegmentList
from topics.core.seq_set import seqs_of
from topics.shm.arena_heap import ArenaFullError
from topics.shm.asks import Done
from topics.shm.topic_messages import Checkpoint, CheckpointReply, MarkAgain, TopicCheckpoint, Trim
from topics.storage.frame import FrameType
from topics.storage.kill_points import reached
from topics.storage.segment import CorruptSegment
from topics.storage.topic_frames import control_frame
from topics.walshard.commit.draft import Draft, LogWrite, Steps
from topics.walshard.commit.log_trim import LogTrim
from topics.walshard.commit.logs import Logs
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.step_clock import StepClock

_REFUSED: Final = (ValueError, ArenaFullError, OSError, CorruptSegment)


class SegmentHandover:
    """Takes over segments for one shard. Everything prepared is committed before."""

    def __init__(self, catalog: Catalog, files: SegmentFiles, logs: Logs, log_trim: LogTrim, time: StepClock) -> None:
        self._catalog = catalog
        self._files = files
        self._logs = logs
        self._log_trim = log_trim
        self._time = time

    def take(self, call: Checkpoint, _frontend: int) -> Steps[CheckpointReply]:
        """Log marks of these segments, then drop the locations of the records in them."""
        self._files.mark_again()
        if not call.topics:  # ends a checkpoint: the snapshot needs all logged deletions marked, and the log synced
            self._require(self._files.is_marked)
        gone: list[int] = []
        refused: list[int] = []
        marks: list[LogWrite] = []
        marked: dict[int, Hosted] = {}
        for checkpoint in call.topics:
            hosted = self._catalog.find_id(checkpoint.topic_id)
            if hosted is None:  # the topic was deleted
                gone.append(checkpoint.topic_id)
                continue
            try:
                if checkpoint.topic_id in marked:
                    raise ValueError("the topic is in this checkpoint twice")
                mark = self._mark(checkpoint, hosted)
            except _REFUSED as error:
                self._logs.lasting.error("a checkpoint was refused", topic=hosted.topic.name, reason=str(error))
                refused.append(checkpoint.topic_id)
                continue
            if mark is not None:
                marks.append(mark)
                marked[checkpoint.topic_id] = hosted
        if marks:
            draft = Draft(marks, touched=marked.values(), floors_of=marked.keys())
            yield draft
            if not draft.committed:
                refused += marked
        elif not self._logs.sync():
            raise storage_unavailable("the log cannot be synced now; see the service's log")
        return CheckpointReply(gone, refused)

    def _mark(self, checkpoint: TopicCheckpoint, hosted: Hosted) -> LogWrite | None:
        """Return the mark of one topic, None when the log has it already."""
        topic, known = hosted.topic, hosted.index.segments
        segments = known.copy()
        version = segments.version
        for info in checkpoint.segments:
            old = segments.put(info)
            if old is not None and old.version != info.version:
                self._files.deleted(topic.id, old)  # fails now rather than in `replaced`, after the mark is logged
        if segments.version == version:
            return None
        _check(segments, known, checkpoint, hosted)
        floors = topic.floors()
        table = hosted.prepare_segments(segments)
        body = encode_body(MarkFrameBody(checkpoint.segments, floors))
        mark = control_frame(
            FrameType.CHECKPOINT_MARK, topic.id, self._time.now.wall_ms, body, seq=checkpoint.up_to_seq
        )
        apply = partial(_apply, hosted, checkpoint, floors, table)
        return LogWrite([mark], apply, sync=True, undo=partial(hosted.release, table))

    def trim(self, call: Trim, _frontend: int, _group: Draft) -> Done:
        """Have log files removed that no snapshot needs any more."""
        self._log_trim.request(call.file_no)
        return Done()

    def mark_again(self, call: MarkAgain, _frontend: int, _group: Draft) -> Done:
        """Mark a topic's logged deletions that are not marked yet. Raise TopicsError if some cannot be marked."""
        hosted = self._catalog.find_id(call.topic_id)
        if hosted is not None:
            hosted.index.flag_moved(list(seqs_of(call.runs)))
        self._require(self._files.is_marked_of(call.topic_id))
        return Done()

    def _require(self, is_marked: bool) -> None:
        if not is_marked:
            raise storage_unavailable("deletions cannot be marked in their segments now")


def _check(segments: SegmentList, known: SegmentList, checkpoint: TopicCheckpoint, hosted: Hosted) -> None:
    """Raise ValueError if a live record whose location is to be dropped is in no segment."""
    topic = hosted.topic
    if segments.last_seq > topic.head_seq or segments.last_seq > max(known.last_seq, checkpoint.up_to_seq):
        raise ValueError(
            f"segments end at {segments.last_seq}, checkpointed is up to {checkpoint.up_to_seq}, "
            f"the head is {topic.head_seq}"
        )
    next_seq = topic.earliest_seq
    for info in segments:
        if info.first_seq > next_seq:
            raise ValueError(f"no segment has records {next_seq} to {info.first_seq - 1}")
        next_seq = max(next_seq, info.last_seq + 1)


def _apply(hosted: Hosted, checkpoint: TopicCheckpoint, floors: Floors, table: tuple[int, int]) -> None:
    reached("mark.logged")
    topic = hosted.topic
    hosted.checkpointed(checkpoint.segments, table)
    topic.logged(floors)
    topic.durable_seq = max(topic.durable_seq, min(checkpoint.up_to_seq, topic.head_seq))
    reached("mark.applied")
