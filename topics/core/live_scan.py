"""Looking through a record index for what lives: what a topic asks when it plans what to give up.

Every range ends with `head_seq`. Entries are looked at in steps that grow: most often the first few tell, and a look
may be into a file.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final, Protocol

from topics.core.floors import EvictReason, Front
from topics.core.location import (
    ENTRY_WORDS,
    FLAGS_SHIFT,
    LOCATION_DELETED,
    LOCATION_GONE,
    LOCATION_LOST,
    LOW_WORD,
)
from topics.core.record_index import RecordIndex

_STEP_MAX: Final = 8192
_NEAR: Final = 64
_SPAN_MAX: Final = 4096
"""Records that are no further apart are looked up in one go of at most so many entries."""


class ScannedEntries(Protocol):
    """What of a record index tells who lives."""

    def entries(self, first_seq: int, last_seq: int) -> array[int]: ...


def front_from(
    index: ScannedEntries,
    seq: int,
    head_seq: int,
    dying: Set[int] = frozenset(),
    behind_deleted: Callable[[int], int] | None = None,
) -> Front:
    """The first seq from `seq` on whose record is neither gone nor about to be deleted. `behind_deleted`: as in
    `RecordIndex`, if there is one.
    """
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
    """(records, bytes) that live from `seq` on, of so many from `earliest_seq` on: by looking at these, or at all
    others if they are fewer.

    The count is exact and comes from the log; an index may be unreadable, or an older copy that has deleted records
    live. Where one side cannot be so the other is asked, and what is left is never less than nothing.
    """
    is_below_shorter = seq - earliest_seq <= head_seq + 1 - seq
    if not is_below_shorter:
        left = _counted(index, seq, head_seq)
        if left is not None:
            return left
    below = _counted(index, earliest_seq, seq - 1)
    if below is None or below[0] > records or below[1] > size_bytes:
        left = _counted(index, seq, head_seq)
        if left is not None:
            return left
        below = index.live_size(earliest_seq, seq - 1)
    return max(0, records - below[0]), max(0, size_bytes - below[1])


def _counted(index: RecordIndex, first_seq: int, last_seq: int) -> tuple[int, int] | None:
    """As `RecordIndex.live_size`, but no estimate: None instead."""
    if first_seq > last_seq:
        return 0, 0
    if not index.is_readable(first_seq, last_seq):
        return None  # known before: it costs no look at all the others
    size = index.live_size(first_seq, last_seq)
    return size if index.is_readable(first_seq, last_seq) else None


def last_undeleted(index: ScannedEntries, first_seq: int, last_seq: int) -> int:
    """The last seq of first_seq..last_seq that nobody deleted; first_seq - 1 when all were."""
    count = 8
    while last_seq >= first_seq:
        start = max(first_seq, last_seq - count + 1)
        words = index.entries(start, last_seq)[3::4]
        for at in range(len(words) - 1, -1, -1):
            if not words[at] >> FLAGS_SHIFT & LOCATION_DELETED:
                return start + at
        last_seq = start - 1
        count = min(2 * count, _STEP_MAX)
    return last_seq


def first_live(index: RecordIndex, seq: int, head_seq: int, most: int) -> list[int]:
    """The first live seqs from `seq` on, ascending, at most so many; fewer: there are no more."""
    return first_live_within(index, seq, head_seq, most, head_seq)[0]


def first_live_within(index: RecordIndex, seq: int, head_seq: int, most: int, looks: int) -> tuple[list[int], int]:
    """As `first_live`, and up to which seq these are all: no more than `looks` entries are looked at. Segments of which
    every record is deleted count for nothing.
    """
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


def living(index: RecordIndex, seqs: Sequence[int], earliest_seq: int, head_seq: int) -> Iterator[tuple[int, int]]:
    """(seq, offset_len) of the live ones of `seqs`, ascending. Neighbours are looked up together."""
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


def freeing(index: RecordIndex, seq: int, head_seq: int, records: int, size_bytes: int) -> tuple[int, int]:
    """How far the oldest have to go, from `seq` on, for so many live records and bytes: (first seq that stays, live
    bytes below it).
    """
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
    """(seq behind it, live records, their bytes) of the segment from `seq` on, if all of that has to go and more."""
    segment = index.segments.at(seq)
    if segment is None or (records <= segment.last_seq - seq and size_bytes <= segment.data_bytes):
        return None  # most often: a write takes the place of a few
    last_seq = min(segment.last_seq, head_seq)
    freed_records, freed_bytes = index.live_size(seq, last_seq)
    if records <= freed_records and size_bytes <= freed_bytes:
        return None
    return last_seq + 1, freed_records, freed_bytes


def first_not_older(index: RecordIndex, oldest_ts: int, low: int, high: int) -> int:
    """The first seq of low..high - 1 that was not committed before `oldest_ts`; `high` if all were. Times ascend."""
    low, high = _narrowed(index, oldest_ts, low, high)
    while low < high:
        middle = (low + high) // 2
        if index.ts_at(middle) < oldest_ts:
            low = middle + 1
        else:
            high = middle
    return low


def _narrowed(index: RecordIndex, oldest_ts: int, low: int, high: int) -> tuple[int, int]:
    """Where that seq lies as far as the list of segments tells."""
    older_seq, segment = index.segments.around(oldest_ts)
    low = max(low, older_seq + 1)
    if segment is None:
        return low, high
    return low, max(low, min(high, segment.first_seq if segment.first_ts >= oldest_ts else segment.last_seq))
