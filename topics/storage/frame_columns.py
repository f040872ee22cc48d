"""Frames of a log as columns: one array, or one string of bytes, for each field of all frames.

`scan_columns` finds the same frames as `frame.scan`, at a fraction of the cost for many frames. Frames of one length
that lie back to back, like the records of a batch, are a table: a slice with a step gives a column. `scan_columns`
walks other frames one by one for their lengths, then checks them together. If anything is wrong, `frame.scan` reads
the same frames again and names the defect.
"""

from __future__ import annotations

import mmap
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import ne, or_, sub
from struct import Struct
from typing import Final, NamedTuple, overload

from xxhash import xxh3_64_intdigest

from topics.storage.frame import (
    CHECKSUM_LEN,
    FLAG_MORE,
    FLAGS_AT,
    HEADER_LEN,
    IDS_AT,
    KNOWN_TYPES,
    LENGTH_FIELD_LEN,
    LOCATION_FLAGS,
    OVERHEAD_LEN,
    TYPE_AT,
    Bytes,
    Defect,
    FrameTuple,
    FrameType,
    is_utf8,
    scan,
)

HEAD_WORDS: Final = 4
_STRETCH_MAX: Final = 4096
"""The most frames of a write that are compared at once to see whether all belong to one topic."""
_HAS_MORE: Final = bytes(1 if flags & FLAG_MORE else 0 for flags in range(256))
_LOCATION_FLAGS: Final = bytes(LOCATION_FLAGS)


class FrameColumns(Sequence[FrameTuple]):
    """Valid frames in the order of the log; as a sequence they are frames as `frame.scan` gives them.

    `offset_len` has a word for each frame, offset | total_len << 32. `types` and `flags` have a byte each. `heads` has
    HEAD_WORDS words each: topic_id, seq, ts, node_len | tag_len << 16 | data_len << 32. The columns do not change.
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

    @classmethod
    def joined(cls, parts: Sequence[FrameColumns]) -> FrameColumns:
        if len(parts) == 1:
            return parts[0]
        return cls(
            array("Q", b"".join([part.offset_len for part in parts])),
            b"".join([part.types for part in parts]),
            b"".join([part.flags for part in parts]),
            array("Q", b"".join([part.heads for part in parts])),
        )

    def without(self, types: bytes) -> FrameColumns:
        """Return the frames that are of none of these types."""
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
        """Count the frames of these types."""
        return len(self.types) - len(self.types.translate(None, types))

    def find(self, *types: int) -> int:
        """Return the number of the first frame of any of these types; the count of all frames if there is none."""
        found = [at for type_ in types if (at := self.types.find(type_)) >= 0]
        return min(found, default=len(self))

    def from_offset(self, offset: int) -> FrameColumns:
        """Return the frames that begin at `offset` or behind it."""
        return self[bisect_left(self.offset_len, offset, key=lambda place: place & 0xFFFF_FFFF) :]

    def complete(self) -> int:
        """Count the frames up to the last one that ends a write."""
        return len(self.flags.translate(_HAS_MORE).rstrip(b"\1"))

    def stretches(self) -> list[tuple[int, int]]:
        """Return (start, stop) of runs of one type and topic, in order. Two neighbours may have the same."""
        if self._stretches is None:
            has_more = self.flags.translate(_HAS_MORE)
            writes_are_long = has_more.count(1) * 8 > len(has_more) * 7
            self._stretches = list(self._write_by_write(has_more)) if writes_are_long else self._frame_by_frame()
        return self._stretches

    def kinds_and_topics(self) -> set[tuple[int, int]]:
        """Return (type, topic_id) of all frames, each pair once."""
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
        # The frames of a write usually belong to one topic, so compare all of them at once.
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
        """Return index entries (`core/location.py`) of all frames, which must be Appends; each gets `more_flags`."""
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


_HEAD_LEN: Final = 8 * HEAD_WORDS  # topic_id, seq, ts and the three lengths
_BODY_TEXT_AT: Final = HEADER_LEN - LENGTH_FIELD_LEN
_FRAME_LEN_MIN: Final = OVERHEAD_LEN - LENGTH_FIELD_LEN
_START: Final = Struct(f"<IH{_HEAD_LEN}s")  # frame_len, type | flags << 8, head

_TABLE_ROWS: Final = (512, 256, 128, 64, 32, 16)
"""The possible row counts of a table: few, so that the structs are made once. For fewer rows a walk is as fast."""
_WALK_FRAMES: Final = 128
_ALIKE: Final = 8
"""Number of consecutive frames of one length at which a walk ends, because a table may begin there."""
_COPIED_MAX_BYTES: Final = 1 << 18
"""The most bytes that are copied at once, so that they are hashed while in the cache. A longer frame is not copied."""

_KNOWN: Final = bytes(sorted(KNOWN_TYPES))


class ColumnScan(NamedTuple):
    """The result of a scan; see `frame.Scan`."""

    frames: FrameColumns
    end: int
    defect: Defect | None


def scan_columns(buffer: Bytes, start: int, end: int, limit: int, *, trusts_records: bool = False) -> ColumnScan:
    """Scan as `frame.scan` does: find the same frames up to the same end.

    With `trusts_records` it checks neither checksum nor text of an Append. This is for committed bytes whose frames
    are checked again when somebody copies them.
    """
    view = memoryview(buffer)
    parts: list[FrameColumns] = []
    offset = start
    while limit:
        part = _table(view, offset, end, limit, trusts_records)
        if part is None:
            part, walked = _walk(view, offset, end, min(limit, _WALK_FRAMES), trusts_records)
        if part is None:
            # Damage, the end, or a frame that is too long to be copied.
            frames, next_offset, defect = scan(view, offset, end, max(1, walked))
            part = FrameColumns.of(frames)
            if not frames or defect is not None:
                return ColumnScan(FrameColumns.joined([*parts, part]), next_offset, defect)
        parts.append(part)
        limit -= len(part)
        last = part.offset_len[-1]
        offset = (last & 0xFFFF_FFFF) + (last >> 32)
    return ColumnScan(FrameColumns.joined(parts), offset, None)


class _Table(NamedTuple):
    """Structs for a number of frames of one length. `bodies` unpacks the hashed bytes and the checksum of each frame,
    `heads` its head. `lengths` are the four byte columns of frame_len. `ones` and `places` are large numbers made of a
    64-bit word for each frame, the first one lowest: 1, and the frame's offset from the first frame.
    """

    bodies: Struct
    heads: Struct
    lengths: list[bytes]
    ones: int
    places: int


@lru_cache(64)
def _table_of(total_len: int, rows: int) -> _Table:
    return _Table(
        Struct("<" + f"{LENGTH_FIELD_LEN}x{total_len - LENGTH_FIELD_LEN - CHECKSUM_LEN}sQ" * rows),
        Struct("<" + f"{IDS_AT}x{_HEAD_LEN}s{total_len - IDS_AT - _HEAD_LEN}x" * rows),
        [bytes((byte,)) * rows for byte in (total_len - LENGTH_FIELD_LEN).to_bytes(LENGTH_FIELD_LEN, "little")],
        int.from_bytes(array("Q", (1,)) * rows, "little"),
        int.from_bytes(array("Q", range(0, rows * total_len, total_len)), "little"),
    )


def _table(view: memoryview, offset: int, end: int, limit: int, trusts_records: bool) -> FrameColumns | None:
    """Return valid frames that are as long as the one at `offset`; None if there are not enough of them."""
    rows_min = _TABLE_ROWS[-1]
    if limit < rows_min or offset + rows_min * OVERHEAD_LEN > end:
        return None
    length_field = view[offset : offset + LENGTH_FIELD_LEN]
    total_len = int.from_bytes(length_field, "little") + LENGTH_FIELD_LEN
    if total_len < OVERHEAD_LEN:
        return None
    rows_max = min(limit, min(end - offset, _COPIED_MAX_BYTES) // total_len)
    for rows in _TABLE_ROWS:
        last = offset + (rows - 1) * total_len
        if rows <= rows_max and view[last : last + LENGTH_FIELD_LEN] == length_field:
            found = _rows(bytes(view[offset : last + total_len]), offset, total_len, rows, trusts_records)
            if found is not None:
                return found
    return None


def _rows(table: bytes, offset: int, total_len: int, rows: int, trusts_records: bool) -> FrameColumns | None:
    """Return the frames of `table`; None if any is not valid."""
    structs = _table_of(total_len, rows)
    if any(table[at::total_len] != column for at, column in enumerate(structs.lengths)):
        return None
    types = table[TYPE_AT::total_len]
    heads = array("Q", b"".join(structs.heads.unpack(table)))
    lens = heads[3::HEAD_WORDS]
    text_lens: Sequence[int] | None
    if lens == lens[:1] * rows:
        # The usual case: each frame has the same lengths as the first.
        text_lens = _text_lens(lens[:1], [total_len])
        text_lens = None if text_lens is None else text_lens * rows if text_lens[0] else []
    else:
        text_lens = _text_lens(lens, [total_len] * rows)
    if text_lens is None or types.translate(None, _KNOWN):
        return None
    if not trusts_records or types.count(FrameType.APPEND) != rows:
        columns = structs.bodies.unpack(table)
        if not _are_whole(columns[0::2], columns[1::2], text_lens):
            return None
    # One large number for all frames: Python numbers beyond 2^30, one by one, take several times as long.
    places = structs.ones * (offset | total_len << 32) + structs.places
    offset_len = array("Q", places.to_bytes(8 * rows, "little"))
    return FrameColumns(offset_len, types, table[FLAGS_AT::total_len], heads)


class _BodyParts(dict[int, Callable[[Bytes | mmap.mmap, int], tuple[bytes, int]]]):
    """Functions that unpack the hashed bytes of a frame and its checksum, by the frame's whole length."""

    def __missing__(self, total_len: int) -> Callable[[Bytes | mmap.mmap, int], tuple[bytes, int]]:
        if len(self) >= 4096:
            self.clear()
        unpack = Struct(f"<{LENGTH_FIELD_LEN}x{total_len - LENGTH_FIELD_LEN - CHECKSUM_LEN}sQ").unpack_from
        parts: Callable[[Bytes | mmap.mmap, int], tuple[bytes, int]] = unpack
        self[total_len] = parts
        return parts


body_parts = _BodyParts()


def _walk(view: memoryview, offset: int, end: int, limit: int, trusts_records: bool) -> tuple[FrameColumns | None, int]:
    """Return (valid frames from `offset` on, their number), or (None, the number of frames that were read)."""
    kinds: list[int] = []
    heads: list[bytes] = []
    offsets: list[int] = []
    add_kind, add_head, add_offset = kinds.append, heads.append, offsets.append
    unpack_start = _START.unpack_from
    at, alike, former_len = offset, 0, -1
    last_start, last_end = end - OVERHEAD_LEN, min(end, offset + _COPIED_MAX_BYTES) - LENGTH_FIELD_LEN
    for _ in range(limit):
        if at > last_start:
            break
        frame_len, kind, head = unpack_start(view, at)
        if at + frame_len > last_end or frame_len < _FRAME_LEN_MIN:
            break
        add_kind(kind)
        add_head(head)
        add_offset(at)
        at += frame_len + LENGTH_FIELD_LEN
        if frame_len != former_len:
            former_len, alike = frame_len, 0
        else:
            alike += 1
            if alike == _ALIKE:
                break
    count = len(offsets)
    if not count:
        return None, 0
    type_flags = array("H", kinds).tobytes()
    types = type_flags[0::2]
    columns = array("Q", b"".join(heads))
    total_lens = list(map(sub, chain(offsets[1:], (at,)), offsets))
    text_lens = _text_lens(columns[3::HEAD_WORDS], total_lens)
    if text_lens is None or types.translate(None, _KNOWN):
        return None, count
    checked = [at for at in range(count) if types[at] != FrameType.APPEND] if trusts_records else range(count)
    if checked:
        found = [body_parts[total_lens[at]](view, offsets[at]) for at in checked]
        if len(checked) != count:
            text_lens = [text_lens[at] for at in checked]
        if not _are_whole([body for body, _ in found], [checksum for _, checksum in found], text_lens):
            return None, count
    halves = array("I", bytes(8 * count))
    halves[0::2] = array("I", offsets)
    halves[1::2] = array("I", total_lens)
    return FrameColumns(array("Q", halves.tobytes()), types, type_flags[1::2], columns), count


def _text_lens(lens: array[int], total_lens: Sequence[int]) -> list[int] | None:
    """Return node_len | tag_len << 16 of each frame; None if the lengths of node, tag and payload do not add up to the
    whole length of a frame. `lens` are the last words of the heads.
    """
    halves = array("I", lens.tobytes())
    text_lens, data_lens = halves[0::2].tolist(), halves[1::2].tolist()
    filled = [(texts & 0xFFFF) + (texts >> 16) for texts in text_lens] if any(text_lens) else repeat(0)
    sums = [texts + data_len + OVERHEAD_LEN for texts, data_len in zip(filled, data_lens, strict=False)]
    return text_lens if sums == total_lens else None


def _are_whole(bodies: Sequence[bytes], checksums: Sequence[int], text_lens: Sequence[int]) -> bool:
    """True if checksums match, and nodes and tags are UTF-8; `text_lens` may be empty if no frame has any."""
    if tuple(map(xxh3_64_intdigest, bodies)) != tuple(checksums):
        return False
    if not any(text_lens):
        return True
    texts = [
        body[_BODY_TEXT_AT : _BODY_TEXT_AT + (lens & 0xFFFF) + (lens >> 16)]
        for body, lens in zip(bodies, text_lens, strict=True)
    ]
    if b"".join(texts).isascii():
        return True
    return all(
        is_utf8(text[: lens & 0xFFFF]) and is_utf8(text[lens & 0xFFFF :])
        for text, lens in zip(texts, text_lens, strict=True)
    )
