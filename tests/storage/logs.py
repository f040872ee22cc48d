"""Making small logs and reading them back."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tests.storage.faults import FaultyFileSystem
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import FrameType, encode, lay_out, stamp
from topics.storage.logfile import WalEnd, WalIdentity
from topics.storage.recovery import Recovery, Start
from topics.storage.wal import Moved, WalWriter

IDENTITY = WalIdentity(0, 1, "boot-1")
LATER_BOOT = WalIdentity(0, 1, "boot-2")
TOPIC_ID = 7
TS_MS = 1_700_000_000_000


def appends(first_seq: int, payloads: list[bytes], topic_id: int = TOPIC_ID) -> bytes:
    """One atomic write."""
    laid_out = lay_out([(b"", b"", payload, b"") for payload in payloads])
    stamp(laid_out.buffer, laid_out.offset_len, topic_id, first_seq, TS_MS, 0)
    return bytes(laid_out.buffer)


def topic_create(topic_id: int, name: str) -> bytes:
    body = msgspec.msgpack.encode({"name": name, "config": {}})
    return encode(FrameType.TOPIC_CREATE, 0, topic_id, 0, TS_MS, b"", b"", body)


class Place(NamedTuple):
    """The place of an acknowledged write."""

    file_no: int
    offset: int
    content: bytes

    def after(self, moved: Moved | None) -> Place:
        if moved is None or self.file_no != moved.file_no or not moved.start <= self.offset < moved.end:
            return self
        return Place(moved.new_file_no, self.offset - moved.start + moved.new_start, self.content)


def open_writer(
    fs: FileSystem, directory: str, end: WalEnd | None = None, identity: WalIdentity = IDENTITY, **options: Any
) -> WalWriter:
    options.setdefault("file_bytes", 4096)
    return WalWriter(fs, directory, identity, end, **options)


def commit(writer: WalWriter, *writes: bytes, sync: bool = False) -> list[Place]:
    """One group."""
    plan = writer.plan([len(write) for write in writes])
    writer.commit(plan, writes, sync)
    return [Place(plan.file_no, offset, write) for offset, write in zip(plan.offsets, writes, strict=True)]


def kill(writer: WalWriter) -> None:
    """Leave the files as SIGKILL does: descriptors are gone, nothing is synced or marked."""
    writer._active.close()


class Read(NamedTuple):
    recovery: Recovery
    content: bytes
    """All frames handed out, one after the other."""


def read_log(
    directory: str,
    identity: WalIdentity = IDENTITY,
    fs: FileSystem | None = None,
    accept_data_loss: bool = False,
    start: Start = None,
) -> Read:
    recovery = Recovery(fs or FaultyFileSystem(), directory, identity, accept_data_loss, start=start)
    pieces: list[bytes] = []
    for batch in recovery:
        pieces += [bytes(batch.buffer[offset : offset + total_len]) for offset, total_len, *_ in batch.frames]
    return Read(recovery, b"".join(pieces))


def content_at(directory: str, place: Place) -> bytes:
    with open(layout.log_path(directory, place.file_no), "rb") as file:
        file.seek(place.offset)
        return file.read(len(place.content))


def patch(directory: str, file_no: int, offset: int, replacement: bytes) -> None:
    """Damage a log file."""
    with open(layout.log_path(directory, file_no), "r+b") as file:
        file.seek(offset)
        file.write(replacement)


def file_bytes(directory: str, file_no: int) -> bytes:
    with open(layout.log_path(directory, file_no), "rb") as file:
        return file.read()
