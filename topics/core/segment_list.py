"""The segments of a topic, as the log's CHECKPOINT_MARKs list them. Pure.

A segment is dense: its index has an entry for every seq first_seq..last_seq. Seqs may be missing between two segments
only below the topic's `earliest_seq`, where no record lives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

SEALED: Final = 1
"""Flag of a segment to which nothing is appended any more and which has tag postings."""
COLD: Final = 2
"""Flag of a segment whose `.data` is in the cold directory. `.idx` and `.tags` are there and here; those here count."""
_last_ts = attrgetter("last_ts")


class SegmentName(NamedTuple):
    """The parts of the names of a segment's files within its topic; `version` counts its rewritings."""

    first_seq: int
    version: int


class SegmentKey(NamedTuple):
    """The key of a segment's files among those of all topics."""

    topic_id: int
    first_seq: int
    version: int

    @property
    def name(self) -> SegmentName:
        return SegmentName(self.first_seq, self.version)


class SegmentInfo(msgspec.Struct, array_like=True, frozen=True, order=False):
    """The committed part of one segment. `version` counts rewrites and is part of the file names (`layout.py`)."""

    first_seq: int
    last_seq: int
    first_ts: int
    last_ts: int
    data_bytes: int
    version: int
    flags: int

    @property
    def records(self) -> int:
        """Number of entries in its index, dead ones included."""
        return self.last_seq - self.first_seq + 1

    def key_in(self, topic_id: int) -> SegmentKey:
        """Return the key of its files if it belongs to this topic."""
        return SegmentKey(topic_id, self.first_seq, self.version)


class SegmentList:
    """The segments of one topic, ascending by seq, without overlap. `version` grows with every change."""

    __slots__ = ("_first_seqs", "_rows", "version")

    def __init__(self, rows: Iterable[SegmentInfo] = ()) -> None:
        self._rows: list[SegmentInfo] = []
        self._first_seqs: list[int] = []
        self.version = 0
        for row in rows:
            self.put(row)

    def copy(self) -> SegmentList:
        """Return an independent copy."""
        other = SegmentList()
        other._rows, other._first_seqs, other.version = self._rows[:], self._first_seqs[:], self.version
        return other

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SegmentInfo]:
        return iter(self._rows)

    @property
    def last(self) -> SegmentInfo | None:
        """Last segment, the only one that may be active."""
        return self._rows[-1] if self._rows else None

    @property
    def last_seq(self) -> int:
        """Last seq that is in a segment; 0 without any."""
        return self._rows[-1].last_seq if self._rows else 0

    @property
    def sealed_last_seq(self) -> int:
        """Last seq that is in a sealed segment (all but the last are sealed); 0 without any."""
        return next((row.last_seq for row in reversed(self._rows) if row.flags & SEALED), 0)

    @property
    def dense_from_seq(self) -> int:
        """Seq from which none is missing up to `last_seq`; 1 without any segment."""
        at = len(self._rows) - 1
        while at > 0 and self._rows[at - 1].last_seq + 1 == self._rows[at].first_seq:
            at -= 1
        return self._rows[at].first_seq if self._rows else 1

    def put(self, info: SegmentInfo) -> SegmentInfo | None:
        """Add a segment, or replace the one with the same first_seq and return that one. An older state of a segment
        changes nothing, so the same mark may come twice. Raise ValueError if segments would overlap.
        """
        at = bisect_right(self._first_seqs, info.first_seq)
        known = self._rows[at - 1] if at else None
        if known is not None and known.first_seq == info.first_seq:
            if _age(info) <= _age(known):
                return None
            self._rows[at - 1] = info
        else:
            self._rows.insert(at, info)
            self._first_seqs.insert(at, info.first_seq)
            known = None
            at += 1
        if at > 1 and self._rows[at - 2].last_seq >= info.first_seq:
            raise ValueError(f"segment {info.first_seq} begins before the end of the one before, {self._rows[at - 2]}")
        if at < len(self._rows) and self._rows[at].first_seq <= info.last_seq:
            raise ValueError(f"segment {info.first_seq} ends at {info.last_seq}, behind the start of {self._rows[at]}")
        self.version += 1
        return known

    def at(self, seq: int) -> SegmentInfo | None:
        """Return the segment that has this seq, None if none has."""
        at = bisect_right(self._first_seqs, seq)
        if at and self._rows[at - 1].last_seq >= seq:
            return self._rows[at - 1]
        return None

    def between(self, first_seq: int, last_seq: int) -> list[SegmentInfo]:
        """Return the segments that have any seq of first_seq..last_seq."""
        start = bisect_right(self._first_seqs, first_seq)
        if start and self._rows[start - 1].last_seq >= first_seq:
            start -= 1
        return self._rows[start : bisect_right(self._first_seqs, last_seq)]

    def having(self, seqs: Sequence[int]) -> Iterator[tuple[SegmentInfo, Sequence[int]]]:
        """Yield (segment, those of these ascending seqs that it has) for each segment that has any."""
        start = 0
        for info in self.between(seqs[0], seqs[-1]) if seqs else ():
            start = bisect_left(seqs, info.first_seq, start)
            end = bisect_left(seqs, info.last_seq + 1, start)
            if end > start:
                yield info, seqs[start:end]
            start = end

    def around(self, ts: int) -> tuple[int, SegmentInfo | None]:
        """Return (last seq of the segments that end before `ts`, 0 without any; the first segment that does not)."""
        at = bisect_left(self._rows, ts, key=_last_ts)
        return self._rows[at - 1].last_seq if at else 0, self._rows[at] if at < len(self._rows) else None

    def drop_below(self, seq: int) -> list[SegmentInfo]:
        """Remove segments that end below `seq`; return them."""
        count = 0
        while count < len(self._rows) and self._rows[count].last_seq < seq:
            count += 1
        dropped = self._rows[:count]
        if count:
            del self._rows[:count]
            del self._first_seqs[:count]
            self.version += 1
        return dropped


def _age(info: SegmentInfo) -> tuple[int, int, int]:
    """Return a key that rises with the states of a segment: it grows, is sealed, moved and rewritten, never back."""
    return info.version, info.last_seq, info.flags
