"""Records as they are served: from frames in a log file to the JSON objects of an answer.

A frame's payload already is the JSON that the client gets, so a record is three texts put together: its numbers, its
node and tag if it has them, its payload. The common page, without node, tag, meta or deletions, is one loop of a
slice and a comparison for each record and one formatting for all of them (`bench diff`).
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

from topics.core.topic import LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST
from topics.frontend.log_files import LogFiles
from topics.shm.arena import Locations
from topics.storage.frame import (
    CHECKSUM,
    CHECKSUM_LEN,
    HEADER_LEN,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    OVERHEAD_LEN,
)

_IDENTITY: Final = Struct("<I2xQQ")
"""frame_len, topic_id, seq of a frame."""
_HEADER: Final = Struct("<I2xQQ8xHH4x")
"""frame_len, topic_id, seq, node_len, tag_len."""
_LENGTH_FIELD_LEN: Final = 4
_META: Final = b',"meta":{'
_DATA_KEY_LEN: Final = len('"data":')
_META_KEYS_LEN: Final = len('"data":,"meta":')
_FLAGS_SHIFT: Final = 32
_FILE_KEY: Final = 0xFFFF_FFFF | LOCATION_IN_RAM_LOG << _FLAGS_SHIFT
"""What of an entry's file_flags says which file it is."""


class MismatchError(Exception):
    """A frame is not the one its location promises: the location is out of date, or the file is damaged."""


class CorruptRecordError(Exception):
    """A frame is the one that was looked for, and its bytes are not those that were written."""

    def __init__(self, seq: int, file: str, offset: int) -> None:
        super().__init__(f"record {seq}: {file}, offset {offset}")
        self.seq = seq
        self.file = file
        self.offset = offset


class PageOptions(NamedTuple):
    """What a reader wants: `nodes` are the writers whose records it does not want back (api §4), None for all.
    `extras` are members to add to the records of these seqs, each with a comma before it. `payload_bytes`: of the byte
    budget only data and meta count; `verify`: checksums are looked at (CorruptRecordError).
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


class Rendered(msgspec.Struct, frozen=True, gc=False):
    """JSON objects joined by commas; `examined` is how many locations were looked at, `full` that a bound of the
    options ended it, `lost` that a lost record did (it is not among those examined).
    """

    body: bytes
    count: int
    size_bytes: int
    examined: int
    full: bool
    lost: bool


class Source(NamedTuple):
    """Where the frames of one topic are."""

    files: LogFiles
    shard: int
    topic_id: int


def render(
    source: Source, first_seq: int, locations: Locations, options: PageOptions, count: int, size_bytes: int
) -> Rendered:
    """The records at `locations` (consecutive seqs from `first_seq`) as far as the options allow, `count` and
    `size_bytes` of which are used up already. Raises MismatchError, FileNotFoundError, EOFError.
    """
    plain = max(locations.file_flags) >> _FLAGS_SHIFT <= LOCATION_IN_RAM_LOG
    special = options.extras is not None or options.payload_bytes or options.verify
    if plain and options.include_data and not special:
        return _render_plain(source, first_seq, locations, options, count, size_bytes)
    return _render_any(source, first_seq, locations, options, count, size_bytes)


def _render_plain(
    source: Source, first_seq: int, locations: Locations, options: PageOptions, count: int, size_bytes: int
) -> Rendered:
    """Records without node, tag and meta, none deleted or lost."""
    totals = list(accumulate([offset_len >> 32 for offset_len in locations.offset_len], initial=size_bytes))
    take = max(0, min(bisect_right(totals, options.max_batch_bytes) - 1, options.limit - count))
    if take == 0 and count == 0:
        take = 1
    examined = len(locations.ts)
    arguments: list[int | bytes] = []
    unpack = _IDENTITY.unpack_from
    topic_id = source.topic_id
    seq = first_seq
    start = 0
    while start < take:
        file_flags = locations.file_flags[start]
        stop = start + 1
        while stop < take and locations.file_flags[stop] == file_flags:
            stop += 1
        offset_lens = locations.offset_len[start:stop]
        # Within a file offsets grow with the seq: where the last frame ends, all do.
        end = (offset_lens[-1] & 0xFFFF_FFFF) + (offset_lens[-1] >> 32)
        file = source.files.get(source.shard, bool(file_flags >> _FLAGS_SHIFT), file_flags & 0xFFFF_FFFF, end)
        for offset_len, ts in zip(offset_lens, locations.ts[start:stop], strict=True):
            offset = offset_len & 0xFFFF_FFFF
            end = offset + (offset_len >> 32)
            if unpack(file, offset) != (end - offset - _LENGTH_FIELD_LEN, topic_id, seq):
                raise MismatchError(f"seq {seq}, file {file_flags & 0xFFFF_FFFF}, offset {offset}")
            arguments += (seq, ts, file[offset + HEADER_LEN : end - CHECKSUM_LEN])
            seq += 1
        start = stop
    body = _template(take) % tuple(arguments)
    return Rendered(body, take, totals[take], take, take < examined, False)


def _render_any(
    source: Source, first_seq: int, locations: Locations, options: PageOptions, count: int, size_bytes: int
) -> Rendered:
    nodes = options.nodes
    shown_tag = LOCATION_HAS_TAG if options.include_tags else 0
    split_meta = 0 if options.include_data and options.include_meta else LOCATION_HAS_META
    room, room_bytes = options.limit - count, options.max_batch_bytes - size_bytes
    arguments: list[int | bytes] = []
    taken = 0
    full = lost = False
    file: mmap | bytes = b""
    file_key = -1
    topic_id = source.topic_id
    unpack = _HEADER.unpack_from
    seq = first_seq - 1
    for ts, offset_len, file_flags in zip(*locations, strict=True):
        seq += 1
        flags = file_flags >> _FLAGS_SHIFT
        if flags & (LOCATION_DELETED | LOCATION_LOST):
            if flags & LOCATION_DELETED:
                continue
            lost = True
            break
        offset = offset_len & 0xFFFF_FFFF
        length = offset_len >> 32
        end = offset + length
        if file_flags & _FILE_KEY != file_key or end > len(file):
            file_key = file_flags & _FILE_KEY
            file = source.files.get(source.shard, bool(flags & LOCATION_IN_RAM_LOG), file_flags & 0xFFFF_FFFF, end)
        frame_len, frame_topic_id, frame_seq, node_len, tag_len = unpack(file, offset)
        if frame_seq != seq or frame_topic_id != topic_id or frame_len != length - _LENGTH_FIELD_LEN:
            raise MismatchError(f"seq {seq}, file {file_flags & 0xFFFF_FFFF}, offset {offset}")
        at = offset + HEADER_LEN
        attributes = b"" if options.extras is None else options.extras.get(seq, b"")
        if flags & LOCATION_HAS_NODE:
            node = file[at : at + node_len]
            if nodes is not None and node in nodes:
                continue
            attributes += _node_member(node)
            at += node_len
        if options.payload_bytes:
            keys_len = _META_KEYS_LEN if flags & LOCATION_HAS_META else _DATA_KEY_LEN
            length -= OVERHEAD_LEN + node_len + tag_len + keys_len
        if taken == room or (length > room_bytes and count + taken > 0):
            full = True
            break
        if options.verify and CHECKSUM.unpack_from(file, end - CHECKSUM_LEN)[0] != xxh3_64_intdigest(
            file[offset + _LENGTH_FIELD_LEN : end - CHECKSUM_LEN]
        ):
            if count + taken:  # what is before it is whole; it is the next page's first
                full = True
                break
            raise CorruptRecordError(seq, f"log file {file_flags & 0xFFFF_FFFF}", offset)
        if flags & shown_tag:
            attributes += _tag_member(file[at : at + tag_len])
        payload = file[at + tag_len : end - CHECKSUM_LEN]
        if flags & split_meta:
            payload = _part(payload, options)
        elif not options.include_data:
            payload = b""
        arguments += (seq, ts, attributes, payload)
        taken += 1
        room_bytes -= length
    else:
        seq += 1
    body = _attributed_template(taken, options.include_data) % tuple(arguments)
    return Rendered(body, taken, options.max_batch_bytes - room_bytes, seq - first_seq, full, lost)


def _part(payload: bytes, options: PageOptions) -> bytes:
    """A payload without its data (then with the comma before it), its meta or both.

    Meta is an object whose values hold no object that has a `meta` of its own, so the last occurrence is its start,
    whatever `data` contains; inside a string the quotes would be escaped.
    """
    split = payload.rindex(_META)
    if options.include_data:
        return payload[:split]
    return payload[split:] if options.include_meta else b""


@lru_cache(maxsize=64)
def _template(count: int) -> bytes:
    return b",".join([b'{"$seq":%d,"$ts":%d,%b}'] * count)


@lru_cache(maxsize=64)
def _attributed_template(count: int, with_data: bool) -> bytes:
    return b",".join([b'{"$seq":%d,"$ts":%d%b,%b}' if with_data else b'{"$seq":%d,"$ts":%d%b%b}'] * count)


@lru_cache(maxsize=4096)
def _node_member(node: bytes) -> bytes:
    return b',"$node":' + msgspec.json.encode(node.decode())


@lru_cache(maxsize=4096)
def _tag_member(tag: bytes) -> bytes:
    return b',"$tag":' + msgspec.json.encode(tag.decode())
