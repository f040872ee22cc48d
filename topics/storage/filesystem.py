"""The seam between the storage code and the disk: every call that can fail, lose or tear bytes goes through here.

Production has one implementation, plain system calls. Tests have others: they fail the Nth call, cut a write short, or
stop between two calls. So the seam has only calls whose effect on a disk is defined. It has no buffered file object and
no mmap: readers map files themselves, and only read published bytes.

At its start the service tries how groups can reach a log file in the directory of the log (`choose_write_path`).
`pwritev` hands the kernel all pieces of a group in one call. If the file system does not take that, the service joins
the pieces and writes them by `pwrite`, which costs one more copy in memory. `fdatasync` follows either of them
(decision 7 says why RWF_DSYNC is not used).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import cache
from typing import Any, Final, Protocol

from topics.storage.frame import Bytes

NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Errors of a write on a disk that is full, or whose user has no more of it."""
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
_SYNCFS_REPORTS_ERRORS: Final = (5, 8)
_WRITE: Final = 2
_WRITE_AND_WAIT: Final = 7
"""Flags of sync_file_range(2)."""
_libc = ctypes.CDLL(None, use_errno=True)


def said(error: Exception) -> str:
    """Return what an error says to people: the place first, if an OSError names one, and no number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def way_to_write(error: OSError) -> str:
    """Return what lets a write succeed that failed with this error."""
    if error.errno in NO_ROOM:
        return "free some space there"
    if error.errno == errno.EROFS:
        return "mount its file system writable"
    return f"give user {os.geteuid()} write access to it"


class FileSystem(Protocol):
    """Calls raise OSError as the system does; a descriptor is an int that only this file system understands."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file; `flags` are os.O_*, and O_CLOEXEC is implied."""

    def close(self, fd: int) -> None: ...

    def size_bytes(self, fd: int) -> int: ...

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Read `length` bytes or fewer, b"" at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Write at most IOV_MAX buffers with one call; return the bytes written, which may be fewer."""

    def write_back(self, fd: int, waits: bool) -> None:
        """Have the kernel begin to write the data to the disk, so that a later `fdatasync` waits less. With `waits`
        this returns only when the kernel has tried. Only the `fdatasync` tells whether the data are on the disk.
        """

    def fdatasync(self, fd: int) -> None:
        """Put the data onto the disk, and the metadata needed to read it back (size, extents)."""

    def fsync_dir(self, path: str) -> None:
        """Make creations, renames and removals inside the directory durable."""

    def sync_all(self, path: str) -> None:
        """Sync the whole file system of `path`, files and names: one call instead of thousands. It may not report a
        failure (`syncfs_reports_errors`).
        """

    def ftruncate(self, fd: int, size_bytes: int) -> None: ...

    def free_bytes(self, path: str) -> int:
        """Return the room that the file system of `path` has left for this process."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space (ENOSPC comes here rather than later) and extend the file; new bytes read as zeros."""

    def rename(self, source: str, target: str) -> None:
        """Rename atomically; replace a file at `target`."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name. Raise FileExistsError if that is taken."""

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[str]: ...

    def exists(self, path: str) -> bool: ...


class OsFileSystem:
    """The real file system. Any number of processes may have one. `choose_write_path` explains `vectored`."""

    def __init__(self, vectored: bool = True) -> None:
        self._vectored = vectored

    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    ftruncate = staticmethod(os.ftruncate)
    fallocate = staticmethod(os.posix_fallocate)
    rmdir = staticmethod(os.rmdir)
    exists = staticmethod(os.path.exists)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return os.pwritev(fd, buffers, offset) if self._vectored else os.pwrite(fd, b"".join(buffers), offset)

    def write_back(self, fd: int, waits: bool) -> None:
        flags = _WRITE_AND_WAIT if waits else _WRITE
        _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), flags)

    def fsync_dir(self, path: str) -> None:
        with opened(self, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    def sync_all(self, path: str) -> None:
        with opened(self, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            if _libc.syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), path)

    def free_bytes(self, path: str) -> int:
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)


@contextmanager
def opened(fs: FileSystem, path: str, flags: int) -> Iterator[int]:
    """Open a file inside the block. Errors of calls with the descriptor alone get the path."""
    fd = fs.open(path, flags)
    try:
        yield fd
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise
    finally:
        fs.close(fd)


def syncfs_reports_errors(release: str) -> bool:
    """Return whether `OsFileSystem.sync_all` raises if the kernel could not write something. syncfs(2) before Linux 5.8
    reports no errors. `release` comes from `os.uname()`; one without a number counts as old.
    """
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and (int(version[1]), int(version[2])) >= _SYNCFS_REPORTS_ERRORS


def make_dirs(fs: FileSystem, path: str) -> None:
    """Make `path` and its missing parents durably: each new entry is synced into its parent."""
    if fs.exists(path):
        return
    parent = os.path.dirname(path) or "."
    make_dirs(fs, parent)
    with suppress(FileExistsError):  # another process was faster
        fs.mkdir(path)
    fs.fsync_dir(parent)


def names_in(fs: FileSystem, directory: str) -> list[str]:
    """Return the names in a directory; none if it does not exist."""
    return fs.listdir(directory) if fs.exists(directory) else []


def read_all(fs: FileSystem, path: str) -> bytes:
    """Read the whole file. Raise OSError with the path."""
    with opened(fs, path, os.O_RDONLY) as fd:
        return read_up_to(fs, fd, fs.size_bytes(fd), 0)


def read_up_to(fs: FileSystem, fd: int, length: int, offset: int) -> bytes:
    """Read `length` bytes, fewer only at the end of the file. Raise OSError."""
    pieces: list[bytes] = []
    end = offset + length
    while offset < end and (piece := fs.pread(fd, end - offset, offset)):
        pieces.append(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_all(fs: FileSystem, fd: int, content: Bytes, offset: int) -> None:
    """Write all of `content` into a file that grows. A nearly full disk may take only a part; then the next call gives
    the reason. Raise OSError; some bytes may be written then.
    """
    written = 0
    while written < len(content):
        count = fs.pwritev(fd, [memoryview(content)[written:]], offset + written)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count


def replace_file(fs: FileSystem, path: str, content: Bytes) -> None:
    """Make or replace a file durably: it gets its name only once it is whole and on the disk.

    If this raises OSError, the former file is unchanged, unless only the sync of the directory failed.
    """
    with new_file(fs, path, os.O_WRONLY) as fd:
        write_all(fs, fd, content, 0)
    fs.fsync_dir(os.path.dirname(path))


@contextmanager
def new_file(fs: FileSystem, path: str, flags: int) -> Iterator[int]:
    """Write a file inside the block, under another name; sync and rename it at the end, or remove it after an error."""
    tmp_path = path + ".tmp"
    try:
        with opened(fs, tmp_path, flags | os.O_CREAT | os.O_TRUNC) as fd:
            yield fd
            fs.fdatasync(fd)
        fs.rename(tmp_path, path)
    except BaseException:
        # The error that is being raised is the one to report; nothing reads a leftover.
        with suppress(OSError):
            fs.unlink(tmp_path)
        raise


@cache
def boot_id() -> str:
    """Return an id that changes with every boot of the machine. Bytes that a power loss tore have an earlier id."""
    with open(BOOT_ID_PATH, encoding="ascii") as file:
        return file.read().strip()


_ACCESS_MODE: Final = os.O_RDONLY | os.O_WRONLY | os.O_RDWR


class ReadOnlyFileSystem(OsFileSystem):
    """A file system that changes nothing: with it recovery reports its repairs without making them.

    Changes succeed and have no effect; a file that would be created reads as empty.
    """

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_CREAT:
            return super().open(os.devnull, os.O_RDONLY)
        return super().open(path, flags & ~_ACCESS_MODE & ~os.O_TRUNC)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return sum(map(len, buffers))

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    write_back = fdatasync = fsync_dir = sync_all = ftruncate = fallocate = rename = link = unlink = mkdir = rmdir = (
        _nothing
    )


_PROBE_NAME: Final = ".write-path.tmp"
_PIECES: Final = (b"top", b"", b"ics")


class WritePath(IntEnum):
    """The call that writes a group to its file, as the control page has it; 0 means not chosen yet."""

    PWRITEV = 1
    PWRITE = 2

    def file_system(self) -> OsFileSystem:
        """Return the file system that writes that way."""
        return OsFileSystem(vectored=self is WritePath.PWRITEV)


def choose_write_path(directory: str, candidate: FileSystem | None = None) -> WritePath:
    """Return PWRITEV if `directory` takes it and reads back the same bytes. Raise OSError if it takes no writes."""
    fs = candidate or OsFileSystem()
    make_dirs(fs, directory)
    path = os.path.join(directory, _PROBE_NAME)
    fd = fs.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        whole = b"".join(_PIECES)
        written = 0
        # The error does not matter here: the plain write that is used then reports the real one.
        with suppress(OSError):
            written = fs.pwritev(fd, _PIECES, 0)
        vectored = written == len(whole) and fs.pread(fd, len(whole), 0) == whole
    finally:
        fs.close(fd)
        fs.unlink(path)
    return WritePath.PWRITEV if vectored else WritePath.PWRITE


class DeferredSyncs:
    """A file system that collects syncs, so that a caller writes many files and syncs them all at the end.

    Call `sync` to make the collected syncs, or make one `sync_all` of `fs` instead.
    """

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._paths: dict[int, str] = {}
        self._files: dict[str, None] = {}
        self._directories: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = self._fs.open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def rename(self, source: str, target: str) -> None:
        self._fs.rename(source, target)
        if source in self._files:
            del self._files[source]
            self._files[target] = None

    def unlink(self, path: str) -> None:
        self._files.pop(path, None)
        self._fs.unlink(path)

    def fdatasync(self, fd: int) -> None:
        self._files[self._paths[fd]] = None
        self._fs.write_back(fd, waits=False)

    def fsync_dir(self, path: str) -> None:
        self._directories[path] = None

    def sync(self, synced_directories: set[str]) -> None:
        """Make the collected syncs, but skip `synced_directories`; add the others to that set. Raise OSError."""
        for path in self._files:
            with opened(self._fs, path, os.O_RDWR) as fd:
                self._fs.fdatasync(fd)
        for path in self._directories.keys() - synced_directories:
            self._fs.fsync_dir(path)
            synced_directories.add(path)
