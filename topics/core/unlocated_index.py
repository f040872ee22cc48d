"""A record index that knows of segments, and of other records how far they go: for a fold that ends in a snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from topics.core.location import ENTRY_WORDS
from topics.core.segment_list import SegmentInfo, SegmentList


class UnlocatedIndex:
    """Nothing that asks for an entry may be asked: what a log says of counts and floors needs none."""

    __slots__ = ("next_seq", "segments")

    def __init__(self) -> None:
        self.next_seq = 1
        self.segments = SegmentList()

    @property
    def base_seq(self) -> int:
        return next((segment.first_seq for segment in self.segments), self.next_seq)

    def reserve(self, count: int) -> None:
        """Nothing is kept."""

    def append(self, ts: int, offset_len: array[int], file_flags: array[int]) -> None:
        raise AssertionError("a log is folded, nothing is written")

    def append_entries(self, entries: array[int]) -> None:
        self.next_seq += len(entries) // ENTRY_WORDS

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        raise AssertionError("locations are not kept")

    def ts_at(self, seq: int) -> int:
        raise AssertionError("locations are not kept")

    def live_size(self, first_seq: int, last_seq: int) -> tuple[int, int]:
        raise AssertionError("locations are not kept")

    def is_readable(self, first_seq: int, last_seq: int) -> bool:
        raise AssertionError("locations are not kept")

    def pick_live(self, seqs: Sequence[int]) -> tuple[list[int], int]:
        raise AssertionError("locations are not kept")

    def behind_deleted(self, seq: int) -> int:
        raise AssertionError("locations are not kept")

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        """The shard marks them; what follows from it is in the log."""

    def checkpointed(self, up_to_seq: int, segments: Iterable[SegmentInfo]) -> None:
        for segment in segments:
            self.segments.put(segment)

    def drop_before(self, seq: int) -> None:
        self.segments.drop_below(seq)

    def skip_to(self, seq: int) -> None:
        self.next_seq = max(self.next_seq, seq)
