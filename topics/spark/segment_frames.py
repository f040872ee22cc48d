"""A segment's index and frames as columns, by numpy: what `storage/segment_columns.py` does without it for the service.
Here it is only found that all is well; when it is not, that module says what is wrong, and where.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from topics.core.location import LOCATION_GONE
from topics.storage import segment_columns
from topics.storage.frame import LOCATION_FLAGS
from topics.storage.segment import ENTRY, ENTRY_LEN, HEADER, HEADER_LEN, TAIL_LEN

Ints = npt.NDArray[np.int64]
Bytes8 = npt.NDArray[np.uint8]

Kind = TypeVar("Kind", bound=np.generic)

# With the padding, which is zeros: anything else does not go with its frame.
_ENTRY: Final[np.dtype[np.void]] = np.dtype(
    {"names": ["offset", "len", "ts", "flags"], "formats": ["<u4", "<u4", "<u8", "<u4"], "offsets": [0, 4, 8, 16]}
)
_FRAME: Final[np.dtype[np.void]] = np.dtype(
    {
        "names": ["flags", "seq", "ts", "node_len", "tag_len", "data_len"],
        "formats": ["u1", "<u8", "<u8", "<u2", "<u2", "<u4"],
        "offsets": [4, 5, 13, 21, 23, 25],
    }
)
assert (_ENTRY.itemsize, ENTRY.size) == (ENTRY_LEN, 20)
assert (_FRAME.itemsize, HEADER.format) == (HEADER_LEN, "<IBQQHHI")
_CHECKED_FROM: Final = 4
_CHECKSUM: Final[np.dtype[np.uint64]] = np.dtype(np.uint64)
_BYTE: Final[np.dtype[np.uint8]] = np.dtype(np.uint8)
_LOCATION_FLAGS: Final = np.array(LOCATION_FLAGS, np.int64)


class Entries(NamedTuple):
    """Index entries of consecutive seqs, as `segment_columns.Columns`."""

    ts: Ints
    offsets: Ints
    lengths: Ints
    flags: Ints

    def part(self, start: int, stop: int) -> Entries:
        """Those from `start` on, up to `stop`."""
        return Entries(self.ts[start:stop], self.offsets[start:stop], self.lengths[start:stop], self.flags[start:stop])

    def as_lists(self) -> segment_columns.Columns:
        return segment_columns.Columns(
            self.ts.tolist(), self.offsets.tolist(), self.lengths.tolist(), self.flags.tolist()
        )


def read_entries(idx: bytes, first: int, count: int) -> Entries:
    """`count` entries of an index, from number `first` on."""
    table = np.frombuffer(idx, _ENTRY, count, first * ENTRY_LEN)
    offsets, lengths, ts, flags = (table[name].astype(np.int64) for name in ("offset", "len", "ts", "flags"))
    return Entries(ts, offsets, lengths, flags)


def extent(entries: Entries, data_bytes: int, idx_path: str, first_entry_at: int) -> tuple[Ints, int]:
    """As `segment_columns.extent`."""
    framed = np.flatnonzero(entries.lengths)
    if not len(framed):
        return np.zeros(len(entries.lengths), np.int64), 0
    ends = entries.offsets[framed[0]] + np.cumsum(entries.lengths)
    starts = ends - entries.lengths
    end = int(ends[-1])
    if end > data_bytes or (starts[framed] != entries.offsets[framed]).any():
        segment_columns.extent(entries.as_lists(), data_bytes, idx_path, first_entry_at)
        raise AssertionError("one of them lies elsewhere")
    return starts, end


def check_frames(path: str, buffer: bytes, base: int, first_seq: int, entries: Entries, starts: Ints) -> None:
    """As `segment_columns.check_frames`."""
    live = np.flatnonzero(entries.flags & LOCATION_GONE == 0)
    if not len(live):
        return
    of_live = Entries(*(column[live] for column in entries))
    if not _are_whole(buffer, first_seq + live, of_live, starts[live]):
        segment_columns.check_frames(path, buffer, base, first_seq, entries.as_lists(), starts.tolist())
        raise AssertionError("one of them differs")


def _are_whole(buffer: bytes, seqs: Ints, entries: Entries, starts: Ints) -> bool:
    if entries.lengths.min() < HEADER_LEN + TAIL_LEN:
        return False
    checksums_at = starts + entries.lengths - TAIL_LEN
    bodies = map(buffer.__getitem__, map(slice, (starts + _CHECKED_FROM).tolist(), checksums_at.tolist()))
    digests = np.fromiter(map(xxh3_64_intdigest, bodies), np.uint64, len(seqs))
    frames = headers(buffer, starts)
    return bool(
        (digests == at(buffer, _CHECKSUM, checksums_at)).all()
        and (frames["seq"] == seqs.astype(np.uint64)).all()
        and (frames["ts"] == entries.ts.astype(np.uint64)).all()
        and (_LOCATION_FLAGS[frames["flags"]] == entries.flags).all()
    )


def headers(buffer: bytes, starts: Ints) -> npt.NDArray[np.void]:
    """The fixed part of each frame: flags, seq, ts, node_len, tag_len, data_len."""
    return at(buffer, _FRAME, starts)


def marks(buffer: bytes, ends: Ints) -> Bytes8:
    """The del byte of each frame that ends there."""
    return at(buffer, _BYTE, ends - 1)


def at(buffer: bytes, kind: np.dtype[Kind], places: Ints) -> npt.NDArray[Kind]:
    """A value of this kind at each of these places, which need not be aligned."""
    count = len(buffer) - kind.itemsize + 1
    whole: npt.NDArray[Kind] = np.ndarray((max(0, count),), kind, buffer, strides=(1,))
    return whole[places]
