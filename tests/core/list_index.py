"""A RecordIndex as simple as can be."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from topics.core.location import ENTRY_WORDS
from topics.core.segment_list import SegmentInfo, SegmentList


class ListIndex:
    def __init__(self, first_seq: int) -> None:
        self.base_seq = self.next_seq = first_seq
        self.segments = SegmentList()
        self.rows: dict[int, tuple[int, ...]] = {}

    def reserve(self, count: int) -> None:
        pass

    def append(self, ts: int, offset_len: array[int], file_flags: array[int]) -> None:
        for location, file in zip(offset_len, file_flags, strict=True):
            self.rows[self.next_seq] = (self.next_seq, ts, location, file)
            self.next_seq += 1

    def append_entries(self, entries: array[int]) -> None:
        for at in range(0, len(entries), ENTRY_WORDS):
            row = tuple(entries[at : at + ENTRY_WORDS])
            assert row[0] == self.next_seq
            self.rows[self.next_seq] = row
            self.next_seq += 1

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        assert self.base_seq <= first_seq
        assert last_seq < self.next_seq
        return array("Q", [word for seq in range(first_seq, last_seq + 1) for word in self.rows[seq]])

    def live_size(self, first_seq: int, last_seq: int) -> tuple[int, int]:
        lengths = [row[2] >> 32 for seq in range(first_seq, last_seq + 1) if not (row := self.rows[seq])[3] >> 32 & 34]
        return len(lengths), sum(lengths)

    def is_readable(self, first_seq: int, last_seq: int) -> bool:
        return True

    def pick_live(self, seqs: Sequence[int]) -> tuple[list[int], int]:
        live = [seq for seq in seqs if not self.rows[seq][3] >> 32 & 34]
        return live, sum(self.rows[seq][2] >> 32 for seq in live)

    def behind_deleted(self, seq: int) -> int:
        return seq

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.replace(seq, 3, self.rows[seq][3] | 2 << 32)

    def checkpointed(self, segments: Iterable[SegmentInfo]) -> None:
        for segment in segments:
            self.segments.put(segment)

    def replace(self, seq: int, word: int, value: int) -> None:
        assert self.base_seq <= seq < self.next_seq
        row = list(self.rows[seq])
        row[word] = value
        self.rows[seq] = tuple(row)

    def drop_before(self, seq: int) -> None:
        self.base_seq = max(self.base_seq, min(seq, self.next_seq))

    def skip_to(self, seq: int) -> None:
        if seq > self.next_seq:
            self.base_seq = self.next_seq = seq

    def ts_at(self, seq: int) -> int:
        assert self.base_seq <= seq < self.next_seq
        return self.rows[seq][1]
