"""A disk that fails on cue: the Nth call of a kind, once or from then on, in a stated way."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.frame import Bytes

CHANGING_CALLS = frozenset(
    (
        *("open", "pwritev", "fdatasync", "fsync_dir", "sync_all", "ftruncate", "fallocate"),
        *("rename", "unlink", "mkdir", "rmdir"),
    )
)
"""Calls that can change what a disk holds, or that say it is there. `close` cannot fail in a way that matters here."""


class Crash(BaseException):
    """The process ends in the middle of a call; not an Exception, so that no handler keeps it alive."""


@dataclass(frozen=True)
class Fault:
    """Strikes at the `nth` call (from 1) among `calls`, and at every later one too if `always`.

    `error`: an errno; SHORT (half of a vectored write is written); CRASH (nothing of the call happens, and nothing
    after it); TORN_CRASH (half of a vectored write happens first); LATE_CRASH (the whole call happens first).
    """

    SHORT = -1
    CRASH = -2
    TORN_CRASH = -3
    LATE_CRASH = -4

    nth: int
    error: int
    always: bool = False
    calls: frozenset[str] = CHANGING_CALLS


class FaultyFileSystem:
    """The real file system but for the armed fault. Syncs are counted, not done: a test cannot see them.

    `log` holds the name of every call in CHANGING_CALLS so far.
    """

    def __init__(self, inner: FileSystem | None = None) -> None:
        self._inner = inner or OsFileSystem()
        self._fault: Fault | None = None
        self._matching_calls = 0
        self._crashed = False
        self._open_fds: set[int] = set()
        self._buried_fds: set[int] = set()
        self._closing = threading.Lock()
        self.log: list[str] = []
        self.struck = 0

    def arm(self, fault: Fault | None) -> None:
        self._fault = fault
        self._matching_calls = 0

    def bury(self) -> None:
        """Close what a process left open. A thread of it that still runs closes none of that a second time."""
        with self._closing:
            while self._open_fds:
                fd = self._open_fds.pop()
                self._inner.close(fd)
                self._buried_fds.add(fd)

    def _strikes(self, call: str) -> int | None:
        """The error that this call meets, None if it goes through."""
        if self._crashed:
            raise Crash(call)
        if call in CHANGING_CALLS:
            self.log.append(call)
        fault = self._fault
        if fault is None or call not in fault.calls:
            return None
        self._matching_calls += 1
        if self._matching_calls != fault.nth and not (fault.always and self._matching_calls > fault.nth):
            return None
        if fault.error in (Fault.SHORT, Fault.TORN_CRASH) and call != "pwritev":
            if fault.error == Fault.SHORT:
                return None
            self._crash(call)
        self.struck += 1
        if fault.error == Fault.CRASH:
            self._crash(call)
        return fault.error

    def _crash(self, call: str) -> None:
        self.struck += 1
        self._crashed = True
        raise Crash(call)

    def _gate(self, call: str) -> bool:
        """Raises what the call meets; True: it happens, and the process ends right after it."""
        error = self._strikes(call)
        if error is None:
            return False
        if error == Fault.LATE_CRASH:
            return True
        raise OSError(error, os.strerror(error), call)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        late = self._gate("open")
        fd = self._inner.open(path, flags, mode)
        with self._closing:
            self._buried_fds.discard(fd)
            self._open_fds.add(fd)
        if late:
            self._crash("open")
        return fd

    def close(self, fd: int) -> None:
        with self._closing:
            if not self._crashed and fd not in self._buried_fds:
                self._open_fds.discard(fd)
                self._inner.close(fd)

    def size_bytes(self, fd: int) -> int:
        self._gate("size_bytes")
        return self._inner.size_bytes(fd)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._gate("pread")
        return self._inner.pread(fd, length, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        error = self._strikes("pwritev")
        if error is None:
            return self._inner.pwritev(fd, buffers, offset)
        if error == Fault.LATE_CRASH:
            self._inner.pwritev(fd, buffers, offset)
            self._crash("pwritev")
        if error in (Fault.SHORT, Fault.TORN_CRASH):
            joined = b"".join(buffers)
            written = self._inner.pwritev(fd, [joined[: len(joined) // 2]], offset)
            if error == Fault.SHORT:
                return written
            self._crash("pwritev")
        raise OSError(error, os.strerror(error), "pwritev")

    def write_back(self, fd: int, waits: bool) -> None:
        """Nothing that anybody may rely on."""

    def fdatasync(self, fd: int) -> None:
        if self._gate("fdatasync"):
            self._crash("fdatasync")

    def fsync_dir(self, path: str) -> None:
        if self._gate("fsync_dir"):
            self._crash("fsync_dir")

    def sync_all(self, path: str) -> None:
        if self._gate("sync_all"):
            self._crash("sync_all")

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        late = self._gate("ftruncate")
        self._inner.ftruncate(fd, size_bytes)
        if late:
            self._crash("ftruncate")

    def free_bytes(self, path: str) -> int:
        return self._inner.free_bytes(path)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        late = self._gate("fallocate")
        self._inner.fallocate(fd, offset, length)
        if late:
            self._crash("fallocate")

    def rename(self, source: str, target: str) -> None:
        late = self._gate("rename")
        self._inner.rename(source, target)
        if late:
            self._crash("rename")

    def link(self, source: str, target: str) -> None:
        late = self._gate("link")
        self._inner.link(source, target)
        if late:
            self._crash("link")

    def unlink(self, path: str) -> None:
        late = self._gate("unlink")
        self._inner.unlink(path)
        if late:
            self._crash("unlink")

    def mkdir(self, path: str) -> None:
        late = self._gate("mkdir")
        self._inner.mkdir(path)
        if late:
            self._crash("mkdir")

    def rmdir(self, path: str) -> None:
        late = self._gate("rmdir")
        self._inner.rmdir(path)
        if late:
            self._crash("rmdir")

    def listdir(self, path: str) -> list[str]:
        self._gate("listdir")
        return self._inner.listdir(path)

    def exists(self, path: str) -> bool:
        self._gate("exists")
        return self._inner.exists(path)


ERRNOS = (errno.EIO, errno.ENOSPC)


class SmallFileSystem(FaultyFileSystem):
    """A file system with so much room for the files in `directory`, counted in blocks."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__()
        self.room_bytes = room_bytes
        self.directory = "/nowhere"
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def free_bytes(self, path: str) -> int:
        if path and not path.startswith(self.directory):
            return super().free_bytes(path)
        used = sum(file.stat().st_blocks * 512 for file in Path(self.directory).rglob("*") if file.is_file())
        return max(0, self.room_bytes - used)

    def _take(self, fd: int, length: int) -> None:
        if self._paths[fd].startswith(self.directory) and length > self.free_bytes(self.directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self._take(fd, sum(map(len, buffers)))
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._take(fd, length)
        super().fallocate(fd, offset, length)
