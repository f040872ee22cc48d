"""The log file `wal-<20 digits>.log`, with the frames that are about the file and not about a topic. Version 2.

    ┌────────────┬──────────────────────────────────────────────────┬──────────┬─────────────────────┐
    │ FILE_START │ groups of writes, SYNC_MARKs between them        │ FILE_END │ zeros, never written │
    └────────────┴──────────────────────────────────────────────────┴──────────┴─────────────────────┘

    FILE_START  msgpack map, the fields of `FileStart`. It is durable before the file gets its name.
    SYNC_MARK   topic_id = file_no, seq = offset: every byte below that offset was on the disk before the mark was
                written. Damage below a mark is corruption, never a torn tail.
    FILE_END    topic_id = file_no, seq = its own offset. It is durable before the next file gets its first write. The
    active file has none. A file whose sync failed has none either: it ends at the `previous_end` of the next
    file, and nobody reads the bytes behind that.

A write (frames up to one without FLAG_MORE) and a group of writes never span two files. CURRENT holds the name of the
active file and a newline. The only file that may come after it is a spare: FILE_START and zeros.

COMMITTED says how far the log went when its writer stopped: "wal-<20 digits>.log <offset>", padded to a line of 64
bytes. It is blank while a writer is at work, so it stays blank after a power loss and in a copy of a running service. A
log surely has its end only if it reaches the place in COMMITTED. The writer overwrites it in place: that needs no room.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from topics.storage import layout
from topics.storage.filesystem import FileSystem, new_file, opened, read_all, read_up_to, replace_file
from topics.storage.frame import CHECKSUM_LEN, HEADER_LEN, Bytes, Defect, FrameType, encode, scan

LOG_VERSION: Final = 2
Preallocate = Literal["zero", "none"]

_ZEROS: Final = bytes(1 << 20)
_FILE_START_MAX_BYTES: Final = 4096
_LOOK_BYTES: Final = 1 << 18


class WalIdentity(msgspec.Struct, frozen=True):
    """The shard that owns a log, the shard count, and the boot of the machine that writes the log."""

    shard: int
    shards: int
    boot_id: str


class FileStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first frame of a file. `log_id` is random and the same in all files of a log, so a foreign file shows."""

    version: int
    log_id: int
    file_no: int
    shard: int
    shards: int
    boot_id: str
    previous_end: int | None = None


class WalEnd(msgspec.Struct, frozen=True):
    """The end of a recovered log: everything before it is valid and on the disk, everything behind it is zeros."""

    file_no: int
    offset: int
    log_id: int
    boot_id: str
    """The boot in which the file was made, see `WalWriter`."""


class WalPosition(msgspec.Struct, frozen=True, order=True):
    """A place between two frames of a log: `offset` bytes into file `file_no`. As a `word` it is in shared memory."""

    file_no: int
    offset: int

    @classmethod
    def of_word(cls, word: int) -> WalPosition:
        return cls(word >> 32, word & 0xFFFF_FFFF)

    @property
    def word(self) -> int:
        return self.file_no << 32 | self.offset


class _Versioned(msgspec.Struct):
    version: int


class RefusedLog(Exception):  # noqa: N818 — named for what it is
    """The log cannot be used as it is: a start would lose or misread data. `.path` is the file."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


class UnknownLogVersion(RefusedLog):
    """Another release wrote the log, in a format that this one does not know."""

    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            path,
            f"log format version {version} is unknown (this release reads version {LOG_VERSION}); start the release "
            f"that wrote it, or point TOPICS_DATA_DIR elsewhere",
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


def find_file_end(fs: FileSystem, fd: int, file_no: int) -> int | None:
    """Return the offset behind the FILE_END of a file, None if it has none. FILE_END is the last frame before the zeros
    that were never written.
    """
    size_bytes = fs.size_bytes(fd)
    at, written = size_bytes, b""
    while at and not written:
        step = min(_LOOK_BYTES, at)
        at -= step
        written = read_up_to(fs, fd, step, at).rstrip(b"\0")
    written_end = at + len(written)
    for end in range(written_end, min(written_end + CHECKSUM_LEN, size_bytes) + 1):  # a checksum may end with zeros
        offset = end - FILE_END_LEN
        if offset >= 0 and read_up_to(fs, fd, FILE_END_LEN, offset) == file_end_frame(file_no, offset):
            return end
    return None


_decode_version = msgspec.msgpack.Decoder(_Versioned).decode  # before any thread, see `archive_objects.py`
_decode_start = msgspec.msgpack.Decoder(FileStart).decode


def parse_file_start(path: str, buffer: Bytes) -> tuple[FileStart, int]:
    """Return the FILE_START that `buffer` begins with, and its length. Raise NotALogFile or UnknownLogVersion."""
    frames, end, defect = scan(buffer, 0, min(len(buffer), _FILE_START_MAX_BYTES), limit=1)
    if not frames:
        raise NotALogFile((defect or Defect.EMPTY).value)
    type_ = frames[0][2]
    if type_ != FrameType.FILE_START:
        raise NotALogFile(f"begins with a frame of type {type_}")
    body = buffer[HEADER_LEN : end - CHECKSUM_LEN]
    try:
        version = _decode_version(body).version
        if version != LOG_VERSION:
            raise UnknownLogVersion(path, version)
        return _decode_start(body), end
    except msgspec.DecodeError as error:
        raise NotALogFile(f"FILE_START does not decode: {error}") from error


def read_file_start(fs: FileSystem, path: str) -> tuple[FileStart, int]:
    """Return the FILE_START of a file, and its length. Raise NotALogFile, UnknownLogVersion or OSError."""
    with opened(fs, path, os.O_RDONLY) as fd:
        return parse_file_start(path, fs.pread(fd, _FILE_START_MAX_BYTES, 0))


def read_first_start(fs: FileSystem, directory: str) -> FileStart | None:
    """Return the first readable FILE_START in a log, None if the log has no file. Its `log_id` identifies the log. An
    unreadable file before it may be one that nobody needs any more (recovery decides that), or may just be removed.
    Raise NotALogFile, UnknownLogVersion or OSError.
    """
    unread: NotALogFile | FileNotFoundError | None = None
    for number in layout.list_log_files(fs, directory):
        try:
            return read_file_start(fs, layout.log_path(directory, number))[0]
        except (NotALogFile, FileNotFoundError) as error:
            unread = unread or error
    if unread is not None:
        raise unread
    return None


def create_log_file(
    fs: FileSystem, directory: str, file_no: int, content: Bytes, size_bytes: int, preallocate: Preallocate
) -> None:
    """Make the file durably, or replace it, with `content` at its beginning; it gets its name once all of it is there.

    "zero" writes the whole space, because a sync of overwritten space needs no journal commit, unlike a sync of space
    that is only reserved. "none" leaves a hole. If this raises OSError, it leaves no file.
    """
    with new_file(fs, layout.log_path(directory, file_no), os.O_RDWR) as fd:
        if preallocate == "zero":
            fs.fallocate(fd, 0, size_bytes)  # a full disk fails here, before any byte is written
            _write_zeros(fs, fd, len(content), size_bytes)
        else:
            fs.ftruncate(fd, size_bytes)
        write_fully(fs, fd, [content], 0)
    fs.fsync_dir(directory)


def write_fully(fs: FileSystem, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
    """Write all buffers with one call. Raise OSError after a short write, with the error of writing the rest or EIO."""
    length = sum(map(len, buffers))
    written = fs.pwritev(fd, buffers, offset)
    if written != length:
        fs.pwritev(fd, [b"".join(buffers)[written:]], offset + written)
        raise OSError(5, f"short write: {written} of {length} bytes")


def _write_zeros(fs: FileSystem, fd: int, start: int, end: int) -> None:
    zeros = memoryview(_ZEROS)
    while start < end:
        step = min(len(zeros), end - start)
        write_fully(fs, fd, [zeros[:step]], start)
        start += step


def map_file(path: str) -> mmap.mmap:
    """Map a log file whole and read-only. Raise OSError, and EOFError if it is empty."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise EOFError(f"{path} is empty") from error
    finally:
        os.close(fd)


def erase_behind(fs: FileSystem, fd: int, offset: int, size_bytes: int) -> None:
    """Make everything from `offset` on zeros again, by cutting the file and extending it. Raise OSError.

    Overwriting with zeros would be unsafe: a kill in its middle would leave valid frames behind a hole, which recovery
    takes for corruption. A cut happens completely or not at all. Readers may have mapped the whole file, but none reads
    a byte behind the last published frame.
    """
    fs.ftruncate(fd, offset)
    fs.ftruncate(fd, size_bytes)


def write_current(fs: FileSystem, directory: str, file_no: int) -> None:
    """Make CURRENT name the file, durably and atomically. Raise OSError; CURRENT is the old or the new one then."""
    replace_file(fs, os.path.join(directory, layout.CURRENT_NAME), layout.log_name(file_no).encode() + b"\n")


def note_committed(fs: FileSystem, directory: str, position: WalPosition | None) -> None:
    """Write durably to COMMITTED where the log ends, or a blank line (None) before the log goes on. Raise OSError."""
    path = os.path.join(directory, layout.COMMITTED_NAME)
    is_new = not fs.exists(path)
    text = "" if position is None else f"{layout.log_name(position.file_no)} {position.offset}"
    with opened(fs, path, os.O_RDWR | os.O_CREAT) as fd:
        write_fully(fs, fd, [f"{text:63}\n".encode()], 0)
        fs.fdatasync(fd)
    if is_new:
        fs.fsync_dir(directory)


def is_at_work(fs: FileSystem, directory: str) -> bool:
    """Return whether COMMITTED exists and is blank: a writer is at work, or was when it stopped."""
    path = os.path.join(directory, layout.COMMITTED_NAME)
    return fs.exists(path) and not read_all(fs, path).strip()


def read_committed(fs: FileSystem, directory: str) -> WalPosition | None:
    """Return the place that COMMITTED names, None if it names none."""
    path = os.path.join(directory, layout.COMMITTED_NAME)
    if not fs.exists(path):
        return None
    name, _, offset = read_all(fs, path).decode("ascii", "replace").strip().partition(" ")
    file_no = layout.log_file_no(name)
    return WalPosition(file_no, int(offset)) if file_no is not None and offset.isdecimal() else None


def read_current(fs: FileSystem, directory: str) -> int | None:
    """Return the number of the file that CURRENT names, None without CURRENT. Raise RefusedLog for other content."""
    path = os.path.join(directory, layout.CURRENT_NAME)
    if not fs.exists(path):
        return None
    content = read_all(fs, path)
    file_no = layout.log_file_no(content.removesuffix(b"\n").decode("ascii", "replace"))
    if file_no is None:
        why = f"holds {content[:64]!r} instead of a log file's name; put the last file's name into it"
        raise RefusedLog(path, why)
    return file_no
