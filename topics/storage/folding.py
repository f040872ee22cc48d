"""What one log says of its topics and their segments, for the offline check: the fold that a start would do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from topics.core.fold import Fold
from topics.core.location import ENTRY_WORDS, LOCATION_LOST, any_flagged, flags_of
from topics.core.segment_list import SegmentInfo
from topics.core.shard_state import ShardState
from topics.core.topic import Topic
from topics.core.unlocated_index import UnlocatedIndex
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import WalPosition
from topics.storage.recovery import RecoveredFile
from topics.storage.state import ShardPart


class Known(NamedTuple):
    """`deleted`: seqs (ascending) whose deletion segments may not have yet. `live` of the records `earliest_seq` to
    `head_seq` live, None where the log cannot know (records were in RAM, or their log is lost); so many of these,
    `live_behind`, are in no segment.
    """

    segments: list[SegmentInfo]
    deleted: array[int]
    earliest_seq: int
    live: int | None
    live_behind: int


class _Index(UnlocatedIndex):
    """`deleted` and `lost`: seqs of which the log says so, in its order."""

    __slots__ = ("deleted", "lost")

    def __init__(self) -> None:
        super().__init__()
        self.deleted: array[int] = array("Q")
        self.lost: array[int] = array("Q")

    def append_entries(self, entries: array[int]) -> None:
        super().append_entries(entries)
        if any_flagged(entries, LOCATION_LOST):
            is_lost = [flags & LOCATION_LOST for flags in flags_of(entries)]
            self.lost.extend(compress(entries[0::ENTRY_WORDS], is_lost))

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        self.deleted.extend(seqs)


class Folding:
    """From a snapshot's part, or from nothing. Raises FoldError, msgspec.DecodeError."""

    def __init__(self, part: ShardPart | None) -> None:
        self._fold = Fold(lambda _topic_id: _Index())
        self._position = WalPosition(1, 0) if part is None else part.position
        if part is not None:
            self._fold.restore(part.decoded())

    def add(self, batch: RecoveredFile) -> None:
        """The next frames of the log; those that the snapshot has are passed over."""
        position = self._position
        frames = batch.frames
        if batch.file_no < position.file_no:
            return
        if batch.file_no == position.file_no:
            frames = frames.from_offset(position.offset)
        if frames:
            fold_frames(self._fold, batch._replace(frames=frames), in_ram=False)

    def state(self) -> ShardState:
        """What a snapshot would hold. FoldError when the log lacks records."""
        return self._fold.state()

    def known(self) -> dict[int, Known]:
        """Live topics by id. FoldError when the log lacks records."""
        self._fold.state()
        found = {}
        for topic in self._fold.topics.values():
            assert isinstance(topic.index, _Index)
            found[topic.id] = self._known(topic, topic.index)
        return found

    def _known(self, topic: Topic, index: _Index) -> Known:
        deleted = frozenset(index.deleted)
        behind_seq = max(topic.earliest_seq, index.segments.last_seq + 1)
        gone = sum(1 for seq in deleted.union(index.lost) if behind_seq <= seq <= topic.head_seq)
        # Behind an accepted loss segments go on where the log has ended, and may lack what is in between.
        is_counted = (
            self._fold.is_counted(topic)
            and index.segments.last_seq <= topic.head_seq
            and index.segments.dense_from_seq <= topic.earliest_seq
        )
        return Known(
            list(index.segments),
            array("Q", sorted(deleted)),
            topic.earliest_seq,
            topic.records if is_counted else None,
            max(0, topic.head_seq - behind_seq + 1) - gone,
        )

    @property
    def deleted_ids(self) -> set[int]:
        return self._fold.created_ids - self._fold.topics.keys()
