"""Blocks of memory in an index arena (`arena.py` has the layout), and the rings of locations in them.

Block sizes are powers of two from 64 bytes. A block gets memory when it is first needed. Only the shard knows which
blocks are free, and it uses a freed block again for the next one of the same size.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from typing import Final

from topics.core.location import ENTRY_WORDS, dense_entries
from topics.shm.instance import ARENA_RESERVE_BYTES
from topics.shm.memory import SharedObject

_BLOCK_MIN_BYTES: Final = 64
_GIVE_BACK_BYTES: Final = 64 * 1024
"""Free blocks of this size or more give their memory back."""
RING_MIN_ENTRIES: Final = 16
LARGE_ENTRIES: Final = 4096
"""Rings of this many entries (128 KiB) or more are shrunk even without a checkpoint."""


class ArenaFullError(Exception):
    """The address space or /dev/shm has no room for another block."""


class ArenaHeap:
    """The allocator for bytes `first_byte` to `end_byte` of a shared object, in the process that writes it."""

    def __init__(self, shared: SharedObject, first_byte: int, end_byte: int) -> None:
        self._shared = shared
        self.words = shared.words
        """The words of the whole object: a block at byte b begins with word b >> 3."""
        self._first = self._next = self._backed = first_byte
        self._end = end_byte
        self._free: dict[int, list[int]] = {}
        self._given_back = 0

    def allocate(self, size_bytes: int) -> int:
        """Return the byte offset of a block of at least `size_bytes`. Raise ArenaFullError."""
        size = _block_size(size_bytes)
        free = self._free.get(size)
        if free:
            if size >= _GIVE_BACK_BYTES:
                start, end = _whole_pages(free[-1], size)
                self._reserve(start, end - start, size)
                self._given_back -= end - start
            return free.pop()
        block = self._next
        if block + size > self._backed:
            self._back(block + size)
        self._next += size
        return block

    def free(self, offset: int, size_bytes: int) -> None:
        """Free a block."""
        size = _block_size(size_bytes)
        self._free.setdefault(size, []).append(offset)
        if size >= _GIVE_BACK_BYTES:
            start, end = _whole_pages(offset, size)
            self._shared.give_back(start, end - start)
            self._given_back += end - start

    @property
    def used_bytes(self) -> int:
        """The memory that backs the blocks."""
        return self._backed - self._first - self._given_back

    def _back(self, end: int) -> None:
        grow = max(end - self._backed, ARENA_RESERVE_BYTES // 2)
        if self._backed + grow > self._end:
            raise ArenaFullError(f"index arena {self._shared.name} has used up its {self._end} bytes")
        self._reserve(self._backed, grow, grow)
        self._backed += grow

    def _reserve(self, offset: int, length: int, wanted_bytes: int) -> None:
        try:
            self._shared.reserve(offset, length)
        except OSError as error:
            why = f"/dev/shm has no room for {wanted_bytes} more bytes of index: {error.strerror}"
            raise ArenaFullError(why) from error


def _block_size(size_bytes: int) -> int:
    return max(_BLOCK_MIN_BYTES, 1 << (size_bytes - 1).bit_length())


def _whole_pages(offset: int, size: int) -> tuple[int, int]:
    """Return start and end of the pages that lie completely in a block."""
    page = mmap.PAGESIZE
    return -(-offset // page) * page, (offset + size) // page * page


class LocationRing:
    """The shard's side of one topic's ring. After `reserve`, `append` cannot fail."""

    __slots__ = ("_heap", "_outgrown", "_words", "base_seq", "capacity", "next_seq", "word")

    def __init__(self, heap: ArenaHeap, first_seq: int) -> None:
        self._heap = heap
        self._words = heap.words
        self.base_seq = first_seq
        self.next_seq = first_seq
        self.capacity = RING_MIN_ENTRIES
        self.word = heap.allocate(RING_MIN_ENTRIES * ENTRY_WORDS * 8) >> 3
        self._outgrown: list[tuple[int, int]] = []

    def reserve(self, count: int) -> None:
        """Make room for `count` more entries. Raise ArenaFullError."""
        need = self.next_seq - self.base_seq + count
        if need > self.capacity:
            self._move(1 << (need - 1).bit_length())

    def shrink(self) -> None:
        """Free memory when hardly any of it is used. On ArenaFullError the ring stays as it is."""
        used = self.next_seq - self.base_seq
        if self.capacity > RING_MIN_ENTRIES and used * 4 <= self.capacity:
            self._move(max(RING_MIN_ENTRIES, 1 << (2 * used - 1).bit_length()))

    def _move(self, capacity: int) -> None:
        """Move the ring to another block."""
        word = self._heap.allocate(capacity * ENTRY_WORDS * 8) >> 3
        old_word, old_capacity = self.word, self.capacity
        columns = self._copy(self.base_seq, self.next_seq - 1) if self.next_seq > self.base_seq else None
        self.word, self.capacity = word, capacity
        if columns is not None:
            self._store(self.base_seq, columns)
        # Readers read the old block until the topic is published again.
        self._outgrown.append((old_word << 3, old_capacity * ENTRY_WORDS * 8))

    def published(self) -> None:
        """Free former blocks: readers know the current one."""
        for block in self._outgrown:
            self._heap.free(*block)
        self._outgrown.clear()

    def append(self, ts: int, offset_len: array[int], file_flags: array[int]) -> None:
        """Append entries for the next len(offset_len) seqs, all of one commit time."""
        count = len(offset_len)
        first = self.next_seq
        if count == 1:
            word = self.word + (first & (self.capacity - 1)) * ENTRY_WORDS
            words = self._words
            words[word + 1] = ts
            words[word + 2] = offset_len[0]
            words[word + 3] = file_flags[0]
            words[word] = first
        else:
            self._store(first, dense_entries(first, ts, offset_len, file_flags))
        self.next_seq = first + count

    def append_entries(self, entries: array[int]) -> None:
        """Append whole entries of consecutive seqs (recovery)."""
        self._store(self.next_seq, entries)
        self.next_seq += len(entries) // ENTRY_WORDS

    def drop_before(self, seq: int) -> None:
        """Forget entries below `seq`."""
        self.base_seq = max(self.base_seq, min(seq, self.next_seq))

    def skip_to(self, seq: int) -> None:
        """Empty the ring; the next entry will be that of `seq`."""
        assert seq >= self.next_seq
        self.base_seq = self.next_seq = seq

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        """Return the words of the entries first_seq..last_seq, ENTRY_WORDS each."""
        assert self.base_seq <= first_seq
        assert last_seq < self.next_seq
        return self._copy(first_seq, last_seq)

    def replace(self, seq: int, word: int, value: int) -> None:
        """Overwrite one word (0..3) of an entry."""
        assert self.base_seq <= seq < self.next_seq
        self._words[self.word + (seq & (self.capacity - 1)) * ENTRY_WORDS + word] = value

    def flag(self, seqs: Sequence[int], bits: int) -> None:
        """Set bits in the file_flags of these entries."""
        assert not seqs or (self.base_seq <= seqs[0] and seqs[-1] < self.next_seq)
        words, start, mask = self._words, self.word + 3, self.capacity - 1
        for seq in seqs:
            words[start + (seq & mask) * ENTRY_WORDS] |= bits

    def column(self, seqs: Sequence[int], word: int) -> list[int]:
        """Return one word (0..3) of the entry of each of these seqs, which ascend."""
        assert not seqs or (self.base_seq <= seqs[0] and seqs[-1] < self.next_seq)
        words, start, mask = self._words, self.word + word, self.capacity - 1
        return [words[start + (seq & mask) * ENTRY_WORDS] for seq in seqs]

    def replace_entries(self, first_seq: int, entries: array[int]) -> None:
        """Overwrite whole entries of consecutive seqs."""
        assert self.base_seq <= first_seq
        assert first_seq + len(entries) // ENTRY_WORDS <= self.next_seq
        self._store(first_seq, entries)

    def ts_at(self, seq: int) -> int:
        """Return the commit time of a record in the ring, in ms."""
        assert self.base_seq <= seq < self.next_seq
        ts: int = self._words[self.word + (seq & (self.capacity - 1)) * ENTRY_WORDS + 1]
        return ts

    def release(self) -> None:
        """Free the ring: the topic was deleted."""
        self.published()
        self._heap.free(self.word << 3, self.capacity * ENTRY_WORDS * 8)

    def _copy(self, first_seq: int, last_seq: int) -> array[int]:
        return array("Q", copy_entries(self._words, self.word, self.capacity, first_seq, last_seq))

    def _store(self, first_seq: int, entries: array[int]) -> None:
        words = self._words
        start = (first_seq & (self.capacity - 1)) * ENTRY_WORDS
        room = self.capacity * ENTRY_WORDS - start
        assert len(entries) <= self.capacity * ENTRY_WORDS
        words[self.word + start : self.word + start + min(room, len(entries))] = entries[:room]
        if len(entries) > room:
            words[self.word : self.word + len(entries) - room] = entries[room:]


def copy_entries(words: memoryview, ring_word: int, capacity: int, first_seq: int, last_seq: int) -> bytes:
    """Return the bytes of consecutive ring entries, across the wrap."""
    start = (first_seq & (capacity - 1)) * ENTRY_WORDS
    length = (last_seq - first_seq + 1) * ENTRY_WORDS
    assert length <= capacity * ENTRY_WORDS
    room = capacity * ENTRY_WORDS - start
    head = words[ring_word + start : ring_word + start + min(room, length)].tobytes()
    if length <= room:
        return head
    return head + words[ring_word : ring_word + length - room].tobytes()
