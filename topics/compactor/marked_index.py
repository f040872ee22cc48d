"""A topic's index as the compactor needs it: which segments there are, and in which of them records were deleted."""

from __future__ import annotations

from collections.abc import Sequence

from topics.core.unlocated_index import UnlocatedIndex


class MarkedIndex(UnlocatedIndex):
    """`marked`: first seqs of segments in which records were deleted; who uses it empties it."""

    __slots__ = ("marked",)

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[int] = set()

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
