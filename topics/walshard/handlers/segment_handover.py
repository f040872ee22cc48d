"""Taking over what the compactor has put into segments: its `Checkpoint` becomes marks in the log, one for each topic.

A mark counts once it is on the disk, behind all frames that it speaks of. Only then are locations let go, so a shard
that is killed in between finds either both or the segments alone. The compactor repeats what was not answered, and a
mark that says nothing new changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from topics.core.control_bodies import MarkFrameBody, encode_body
from topics.core.errors import TopicsError
from topics.core.floors import Floors
from topics.core.segment_list import SegmentList
from topics.core.seq_set import seqs_of
from topics.log import get_logger
from topics.shm.arena_heap import ArenaFullError
from topics.shm.asks import Done
from topics.shm.topic_messages import Checkpoint, CheckpointReply, MarkAgain, TopicCheckpoint, Trim
from topics.storage.frame import FrameType
from topics.storage.kill_points import reached
from topics.storage.segment import CorruptSegment
from topics.storage.topic_frames import control_frame
from topics.walshard.commit.draft import AloneHandler, Draft, GroupHandler, LogWrite, Steps
from topics.walshard.commit.log_trim import LogTrim
from topics.walshard.commit.logs import Logs
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.step_clock import StepClock

log = get_logger()

_REFUSED: Final = (ValueError, ArenaFullError, OSError, CorruptSegment)


class SegmentHandover:
    """Takes over segments for one shard. Everything prepared is committed before."""

    def __init__(self, catalog: Catalog, files: SegmentFiles, logs: Logs, log_trim: LogTrim, time: StepClock) -> None:
        self._catalog = catalog
        self._files = files
        self._logs = logs
        self._log_trim = log_trim
        self._time = time

    @property
    def routes(self) -> dict[type, GroupHandler]:
        """The requests that are handled here in a group."""
        return {MarkAgain: self.mark_again, Trim: self.trim}

    @property
    def alone_routes(self) -> dict[type, AloneHandler]:
        """The requests that are handled here by themselves."""
        return {Checkpoint: self.take}

    def take(self, call: Checkpoint, _frontend: int) -> Steps[CheckpointReply]:
        """Logs that these segments are there, then lets go of the locations of their records."""
        self._files.mark_again()
        if not call.topics:  # the end of a checkpoint: a snapshot would take for done what only the log says
            self._require(self._files.is_marked)
        marks = Marks(self._files, self._time.now.wall_ms)
        for checkpoint in call.topics:
            marks.add(checkpoint, self._catalog.find_id(checkpoint.topic_id))
        if marks.operations:
            draft = Draft(marks.operations, touched=marks.marked.values(), floors_of=marks.marked.keys())
            yield draft
            if not draft.committed:
                marks.undo()
        elif not self._logs.sync():
            raise TopicsError("storage_unavailable", "the log cannot be synced now; see the service's log")
        return CheckpointReply(marks.gone, marks.refused)

    def trim(self, call: Trim, _frontend: int, _group: Draft) -> Done:
        """Has log files removed that snapshots have made superfluous."""
        self._log_trim.request(call.file_no)
        return Done()

    def mark_again(self, call: MarkAgain, _frontend: int, _group: Draft) -> Done:
        """Marks deletions that the log tells of, whatever was marked before; of a topic that is deleted, none. Raises
        TopicsError when there are some that cannot be marked.
        """
        hosted = self._catalog.find_id(call.topic_id)
        if hosted is not None:
            hosted.index.flag_moved(list(seqs_of(call.runs)))
        self._require(self._files.is_marked_of(call.topic_id))
        return Done()

    def _require(self, is_marked: bool) -> None:
        if not is_marked:
            raise TopicsError("storage_unavailable", "deletions cannot be marked in their segments now")


class Marks:
    """What one `Checkpoint` leads to. `operations` are one group; `undo` when it did not get into the log."""

    def __init__(self, files: SegmentFiles, now_ms: int) -> None:
        self._files = files
        self._now_ms = now_ms
        self._tables: list[tuple[Hosted, tuple[int, int]]] = []
        self.operations: list[LogWrite] = []
        self.marked: dict[int, Hosted] = {}
        self.gone: list[int] = []
        self.refused: list[int] = []

    def add(self, checkpoint: TopicCheckpoint, hosted: Hosted | None) -> None:
        """`hosted` is None when the topic is deleted."""
        if hosted is None:
            self.gone.append(checkpoint.topic_id)
            return
        try:
            operation = self._operation(checkpoint, hosted)
        except _REFUSED as error:
            log.error("a checkpoint was refused", topic=hosted.topic.name, reason=str(error))
            self.refused.append(checkpoint.topic_id)
            return
        if operation is not None:
            self.operations.append(operation)
            self.marked[checkpoint.topic_id] = hosted

    def undo(self) -> None:
        """Nothing of it is in the log."""
        for hosted, table in self._tables:
            hosted.release_segments(table)
        self.refused += self.marked

    def _operation(self, checkpoint: TopicCheckpoint, hosted: Hosted) -> LogWrite | None:
        """None when the log says it already."""
        topic = hosted.topic
        if topic.id in self.marked:
            raise ValueError("the topic is in this checkpoint twice")
        known = hosted.index.segments
        segments = known.copy()
        version = segments.version
        for info in checkpoint.segments:
            old = segments.put(info)
            if old is not None and old.version != info.version:
                self._files.deleted(topic.id, old)  # to be read once more when it is logged: rather fail now
        if segments.version == version:
            return None
        _check(segments, known, checkpoint, hosted)
        floors = topic.floors()
        table = hosted.prepare_segments(segments)
        self._tables.append((hosted, table))
        body = encode_body(MarkFrameBody(checkpoint.segments, floors))
        mark = control_frame(FrameType.CHECKPOINT_MARK, topic.id, self._now_ms, body, seq=checkpoint.up_to_seq)
        return LogWrite([mark], partial(_apply, hosted, checkpoint, floors, table), sync=True)


def _check(segments: SegmentList, known: SegmentList, checkpoint: TopicCheckpoint, hosted: Hosted) -> None:
    """Locations are let go only of records that are in segments indeed."""
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


def _apply(
    hosted: Hosted,
    checkpoint: TopicCheckpoint,
    floors: Floors,
    table: tuple[int, int],
) -> None:
    reached("mark.logged")
    topic = hosted.topic
    hosted.checkpointed(checkpoint.up_to_seq, checkpoint.segments, table)
    topic.logged(floors)
    topic.durable_seq = max(topic.durable_seq, min(checkpoint.up_to_seq, topic.head_seq))
    reached("mark.applied")
