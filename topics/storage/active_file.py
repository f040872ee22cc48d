"""The log file that a writer (`wal.py`) has open."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Final

from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import Bytes, scan
from topics.storage.logfile import erase_behind, write_fully

_IOV_MAX: Final = os.sysconf("SC_IOV_MAX")


class ActiveFile:
    """The log file that is being written. It owns the descriptors. Methods raise OSError; the writer handles failures.

    `end` is the end of the last committed group. The file is known to be on the disk up to `synced`. The last SYNC_MARK
    vouches for everything up to `marked` and ends at `mark_end`. marked <= synced <= end, and none of them decreases.
    """

    def __init__(self, fs: FileSystem, directory: str, file_no: int, end: int, marked: int) -> None:
        self.path = layout.log_path(directory, file_no)
        self.file_no = file_no
        self.end = self.synced = end
        self.marked = marked
        self.mark_end = 0
        self._fs = fs
        self._fd = fs.open(self.path, os.O_RDWR)
        try:
            self.size_bytes = fs.size_bytes(self._fd)
            # The kernel reports a failed write-back once to each open file description. If the background sync shared
            # the writer's, it could consume the report that the sync of a commit needs.
            self._background_fd = fs.open(self.path, os.O_RDWR)
        except OSError:
            fs.close(self._fd)
            raise
        self._closing = threading.Lock()  # `close` waits with it until the background sync has used its descriptor
        self._closed = False

    def write(self, pieces: Sequence[Bytes], offset: int) -> None:
        for first in range(0, len(pieces), _IOV_MAX):
            chunk = pieces[first : first + _IOV_MAX]
            write_fully(self._fs, self._fd, chunk, offset)
            offset += sum(map(len, chunk))

    def sync(self) -> None:
        self._fs.fdatasync(self._fd)

    def sync_in_background(self) -> int:
        """Sync in another thread than the writer's; return the offset up to which everything is on the disk."""
        with self._closing:
            end = self.end
            if not self._closed:  # a closed file was synced, or its tail was saved elsewhere
                self._fs.fdatasync(self._background_fd)
            return end

    def erase_uncommitted(self) -> None:
        """Make everything behind `end` zeros again."""
        erase_behind(self._fs, self._fd, self.end, self.size_bytes)

    def read_unsynced(self) -> bytes:
        """Read the committed frames from `synced` on, and check each of them."""
        length = self.end - self.synced
        tail = self._fs.pread(self._fd, length, self.synced)
        if len(tail) != length or scan(tail, 0, length).end != length:
            raise OSError(5, f"{self.path}: the frames from {self.synced} to {self.end} do not read back as written")
        return tail

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._fs.close(self._fd)
                self._fs.close(self._background_fd)
