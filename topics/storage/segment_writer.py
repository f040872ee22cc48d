"""Writing a segment: records of a log file get the form of a segment and are appended to an active one.

`frame.py` and `segment.py` have the two forms; `segment_deletes.py` deletes. Records of one length that follow each
other in their topic are gathered into a table, and whole columns of it are moved. A record of another length is cut out
by itself.
"""

from __future__ import annotations

import mmap
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, compress, repeat
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.location import (
    ENTRY_WORDS,
    LOCATION_DELETED,
    LOCATION_GONE,
    LOCATION_LOST,
    flags_of,
    lengths_of,
    offsets_of,
)
from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, write_all
from topics.storage.frame import CHECKSUM_LEN as WAL_CHECKSUM_LEN
from topics.storage.frame import FLAGS_AT as WAL_FLAGS_AT
from topics.storage.frame import IDS_AT as WAL_IDS_AT
from topics.storage.frame import LENGTH_FIELD_LEN, OVERHEAD_LEN, Bytes
from topics.storage.segment import (
    DATA_MAX_BYTES,
    ENTRY,
    ENTRY_FLAGS_AT,
    ENTRY_LEN,
    KEPT_FLAGS,
    LOG_FRAME_EXTRA_LEN,
    TAIL_LEN,
    CorruptSegment,
)

_WAL_IDENTITY_LEN: Final = 16  # topic_id, seq
_WAL_SEQ_AT: Final = WAL_IDS_AT + 8
_TABLE_ROWS_MIN: Final = 32
_TABLE_ROWS_MAX: Final = 512
_SHORT_ROWS: Final = 4
_SHORT_MAX: Final = 4
"""After so many stretches that are so short, the rest of a table is gathered record by record."""
_TABLE_MAX_BYTES: Final = 1 << 18
"""So much is hashed at once, so that it is still in the cache."""

# What the index says of a record, by the flags of its entry: of one that is gone nothing else.
_IDX_FLAGS: Final = bytes(
    LOCATION_DELETED if flags & LOCATION_DELETED else LOCATION_LOST if flags & LOCATION_LOST else flags & KEPT_FLAGS
    for flags in range(256)
)
_IS_LIVE: Final = bytes(not flags & LOCATION_GONE for flags in range(256))
_FLAG_BYTES: Final = [bytes((flags,)) for flags in range(256)]
# The end of a frame and the length of the one behind it: one pack and one join entry less a record.
_TAIL_AND_NEXT: Final = Struct("<QBI")
_FRAME_LEN: Final = Struct("<I")


def convert(buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int], data_bytes: int) -> tuple[bytes, bytes]:
    """Turns log frames into the segment's frames, which will lie at `data_bytes`, and their entries in the index.

    Raises ValueError when the log has other frames there than the entries say.
    """
    count = len(entries) // ENTRY_WORDS
    flags = flags_of(entries)
    is_live = flags.translate(_IS_LIVE)
    if 0 in is_live:
        rows = array("Q", b"".join(compress(_rows_of(entries), is_live)))
        data, live_lengths = _frames(buffer, topic_id, rows)
        lengths = array("I", bytes(4 * count))
        offsets = array("I", bytes(4 * count))
        reasons = offsets_of(entries)
        for at in range(count):
            if flags[at] & LOCATION_LOST and not flags[at] & LOCATION_DELETED:
                offsets[at] = reasons[at]
        live_offsets = accumulate(live_lengths, initial=data_bytes)
        for at, offset, length in zip(compress(range(count), is_live), live_offsets, live_lengths, strict=False):
            offsets[at], lengths[at] = offset, length
    else:
        data, lengths = _frames(buffer, topic_id, entries)
        offsets = array("I", accumulate(lengths, initial=data_bytes))
        offsets.pop()
    halves = array("I", entries.tobytes())
    idx = array("I", bytes(count * ENTRY_LEN))
    idx[0::5] = offsets
    idx[1::5] = lengths
    idx[2::5] = halves[2::8]
    idx[3::5] = halves[3::8]
    packed = bytearray(idx.tobytes())
    packed[ENTRY_FLAGS_AT::ENTRY_LEN] = flags.translate(_IDX_FLAGS)
    return data, bytes(packed)


def _rows_of(entries: array[int]) -> tuple[bytes, ...]:
    row_len = ENTRY_WORDS * entries.itemsize
    rows: tuple[bytes, ...] = Struct(f"{row_len}s" * (len(entries) // ENTRY_WORDS)).unpack(entries.tobytes())
    return rows


def _frames(buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int]) -> tuple[bytes, array[int]]:
    """Returns the frames of live records back to back, and the length of each."""
    if isinstance(buffer, memoryview) and isinstance(buffer.obj, bytes) and buffer.nbytes == len(buffer.obj):
        buffer = buffer.obj  # a slice of it costs half
    seqs, places = entries[0::ENTRY_WORDS], entries[2::ENTRY_WORDS]
    offsets, total_lens = offsets_of(entries), lengths_of(entries)
    parts: list[bytes] = []
    lengths = array("I")
    loose = 0
    count = len(places)
    for first, behind in _tables(total_lens):
        if loose < first:
            parts.append(_one_by_one(buffer, topic_id, seqs[loose:first], places[loose:first], lengths))
        table = _gathered(buffer, offsets[first:behind], total_lens[first])
        parts.append(_converted(table, topic_id, seqs[first:behind], total_lens[first]))
        lengths.extend(array("I", (total_lens[first] - LOG_FRAME_EXTRA_LEN,)) * (behind - first))
        loose = behind
    if loose < count:
        parts.append(_one_by_one(buffer, topic_id, seqs[loose:], places[loose:], lengths))
    return b"".join(parts), lengths


def _tables(lengths: array[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, behind) of stretches of records of one length, where there are enough of them."""
    count = len(lengths)
    first = 0
    while first < count:
        behind = min(count, first + max(1, min(_TABLE_ROWS_MAX, _TABLE_MAX_BYTES // max(1, lengths[first]))))
        if not _are_alike(lengths, first, behind):
            behind = bisect_left(
                range(behind), True, lo=first + 1, key=lambda end: not _are_alike(lengths, first, end + 1)
            )
        if behind - first >= _TABLE_ROWS_MIN:
            yield first, behind
            first = behind
        else:
            first = _next_table(lengths, behind)


def _are_alike(lengths: array[int], first: int, behind: int) -> bool:
    return lengths[first:behind] == lengths[first : first + 1] * (behind - first)


def _next_table(lengths: array[int], start: int) -> int:
    """Returns the number of the first record from `start` on that may begin a table, or the count of records if none
    may.
    """
    # A table has a whole block of half its least size in it, wherever it begins.
    block = _TABLE_ROWS_MIN // 2
    at = -(-start // block) * block
    count = len(lengths)
    while at + block <= count and not (lengths[at] == lengths[at + block - 1] and _are_alike(lengths, at, at + block)):
        at += block
    if at + block > count:
        return count
    while at > start and lengths[at - 1] == lengths[at]:
        at -= 1
    return at


def _gathered(buffer: Bytes | mmap.mmap, offsets: array[int], total_len: int) -> bytearray:
    """Returns log frames of one length from wherever they lie; those of a batch lie back to back."""
    pieces: list[Bytes] = []
    rows = len(offsets)
    at, guess, short = 0, rows, 0
    while at < rows and short < _SHORT_MAX:
        offset = offsets[at]
        # As many as the last time, which is so with batches of one size, or how many there are.
        behind = min(at + guess, rows)
        if not _are_neighbours(offsets, at, behind, total_len) or (
            behind < rows and offsets[behind] - offsets[behind - 1] == total_len
        ):
            behind = _neighbours_from(offsets, at, total_len)
        guess = behind - at
        short += guess < _SHORT_ROWS
        pieces.append(buffer[offset : offset + guess * total_len])
        at = behind
    pieces += [buffer[offset : offset + total_len] for offset in offsets[at:]]
    return bytearray().join(pieces)


def _neighbours_from(offsets: array[int], first: int, total_len: int) -> int:
    """Returns the end of the frames that lie back to back from the first one on."""
    offset = offsets[first]
    behind = bisect_left(
        range(len(offsets)), True, lo=first + 1, key=lambda at: offsets[at] != offset + (at - first) * total_len
    )
    # Where they are not in the order of the log, what was asked of some need not hold for all.
    return behind if _are_neighbours(offsets, first, behind, total_len) else first + 1


def _are_neighbours(offsets: array[int], first: int, behind: int, total_len: int) -> bool:
    offset = offsets[first]
    end = offset + (behind - first) * total_len
    return offsets[behind - 1] == end - total_len and offsets[first:behind] == array("I", range(offset, end, total_len))


class _Columns(NamedTuple):
    """Structs for a table of log frames. `identities` gives topic_id and seq of each. When columns were moved, `bodies`
    gives the hashed bytes of each, and `frames` the segment's frames.
    """

    identities: Struct
    bodies: Struct
    frames: Struct
    frame_len: list[bytes]


@lru_cache(64)
def _columns_of(total_len: int, rows: int) -> _Columns:
    begin = _WAL_SEQ_AT - 1  # where flags go
    frame_len = total_len - LOG_FRAME_EXTRA_LEN
    rest = total_len - WAL_IDS_AT - _WAL_IDENTITY_LEN
    return _Columns(
        Struct(f"{WAL_IDS_AT}x{_WAL_IDENTITY_LEN}s{rest}x" * rows),
        Struct(f"{begin}x{total_len - WAL_CHECKSUM_LEN - begin}s{WAL_CHECKSUM_LEN}x" * rows),
        Struct(f"{begin - LENGTH_FIELD_LEN}x" + f"{LOG_FRAME_EXTRA_LEN}x".join([f"{frame_len}s"] * rows)),
        [bytes((byte,)) * rows for byte in (frame_len - LENGTH_FIELD_LEN).to_bytes(LENGTH_FIELD_LEN, "little")],
    )


def _converted(table: bytearray, topic_id: int, seqs: array[int], total_len: int) -> bytes:
    """Returns the segment's frames of log frames of one length. It works in place: a frame begins in the topic id of
    its log frame, with flags where that ended, and its `del` is the first byte of the next one.
    """
    rows = len(seqs)
    if len(table) != rows * total_len or total_len < OVERHEAD_LEN:
        raise _other_frames(topic_id)
    columns = _columns_of(total_len, rows)
    if b"".join(columns.identities.unpack(table)) != _identities(topic_id, seqs):
        raise _other_frames(topic_id)
    begin = _WAL_SEQ_AT - 1
    table[begin::total_len] = table[WAL_FLAGS_AT::total_len]
    checksums = array("Q", map(xxh3_64_intdigest, columns.bodies.unpack(table))).tobytes()
    for at in range(WAL_CHECKSUM_LEN):
        table[total_len - WAL_CHECKSUM_LEN + at :: total_len] = checksums[at::WAL_CHECKSUM_LEN]
    for at, column in enumerate(columns.frame_len, begin - LENGTH_FIELD_LEN):
        table[at::total_len] = column
    table.append(0)
    table[total_len::total_len] = bytes(rows)
    return b"".join(columns.frames.unpack(table))


def _one_by_one(
    buffer: Bytes | mmap.mmap, topic_id: int, seqs: array[int], places: array[int], lengths: array[int]
) -> bytes:
    bodies = [
        _FLAG_BYTES[buffer[(start := place & 0xFFFF_FFFF) + WAL_FLAGS_AT]]
        + buffer[start + _WAL_SEQ_AT : start + (place >> 32) - WAL_CHECKSUM_LEN]
        for place in places
    ]
    identities = [buffer[(start := (place & 0xFFFF_FFFF) + WAL_IDS_AT) : start + _WAL_IDENTITY_LEN] for place in places]
    if b"".join(identities) != _identities(topic_id, seqs):
        raise _other_frames(topic_id)
    frame_lens = [(place >> 32) - LOG_FRAME_EXTRA_LEN - LENGTH_FIELD_LEN for place in places]
    parts: list[bytes] = [b""] * (2 * len(bodies) + 1)
    parts[0] = _FRAME_LEN.pack(frame_lens[0])
    parts[1::2] = bodies
    next_frame_lens = [*frame_lens[1:], 0]
    parts[2::2] = map(_TAIL_AND_NEXT.pack, map(xxh3_64_intdigest, bodies), repeat(0), next_frame_lens)
    parts[-1] = parts[-1][:TAIL_LEN]  # nothing is behind the last one
    lengths.extend([frame_len + LENGTH_FIELD_LEN for frame_len in frame_lens])
    return b"".join(parts)


def _identities(topic_id: int, seqs: array[int]) -> bytes:
    expected = array("Q", (topic_id,)) * (2 * len(seqs))
    expected[1::2] = seqs
    return expected.tobytes()


def _other_frames(topic_id: int) -> ValueError:
    return ValueError(f"the log's frames are not those of topic {topic_id:#x} that the entries name")


_CHUNK_RECORDS: Final = 4096  # few enough to be hashed and joined while they are in the cache
CHUNK_BYTES: Final = 64 * 1024 * 1024
"""One write takes less than 2 GiB on Linux, and joined pieces take memory."""


class SegmentWriter:
    """Appends to one segment; its only writer. Methods raise OSError.

    After a failed `append` nothing was appended, and it may be repeated. After a failed `sync` nothing appended since
    the last mark can be trusted: close the writer and reopen the segment at the mark.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        first_seq: int,
        version: int,
        records: int,
        data_bytes: int,
        fds: tuple[int, int],
    ) -> None:
        self.first_seq = first_seq
        self.version = version
        self.records = records
        self.data_bytes = data_bytes
        """Length of `.data` up to its last frame."""
        self._fs = fs
        self._directory = directory
        self._data_fd, self._idx_fd = fds
        self._is_new = False
        self._has_leftovers = False

    @classmethod
    def create(cls, fs: FileSystem, directory: str, first_seq: int, version: int = 0) -> SegmentWriter:
        """Makes a new segment; leftovers that a crash left under the same name, without a mark, are thrown away."""
        make_dirs(fs, directory)
        _unseal(fs, directory, first_seq, version)
        fds = _open_pair(fs, directory, first_seq, version, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        writer = cls(fs, directory, first_seq, version, 0, 0, fds)
        writer._is_new = True
        return writer

    @classmethod
    def reopen(
        cls, fs: FileSystem, directory: str, first_seq: int, records: int, data_bytes: int, version: int = 0
    ) -> SegmentWriter:
        """Opens the segment as the last mark says it is; bytes behind that are cut off. Raises CorruptSegment when less
        than that is there.
        """
        was_sealed = _unseal(fs, directory, first_seq, version)
        fds = _open_pair(fs, directory, first_seq, version, os.O_RDWR)
        try:
            wanted = (data_bytes, records * ENTRY_LEN)
            paths = (
                layout.segment_data_path(directory, first_seq, version),
                layout.segment_idx_path(directory, first_seq, version),
            )
            for path, fd, length in zip(paths, fds, wanted, strict=True):
                size_bytes = fs.size_bytes(fd)
                if size_bytes < length:
                    raise CorruptSegment(path, size_bytes, f"the file ends there, {length} bytes are committed")
            _check_end(fs, paths[1], fds[1], records, data_bytes)
            writer = cls(fs, directory, first_seq, version, records, data_bytes, fds)
            writer._is_new = was_sealed or records == 0
            writer._has_leftovers = True
            writer._cut_leftovers()
        except BaseException:
            for fd in fds:
                fs.close(fd)
            raise
        return writer

    @property
    def next_seq(self) -> int:
        return self.first_seq + self.records

    def room(self, entries: array[int], max_records: int, max_bytes: int) -> int:
        """Returns how many of the entries (see `append`) fit into a segment of these bounds; at least one fits into an
        empty one.
        """
        max_bytes = min(max_bytes, DATA_MAX_BYTES)
        lengths = lengths_of(entries)
        fitting = len(lengths)
        if self.data_bytes + sum(lengths) > max_bytes:  # more than they take, for a few bytes of each are left out
            is_gone = [flags & LOCATION_GONE for flags in flags_of(entries)]
            taken = [0 if gone else length - LOG_FRAME_EXTRA_LEN for length, gone in zip(lengths, is_gone, strict=True)]
            fitting = bisect_right(list(accumulate(taken, initial=self.data_bytes)), max_bytes) - 1
        fitting = min(fitting, max_records - self.records)
        if fitting <= 0 and self.records == 0 and lengths:
            return 1
        return max(fitting, 0)

    def append(self, buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int]) -> None:
        """Appends records in the order of their seqs, the first of them `next_seq`, from the log file that `buffer` is.

        `entries` are index entries (`core/location.py`); all offsets are in `buffer`, whose frames were validated.
        Deleted and lost records get an entry and no frame.
        """
        count = len(entries) // ENTRY_WORDS
        seqs = entries[0::ENTRY_WORDS]
        if seqs != array("Q", range(self.next_seq, self.next_seq + count)):
            raise ValueError(
                f"segment {self.first_seq} goes on with seq {self.next_seq}, not with {seqs[:8].tolist()}…"
            )
        self._cut_leftovers()
        self._has_leftovers = True
        idx = bytearray()
        data_bytes = self.data_bytes
        for chunk in _chunks(entries):
            data, idx_part = convert(buffer, topic_id, chunk, data_bytes)
            assert data_bytes + len(data) <= DATA_MAX_BYTES, "see `room`"
            if data:
                write_all(self._fs, self._data_fd, data, data_bytes)
            data_bytes += len(data)
            idx += idx_part
        write_all(self._fs, self._idx_fd, idx, self.records * ENTRY_LEN)
        self._has_leftovers = False
        self.records += count
        self.data_bytes = data_bytes

    def sync(self) -> None:
        """Puts everything that was appended, and the files' names, onto the disk."""
        self._cut_leftovers()
        self._fs.fdatasync(self._data_fd)
        self._fs.fdatasync(self._idx_fd)
        if self._is_new:
            # All names, not only those this writer made: another writer may have been killed before its sync.
            topics_dir = os.path.dirname(self._directory)
            for directory in (self._directory, topics_dir, os.path.dirname(topics_dir)):
                self._fs.fsync_dir(directory)
            self._is_new = False

    def cut_back(self, records: int, data_bytes: int) -> None:
        """Goes back to that length: everything appended since is thrown away."""
        self.records, self.data_bytes = records, data_bytes
        self._has_leftovers = True
        self._cut_leftovers()

    def close(self) -> None:
        self._fs.close(self._data_fd)
        self._fs.close(self._idx_fd)

    def _cut_leftovers(self) -> None:
        """Cuts off bytes of an append that failed half-way, or of another writer that was killed."""
        if not self._has_leftovers:
            return
        for fd, length in ((self._data_fd, self.data_bytes), (self._idx_fd, self.records * ENTRY_LEN)):
            if self._fs.size_bytes(fd) > length:
                self._fs.ftruncate(fd, length)
        self._has_leftovers = False


def _chunks(entries: array[int]) -> Iterator[array[int]]:
    """Yields entries to be written at once: at most CHUNK_BYTES, unless it is one record."""
    at = 0
    while at < len(entries):
        chunk = entries[at : at + _CHUNK_RECORDS * ENTRY_WORDS]
        lengths = lengths_of(chunk)
        if sum(lengths) > CHUNK_BYTES:
            chunk = chunk[: max(1, bisect_right(list(accumulate(lengths)), CHUNK_BYTES)) * ENTRY_WORDS]
        yield chunk
        at += len(chunk)


def _unseal(fs: FileSystem, directory: str, first_seq: int, version: int) -> bool:
    """Removes postings of a segment that is written to again: its writer was killed between sealing and the mark. True
    if there were any.
    """
    path = layout.segment_tags_path(directory, first_seq, version)
    if not fs.exists(path):
        return False
    fs.unlink(path)
    return True


def _check_end(fs: FileSystem, idx_path: str, idx_fd: int, records: int, data_bytes: int) -> None:
    """Checks that the index has the committed frames end where the mark says."""
    end_of_idx = records * ENTRY_LEN
    while end_of_idx:
        start = max(0, end_of_idx - _CHUNK_RECORDS * ENTRY_LEN)
        part = pread_fully(fs, idx_path, idx_fd, end_of_idx - start, start)
        for at in range(len(part) - ENTRY_LEN, -1, -ENTRY_LEN):
            offset, length, _, _ = ENTRY.unpack_from(part, at)
            if length:
                if offset + length != data_bytes:
                    raise CorruptSegment(
                        idx_path, start + at, f"the last frame ends at {offset + length}, committed are {data_bytes}"
                    )
                return
        end_of_idx = start
    if data_bytes:
        raise CorruptSegment(idx_path, 0, f"no record has a frame, but {data_bytes} bytes are committed")


def _open_pair(fs: FileSystem, directory: str, first_seq: int, version: int, flags: int) -> tuple[int, int]:
    data_fd = fs.open(layout.segment_data_path(directory, first_seq, version), flags)
    try:
        return data_fd, fs.open(layout.segment_idx_path(directory, first_seq, version), flags)
    except BaseException:
        fs.close(data_fd)
        raise


def pread_fully(fs: FileSystem, path: str, fd: int, length: int, offset: int) -> bytes:
    """Reads so many bytes; raises CorruptSegment when the file is shorter."""
    found = fs.pread(fd, length, offset)
    if len(found) != length:
        raise CorruptSegment(path, offset + len(found), f"the file ends there, {length} bytes from {offset} on are due")
    return found
