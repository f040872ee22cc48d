"""Frames of a segment as columns (numpy) and as Arrow arrays, many at a time.

Only `meta` costs Python a step for each record. The format is that of `storage/segment.py`, which reads it without
numpy for the service. This module only detects damage; `storage/segment.py` then says what is damaged, and where.

A run of frames lies in one buffer. An Arrow array of binaries over that buffer has the borders of all parts of all
frames as its offsets. So each part is an element of the array, and `take` copies the wanted parts:

    … | node | tag | "data": | data | ,"meta":… checksum del, next header | node | …
        5n     5n+1  5n+2      5n+3   5n+4
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from topics.core.location import LOCATION_GONE
from topics.spark.columns import Records, meta_array
from topics.storage import segment
from topics.storage.frame import FLAG_META, FLAG_NODE, FLAG_TAG, LOCATION_FLAGS
from topics.storage.segment import DELETED, ENTRY, ENTRY_LEN, HEADER, HEADER_LEN, TAIL_LEN

Ints = npt.NDArray[np.int64]

Kind = TypeVar("Kind", bound=np.generic)

# The flags with their padding, which is zeros: other bytes there do not match the frame.
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


class ArrowEntries(NamedTuple):
    """Index entries of consecutive seqs, as numpy arrays; otherwise like `segment.Columns`."""

    ts: Ints
    offsets: Ints
    lengths: Ints
    flags: Ints

    def part(self, start: int, stop: int) -> ArrowEntries:
        return ArrowEntries(*(column[start:stop] for column in self))

    def as_lists(self) -> segment.Columns:
        return segment.Columns(*(column.tolist() for column in self))


def read_entries(idx: bytes, first: int, count: int) -> ArrowEntries:
    """Read `count` entries of an index, from number `first` on."""
    table = np.frombuffer(idx, _ENTRY, count, first * ENTRY_LEN)
    offsets, lengths, ts, flags = (table[name].astype(np.int64) for name in ("offset", "len", "ts", "flags"))
    return ArrowEntries(ts, offsets, lengths, flags)


def extent(entries: ArrowEntries, data_bytes: int, idx_path: str, first_entry_at: int) -> tuple[Ints, int]:
    """Return the same as `segment.extent`, or raise the same."""
    framed = np.flatnonzero(entries.lengths)
    if not len(framed):
        return np.zeros(len(entries.lengths), np.int64), 0
    ends = entries.offsets[framed[0]] + np.cumsum(entries.lengths)
    starts = ends - entries.lengths
    end = int(ends[-1])
    if end > data_bytes or (starts[framed] != entries.offsets[framed]).any():
        segment.extent(entries.as_lists(), data_bytes, idx_path, first_entry_at)
        raise AssertionError("one of them lies elsewhere")
    return starts, end


def check_frames(path: str, buffer: bytes, base: int, first_seq: int, entries: ArrowEntries, starts: Ints) -> None:
    """Check frames like `segment.check_frames`, which raises the error if there is damage."""
    live = np.flatnonzero(entries.flags & LOCATION_GONE == 0)
    if not len(live):
        return
    of_live = ArrowEntries(*(column[live] for column in entries))
    if not _are_whole(buffer, first_seq + live, of_live, starts[live]):
        segment.check_frames(path, buffer, base, first_seq, entries.as_lists(), starts.tolist())
        raise AssertionError("one of them differs")


def _are_whole(buffer: bytes, seqs: Ints, entries: ArrowEntries, starts: Ints) -> bool:
    if entries.lengths.min() < HEADER_LEN + TAIL_LEN:
        return False
    checksums_at = starts + entries.lengths - TAIL_LEN
    bodies = map(buffer.__getitem__, map(slice, (starts + _CHECKED_FROM).tolist(), checksums_at.tolist()))
    digests = np.fromiter(map(xxh3_64_intdigest, bodies), np.uint64, len(seqs))
    frames = at(buffer, _FRAME, starts)
    return bool(
        (digests == at(buffer, _CHECKSUM, checksums_at)).all()
        and (frames["seq"] == seqs.astype(np.uint64)).all()
        and (frames["ts"] == entries.ts.astype(np.uint64)).all()
        and (_LOCATION_FLAGS[frames["flags"]] == entries.flags).all()
    )


def at(buffer: bytes, kind: np.dtype[Kind], places: Ints) -> npt.NDArray[Kind]:
    """Return a value of this kind from each of these places, which need not be aligned."""
    count = len(buffer) - kind.itemsize + 1
    whole: npt.NDArray[Kind] = np.ndarray((max(0, count),), kind, buffer, strides=(1,))
    return whole[places]


_PARTS: Final = 5
_DATA_KEY_LEN: Final = len(b'"data":')
_META_KEY: Final = b',"meta":'
_META_BEGINS: Final = b',"meta":{'
_decode_metas = msgspec.json.Decoder(list[dict[str, Any]]).decode


class InconsistentLengthsError(Exception):
    """The lengths of a frame's parts do not add up to its own. `number` is the first such frame."""

    def __init__(self, number: int) -> None:
        super().__init__(f"frame {number}")
        self.number = number


def not_deleted(buffer: bytes, starts: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
    """Return for each frame whether it is not marked as deleted in the data."""
    alive: npt.NDArray[np.bool_] = at(buffer, _BYTE, starts + lengths - 1) != DELETED
    return alive


def decode(
    buffer: bytes,
    seqs: Ints,
    ts_ms: Ints,
    starts: Ints,
    lengths: Ints,
    *,
    tags: frozenset[str] | None,
    not_node: str | None,
    with_meta: bool,
) -> Records:
    """Return the records of the frames that begin at `starts` in `buffer`. Leave out records whose tag is not in `tags`
    (None: any tag will do), and those of the node `not_node`. Raise InconsistentLengthsError.
    """
    frames = at(buffer, _FRAME, starts)
    node_at = starts + HEADER_LEN
    tag_at = node_at + frames["node_len"]
    payload_at = tag_at + frames["tag_len"]
    payload_end = payload_at + frames["data_len"]
    wrong = np.flatnonzero(payload_end + TAIL_LEN != starts + lengths)
    if len(wrong):
        raise InconsistentLengthsError(int(wrong[0]))
    flags = frames["flags"]
    data_end = payload_end.copy()
    meta_numbers = np.flatnonzero(flags & FLAG_META).tolist()
    meta_ats = [buffer.rfind(_META_BEGINS, payload_at[number], payload_end[number]) for number in meta_numbers]
    data_end[meta_numbers] = meta_ats
    count = len(seqs)
    borders = np.empty(_PARTS * count + 1, np.int64)
    for part, column in enumerate((node_at, tag_at, payload_at, payload_at + _DATA_KEY_LEN, data_end)):
        borders[part:-1:_PARTS] = column
    borders[-1] = data_end[-1] if count else 0
    # Arrow does not check offsets.
    wrong = np.flatnonzero(np.diff(borders) < 0)
    if len(wrong):
        raise InconsistentLengthsError(int(wrong[0]) // _PARTS)
    parts = pa.Array.from_buffers(
        pa.large_binary(), _PARTS * count, [None, pa.py_buffer(borders.tobytes()), pa.py_buffer(buffer)]
    )
    numbers = np.arange(count) * _PARTS
    node = _taken(parts, numbers, (flags & FLAG_NODE) == 0)
    tag = _taken(parts, numbers + 1, (flags & FLAG_TAG) == 0)
    kept: Ints | None = None
    if tags is not None or not_node is not None:
        wanted = pa.array(np.ones(count, np.bool_))
        if tags is not None:
            wanted = pc.and_(wanted, pc.is_in(tag, value_set=pa.array(sorted(tags), pa.string())))
        if not_node is not None:
            wanted = pc.and_(wanted, pc.fill_null(pc.not_equal(node, not_node), True))
        kept = np.flatnonzero(wanted.to_numpy(zero_copy_only=False))
        node, tag = node.take(pa.array(kept)), tag.take(pa.array(kept))
        seqs, ts_ms, numbers = seqs[kept], ts_ms[kept], numbers[kept]
    metas: list[dict[str, Any]] = []
    if with_meta and meta_numbers:
        texts = [
            buffer[at + len(_META_KEY) : end]
            for at, end in zip(meta_ats, payload_end[meta_numbers].tolist(), strict=True)
        ]
        metas = _decode_metas(b"[" + b",".join(texts) + b"]")
    meta = meta_array(count, np.asarray(meta_numbers if metas else [], np.int64), metas)
    return Records(
        pa.array(seqs),
        pa.array(ts_ms),
        node,
        tag,
        _taken(parts, numbers + 3),
        meta if kept is None else meta.take(pa.array(kept)),
    )


def _taken(parts: pa.Array, numbers: Ints, missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    return parts.take(pa.array(numbers, mask=missing)).cast(pa.string())
