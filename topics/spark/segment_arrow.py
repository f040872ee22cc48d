"""Frames of a segment into Arrow arrays, many at a time: nothing here costs Python a step for each record but what has
no form for all of them at once (`meta`). The format is `storage/segment.py`'s; what comes here has been checked there.

Everything of a run of frames lies in one buffer. An Arrow array of binaries over that buffer, whose offsets are the
borders of the parts of all frames, has each part as an element; `take` copies those that are wanted out of it:

    … | node | tag | "data": | data | ,"meta":… checksum del, next header | node | …
        5n     5n+1  5n+2      5n+3   5n+4
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from topics.spark.meta_arrow import meta_array
from topics.spark.segment_frames import Ints, headers, marks
from topics.storage.frame import FLAG_META, FLAG_NODE, FLAG_TAG
from topics.storage.segment import DELETED, HEADER_LEN, TAIL_LEN

_PARTS: Final = 5
_DATA_KEY_LEN: Final = len(b'"data":')
_META_KEY: Final = b',"meta":'
_META_BEGINS: Final = b',"meta":{'
_decode_metas = msgspec.json.Decoder(list[dict[str, Any]]).decode


class Records(NamedTuple):
    """Columns of records in the order of their seqs."""

    seq: pa.Array
    ts_ms: pa.Array
    node: pa.Array
    tag: pa.Array
    data: pa.Array
    """JSON text"""
    meta: pa.Array


class InconsistentLengthsError(Exception):
    """`.number`: of the first frame whose parts do not add up to its length."""

    def __init__(self, number: int) -> None:
        super().__init__(f"frame {number}")
        self.number = number


def not_deleted(buffer: bytes, starts: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
    """Which frames are not marked deleted in the data."""
    alive: npt.NDArray[np.bool_] = marks(buffer, starts + lengths) != DELETED
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
    """The records of these frames, which begin at `starts` in `buffer`; without those whose tag is not in `tags` (None:
    all are wanted) and those of the node `not_node`. Raises InconsistentLengthsError.
    """
    frames = headers(buffer, starts)
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
    # Arrow believes what it is told of offsets.
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
