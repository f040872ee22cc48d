"""A segment's index and frames many at a time, for readers that serve pages. The format is `segment.py`'s.

One record at a time costs Python more than the disk does: here an index is columns, and a run of frames is checked by a
handful of calls over all of them. What is written back to back is read as one piece.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.core.location import LOCATION_GONE
from topics.storage.committed_file import Content
from topics.storage.frame import LOCATION_FLAGS
from topics.storage.segment import DELETED, ENTRY_LEN, HEADER_LEN, TAIL_LEN, CorruptSegment

_LENGTH_FIELD_LEN: Final = 4
_ENTRY_U32: Final = ENTRY_LEN // 4
_TS_AT: Final = 8


class Columns(NamedTuple):
    """Index entries of consecutive seqs. A record without a frame has length 0; of a lost one `offsets` is the reason
    (`core.topic.EvictReason`).
    """

    ts: list[int]
    offsets: list[int]
    lengths: list[int]
    flags: list[int]

    def part(self, start: int, stop: int) -> Columns:
        """Those from `start` on, up to `stop`."""
        if start == 0 and stop == len(self.ts):
            return self
        return Columns(self.ts[start:stop], self.offsets[start:stop], self.lengths[start:stop], self.flags[start:stop])

    @property
    def has_gone(self) -> bool:
        """Whether any is deleted or lost."""
        return any(flags & LOCATION_GONE for flags in set(self.flags))


def read_columns(idx: Content, first: int, count: int) -> Columns:
    """`count` entries of an index, from number `first` on."""
    halves = array("I")
    halves.frombytes(idx[first * ENTRY_LEN : (first + count) * ENTRY_LEN])
    ts = array("I", bytes(8 * count))
    ts[0::2] = halves[2::_ENTRY_U32]
    ts[1::2] = halves[3::_ENTRY_U32]
    return Columns(
        memoryview(ts).cast("B").cast("Q").tolist(),
        halves[0::_ENTRY_U32].tolist(),
        halves[1::_ENTRY_U32].tolist(),
        # With the padding, which is zeros: anything else does not go with its frame.
        halves[4::_ENTRY_U32].tolist(),
    )


def index_digest(idx: Content) -> int:
    """XXH3-64 over offset, len and ts of all entries, in their order: the 16 bytes of each that no deletion changes."""
    halves = array("I")
    halves.frombytes(idx[:])
    del halves[4::_ENTRY_U32]
    return xxh3_64_intdigest(halves.tobytes())


def ts_of(idx: Content, number: int) -> int:
    """Commit time of one entry."""
    at = number * ENTRY_LEN + _TS_AT
    return int.from_bytes(idx[at : at + 8], "little")


def first_at(idx: Content, count: int, ts: int) -> int:
    """Number of the first of `count` entries whose commit time is >= ts; `count` when there is none."""
    return bisect_left(range(count), ts, key=lambda number: ts_of(idx, number))


def extent(columns: Columns, data_bytes: int, idx_path: str, first_entry_at: int) -> tuple[list[int], int]:
    """(where each frame begins, where the last one ends). Raises CorruptSegment when the frames do not lie back to back
    within `data_bytes`; `first_entry_at` is the place of the first entry in the index, bytes.
    """
    framed = next((number for number, length in enumerate(columns.lengths) if length), None)
    if framed is None:
        return [0] * len(columns.lengths), 0
    starts = list(accumulate(columns.lengths, initial=columns.offsets[framed]))
    end = starts.pop()
    if starts != columns.offsets:
        for number, (start, offset, length) in enumerate(zip(starts, columns.offsets, columns.lengths, strict=True)):
            if length and start != offset:
                at = first_entry_at + number * ENTRY_LEN
                raise CorruptSegment(idx_path, at, f"a frame should begin at {start}, not at {offset}")
    if end > data_bytes:
        at = first_entry_at + (len(starts) - 1) * ENTRY_LEN
        raise CorruptSegment(idx_path, at, f"a frame ends at {end}, behind the {data_bytes} bytes there are")
    return starts, end


def check_frames(
    path: str, buffer: Content, base: int, first_seq: int, columns: Columns, starts: Sequence[int]
) -> list[int]:
    """That live records have the frames the index says, whole and unchanged. Raises CorruptSegment, naming `path`.
    Returns the seqs of those whose frames are marked deleted: with these the index is behind, or an older one.

    frame_len is not looked at: the checksum vouches for the length that the index gives.

    `starts`: the frames' places in `buffer`, which begins at `base` in the file.
    """
    ts, _, lengths, flags = columns
    seqs: Sequence[int] = range(first_seq, first_seq + len(ts))
    if columns.has_gone:
        live = [number for number, flag in enumerate(flags) if not flag & LOCATION_GONE]
        seqs, ts, flags = [seqs[n] for n in live], [ts[n] for n in live], [flags[n] for n in live]
        starts, lengths = [starts[n] for n in live], [lengths[n] for n in live]
    if not seqs:
        return []
    if min(lengths) < HEADER_LEN + TAIL_LEN:
        shortest = lengths.index(min(lengths))
        raise CorruptSegment(path, base + starts[shortest], f"seq {seqs[shortest]} has a frame of {min(lengths)} bytes")
    checksums_at = [start + length - TAIL_LEN for start, length in zip(starts, lengths, strict=True)]
    bodies = [
        buffer[start + _LENGTH_FIELD_LEN : checksum_at] for start, checksum_at in zip(starts, checksums_at, strict=True)
    ]
    digests = array("Q", map(xxh3_64_intdigest, bodies)).tobytes()
    stored = bytearray().join([buffer[at : at + TAIL_LEN] for at in checksums_at])
    marks = stored[8::TAIL_LEN]
    del stored[8::TAIL_LEN]
    identities = b"".join([body[1:17] for body in bodies])
    wanted = array("Q", bytes(16 * len(bodies)))
    wanted[0::2] = array("Q", seqs)
    wanted[1::2] = array("Q", ts)
    if digests == stored and identities == wanted.tobytes() and [LOCATION_FLAGS[body[0]] for body in bodies] == flags:
        return list(compress(seqs, [mark == DELETED for mark in marks])) if DELETED in marks else []
    for number, (seq, body) in enumerate(zip(seqs, bodies, strict=True)):
        reason = ""
        if digests[number * 8 : number * 8 + 8] != stored[number * 8 : number * 8 + 8]:
            reason = f"checksum of seq {seq} does not match"
        elif identities[number * 16 : number * 16 + 16] != wanted[number * 2 : number * 2 + 2].tobytes():
            found = array("Q", identities[number * 16 : number * 16 + 16])
            reason = f"holds seq {found[0]} of {found[1]}, the index says seq {seq} of {ts[number]}"
        elif LOCATION_FLAGS[body[0]] != flags[number]:
            reason = f"flags {body[0]:#x} of seq {seq}, the index says {flags[number]:#x}"
        if reason:
            raise CorruptSegment(path, base + starts[number], reason)
    raise AssertionError("one of them differs")
