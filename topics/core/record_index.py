"""The record index: where the records of a topic are, and the search for live ones. Pure.

`location.py` has the form of an entry. A search reads entries in growing steps, because the first few are usually
enough and a step may read a file. Every range ends with `head_seq`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Final, Protocol

from topics.core.floors import EvictReason, Front
from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_DELETED, LOCATION_GONE, LOCATION_LOST, LOW_WORD
from topics.core.segment_list import SegmentInfo, SegmentList

_STEP_MAX: Final = 8192
_NEAR: Final = 64
"""The widest gap between records that are looked up together."""
_SPAN_MAX: Final = 4096
"""The most entries that are read to look up records together."""


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
        """Append entries of consecutive seqs in recovery. If a segment has a record, the segment's entry counts."""

    def entries(self, first_seq: int, last_seq: int) -> array[int]: ...
    def ts_at(self, seq: int) -> int: ...
    def live_size(self, first_seq: int, last_seq: int) -> tuple[int, int]:
        """Return (records, bytes in the log) that are neither deleted nor lost; an estimate if unreadable."""

    def is_readable(self, first_seq: int, last_seq: int) -> bool:
        """False if a read of any of these entries has failed: then `live_size` gave an estimate."""

    def pick_live(self, seqs: Sequence[int]) -> tuple[list[int], int]:
        """Return those of these seqs (ascending) that are neither deleted nor lost, and their bytes in the log."""

    def behind_deleted(self, seq: int) -> int:
        """Return the first seq from `seq` on that is not in a sealed segment of which every record is deleted."""

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        """Flag ascending seqs as deleted; skip those that are deleted or lost already."""

    def checkpointed(self, segments: Iterable[SegmentInfo]) -> None:
        """Take in new and changed segments: they have the entries of their records now, with their deletions."""

    def drop_before(self, seq: int) -> None: ...
    def skip_to(self, seq: int) -> None:
        """Let the next entry be that of `seq`: only segments have entries below it."""


class UnlocatedIndex:
    """An index without entries, for a fold that ends in a snapshot. It keeps the segments, the next seq, and the
    deleted seqs in log order. It needs no entries, because the log has the floors and counts that follow from
    deletions.
    """

    __slots__ = ("deleted", "next_seq", "segments")

    def __init__(self) -> None:
        self.next_seq = 1
        self.segments = SegmentList()
        self.deleted: array[int] = array("Q")

    @property
    def base_seq(self) -> int:
        return next((segment.first_seq for segment in self.segments), self.next_seq)

    def reserve(self, count: int) -> None:
        """Do nothing: no entry is kept."""

    def append_entries(self, entries: array[int]) -> None:
        self.next_seq += len(entries) // ENTRY_WORDS

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        self.deleted.extend(seqs)

    def checkpointed(self, segments: Iterable[SegmentInfo]) -> None:
        for segment in segments:
            self.segments.put(segment)

    def drop_before(self, seq: int) -> None:
        self.segments.drop_below(seq)

    def skip_to(self, seq: int) -> None:
        if seq > self.next_seq:
            self.next_seq = seq

    def _without_entries(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this index has no entries")

    append = entries = ts_at = live_size = is_readable = pick_live = behind_deleted = _without_entries


class ScannedEntries(Protocol):
    """The part of a record index that tells which records live."""

    def entries(self, first_seq: int, last_seq: int) -> array[int]: ...


def front_from(
    index: ScannedEntries,
    seq: int,
    head_seq: int,
    dying: Set[int] = frozenset(),
    behind_deleted: Callable[[int], int] | None = None,
) -> Front:
    """Return the first seq from `seq` on that is neither gone nor `dying`, and what was lost before it."""
    lost_below_seq, reason = 0, EvictReason.NONE
    count = 8
    while seq <= head_seq:
        if behind_deleted is not None and count > 8:
            passed_seq = behind_deleted(seq)
            if passed_seq != seq:
                seq = passed_seq
                continue
        entries = index.entries(seq, min(head_seq, seq + count - 1))
        words = entries[3::4]
        count = min(2 * count, _STEP_MAX)
        if all(word >> FLAGS_SHIFT & LOCATION_DELETED for word in set(words)):
            seq += len(words)
            continue
        for at, file_flags in enumerate(words):
            flags = file_flags >> FLAGS_SHIFT
            if not flags & LOCATION_GONE and seq not in dying:
                return Front(seq, lost_below_seq, reason)
            seq += 1
            if flags & LOCATION_GONE == LOCATION_LOST:
                lost_below_seq, reason = seq, EvictReason(entries[at * ENTRY_WORDS + 2] & LOW_WORD)
    return Front(seq, lost_below_seq, reason)


def left_from(
    index: RecordIndex, earliest_seq: int, seq: int, head_seq: int, records: int, size_bytes: int
) -> tuple[int, int]:
    """Return (records, bytes) that live from `seq` on, given those that live from `earliest_seq` on.

    The given counts come from the log and are exact. An index may be unreadable, or an older copy in which deleted
    records live. So this counts the shorter side of `seq`. If that fails or gives more than there are, it counts the
    other side.
    """
    is_below_shorter = seq - earliest_seq <= head_seq + 1 - seq
    if not is_below_shorter:
        left = exact_live_size(index, seq, head_seq)
        if left is not None:
            return left
    below = exact_live_size(index, earliest_seq, seq - 1)
    if below is None or below[0] > records or below[1] > size_bytes:
        left = exact_live_size(index, seq, head_seq)
        if left is not None:
            return left
        below = index.live_size(earliest_seq, seq - 1)
    return max(0, records - below[0]), max(0, size_bytes - below[1])


def exact_live_size(index: RecordIndex, first_seq: int, last_seq: int) -> tuple[int, int] | None:
    """Return `RecordIndex.live_size`, None instead of an estimate."""
    if first_seq > last_seq:
        return 0, 0
    if not index.is_readable(first_seq, last_seq):
        return None  # known before, so it costs no look at the others
    size = index.live_size(first_seq, last_seq)
    return size if index.is_readable(first_seq, last_seq) else None


def last_undeleted(index: ScannedEntries, first_seq: int, last_seq: int) -> int:
    """Return the last seq of first_seq..last_seq that is not deleted; first_seq - 1 if all are."""
    return last_without(LOCATION_DELETED, index, first_seq, last_seq)


def last_without(flag: int, index: ScannedEntries, first_seq: int, last_seq: int) -> int:
    """Return the last seq of first_seq..last_seq that has not this location flag; first_seq - 1 if all have it."""
    count = 8
    while last_seq >= first_seq:
        start = max(first_seq, last_seq - count + 1)
        words = index.entries(start, last_seq)[3::4]
        for at in range(len(words) - 1, -1, -1):
            if not words[at] >> FLAGS_SHIFT & flag:
                return start + at
        last_seq = start - 1
        count = min(2 * count, _STEP_MAX)
    return last_seq


def first_live(index: RecordIndex, seq: int, head_seq: int, most: int, looks: int) -> tuple[list[int], int]:
    """Return the first `most` live seqs from `seq` on, as far as `looks` entries tell, and up to where they are all."""
    found: list[int] = []
    step = most
    while len(found) < most and seq <= head_seq and looks > 0:
        last_seq = min(head_seq, seq + min(step, looks) - 1)
        step = max(64, min(4 * step, 4096))  # dead ones are in the way
        entries = index.entries(seq, last_seq)
        found += [
            at
            for at, file_flags in zip(entries[0::4], entries[3::4], strict=True)
            if not file_flags >> FLAGS_SHIFT & LOCATION_GONE
        ]
        looks -= last_seq + 1 - seq
        seq = last_seq + 1
        if len(found) < most and seq <= head_seq:
            seq = index.behind_deleted(seq)
    if len(found) < most:
        return found, min(seq - 1, head_seq)
    return found[:most], found[most - 1]


def live_entries(
    index: RecordIndex, seqs: Sequence[int], earliest_seq: int, head_seq: int
) -> Iterator[tuple[int, int]]:
    """Yield (seq, offset_len) of the live ones of `seqs` (ascending). Neighbours are looked up together."""
    at = bisect_left(seqs, earliest_seq)
    stop = bisect_right(seqs, head_seq)
    while at < stop:
        end = at + 1
        while end < stop and seqs[end] - seqs[end - 1] <= _NEAR and seqs[end] - seqs[at] < _SPAN_MAX:
            end += 1
        first_seq = seqs[at]
        entries = index.entries(first_seq, seqs[end - 1])
        for seq in seqs[at:end]:
            word = (seq - first_seq) * ENTRY_WORDS
            if not entries[word + 3] >> FLAGS_SHIFT & LOCATION_GONE:
                yield seq, entries[word + 2]
        at = end


def first_kept(index: RecordIndex, seq: int, head_seq: int, records: int, size_bytes: int) -> tuple[int, int]:
    """Return (first seq that stays, live bytes below it) if so many live records and bytes from `seq` on have to go."""
    freed_bytes = 0
    count = 4
    while (records > 0 or size_bytes > 0) and seq <= head_seq:
        whole = _whole_segment(index, seq, head_seq, records, size_bytes)
        if whole is not None:
            seq, freed_records, freed = whole
            records -= freed_records
            size_bytes -= freed
            freed_bytes += freed
            continue
        count = min(max(2 * count, records), _STEP_MAX)
        entries = index.entries(seq, min(head_seq, seq + count - 1))
        for offset_len, file_flags in zip(entries[2::4], entries[3::4], strict=True):
            if records <= 0 and size_bytes <= 0:
                break
            seq += 1
            if file_flags >> FLAGS_SHIFT & LOCATION_GONE:
                continue
            records -= 1
            size_bytes -= offset_len >> 32
            freed_bytes += offset_len >> 32
    return seq, freed_bytes


def _whole_segment(
    index: RecordIndex, seq: int, head_seq: int, records: int, size_bytes: int
) -> tuple[int, int, int] | None:
    """Return (seq behind it, live records, their bytes) of the segment that has `seq`, if all of it has to go."""
    segment = index.segments.at(seq)
    if segment is None or (records <= segment.last_seq - seq and size_bytes <= segment.data_bytes):
        return None  # most often: a write takes the place of a few
    last_seq = min(segment.last_seq, head_seq)
    freed_records, freed_bytes = index.live_size(seq, last_seq)
    if records <= freed_records and size_bytes <= freed_bytes:
        return None
    return last_seq + 1, freed_records, freed_bytes


def first_not_older(index: RecordIndex, oldest_ts: int, low: int, high: int) -> int:
    """Return the first seq of low..high - 1 committed at `oldest_ts` or later, `high` if none was. Times ascend."""
    # First by the list of segments: `ts_at` may read a file.
    older_seq, segment = index.segments.around(oldest_ts)
    low = max(low, older_seq + 1)
    if segment is not None:
        high = max(low, min(high, segment.first_seq if segment.first_ts >= oldest_ts else segment.last_seq))
    return bisect_left(range(high), oldest_ts, lo=low, key=index.ts_at)
