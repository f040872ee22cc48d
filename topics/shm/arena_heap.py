"""Blocks of memory in an index arena (`arena.py`): powers of two from 64 bytes, backed by memory when they are needed.

Only the shard knows which blocks are free. A freed block is used again for the next one of its size.
"""

from __future__ import annotations

import mmap
from typing import Final

from topics.shm.instance import ARENA_RESERVE_BYTES
from topics.shm.memory import SharedObject

_BLOCK_MIN_BYTES: Final = 64
_GIVE_BACK_BYTES: Final = 64 * 1024
"""Free blocks of this size or more hold no memory."""


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
        """Returns the byte offset of a block of at least `size_bytes`. Raises ArenaFullError."""
        size = _block_size(size_bytes)
        free = self._free.get(size)
        if free:
            block = free.pop()
            if size >= _GIVE_BACK_BYTES:
                self._back_again(block, size)
            return block
        block = self._next
        if block + size > self._backed:
            self._back(block + size)
        self._next += size
        return block

    def free(self, offset: int, size_bytes: int) -> None:
        """Frees a block."""
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

    def _back_again(self, block: int, size: int) -> None:
        start, end = _whole_pages(block, size)
        try:
            self._shared.reserve(start, end - start)
        except OSError as error:
            self._free[size].append(block)
            raise ArenaFullError(f"/dev/shm has no room for {size} more bytes of index: {error.strerror}") from error
        self._given_back -= end - start

    def _back(self, end: int) -> None:
        grow = max(end - self._backed, ARENA_RESERVE_BYTES // 2)
        if self._backed + grow > self._end:
            raise ArenaFullError(f"index arena {self._shared.name} has used up its {self._end} bytes")
        try:
            self._shared.reserve(self._backed, grow)
        except OSError as error:
            raise ArenaFullError(f"/dev/shm has no room for {grow} more bytes of index: {error.strerror}") from error
        self._backed += grow


def _block_size(size_bytes: int) -> int:
    return max(_BLOCK_MIN_BYTES, 1 << (size_bytes - 1).bit_length())


def _whole_pages(offset: int, size: int) -> tuple[int, int]:
    """Returns start and end of the pages that lie in a block as a whole."""
    page = mmap.PAGESIZE
    return -(-offset // page) * page, (offset + size) // page * page
