"""The log file: what surrounds the frames of one `wal-<20 digits>.log`. Version 2.

    ┌────────────┬──────────────────────────────────────────────────┬──────────┬─────────────────────┐
    │ FILE_START │ groups of writes, SYNC_MARKs between them        │ FILE_END │ zeros, never written │
    └────────────┴──────────────────────────────────────────────────┴──────────┴─────────────────────┘

    FILE_START  msgpack map, the fields of `FileStart`. Every file has a durable one before it gets its name.
    SYNC_MARK   topic_id = file_no, seq = offset: every byte below that offset was on the disk before the mark was
                written. What is damaged below a mark is corruption, never a torn tail.
    FILE_END    topic_id = file_no, seq = its own offset. Durable before the next file gets its first write. The active
                file has none, nor has a file whose sync failed: the next file's `previous_end` says where that one
                ends, whatever lies behind.

A write (frames up to one without FLAG_MORE) and a group of writes never span two files. CURRENT holds the name of the
active file and a newline; a file after it exists at most as a spare: FILE_START and zeros.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from topics.storage import layout
from topics.storage.filesystem import FileSystem, read_all
from topics.storage.frame import Bytes, Frame, FrameType, encode, read_frame

LOG_VERSION: Final = 2
Preallocate = Literal["zero", "none"]

_ZEROS: Final = bytes(1 << 20)
_FILE_START_MAX_BYTES: Final = 4096


class WalIdentity(msgspec.Struct, frozen=True):
    """Whose log it is, and which boot of the machine writes it."""

    shard: int
    shards: int
    boot_id: str


class FileStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first frame of a file. `log_id` is random and the same in all files of a group: a file that strayed in
    from another log is found out.
    """

    version: int
    log_id: int
    file_no: int
    shard: int
    shards: int
    boot_id: str
    previous_end: int | None = None


class WalEnd(msgspec.Struct, frozen=True):
    """Where a recovered log goes on: everything before it is valid and on the disk, everything behind it is zeros."""

    file_no: int
    offset: int
    log_id: int
    boot_id: str
    """The boot that made the file, see `WalWriter`."""


class WalPosition(msgspec.Struct, frozen=True, order=True):
    """Between two frames of a log: `offset` bytes into file `file_no`."""

    file_no: int
    offset: int


class _Versioned(msgspec.Struct):
    version: int


class RefusedLog(Exception):  # noqa: N818 — named for what it is
    """The log cannot be used as it is; starting would lose or misread data. `.path` is the file."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class UnknownLogVersion(RefusedLog):
    """Written by another release, in a format that this one does not know."""

    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            path,
            f"{path}: log format version {version} is unknown (this release reads version {LOG_VERSION}); "
            f"start the release that wrote it, or point TOPICS_DATA_DIR elsewhere",
        )
        self.version = version


class NotALogFile(ValueError):  # noqa: N818
    """The bytes do not begin with a FILE_START."""


def file_start_frame(start: FileStart) -> bytes:
    return encode(FrameType.FILE_START, 0, 0, 0, 0, b"", b"", msgspec.msgpack.encode(start))


def file_end_frame(file_no: int, offset: int) -> bytes:
    return encode(FrameType.FILE_END, 0, file_no, offset, 0, b"", b"", b"")


def sync_mark_frame(file_no: int, synced_offset: int) -> bytes:
    return encode(FrameType.SYNC_MARK, 0, file_no, synced_offset, 0, b"", b"", b"")


FILE_END_LEN: Final = len(file_end_frame(0, 0))


def parse_file_start(path: str, buffer: Bytes) -> tuple[FileStart, int]:
    """The FILE_START that `buffer` begins with and its length. Raises NotALogFile or UnknownLogVersion."""
    frame = read_frame(buffer, 0, min(len(buffer), _FILE_START_MAX_BYTES))
    if not isinstance(frame, Frame):
        raise NotALogFile(frame.defect.value)
    if frame.type != FrameType.FILE_START:
        raise NotALogFile(f"begins with a frame of type {frame.type}")
    try:
        version = msgspec.msgpack.decode(frame.data, type=_Versioned).version
        if version != LOG_VERSION:
            raise UnknownLogVersion(path, version)
        return msgspec.msgpack.decode(frame.data, type=FileStart), frame.total_len
    except msgspec.DecodeError as error:
        raise NotALogFile(f"FILE_START does not decode: {error}") from error


def read_first_start(fs: FileSystem, directory: str) -> FileStart | None:
    """The FILE_START of the first file that the log still has, None without any. `.log_id` tells which log it is.

    Raises NotALogFile, UnknownLogVersion or OSError.
    """
    numbers = layout.list_log_files(fs, directory)
    if not numbers:
        return None
    path = layout.log_path(directory, numbers[0])
    fd = fs.open(path, os.O_RDONLY)
    try:
        return parse_file_start(path, fs.pread(fd, _FILE_START_MAX_BYTES, 0))[0]
    finally:
        fs.close(fd)


def create_log_file(
    fs: FileSystem, directory: str, file_no: int, content: Bytes, size_bytes: int, preallocate: Preallocate
) -> None:
    """Makes the file, durably, with `content` at its beginning; it exists under its name only when all of it is there.

    "zero" writes the whole space: syncing overwritten space costs no journal commit, unlike space that is merely
    reserved. "none" leaves it a hole. Replaces a file of that name. Raises OSError and leaves nothing then.
    """
    path = layout.log_path(directory, file_no)
    tmp_path = path + layout.TMP_SUFFIX
    fd = fs.open(tmp_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            if preallocate == "zero":
                fs.fallocate(fd, 0, size_bytes)  # a full disk says so here, before a single byte is written
                _write_zeros(fs, fd, len(content), size_bytes)
            else:
                fs.ftruncate(fd, size_bytes)
            write_fully(fs, fd, [content], 0)
            fs.fdatasync(fd)
        finally:
            fs.close(fd)
        fs.rename(tmp_path, path)
    except OSError:
        _try_unlink(fs, tmp_path)
        raise
    fs.fsync_dir(directory)


def write_fully(fs: FileSystem, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
    """One vectored write; a short one is an error, since the space is reserved (OSError EIO)."""
    length = sum(map(len, buffers))
    written = fs.pwritev(fd, buffers, offset)
    if written != length:
        raise OSError(5, f"short write: {written} of {length} bytes")


def _write_zeros(fs: FileSystem, fd: int, start: int, end: int) -> None:
    zeros = memoryview(_ZEROS)
    while start < end:
        step = min(len(zeros), end - start)
        write_fully(fs, fd, [zeros[:step]], start)
        start += step


def erase_behind(fs: FileSystem, fd: int, offset: int, size_bytes: int) -> None:
    """Makes everything from `offset` on zeros again. Raises OSError.

    By giving the space up and taking it back: a process that is killed while it overwrites may leave valid frames
    behind a hole, which would be read as corruption; shortening a file happens at once or not at all. Readers may have
    mapped the whole file, but none touches a byte behind the last published frame.
    """
    fs.ftruncate(fd, offset)
    fs.ftruncate(fd, size_bytes)


def write_current(fs: FileSystem, directory: str, file_no: int) -> None:
    """Makes CURRENT name the file, durably and atomically. Raises OSError; CURRENT is the old or the new one then."""
    path = os.path.join(directory, layout.CURRENT_NAME)
    tmp_path = path + layout.TMP_SUFFIX
    fd = fs.open(tmp_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(fs, fd, [layout.log_name(file_no).encode() + b"\n"], 0)
        fs.fdatasync(fd)
    finally:
        fs.close(fd)
    fs.rename(tmp_path, path)
    fs.fsync_dir(directory)


def read_current(fs: FileSystem, directory: str) -> int | None:
    """The number of the file that CURRENT names, None when there is no CURRENT. Raises RefusedLog for other content."""
    path = os.path.join(directory, layout.CURRENT_NAME)
    if not fs.exists(path):
        return None
    content = read_all(fs, path)
    file_no = layout.log_file_no(content.removesuffix(b"\n").decode("ascii", "replace"))
    if file_no is None:
        raise RefusedLog(
            path, f"{path}: holds {content[:64]!r} instead of a log file's name; put the last file's name into it"
        )
    return file_no


def _try_unlink(fs: FileSystem, path: str) -> None:
    try:
        fs.unlink(path)
    except OSError:
        return  # the error that brought us here is the one to report; recovery removes the leftover
