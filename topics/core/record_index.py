"""What a topic needs to know about where its records are (`location.py` has the form of an entry)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from topics.core.location import ENTRY_WORDS
from topics.core.segment_list import SegmentInfo, SegmentList


class RecordIndex(Protocol):
    """The entries base_seq..next_seq-1 of a topic, dense: those of `segments` first, then those that were appended."""

    @property
    def base_seq(self) -> int: ...
    @property
    def next_seq(self) -> int: ...
    @property
    def segments(self) -> SegmentList: ...
    def reserve(self, count: int) -> None: ...
    def append(self, ts: int, offset_len: array[int], file_flags: array[int]) -> None: ...
    def append_entries(self, entries: array[int]) -> None:
        """Appends entries of consecutive seqs in recovery. A record that a segment has counts as it is there."""

    def entries(self, first_seq: int, last_seq: int) -> array[int]: ...
    def ts_at(self, seq: int) -> int: ...
    def live_size(self, first_seq: int, last_seq: int) -> tuple[int, int]:
        """Returns (records, bytes in the log) that are neither deleted nor lost. It is an estimate where they cannot be
        read.
        """

    def is_readable(self, first_seq: int, last_seq: int) -> bool:
        """False once a read of any of these failed: then `live_size` was an estimate."""

    def pick_live(self, seqs: Sequence[int]) -> tuple[list[int], int]:
        """Returns those of these seqs (ascending) that are neither deleted nor lost, and their bytes in the log."""

    def behind_deleted(self, seq: int) -> int:
        """Returns the first seq from `seq` on that is not in a sealed segment of which every record is deleted."""

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        """Marks ascending seqs deleted; those that are gone already are passed over."""

    def checkpointed(self, up_to_seq: int, segments: Iterable[SegmentInfo]) -> None:
        """These segments are new or changed; entries up to there are in segments now, with their deletions."""

    def drop_before(self, seq: int) -> None: ...
    def skip_to(self, seq: int) -> None:
        """Only segments have anything below `seq` now; the next entry is of that seq."""


class UnlocatedIndex:
    """A record index that knows segments, and how far other records go: for a fold that ends in a snapshot.

    It has no entries, and nothing may ask for one: the counts and floors that a log says need none.
    """

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
        """The shard marks the records; everything that follows from it is in the log."""

    def checkpointed(self, up_to_seq: int, segments: Iterable[SegmentInfo]) -> None:
        for segment in segments:
            self.segments.put(segment)

    def drop_before(self, seq: int) -> None:
        self.segments.drop_below(seq)

    def skip_to(self, seq: int) -> None:
        self.next_seq = max(self.next_seq, seq)
