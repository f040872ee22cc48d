"""Sets of seqs that are mostly consecutive: acknowledged jobs, the seqs of a deletion. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sortedcontainers import SortedDict

Run = tuple[int, int]
"""(first_seq, last_seq), both included."""


def runs_of(seqs: Iterable[int]) -> list[Run]:
    """Return ascending seqs as the fewest runs."""
    runs: list[Run] = []
    first = last = -1
    for seq in seqs:
        if seq == last + 1 and runs:
            runs[-1] = (first, seq)
        else:
            runs.append((seq, seq))
            first = seq
        last = seq
    return runs


def seqs_of(runs: Iterable[Run]) -> Iterator[int]:
    """Yield every seq of every run, in their order."""
    for first, last in runs:
        yield from range(first, last + 1)


class SeqSet:
    """A set of seqs. It keeps their runs, so its memory grows with these alone, and every operation is O(log runs)."""

    __slots__ = ("_last_by_first", "count")

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._last_by_first: SortedDict[int, int] = SortedDict()
        self.count = 0
        for first, last in runs:
            self.add(first, last)

    def __contains__(self, seq: int) -> bool:
        return self.next_absent(seq) != seq

    def runs(self) -> list[Run]:
        """Return the runs, ascending, none touching the next."""
        return list(self._last_by_first.items())

    def next_absent(self, seq: int) -> int:
        """Return the first seq from `seq` on that is not in the set."""
        runs = self._last_by_first
        at = runs.bisect_right(seq) - 1
        if at < 0:
            return seq
        last: int = runs.peekitem(at)[1]
        return max(seq, last + 1)

    def add(self, first: int, last: int) -> None:
        """Add all of first..last; some may be in the set already."""
        assert first <= last
        runs = self._last_by_first
        at = runs.bisect_right(first) - 1
        if at >= 0:
            before_first, before_last = runs.peekitem(at)
            if before_last >= last:
                return
            if before_last >= first - 1:
                self._drop(before_first, before_last)
                first = before_first
        at = runs.bisect_left(first)
        while at < len(runs):
            next_first, next_last = runs.peekitem(at)
            if next_first > last + 1:
                break
            self._drop(next_first, next_last)
            last = max(last, next_last)
        runs[first] = last
        self.count += last - first + 1

    def discard(self, seq: int) -> None:
        """Remove `seq` if it is in the set."""
        at = self._last_by_first.bisect_right(seq) - 1
        if at < 0:
            return
        first, last = self._last_by_first.peekitem(at)
        if last < seq:
            return
        self._drop(first, last)
        if first < seq:
            self.add(first, seq - 1)
        if seq < last:
            self.add(seq + 1, last)

    def discard_below(self, seq: int) -> None:
        """Remove everything below `seq`."""
        runs = self._last_by_first
        while runs:
            first, last = runs.peekitem(0)
            if first >= seq:
                return
            self._drop(first, last)
            if last >= seq:
                self.add(seq, last)

    def _drop(self, first: int, last: int) -> None:
        del self._last_by_first[first]
        self.count -= last - first + 1


def encode_runs(seqs: Sequence[int]) -> list[int]:
    """Encode ascending seqs for a DELETE frame: how many to pass over (from 1 on), how many to take, and so on."""
    runs: list[int] = []
    next_seq = 1
    for seq in seqs:
        if seq == next_seq and runs:
            runs[-1] += 1
        else:
            runs += (seq - next_seq, 1)
        next_seq = seq + 1
    return runs


def decode_runs(runs: Sequence[int]) -> list[int]:
    seqs: list[int] = []
    next_seq = 1
    for gap, count in zip(runs[0::2], runs[1::2], strict=True):
        next_seq += gap
        seqs += range(next_seq, next_seq + count)
        next_seq += count
    return seqs
