"""The files of transactions over topics (api §6): stages and sinks; docs/storage-format.md has their bytes.

A *stage* is a file with records of one topic that a transaction holds back until they are published: unstamped Append
frames of one atomic write (`frame.py`). Only the first one has a topic id: that of the topic that the records are meant
for, 0 if there was none of this name.

The coordinator writes it once and syncs it before it tells anybody the stage's id (`replace_file`). It never changes. A
dropped stage has the file time TAKEN_BACK_NS until it is removed: no batch can claim it any more. Its name is

    <xxh3-128 of topic, 0x00, transaction id: 32 hex>-<16 random hex>.stage

so the stages of a transaction can be found by name, and no client can guess a name. A commit first claims the stages:
to name and id of each it adds `-<16 hex>`, the xxh3-64 of `<sink>/<batch>`. So each stage belongs to one batch.

A *sink* is a file with the latest batch that the sink has committed, and its stages until all of them are published.
Each sink has one file, `<xxh3-128 of its name, 32 hex>.sink`. The shard that would own a topic of its name writes the
file, and replaces it as a whole. A batch is decided once a file that names its stages is on the disk. It is over once a
file without them is there. A process that finds `pending` stages publishes those that are not published yet. A stage is
published only while its batch is decided and not over; other shards see that in the first 32 bytes.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from array import array
from struct import Struct
from typing import BinaryIO, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest, xxh3_128_hexdigest

from topics.storage.filesystem import FileSystem, opened
from topics.storage.frame import CHECKSUM, IDS_AT, LaidOut, is_utf8

STAGE_VERSION: Final = 1
_STAGE_HEADER: Final = Struct("<4sHHIQ")
_STAGE_MAGIC: Final = b"TSTG"
_NAME_LEN_MAX: Final = 255
_TOPIC_ID: Final = Struct("<Q")
_WORD_LEN: Final = 8
_STAGE_ID: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")
_STAGE_NAME: Final = re.compile(r"([0-9a-f]{32}(?:-[0-9a-f]{16}){1,2})\.stage")
_UNCLAIMED_LEN: Final = 49
TAKEN_BACK_NS: Final = 0

if sys.byteorder != "little":
    raise ImportError("the formats of topics are little-endian, and so must be the machine")


class TxnFileDamagedError(Exception):
    """The file of a stage or a sink is damaged; the message says what is wrong."""


class Stage(NamedTuple):
    """The records of one write, to be stamped; `frames` is a copy that the caller may change."""

    topic: str
    offset_len: array[int]
    record_flags: bytes
    frames: bytearray


class StageHead(NamedTuple):
    """The fields at the beginning of a stage's file; `size_bytes` is the size of its frames."""

    topic: str
    records: int
    size_bytes: int
    topic_id: int


def new_stage_id(topic: str, txn: str) -> str:
    return f"{_group(topic, txn)}-{secrets.token_hex(8)}"


def is_stage_id(text: str) -> bool:
    return _STAGE_ID.fullmatch(text) is not None


def claimed_id(stage_id: str, sink: str, batch: int) -> str:
    """Return the id of a stage once this batch has claimed it."""
    return f"{unclaimed_id(stage_id)}-{xxh3_64_hexdigest(b'%b/%d' % (sink.encode(), batch))}"


def unclaimed_id(stage_id: str) -> str:
    """Return the id of a stage as the client knows it."""
    return stage_id[:_UNCLAIMED_LEN]


def stage_name(stage_id: str) -> str:
    """Return the name of a stage's file."""
    return f"{stage_id}.stage"


def can_be_decided(path: str) -> bool:
    """Return whether the stage in this file is there, and was not taken back."""
    try:
        return os.stat(path).st_mtime_ns != TAKEN_BACK_NS
    except OSError:
        return False


def stage_of_name(name: str) -> str | None:
    """Return the stage whose file has this name, None for any other file."""
    found = _STAGE_NAME.fullmatch(name)
    return None if found is None else found[1]


def belongs_to_txn(stage_id: str, topic: str, txn: str) -> bool:
    return stage_id.startswith(f"{_group(topic, txn)}-")


def encode_stage(topic: str, records: LaidOut, topic_id: int = 0) -> bytes:
    name = topic.encode()
    _TOPIC_ID.pack_into(records.buffer, IDS_AT, topic_id)
    content = b"".join(
        (
            _STAGE_HEADER.pack(_STAGE_MAGIC, STAGE_VERSION, len(name), records.count, len(records.buffer)),
            name,
            records.offset_len.tobytes(),
            records.flags,
            records.buffer,
        )
    )
    return content + CHECKSUM.pack(xxh3_64_intdigest(content))


def decode_stage(content: bytes) -> Stage:
    """Decode a whole file. Raise TxnFileDamagedError."""
    view = memoryview(content)
    if len(content) < _STAGE_HEADER.size + CHECKSUM.size:
        raise TxnFileDamagedError(f"it has only {len(content)} bytes")
    magic, version, name_len, count, frames_len = _STAGE_HEADER.unpack_from(content)
    if magic != _STAGE_MAGIC or version != STAGE_VERSION:
        raise TxnFileDamagedError(f"it begins with {magic!r}, version {version}; this release reads {STAGE_VERSION}")
    whole_len = _STAGE_HEADER.size + name_len + count * (_WORD_LEN + 1) + frames_len + CHECKSUM.size
    if defect := _defect(content, whole_len):
        raise TxnFileDamagedError(defect)
    at = _STAGE_HEADER.size
    topic = str(view[at : at + name_len], "utf-8")
    at += name_len
    offset_len = array("Q")
    offset_len.frombytes(view[at : at + count * _WORD_LEN])
    at += count * _WORD_LEN
    return Stage(topic, offset_len, bytes(view[at : at + count]), bytearray(view[at + count : at + count + frames_len]))


def topic_id_of(frames: bytes | bytearray) -> int:
    """Return the id of the topic that the frames of a stage are meant for, 0 for any of its name."""
    return int(_TOPIC_ID.unpack_from(frames, IDS_AT)[0]) if frames else 0


def read_stage_head(file: BinaryIO) -> StageHead:
    """Read the beginning of a stage's file; the checksum is not checked. Raise OSError, TxnFileDamagedError."""
    head = file.read(_STAGE_HEADER.size + _NAME_LEN_MAX)
    if len(head) < _STAGE_HEADER.size:
        raise TxnFileDamagedError(f"it has only {len(head)} bytes")
    magic, version, name_len, count, frames_len = _STAGE_HEADER.unpack_from(head)
    name = head[_STAGE_HEADER.size : _STAGE_HEADER.size + name_len]
    if magic != _STAGE_MAGIC or version != STAGE_VERSION or len(name) != name_len or not is_utf8(name):
        raise TxnFileDamagedError("its beginning is not that of a stage")
    file.seek(_STAGE_HEADER.size + name_len + count * (_WORD_LEN + 1))
    if len(frame := file.read(IDS_AT + _TOPIC_ID.size)) < IDS_AT + _TOPIC_ID.size:
        raise TxnFileDamagedError("its frames are missing")
    return StageHead(name.decode(), count, frames_len, topic_id_of(frame))


def _group(topic: str, txn: str) -> str:
    return xxh3_128_hexdigest(b"\x00".join((topic.encode(), txn.encode())))


def _defect(content: bytes, whole_len: int) -> str | None:
    """Return what is wrong with the length or the checksum of a file; None if nothing is."""
    if len(content) != whole_len:
        return f"it has {len(content)} bytes, its header says {whole_len}"
    body, checksum = memoryview(content)[: -CHECKSUM.size], content[-CHECKSUM.size :]
    return None if CHECKSUM.pack(xxh3_64_intdigest(body)) == checksum else "its checksum is wrong"


SINK_VERSION: Final = 1
_SINK_HEADER: Final = Struct("<4sHHQQQ")
_SINK_MAGIC: Final = b"TSNK"
_SINK_NAME: Final = re.compile(r"[0-9a-f]{32}\.sink")


class Sink(msgspec.Struct, frozen=True):
    """The state of a sink. `pending` has (stage, topic) of all that its batch publishes, nothing once it is over."""

    sink: str
    batch: int
    pending: list[tuple[str, str]]


_SinkBody = tuple[str, list[tuple[str, str]]]
_encode_sink_body = msgspec.msgpack.Encoder().encode
_decode_sink_body = msgspec.msgpack.Decoder(_SinkBody).decode
SINK_HEAD_LEN: Final = _SINK_HEADER.size


def sink_name(sink: str) -> str:
    """Return the name of a sink's file."""
    return f"{xxh3_128_hexdigest(sink.encode())}.sink"


def is_sink_name(name: str) -> bool:
    return _SINK_NAME.fullmatch(name) is not None


def encode_sink(sink: Sink) -> bytes:
    body = _encode_sink_body((sink.sink, sink.pending))
    content = _SINK_HEADER.pack(_SINK_MAGIC, SINK_VERSION, 0, len(body), sink.batch, len(sink.pending)) + body
    return content + CHECKSUM.pack(xxh3_64_intdigest(content))


def decode_sink_head(head: bytes) -> tuple[int, int]:
    """Return (batch, pending_count) of the first SINK_HEAD_LEN bytes, unchecked. Raise TxnFileDamagedError."""
    if len(head) < _SINK_HEADER.size:
        raise TxnFileDamagedError(f"it has only {len(head)} bytes")
    magic, version, _zero, _body_len, batch, pending_count = _SINK_HEADER.unpack_from(head)
    if magic != _SINK_MAGIC or version != SINK_VERSION:
        raise TxnFileDamagedError(f"it begins with {magic!r}, version {version}; this release reads {SINK_VERSION}")
    return batch, pending_count


def read_sink_head(fs: FileSystem, directory: str, sink: str) -> tuple[int, int]:
    """Return (batch, pending_count) of a sink; (0, 0) without a file. Raise OSError, TxnFileDamagedError."""
    try:
        with opened(fs, os.path.join(directory, sink_name(sink)), os.O_RDONLY) as fd:
            return decode_sink_head(fs.pread(fd, SINK_HEAD_LEN, 0))
    except FileNotFoundError:
        return 0, 0


def decode_sink(content: bytes, file_name: str) -> Sink:
    """Decode a whole file. Raise TxnFileDamagedError, also if it belongs to another sink than its name says."""
    batch, pending_count = decode_sink_head(content)
    body_len = _SINK_HEADER.unpack_from(content)[3]
    if defect := _defect(content, _SINK_HEADER.size + body_len + CHECKSUM.size):
        raise TxnFileDamagedError(defect)
    try:
        name, pending = _decode_sink_body(content[_SINK_HEADER.size : -CHECKSUM.size])
    except msgspec.DecodeError as error:
        raise TxnFileDamagedError(f"its body is not that of a sink: {error}") from None
    if len(pending) != pending_count:
        raise TxnFileDamagedError(f"it has {len(pending)} stages, its header says {pending_count}")
    if sink_name(name) != file_name:
        raise TxnFileDamagedError(f"it is of sink {name!r}, whose file is {sink_name(name)}")
    return Sink(name, batch, pending)
