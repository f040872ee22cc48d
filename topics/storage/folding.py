"""What one log says of its topics and their segments, for the offline check: the fold that a start would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from topics.core.fold import Fold
from topics.core.segment_list import SegmentInfo
from topics.core.unlocated_index import UnlocatedIndex
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import WalPosition
from topics.storage.recovery import RecoveredFile
from topics.storage.state import ShardPart


class Known(NamedTuple):
    """`is_deleting`: the log has deletions that may not be marked in the segments yet."""

    segments: list[SegmentInfo]
    is_deleting: bool


class _Index(UnlocatedIndex):
    __slots__ = ("is_deleting",)

    def __init__(self) -> None:
        super().__init__()
        self.is_deleting = False

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        self.is_deleting = True


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

    def known(self) -> dict[int, Known]:
        """Live topics by id. FoldError when the log lacks records."""
        self._fold.state()
        found = {}
        for topic in self._fold.topics.values():
            assert isinstance(topic.index, _Index)
            found[topic.id] = Known(list(topic.index.segments), topic.index.is_deleting)
        return found

    @property
    def deleted_ids(self) -> set[int]:
        return self._fold.created_ids - self._fold.topics.keys()
