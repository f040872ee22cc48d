"""A reader of one segment, record by record, for code that checks it, searches its tags or rewrites it. Readers that
serve pages take many records at a time (`segment.py`, which also has the format).
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from itertools import compress
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, flags_of, lengths_of, offsets_of
from topics.storage import layout
from topics.storage.frame import LENGTH_FIELD_LEN, LOCATION_FLAGS, LOCATION_HAS_TAG
from topics.storage.segment import (
    DELETED,
    ENTRY,
    ENTRY_FLAGS_AT,
    ENTRY_LEN,
    HEADER,
    HEADER_LEN,
    TAIL,
    TAIL_LEN,
    CommittedFile,
    Content,
    CorruptSegment,
    entries_of_idx,
    entry_defect,
)

_FLAGS_AT: Final = 4
_PAD_AT: Final = 17
_WINDOW_BYTES: Final = 1 << 16  # fits the cache; a larger buffer would be new pages each time


class SegmentFrame(NamedTuple):
    """A valid frame of a segment; its parts are copies."""

    seq: int
    ts: int
    flags: int
    node: bytes
    tag: bytes
    data: bytes
    deleted: bool


class SegmentReader:
    """The committed part of a segment: `idx` and `data` are the bytes of both files, in memory or read when needed.

    Only deletion marks ever change in it, so it may be used while the compactor appends to the segment.
    """

    def __init__(self, directory: str, first_seq: int, idx: Content, data: Content, version: int = 0) -> None:
        self.first_seq = first_seq
        self.records = len(idx) // ENTRY_LEN
        self.data = data
        self.data_path = layout.segment_data_path(directory, first_seq, version)
        self.idx_path = layout.segment_idx_path(directory, first_seq, version)
        self._idx = idx

    @classmethod
    def open(cls, directory: str, first_seq: int, records: int, data_bytes: int, version: int = 0) -> SegmentReader:
        """Open a segment with `records` committed records; its files may be unlinked afterwards. Raise
        FileNotFoundError, OSError, and CorruptSegment if the files are shorter. Any method that reads may raise
        CorruptSegment.
        """
        idx = CommittedFile(layout.segment_idx_path(directory, first_seq, version), records * ENTRY_LEN)
        data = CommittedFile(layout.segment_data_path(directory, first_seq, version), data_bytes)
        return cls(directory, first_seq, idx, data, version)

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.records - 1

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        """Return entries (`core/location.py`) without file_no. `len` is the segment frame's, 0 without one."""
        assert self.first_seq <= first_seq
        assert last_seq <= self.last_seq
        start = (first_seq - self.first_seq) * ENTRY_LEN
        count = max(0, last_seq - first_seq + 1)
        return entries_of_idx(self._idx[start : start + count * ENTRY_LEN], first_seq)

    def frame(self, seq: int) -> SegmentFrame | None:
        """Return the record, fully checked; None if it has no frame. Raise CorruptSegment."""
        entry = self._entry(seq)
        return self._read(seq, *entry) if entry[1] else None

    def tagged(self, first_seq: int = 0, last_seq: int = 2**64) -> Iterator[tuple[int, bytes]]:
        """Yield (seq, tag) of every record of first_seq..last_seq that has both a tag and a frame, deleted or not.
        Raise CorruptSegment if a frame is not the record's; nothing else of it is checked.
        """
        first_seq = max(first_seq, self.first_seq)
        last_seq = min(last_seq, self.last_seq)
        idx = self._idx[(first_seq - self.first_seq) * ENTRY_LEN : (last_seq + 1 - self.first_seq) * ENTRY_LEN]
        if not any(flags & LOCATION_HAS_TAG for flags in set(idx[ENTRY_FLAGS_AT::ENTRY_LEN])):
            return
        entries = entries_of_idx(idx, first_seq)
        data, unpack = self.data, HEADER.unpack_from
        size_bytes = len(data)
        window, window_at, window_end = b"", 0, 0
        has_tag = [flags & LOCATION_HAS_TAG for flags in flags_of(entries)]
        for seq, offset, length in compress(
            zip(entries[0::ENTRY_WORDS], offsets_of(entries), lengths_of(entries), strict=True), has_tag
        ):
            if not length:
                continue
            end = offset + length
            if end > size_bytes or length < HEADER_LEN + TAIL_LEN:
                self.frame(seq)  # raises the exact error
            if offset < window_at or end > window_end:
                window, window_at = bytes(data[offset : offset + max(length, _WINDOW_BYTES)]), offset
                window_end = window_at + len(window)
            at = offset - window_at
            frame_len, _, frame_seq, _, node_len, tag_len, data_len = unpack(window, at)
            if (
                frame_seq != seq
                or frame_len != length - LENGTH_FIELD_LEN
                or node_len + tag_len + data_len != length - (HEADER_LEN + TAIL_LEN)
            ):
                self.frame(seq)
            start = at + HEADER_LEN + node_len
            yield seq, window[start : start + tag_len]

    def damage(self, unmarked: Container[int] | None, *, has_data: bool = True) -> Iterator[CorruptSegment]:
        """Yield all damage: in every entry and, if the segment `has_data` here, in every frame and the bytes between.
        `unmarked` are deleted seqs that may not be marked here yet; None means that frames have no marks at all.
        """
        if len(self._idx) % ENTRY_LEN:
            yield CorruptSegment(self.idx_path, self.records * ENTRY_LEN, "the file ends inside an entry")
        end = ts_before = 0
        for seq in range(self.first_seq, self.first_seq + self.records):
            entry_at = (seq - self.first_seq) * ENTRY_LEN
            offset, length, ts, flags = self._entry(seq)
            pad = bytes(self._idx[entry_at + _PAD_AT : entry_at + ENTRY_LEN])
            reason = f"padding is {pad.hex()}, not zeros" if any(pad) else entry_defect(offset, length, flags)
            if reason is None and ts < ts_before:
                reason = f"ts {ts} is before that of the record before, {ts_before}"
            if reason is None and length and offset != end:
                reason = f"the frame of seq {seq} should begin at {end}, not at {offset}"
            if reason is not None:
                yield CorruptSegment(self.idx_path, entry_at, reason)
            ts_before = max(ts, ts_before)
            if not length:
                continue
            end = offset + length
            if not has_data:
                continue
            try:
                frame = self._read(seq, offset, length, ts, flags)
            except CorruptSegment as defect:
                yield defect
                continue
            (deleted_byte,) = self.data[end - 1 : end]
            if deleted_byte not in (0, DELETED):
                yield CorruptSegment(self.data_path, end - 1, f"del is {deleted_byte:#x}, neither 0 nor {DELETED:#x}")
            elif frame.deleted != bool(flags & LOCATION_DELETED) and unmarked is not None and seq not in unmarked:
                in_data, in_idx = ("deleted", "live") if frame.deleted else ("live", "deleted")
                yield CorruptSegment(
                    self.data_path, end - 1, f"seq {seq} is {in_data} here and {in_idx} in the index, at {entry_at}"
                )
        if has_data and end != len(self.data):
            yield CorruptSegment(self.data_path, end, f"the last frame ends there, the file at {len(self.data)}")

    def _entry(self, seq: int) -> tuple[int, int, int, int]:
        """Return (offset, len, ts, flags) of a record."""
        assert self.first_seq <= seq <= self.last_seq
        at = (seq - self.first_seq) * ENTRY_LEN
        return ENTRY.unpack(self._idx[at : at + ENTRY_LEN])

    def _read(self, seq: int, offset: int, length: int, ts: int, location_flags: int) -> SegmentFrame:
        if offset + length > len(self.data) or length < HEADER_LEN + TAIL_LEN:
            raise CorruptSegment(
                self.idx_path,
                (seq - self.first_seq) * ENTRY_LEN,
                f"seq {seq} is said to lie at {offset}, {length} bytes of the {len(self.data)} there are",
            )
        frame = self.data[offset : offset + length]
        frame_len, flags, frame_seq, frame_ts, node_len, tag_len, data_len = HEADER.unpack_from(frame)
        checksum, deleted = TAIL.unpack_from(frame, length - TAIL_LEN)
        body = frame[_FLAGS_AT : length - TAIL_LEN]
        if checksum != xxh3_64_intdigest(body):
            reason = "checksum does not match"
        elif frame_len != length - LENGTH_FIELD_LEN or HEADER_LEN + node_len + tag_len + data_len + TAIL_LEN != length:
            reason = "inconsistent lengths"
        elif (frame_seq, frame_ts) != (seq, ts):
            reason = f"holds seq {frame_seq} of {frame_ts}, the index says seq {seq} of {ts}"
        elif LOCATION_FLAGS[flags] != location_flags & ~LOCATION_DELETED:
            reason = f"flags {flags:#x}, the index says {location_flags:#x}"
        else:
            node_at = HEADER_LEN - _FLAGS_AT
            tag_at = node_at + node_len
            data_at = tag_at + tag_len
            node, tag, data = body[node_at:tag_at], body[tag_at:data_at], body[data_at:]
            return SegmentFrame(seq, ts, flags, bytes(node), bytes(tag), bytes(data), deleted == DELETED)
        raise CorruptSegment(self.data_path, offset, reason)
