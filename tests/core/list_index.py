"""A RecordIndex as simple as can be."""

from __future__ import annotations

from array import array

from topics.core.config import U64_MAX
from topics.core.topic import ENTRY_WORDS


class ListIndex:
    def __init__(self, first_seq: int) -> None:
        self.base_seq = self.next_seq = first_seq
        self.rows: dict[int, tuple[int, ...]] = {}
        self.hold_seq = U64_MAX

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

    def replace(self, seq: int, word: int, value: int) -> None:
        assert self.base_seq <= seq < self.next_seq
        row = list(self.rows[seq])
        row[word] = value
        self.rows[seq] = tuple(row)

    def drop_before(self, seq: int) -> None:
        self.base_seq = max(self.base_seq, min(seq, self.next_seq, self.hold_seq))

    def hold(self, seq: int) -> None:
        self.hold_seq = seq

    def skip_to(self, seq: int) -> None:
        self.base_seq = self.next_seq = seq

    def ts_at(self, seq: int) -> int:
        assert self.base_seq <= seq < self.next_seq
        return self.rows[seq][1]
