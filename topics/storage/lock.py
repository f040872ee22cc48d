"""The lock of a data directory: an exclusive flock on `.topics.lock`, so that only one service uses the directory.

The kernel drops the lock with the last descriptor, however its processes end, so there is no stale lock. Forked
children inherit the lock and hold it until the last of them has ended: no file ever has two writers. The file has the
owner's pid for people; the pid is valid only while the lock is held.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from topics.storage.filesystem import way_to_write
from topics.storage.layout import lock_path


class DataDirLocked(Exception):  # noqa: N818 — named for what it is
    """Another service runs on this data directory. `.pid` is its process, None if the file does not have it yet."""

    def __init__(self, data_dir: str, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "a process that is starting"
        super().__init__(
            f"data directory {data_dir} is in use by {holder}; stop that service or choose another TOPICS_DATA_DIR"
        )
        self.pid = pid


class DataDirNotWritable(Exception):  # noqa: N818
    """The data directory cannot be made or written. `errno` and `reason` are those of the call that failed."""

    def __init__(self, data_dir: str, error: OSError) -> None:
        super().__init__(
            f"data directory {data_dir} is not writable: {error.strerror or error}; "
            f"{way_to_write(error)} or choose another TOPICS_DATA_DIR"
        )
        self.errno = error.errno
        self.reason = error.strerror or str(error)


class DataDirLock:
    """The exclusive lock, held from `acquire` until `release` or the end of the process."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    def acquire(cls, data_dir: str) -> DataDirLock:
        """Make the directory if it is missing, and lock it. Raise DataDirLocked or DataDirNotWritable at once."""
        path = lock_path(data_dir)
        try:
            os.makedirs(data_dir, mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirNotWritable(data_dir, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # This write fails early on a read-only mount or a full disk.
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            pid = _read_pid(fd)
            os.close(fd)
            raise DataDirLocked(data_dir, pid) from None
        except OSError as error:
            os.close(fd)
            raise DataDirNotWritable(data_dir, error) from error
        return cls(fd, path)

    def release(self) -> None:
        """Release the lock. The file stays: if it were removed, two services could lock two different inodes."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


@contextmanager
def inspecting(data_dir: str) -> Iterator[None]:
    """Keep services from starting on the directory inside the block; others may inspect it as well. Changes nothing.

    Raise DataDirLocked if a service runs. A directory without a lock file is a copy, and is not locked.
    """
    try:
        fd = os.open(lock_path(data_dir), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        try:
            # A shared lock is refused exactly while the exclusive one is held.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirLocked(data_dir, _read_pid(fd)) from None
        yield
    finally:
        os.close(fd)


def holder_pid(data_dir: str) -> int | None:
    """Return the pid of the service that holds the lock, None if nobody does (or it has not written its pid yet)."""
    try:
        with inspecting(data_dir):
            return None
    except DataDirLocked as locked:
        return locked.pid


def open_process(pid: int) -> int | None:
    """Return a pidfd of a process, None if it does not run. It needs no /proc, where systemd may hide processes."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL):  # the last two: a thread has the number now
            return None
        raise


def is_running(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    fd = open_process(pid)
    if fd is None:
        return False
    try:
        return not select.select([fd], [], [], 0)[0]  # readable once it has ended
    finally:
        os.close(fd)


def may_hold(data_dir: str, pid: int) -> bool:
    """Return whether a process may have the lock file open. The pid in the file may be a container's, or used again."""
    lock, folder = os.stat(lock_path(data_dir)), f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"{folder}/{fd}"), lock):
                    return True
    except FileNotFoundError:  # it has ended, systemd's ProtectProc= hides it, or there is no /proc
        return is_running(pid)
    except PermissionError:
        return True  # another user's process: only that user can see its files, or signal it
    return False


@contextmanager
def running_supervisor(data_dir: str) -> Iterator[tuple[int, int]]:
    """Find the supervisor of `data_dir`; give its pid and a pidfd. Raise ProcessLookupError if none runs, OSError if
    this process cannot see it (for example because it runs in a container).
    """
    pid, process_fd = holder_pid(data_dir), None
    try:
        is_holder = False
        if pid is not None:
            process_fd = open_process(pid)
            is_holder = process_fd is not None and may_hold(data_dir, pid)
        if pid is None or holder_pid(data_dir) != pid:
            raise ProcessLookupError
        if process_fd is None or not is_holder:
            raise OSError(f"process {pid} here is not the service: that runs in a container, or is ending")
        yield pid, process_fd
    finally:
        if process_fd is not None:
            os.close(process_fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
