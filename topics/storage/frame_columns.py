"""Frames of a log as columns: of each field one array or string of bytes for all (`column_scan.py` makes them)."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import ne, or_
from typing import Final, overload

from topics.storage.frame import FLAG_MORE, LOCATION_FLAGS, FrameTuple

HEAD_WORDS: Final = 4
_STRETCH_MAX: Final = 4096
"""Frames of a write that are looked at as one, however long it is: who finds several topics looks at fewer again."""
_HAS_MORE: Final = bytes(1 if flags & FLAG_MORE else 0 for flags in range(256))
_LOCATION_FLAGS: Final = bytes(LOCATION_FLAGS)


class FrameColumns(Sequence[FrameTuple]):
    """Valid frames in the order of the log, n of them. As a sequence it is of frames as `frame.scan` gives them.

    `offset_len`: n × (offset | total_len << 32); `types`, `flags`: a byte each; `heads`: HEAD_WORDS words each:
    topic_id, seq, ts, node_len | tag_len << 16 | data_len << 32. Not to be changed.
    """

    __slots__ = ("_stretches", "flags", "heads", "offset_len", "types")

    def __init__(self, offset_len: array[int], types: bytes, flags: bytes, heads: array[int]) -> None:
        self.offset_len = offset_len
        self.types = types
        self.flags = flags
        self.heads = heads
        self._stretches: list[tuple[int, int]] | None = None

    @classmethod
    def none(cls) -> FrameColumns:
        return cls(array("Q"), b"", b"", array("Q"))

    @classmethod
    def of(cls, frames: Iterable[FrameTuple]) -> FrameColumns:
        offset_len, types, flags, heads = array("Q"), bytearray(), bytearray(), array("Q")
        for offset, total_len, type_, flag, topic_id, seq, ts, node_len, tag_len, data_len in frames:
            offset_len.append(offset | total_len << 32)
            types.append(type_)
            flags.append(flag)
            heads.extend((topic_id, seq, ts, node_len | tag_len << 16 | data_len << 32))
        return cls(offset_len, bytes(types), bytes(flags), heads)

    def __len__(self) -> int:
        return len(self.types)

    @overload
    def __getitem__(self, at: int) -> FrameTuple: ...
    @overload
    def __getitem__(self, at: slice) -> FrameColumns: ...
    def __getitem__(self, at: int | slice) -> FrameTuple | FrameColumns:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1
            heads = self.heads[start * HEAD_WORDS : stop * HEAD_WORDS]
            return FrameColumns(self.offset_len[start:stop], self.types[start:stop], self.flags[start:stop], heads)
        at = range(len(self))[at]
        offset_len = self.offset_len[at]
        topic_id, seq, ts, lens = self.heads[at * HEAD_WORDS : (at + 1) * HEAD_WORDS]
        places = (offset_len & 0xFFFF_FFFF, offset_len >> 32, self.types[at], self.flags[at])
        return (*places, topic_id, seq, ts, lens & 0xFFFF, lens >> 16 & 0xFFFF, lens >> 32)

    def __iter__(self) -> Iterator[FrameTuple]:
        heads = self.heads
        for offset_len, type_, flags, topic_id, seq, ts, lens in zip(
            self.offset_len, self.types, self.flags, heads[0::4], heads[1::4], heads[2::4], heads[3::4], strict=True
        ):
            places = (offset_len & 0xFFFF_FFFF, offset_len >> 32, type_, flags)
            yield (*places, topic_id, seq, ts, lens & 0xFFFF, lens >> 16 & 0xFFFF, lens >> 32)

    def __add__(self, behind: FrameColumns) -> FrameColumns:
        if not self.types:
            return behind
        return FrameColumns(
            self.offset_len + behind.offset_len,
            self.types + behind.types,
            self.flags + behind.flags,
            self.heads + behind.heads,
        )

    def without(self, types: bytes) -> FrameColumns:
        """Those that are of none of these types."""
        if not self.of_any(types):
            return self
        kept = FrameColumns.none()
        start = 0
        for dropped in re.finditer(b"[" + re.escape(types) + b"]+|$", self.types):
            kept.offset_len.extend(self.offset_len[start : dropped.start()])
            kept.heads.extend(self.heads[start * HEAD_WORDS : dropped.start() * HEAD_WORDS])
            start = dropped.end()
        is_kept = [type_ not in types for type_ in self.types]
        kept.types = bytes(compress(self.types, is_kept))
        kept.flags = bytes(compress(self.flags, is_kept))
        return kept

    def of_any(self, types: bytes) -> int:
        """How many are of these types."""
        return len(self.types) - len(self.types.translate(None, types))

    def find(self, *types: int) -> int:
        """The number of the first of any of these types; n without one."""
        found = [at for type_ in types if (at := self.types.find(type_)) >= 0]
        return min(found, default=len(self))

    def from_offset(self, offset: int) -> FrameColumns:
        """Those that begin there or behind it."""
        return self[bisect_left(self.offset_len, offset, key=lambda place: place & 0xFFFF_FFFF) :]

    def complete(self) -> int:
        """How many there are up to the last that ends a write."""
        return len(self.flags.translate(_HAS_MORE).rstrip(b"\1"))

    def stretches(self) -> list[tuple[int, int]]:
        """(start, stop) of frames that are of one type and topic, all in order; the next may be of the same."""
        if self._stretches is None:
            has_more = self.flags.translate(_HAS_MORE)
            writes_are_long = has_more.count(1) * 8 > len(has_more) * 7
            self._stretches = list(self._write_by_write(has_more)) if writes_are_long else self._frame_by_frame()
        return self._stretches

    def kinds_and_topics(self) -> set[tuple[int, int]]:
        """Which topics they are about, and how: (type, topic_id)."""
        return {(self.types[start], self.heads[start * HEAD_WORDS]) for start, _ in self.stretches()}

    def _frame_by_frame(self) -> list[tuple[int, int]]:
        types, topic_ids = self.types, self.heads[0::HEAD_WORDS].tolist()
        count = len(types)
        is_other: Iterator[bool] = map(ne, topic_ids, topic_ids[1:])
        if types.count(types[:1]) != count:
            is_other = map(or_, is_other, map(ne, types, types[1:]))
        borders = list(compress(range(1, count), is_other))
        return list(zip([0, *borders], [*borders, count], strict=True)) if count else []

    def _write_by_write(self, has_more: bytes) -> Iterator[tuple[int, int]]:
        # The frames of a write are of one topic as a rule, which is asked of all of them at once.
        types, topic_ids = self.types, self.heads[0::HEAD_WORDS]
        count = len(types)
        start = 0
        while start < count:
            type_, topic_id = types[start], topic_ids[start]
            stop = min(has_more.find(0, start, start + _STRETCH_MAX) + 1 or count, start + _STRETCH_MAX)
            length = stop - start
            if length > 1 and (
                types.count(type_, start, stop) != length
                or topic_ids[start:stop] != topic_ids[start : start + 1] * length
            ):
                length = 1
            if length == 1:
                stop = start + 1
                while stop < count and topic_ids[stop] == topic_id and types[stop] == type_:
                    stop += 1
            yield start, stop
            start = stop

    def entries(self, file_no: int, more_flags: int) -> array[int]:
        """Index entries (`core/location.py`) of all, as if all were Appends; `more_flags` are set in each."""
        count = len(self.types)
        files = bytearray(file_no.to_bytes(8, "little") * count)
        flags = self.flags.translate(_LOCATION_FLAGS)
        files[4::8] = flags.translate(bytes(flag | more_flags for flag in range(256))) if more_flags else flags
        entries = array("Q", bytes(32 * count))
        entries[0::4] = self.heads[1::HEAD_WORDS]
        entries[1::4] = self.heads[2::HEAD_WORDS]
        entries[2::4] = self.offset_len
        entries[3::4] = array("Q", bytes(files))
        return entries
