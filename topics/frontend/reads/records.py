"""Renders records: from frames in a log file or a segment to the JSON objects of an answer.

A frame's payload is already the JSON that the client gets. The common page, without node, tag, meta or deletions, takes
one slice for each record and one formatting for all of them (`bench diff`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from mmap import mmap
from struct import Struct
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from topics.core.location import LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST
from topics.frontend.entry.responses import encode_json
from topics.storage import segment
from topics.storage.frame import (
    CHECKSUM,
    CHECKSUM_LEN,
    HEADER_LEN,
    LENGTH_FIELD_LEN,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    OVERHEAD_LEN,
)

_LENS: Final = Struct("<HH4x")
"""node_len and tag_len, the last fields before data_len of a header, in the log and in a segment alike."""
_META: Final = b',"meta":{'
_DATA_KEY_LEN: Final = len('"data":')
_META_KEYS_LEN: Final = len('"data":,"meta":')


class CorruptRecordError(Exception):
    """A frame is the right one, but its bytes are not those that were written."""

    def __init__(self, seq: int, file: str, offset: int) -> None:
        super().__init__(f"record {seq}: {file}, offset {offset}")
        self.seq = seq
        self.file = file
        self.offset = offset


class PageOptions(NamedTuple):
    """The wishes of a reader. Records of the writers `nodes` are left out (api §4). `extras` are members to add to the
    records of these seqs, each with a comma before it. With `payload_bytes` only data and meta count as bytes. With
    `verify` checksums are checked even if they were before (CorruptRecordError).
    """

    limit: int
    max_batch_bytes: int
    nodes: frozenset[bytes] | None = None
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    extras: Mapping[int, bytes] | None = None
    payload_bytes: bool = False
    verify: bool = False

    @property
    def is_plain(self) -> bool:
        """True if records that have only data are shown as they are."""
        return self.include_data and self.extras is None and not self.payload_bytes and not self.verify


class FrameKind(NamedTuple):
    """The differences between frames of the log and of segments, in bytes."""

    header_len: int
    tail_len: int
    extra_len: int
    """Bytes by which the frame is longer in the log: pages must end at the same record wherever it is."""


LOG_FRAME: Final = FrameKind(HEADER_LEN, CHECKSUM_LEN, 0)
SEGMENT_FRAME: Final = FrameKind(segment.HEADER_LEN, segment.TAIL_LEN, segment.LOG_FRAME_EXTRA_LEN)


class Run(NamedTuple):
    """Consecutive records, and the bytes of their frames. The live ones were checked to be the right ones."""

    first_seq: int
    ts: list[int]
    starts: list[int]
    """The start of each frame in `buffer`."""
    lengths: list[int]
    flags: list[int]
    buffer: bytes | mmap
    kind: FrameKind
    file_no: int = 0
    """The log file that the records are in."""
    base: int = 0
    """The start of `buffer` in that file."""


class Rendered(msgspec.Struct, frozen=True, gc=False):
    """JSON of the first `examined` records of a run: a bound (`full`), a lost record (`lost`) or the run ended it."""

    body: bytes
    count: int
    size_bytes: int
    examined: int
    full: bool
    lost: bool


def render(run: Run, options: PageOptions, count: int, size_bytes: int) -> Rendered:
    """Render the records of a run as far as the options allow. They count on from `count` and `size_bytes`."""
    if options.is_plain and max(run.flags) <= LOCATION_IN_RAM_LOG:
        return _render_plain(run, options, count, size_bytes)
    return _render_any(run, options, count, size_bytes)


def _render_plain(run: Run, options: PageOptions, count: int, size_bytes: int) -> Rendered:
    """Render records without node, tag and meta, none of which is deleted or lost."""
    first_seq, ts, starts, lengths, _, buffer, (header_len, tail_len, extra_len), *_ = run
    examined = take = len(ts)
    size_bytes += sum(lengths) + extra_len * take
    if size_bytes > options.max_batch_bytes or take > options.limit - count:
        size_bytes -= sum(lengths) + extra_len * take
        totals = list(accumulate([length + extra_len for length in lengths], initial=size_bytes))
        take = max(0, min(bisect_right(totals, options.max_batch_bytes) - 1, options.limit - count))
        if take == 0 and count == 0:
            take = 1
        size_bytes = totals[take]
        ts, starts, lengths = ts[:take], starts[:take], lengths[:take]
    arguments: list[int | bytes] = [0] * (3 * take)
    arguments[0::3] = range(first_seq, first_seq + take)
    arguments[1::3] = ts
    arguments[2::3] = [
        buffer[start + header_len : start + length - tail_len] for start, length in zip(starts, lengths, strict=True)
    ]
    return Rendered(_template(take) % tuple(arguments), take, size_bytes, take, take < examined, False)


def _render_any(run: Run, options: PageOptions, count: int, size_bytes: int) -> Rendered:
    nodes = options.nodes
    shown_tag = LOCATION_HAS_TAG if options.include_tags else 0
    split_meta = 0 if options.include_data and options.include_meta else LOCATION_HAS_META
    room, room_bytes = options.limit - count, options.max_batch_bytes - size_bytes
    arguments: list[int | bytes] = []
    taken = 0
    full = lost = False
    buffer, (header_len, tail_len, extra_len) = run.buffer, run.kind
    verify = options.verify and run.kind is LOG_FRAME  # frames of segments were verified before
    unpack = _LENS.unpack_from
    seq = run.first_seq - 1
    for ts, start, length, flags in zip(run.ts, run.starts, run.lengths, run.flags, strict=True):
        seq += 1
        if flags & (LOCATION_DELETED | LOCATION_LOST):
            if flags & LOCATION_DELETED:
                continue
            lost = True
            break
        at = start + header_len
        node_len, tag_len = unpack(buffer, at - _LENS.size)
        attributes = b"" if options.extras is None else options.extras.get(seq, b"")
        if flags & LOCATION_HAS_NODE:
            node = buffer[at : at + node_len]
            if nodes is not None and node in nodes:
                continue
            attributes += _node_member(node)
            at += node_len
        counted_len = length + extra_len
        if options.payload_bytes:
            keys_len = _META_KEYS_LEN if flags & LOCATION_HAS_META else _DATA_KEY_LEN
            counted_len -= OVERHEAD_LEN + node_len + tag_len + keys_len
        if taken == room or (counted_len > room_bytes and count + taken > 0):
            full = True
            break
        if verify and CHECKSUM.unpack_from(buffer, start + length - CHECKSUM_LEN)[0] != xxh3_64_intdigest(
            buffer[start + LENGTH_FIELD_LEN : start + length - CHECKSUM_LEN]
        ):
            if count + taken:  # return the whole records before the damaged one; it will be first in the next page
                full = True
                break
            raise CorruptRecordError(seq, f"log file {run.file_no}", run.base + start)
        if flags & shown_tag:
            attributes += _tag_member(buffer[at : at + tag_len])
        payload = buffer[at + tag_len : start + length - tail_len]
        if flags & split_meta:
            payload = _part(payload, options)
        elif not options.include_data:
            payload = b""
        arguments += (seq, ts, attributes, payload)
        taken += 1
        room_bytes -= counted_len
    else:
        seq += 1
    body = _attributed_template(taken, options.include_data) % tuple(arguments)
    return Rendered(body, taken, options.max_batch_bytes - room_bytes, seq - run.first_seq, full, lost)


def _part(payload: bytes, options: PageOptions) -> bytes:
    """Return a payload without its data (then with the comma before it), its meta or both. The values of meta hold no
    `meta` of their own, and quotes inside a string are escaped: the last occurrence is the start of meta.
    """
    split = payload.rindex(_META)
    if options.include_data:
        return payload[:split]
    return payload[split:] if options.include_meta else b""


def plain_json(seq: int, ts: int, payload: bytes) -> bytes:
    """Return a record that has only data."""
    return b'{"$seq":%d,"$ts":%d,%b}' % (seq, ts, payload)


@lru_cache(maxsize=64)
def _template(count: int) -> bytes:
    return b",".join([b'{"$seq":%d,"$ts":%d,%b}'] * count)


@lru_cache(maxsize=64)
def _attributed_template(count: int, with_data: bool) -> bytes:
    return b",".join([b'{"$seq":%d,"$ts":%d%b,%b}' if with_data else b'{"$seq":%d,"$ts":%d%b%b}'] * count)


@lru_cache(maxsize=4096)
def _node_member(node: bytes) -> bytes:
    return b',"$node":' + encode_json(node.decode())


@lru_cache(maxsize=4096)
def _tag_member(tag: bytes) -> bytes:
    return b',"$tag":' + encode_json(tag.decode())
