"""A stage: records of one topic that a transaction holds back (api §6), in a file of its own until they are published.

All integers are little-endian.

  0       4         6          8       12           20
  ┌───────┬─────────┬──────────┬───────┬────────────┬───────┬──────────────────┬──────────────┬────────┬──────────┐
  │ magic │ version │ name_len │ count │ frames_len │ topic │ offset_len       │ record flags │ frames │ checksum │
  │ TSTG  │ u16     │ u16      │ u32   │ u64        │ utf8  │ u64 × count      │ u8 × count   │ bytes  │ u64      │
  └───────┴─────────┴──────────┴───────┴────────────┴───────┴──────────────────┴──────────────┴────────┴──────────┘
    offset_len = where a frame begins in `frames`, and its length << 32
    frames     = unstamped Append frames of one atomic write (`frame.py`)
    checksum   = XXH3-64 of everything before it

Written once, whole and synced before anybody hears of it (`replace_file`), never changed; its name is

    <xxh3-128 of topic, 0x00, transaction id: 32 hex>-<16 random hex>.stage

so that the stages of a transaction are found by name, and a name is guessed by nobody.
"""

from __future__ import annotations

import re
import secrets
import sys
from array import array
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from topics.storage.frame import LaidOut

VERSION: Final = 1
_HEADER: Final = Struct("<4sHHIQ")
_MAGIC: Final = b"TSTG"
_CHECKSUM: Final = Struct("<Q")
_WORD_LEN: Final = 8
_ID: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")
_SUFFIX: Final = ".stage"

if sys.byteorder != "little":
    raise ImportError("the formats of topics are little-endian, and so must be the machine")


class StageDamagedError(Exception):
    """The file is not what was written; the message says how."""


class Stage(NamedTuple):
    """The records of one write, ready to be stamped; `frames` is the reader's own copy."""

    topic: str
    offset_len: array[int]
    record_flags: bytes
    frames: bytearray


class StageHead(NamedTuple):
    """What a stage's file begins with; `size_bytes` is that of its frames."""

    topic: str
    records: int
    size_bytes: int


def new_stage_id(topic: str, txn: str) -> str:
    return f"{_group(topic, txn)}-{secrets.token_hex(8)}"


def is_stage_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def stage_name(stage_id: str) -> str:
    """The name of its file."""
    return stage_id + _SUFFIX


def stage_of_name(name: str) -> str | None:
    """The stage whose file has this name, None for any other file."""
    stage_id = name.removesuffix(_SUFFIX)
    return stage_id if name.endswith(_SUFFIX) and is_stage_id(stage_id) else None


def belongs_to_txn(stage_id: str, topic: str, txn: str) -> bool:
    return stage_id.startswith(f"{_group(topic, txn)}-")


def encode_stage(topic: str, records: LaidOut) -> bytes:
    name = topic.encode()
    content = b"".join(
        (
            _HEADER.pack(_MAGIC, VERSION, len(name), records.count, len(records.buffer)),
            name,
            records.offset_len.tobytes(),
            records.flags,
            records.buffer,
        )
    )
    return content + _CHECKSUM.pack(xxh3_64_intdigest(content))


def decode_stage(content: bytes) -> Stage:
    """StageDamagedError when it is not whole or its checksum is wrong."""
    view = memoryview(content)
    if len(content) < _HEADER.size + _CHECKSUM.size:
        raise StageDamagedError(f"it has only {len(content)} bytes")
    magic, version, name_len, count, frames_len = _HEADER.unpack_from(content)
    if magic != _MAGIC or version != VERSION:
        raise StageDamagedError(f"it begins with {magic!r}, version {version}; this program knows version {VERSION}")
    whole_len = _HEADER.size + name_len + count * (_WORD_LEN + 1) + frames_len + _CHECKSUM.size
    if len(content) != whole_len:
        raise StageDamagedError(f"it has {len(content)} bytes, its header says {whole_len}")
    (checksum,) = _CHECKSUM.unpack_from(content, whole_len - _CHECKSUM.size)
    if xxh3_64_intdigest(view[: -_CHECKSUM.size]) != checksum:
        raise StageDamagedError("its checksum is wrong")
    at = _HEADER.size
    topic = str(view[at : at + name_len], "utf-8")
    at += name_len
    offset_len = array("Q")
    offset_len.frombytes(view[at : at + count * _WORD_LEN])
    at += count * _WORD_LEN
    return Stage(topic, offset_len, bytes(view[at : at + count]), bytearray(view[at + count : at + count + frames_len]))


def decode_stage_head(head: bytes) -> StageHead:
    """From the first HEAD_LEN bytes of the file, without its checksum."""
    if len(head) < _HEADER.size:
        raise StageDamagedError(f"it has only {len(head)} bytes")
    magic, version, name_len, count, frames_len = _HEADER.unpack_from(head)
    name = head[_HEADER.size : _HEADER.size + name_len]
    if magic != _MAGIC or version != VERSION or len(name) != name_len:
        raise StageDamagedError("its beginning is not that of a stage")
    return StageHead(name.decode(), count, frames_len)


HEAD_LEN: Final = _HEADER.size + 255
"""Enough for the longest topic name."""


def _group(topic: str, txn: str) -> str:
    return xxh3_128_hexdigest(b"\x00".join((topic.encode(), txn.encode())))
