"""A topic's index as the compactor needs it: which segments there are, and which records were deleted since when."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from topics.core.segment_list import SegmentInfo
from topics.core.unlocated_index import UnlocatedIndex


class MarkedIndex(UnlocatedIndex):
    """`deleted`: seqs that the log says were deleted, in its order; who has seen to them empties it.

    Seqs, not segments: the log may tell of a deletion before it tells of the segment in which it was marked.
    """

    __slots__ = ("deleted",)

    def __init__(self) -> None:
        super().__init__()
        self.deleted: array[int] = array("Q")

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        self.deleted.extend(seqs)

    def deleted_in_segments(self) -> list[tuple[SegmentInfo, Sequence[int]]]:
        """(segment as it is now, those of `deleted` that it has, ascending) for each that has any."""
        if not self.deleted:
            return []
        seqs = sorted(self.deleted)
        found: list[tuple[SegmentInfo, Sequence[int]]] = []
        start = 0
        for info in self.segments.between(seqs[0], seqs[-1]):
            start = bisect_left(seqs, info.first_seq, start)
            end = bisect_left(seqs, info.last_seq + 1, start)
            if end > start:
                found.append((info, seqs[start:end]))
            start = end
        return found
