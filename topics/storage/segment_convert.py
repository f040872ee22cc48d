"""The conversion of log frames (`frame.py`) into segment frames and their index entries (`segment.py`).

`convert` gathers consecutive records of one length into a table and moves whole columns of it. It cuts out any other
record by itself.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, compress, repeat
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, LOCATION_LOST, flags_of, lengths_of, offsets_of
from topics.storage.frame import CHECKSUM_LEN as WAL_CHECKSUM_LEN
from topics.storage.frame import FLAGS_AT as WAL_FLAGS_AT
from topics.storage.frame import IDS_AT as WAL_IDS_AT
from topics.storage.frame import LENGTH_FIELD_LEN, OVERHEAD_LEN, Bytes, checksums_of, hashed_parts
from topics.storage.frame_columns import body_parts
from topics.storage.segment import ENTRY_FLAGS_AT, ENTRY_LEN, IS_LIVE, KEPT_FLAGS, LOG_FRAME_EXTRA_LEN, TAIL_LEN

_WAL_SEQ_AT: Final = WAL_IDS_AT + 8
_TABLE_ROWS_MIN: Final = 32
_TABLE_ROWS_MAX: Final = 512
_SHORT_ROWS: Final = 4
_SHORT_MAX: Final = 4
"""After _SHORT_MAX stretches of fewer than _SHORT_ROWS records, the rest of a table is gathered one by one."""
_TABLE_MAX_BYTES: Final = 1 << 18
"""The most bytes that are hashed at once, while they are in the cache."""

# Flags in the index, by the flags of the log's entry; a deleted or lost record has no other flag.
_IDX_FLAGS: Final = bytes(
    LOCATION_DELETED if flags & LOCATION_DELETED else LOCATION_LOST if flags & LOCATION_LOST else flags & KEPT_FLAGS
    for flags in range(256)
)
_FLAG_BYTES: Final = [bytes((flags,)) for flags in range(256)]
# The end of a frame and the length of the next: packing both together saves one pack and one join entry a record.
_TAIL_AND_NEXT: Final = Struct("<QBI")
_FRAME_LEN: Final = Struct("<I")
# Places in the hashed bytes of a log frame.
_FLAGS_IN_BODY: Final = WAL_FLAGS_AT - LENGTH_FIELD_LEN
_SEQ_IN_BODY: Final = _WAL_SEQ_AT - LENGTH_FIELD_LEN
_IDENTITY_IN_BODY: Final = slice(_SEQ_IN_BODY - 8, _SEQ_IN_BODY + 8)


def convert(buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int], data_bytes: int) -> tuple[bytes, bytes]:
    """Check log frames and return (segment frames, index entries) for them; the caller writes the frames at
    `data_bytes`. Raise ValueError if the log has other frames than `entries` say, or damaged ones.
    """
    count = len(entries) // ENTRY_WORDS
    packed = entries.tobytes()
    flags = flags_of(entries)
    is_live = flags.translate(IS_LIVE)
    if 0 in is_live:
        rows = Struct(f"{ENTRY_WORDS * entries.itemsize}s" * count).unpack(packed)
        data, live_lengths = _frames(buffer, topic_id, array("Q", b"".join(compress(rows, is_live))))
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
        if lengths and _are_alike(lengths, 0, count):
            offsets = _steps(data_bytes, lengths[0], count)
        else:
            offsets = array("I", accumulate(lengths, initial=data_bytes))
            offsets.pop()
    halves = array("I", packed)
    idx = array("I", bytes(count * ENTRY_LEN))
    idx[0::5] = offsets
    idx[1::5] = lengths
    idx[2::5] = halves[2::8]
    idx[3::5] = halves[3::8]
    idx_bytes = bytearray(idx.tobytes())
    idx_bytes[ENTRY_FLAGS_AT::ENTRY_LEN] = flags.translate(_IDX_FLAGS)
    return data, bytes(idx_bytes)


def _steps(first: int, step: int, count: int) -> array[int]:
    """Return `count` numbers (u32) from `first` on, computed as one large number: a range makes an object each."""
    whole = _ones(count) * first + _naturals(count) * step
    return array("I", whole.to_bytes(4 * count, "little"))


@lru_cache(4)
def _ones(count: int) -> int:
    return int.from_bytes(array("I", (1,)) * count, "little")


@lru_cache(4)
def _naturals(count: int) -> int:
    return int.from_bytes(array("I", range(count)), "little")


def _frames(buffer: Bytes | mmap.mmap, topic_id: int, entries: array[int]) -> tuple[bytes, array[int]]:
    """Return the frames of live records back to back, and the length of each."""
    if isinstance(buffer, memoryview) and isinstance(buffer.obj, bytes) and buffer.nbytes == len(buffer.obj):
        buffer = buffer.obj  # slices of the object itself cost half
    seqs, offsets, total_lens = entries[0::ENTRY_WORDS], offsets_of(entries), lengths_of(entries)
    parts: list[bytes] = []
    loose = 0
    for first, behind in _tables(total_lens):
        table = _gathered(buffer, offsets[first:behind], total_lens[first])
        part = _converted(table, topic_id, seqs[first:behind], total_lens[first])
        if part is not None:
            if loose < first:
                gap = slice(loose, first)
                parts.append(_one_by_one(buffer, topic_id, seqs[gap], offsets[gap], total_lens[gap]))
            parts.append(part)
            loose = behind
    if loose < len(seqs):
        parts.append(_one_by_one(buffer, topic_id, seqs[loose:], offsets[loose:], total_lens[loose:]))
    if total_lens and _are_alike(total_lens, 0, len(total_lens)):
        return b"".join(parts), array("I", (total_lens[0] - LOG_FRAME_EXTRA_LEN,)) * len(total_lens)
    return b"".join(parts), _less(total_lens, LOG_FRAME_EXTRA_LEN)


def _tables(lengths: array[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, behind) of stretches of records of one length that are long enough for a table."""
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
    """Return the number of the first record from `start` on that may begin a table, their count if none may."""
    # Any table of the least size contains a whole aligned block of half that size: look only at such blocks.
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
    """Copy log frames of one length into one buffer. Frames of one batch lie back to back and are copied at once.

    If offsets ascend, the first and the last offset of a stretch tell whether all between lie back to back. If they do
    not ascend, this may gather wrong frames.
    """
    pieces: list[Bytes] = []
    rows = len(offsets)
    at, guess, short = 0, rows, 0
    while at < rows and short < _SHORT_MAX:
        offset = offsets[at]
        # Try the length of the last stretch (batches often have one size), else search.
        behind = min(at + guess, rows)
        if offsets[behind - 1] != offset + (behind - 1 - at) * total_len or (
            behind < rows and offsets[behind] == offset + (behind - at) * total_len
        ):
            behind = bisect_left(
                range(rows), True, lo=at + 1, key=lambda row: offsets[row] != offset + (row - at) * total_len
            )
        guess = behind - at
        short += guess < _SHORT_ROWS
        pieces.append(buffer[offset : offset + guess * total_len])
        at = behind
    pieces += [buffer[offset : offset + total_len] for offset in offsets[at:]]
    return bytearray().join(pieces)


class _Columns(NamedTuple):
    """Structs for a table of log frames after its columns were moved: `bodies` unpacks the hashed bytes of each frame,
    `frames` the segment's frames.
    """

    bodies: Struct
    frames: Struct
    frame_len: list[bytes]


@lru_cache(64)
def _columns_of(total_len: int, rows: int) -> _Columns:
    begin = _WAL_SEQ_AT - 1  # place of the flags
    frame_len = total_len - LOG_FRAME_EXTRA_LEN
    hashed_len = total_len - WAL_CHECKSUM_LEN - begin
    return _Columns(
        Struct(f"{begin}x{hashed_len}s{WAL_CHECKSUM_LEN}x" * rows),
        Struct(f"{begin - LENGTH_FIELD_LEN}x" + f"{LOG_FRAME_EXTRA_LEN}x".join([f"{frame_len}s"] * rows)),
        [bytes((byte,)) * rows for byte in (frame_len - LENGTH_FIELD_LEN).to_bytes(LENGTH_FIELD_LEN, "little")],
    )


def _converted(table: bytearray, topic_id: int, seqs: array[int], total_len: int) -> bytes | None:
    """Convert log frames of one length in place. Return None if a frame is damaged or not the expected one.

    A segment frame begins inside the topic id of its log frame. Its flags stand where the topic id ended, and its `del`
    is the first byte of the next log frame.
    """
    rows = len(seqs)
    if len(table) != rows * total_len or total_len < OVERHEAD_LEN:
        return None
    columns = _columns_of(total_len, rows)
    id_bytes, seq_bytes = topic_id.to_bytes(8, "little"), seqs.tobytes()
    for at in range(8):
        if table[WAL_IDS_AT + at :: total_len] != id_bytes[at : at + 1] * rows:
            return None
        if table[_WAL_SEQ_AT + at :: total_len] != seq_bytes[at::8]:
            return None
    checksum_at = total_len - WAL_CHECKSUM_LEN
    checksums = checksums_of(hashed_parts(total_len, rows).unpack(table))
    for at in range(WAL_CHECKSUM_LEN):
        if table[checksum_at + at :: total_len] != checksums[at::WAL_CHECKSUM_LEN]:
            return None
    begin = _WAL_SEQ_AT - 1
    table[begin::total_len] = table[WAL_FLAGS_AT::total_len]
    checksums = checksums_of(columns.bodies.unpack(table))
    for at in range(WAL_CHECKSUM_LEN):
        table[checksum_at + at :: total_len] = checksums[at::WAL_CHECKSUM_LEN]
    for at, column in enumerate(columns.frame_len, begin - LENGTH_FIELD_LEN):
        table[at::total_len] = column
    table.append(0)
    table[total_len::total_len] = bytes(rows)
    return b"".join(columns.frames.unpack(table))


def _one_by_one(
    buffer: Bytes | mmap.mmap, topic_id: int, seqs: array[int], offsets: array[int], total_lens: array[int]
) -> bytes:
    try:
        logged = [body_parts[length](buffer, offset) for offset, length in zip(offsets, total_lens, strict=True)]
    except struct.error as error:
        raise ValueError(f"the log has no frames of topic {topic_id:#x} where the entries say") from error
    hashed, checksums = zip(*logged, strict=True)
    if b"".join([body[_IDENTITY_IN_BODY] for body in hashed]) != _identities(topic_id, seqs):
        raise ValueError(f"the log's frames are not those of topic {topic_id:#x} that the entries name")
    digests = tuple(map(xxh3_64_intdigest, hashed))
    if digests != checksums:
        damaged = next(at for at, digest in enumerate(digests) if digest != checksums[at])
        seq, offset = seqs[damaged], offsets[damaged]
        raise ValueError(f"the frame of record {seq} of topic {topic_id:#x}, at offset {offset}, is damaged")
    flag_bytes = _FLAG_BYTES
    bodies = [flag_bytes[body[_FLAGS_IN_BODY]] + body[_SEQ_IN_BODY:] for body in hashed]
    frame_lens = _less(total_lens, LOG_FRAME_EXTRA_LEN + LENGTH_FIELD_LEN).tolist()
    parts: list[bytes] = [b""] * (2 * len(bodies) + 1)
    parts[0] = _FRAME_LEN.pack(frame_lens[0])
    parts[1::2] = bodies
    next_frame_lens = [*frame_lens[1:], 0]
    parts[2::2] = map(_TAIL_AND_NEXT.pack, map(xxh3_64_intdigest, bodies), repeat(0), next_frame_lens)
    parts[-1] = parts[-1][:TAIL_LEN]  # nothing is behind the last one
    return b"".join(parts)


def _less(lengths: array[int], extra: int) -> array[int]:
    """Return lengths (u32), each less by `extra`, by one subtraction of large numbers. None may be below `extra`."""
    size_bytes = 4 * len(lengths)
    fewer = int.from_bytes(lengths, "little") - _ones(len(lengths)) * extra
    return array("I", fewer.to_bytes(size_bytes, "little"))


def _identities(topic_id: int, seqs: array[int]) -> bytes:
    expected = array("Q", (topic_id,)) * (2 * len(seqs))
    expected[1::2] = seqs
    return expected.tobytes()
