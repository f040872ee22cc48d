"""What a sink has committed (api §6): its latest batch, and the stages of it as long as they are not all published.

  0       4         6         8          16      24              32
  ┌───────┬─────────┬─────────┬──────────┬───────┬───────────────┬───────────────────────────────────────┬──────────┐
  │ magic │ version │ zero    │ body_len │ batch │ pending_count │ body, msgpack:                        │ checksum │
  │ TSNK  │ u16     │ u16     │ u64      │ u64   │ u64           │ [sink str, [[stage str, topic str]…]] │ u64      │
  └───────┴─────────┴─────────┴──────────┴───────┴───────────────┴───────────────────────────────────────┴──────────┘
    checksum = XXH3-64 of everything before it; integers little-endian

One file a sink, `<xxh3-128 of its name, 32 hex>.sink`, written by the shard that owns the name (as if it were a
topic's) and replaced as a whole. A batch is decided once the file that names its stages is on the disk, and over once
the file without them is: whoever finds `pending` publishes those that are not published yet. A stage is published only
while its batch is decided and not over, which other shards see in the first 32 bytes.
"""

from __future__ import annotations

import os
import re
from struct import Struct
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from topics.storage.filesystem import FileSystem

VERSION: Final = 1
_HEADER: Final = Struct("<4sHHQQQ")
_MAGIC: Final = b"TSNK"
_CHECKSUM: Final = Struct("<Q")
_NAME: Final = re.compile(r"[0-9a-f]{32}\.sink")


class SinkDamagedError(Exception):
    """The file is not what was written; the message says how."""


class Sink(msgspec.Struct, frozen=True):
    """`pending` is (stage, topic) of everything the batch publishes, empty when that is done."""

    sink: str
    batch: int
    pending: list[tuple[str, str]]


_Body = tuple[str, list[tuple[str, str]]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode
HEAD_LEN: Final = _HEADER.size


def sink_name(sink: str) -> str:
    """The name of its file."""
    return f"{xxh3_128_hexdigest(sink.encode())}.sink"


def is_sink_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def encode_sink(sink: Sink) -> bytes:
    body = _encode((sink.sink, sink.pending))
    content = _HEADER.pack(_MAGIC, VERSION, 0, len(body), sink.batch, len(sink.pending)) + body
    return content + _CHECKSUM.pack(xxh3_64_intdigest(content))


def decode_head(head: bytes) -> tuple[int, int]:
    """(batch, pending_count) from the first HEAD_LEN bytes, without the checksum: the owner looks at that."""
    if len(head) < _HEADER.size:
        raise SinkDamagedError(f"it has only {len(head)} bytes")
    magic, version, _zero, _body_len, batch, pending_count = _HEADER.unpack_from(head)
    if magic != _MAGIC or version != VERSION:
        raise SinkDamagedError(f"it begins with {magic!r}, version {version}; this program knows version {VERSION}")
    return batch, pending_count


def read_head(fs: FileSystem, directory: str, sink: str) -> tuple[int, int]:
    """(batch, pending_count) of a sink, by whoever; (0, 0) without a file. Raises OSError, SinkDamagedError."""
    try:
        fd = fs.open(os.path.join(directory, sink_name(sink)), os.O_RDONLY)
    except FileNotFoundError:
        return 0, 0
    try:
        return decode_head(fs.pread(fd, HEAD_LEN, 0))
    finally:
        fs.close(fd)


def decode_sink(content: bytes) -> Sink:
    """SinkDamagedError when it is not whole or its checksum is wrong."""
    batch, pending_count = decode_head(content)
    body_len = _HEADER.unpack_from(content)[3]
    whole_len = _HEADER.size + body_len + _CHECKSUM.size
    if len(content) != whole_len:
        raise SinkDamagedError(f"it has {len(content)} bytes, its header says {whole_len}")
    (checksum,) = _CHECKSUM.unpack_from(content, whole_len - _CHECKSUM.size)
    if xxh3_64_intdigest(content[: -_CHECKSUM.size]) != checksum:
        raise SinkDamagedError("its checksum is wrong")
    try:
        name, pending = _decode(content[_HEADER.size : -_CHECKSUM.size])
    except msgspec.DecodeError as error:
        raise SinkDamagedError(f"its body is not that of a sink: {error}") from None
    if len(pending) != pending_count:
        raise SinkDamagedError(f"it has {len(pending)} stages, its header says {pending_count}")
    return Sink(name, batch, pending)
