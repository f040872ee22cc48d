"""A topic's index as the compactor needs it: which segments there are, and in which of them records were deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topics.core.segment_list import SegmentInfo
from topics.core.unlocated_index import UnlocatedIndex


class MarkedIndex(UnlocatedIndex):
    """`marked`: first seqs of segments in which records were deleted; who uses it empties it."""

    __slots__ = ("_floor_seq", "marked")

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[int] = set()
        self._floor_seq = 1

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        at = 0
        while at < len(seqs):
            segment = self.segments.at(seqs[at])
            if segment is None:
                at += 1
                continue
            self.marked.add(segment.first_seq)
            while at < len(seqs) and seqs[at] <= segment.last_seq:
                at += 1

    def checkpointed(self, up_to_seq: int, segments: Iterable[SegmentInfo]) -> None:
        # The log repeats what a shard's answer has said before; a segment may be gone for good by then.
        super().checkpointed(up_to_seq, [info for info in segments if info.last_seq >= self._floor_seq])

    def drop_before(self, seq: int) -> None:
        self._floor_seq = max(self._floor_seq, seq)
        super().drop_before(seq)
