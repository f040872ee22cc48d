"""Following one shard's log while its shard writes it: every frame once, up to where the shard says it is committed.

Unlike recovery this repairs nothing and forgives nothing. What is committed is valid, so anything else means that this
reader is not where it believes to be.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Final

from topics.storage import layout
from topics.storage.column_scan import scan_columns
from topics.storage.frame import FrameType
from topics.storage.logfile import FileStart, NotALogFile, WalPosition, parse_file_start
from topics.storage.recovery import BATCH_FRAMES, FRAMING_TYPES, RecoveredFile

_HEAD_BYTES: Final = 4096


class TailLost(Exception):  # noqa: N818 — named for what it is
    """The log does not go on where this reader stopped: begin again from the newest snapshot."""


class LogTail:
    """`position` is behind the last frame that was handed out."""

    def __init__(self, directory: str, position: WalPosition) -> None:
        self._directory = directory
        self.position = position

    @classmethod
    def from_first_file(cls, directory: str, first_file_no: int) -> LogTail:
        """Of a log that no snapshot goes with."""
        return cls(directory, WalPosition(first_file_no, 0))

    def read(self, until: WalPosition) -> Iterator[RecoveredFile]:
        """The frames up to `until`, which the shard has committed, in batches; those that frame the log are left out.

        `position` moves with each batch when the next one is asked for. Raises TailLost and OSError.
        """
        if until < self.position:
            raise TailLost(f"{self._directory}: read up to {self.position}, but committed is {until}")
        while self.position.file_no < until.file_no:
            yield from self._rest_of_file()
        yield from self._read(until.offset, None)

    def log_id(self) -> int:
        """Of the file at `position`."""
        path = layout.log_path(self._directory, self.position.file_no)
        return self._start_of(path)[0].log_id

    def _rest_of_file(self) -> Iterator[RecoveredFile]:
        """Up to where the next file takes over."""
        file_no = self.position.file_no
        following, _ = self._start_of(layout.log_path(self._directory, file_no + 1))
        if following.previous_end is None:
            yield from self._read(None, file_no)
        elif self.position.offset < following.previous_end:
            yield from self._read(following.previous_end, None)
        # What lay behind `previous_end` was read already, or comes again: both change nothing.
        self.position = WalPosition(file_no + 1, 0)

    def _read(self, end: int | None, ends_file_no: int | None) -> Iterator[RecoveredFile]:
        """From `position` exactly to `end`, or without one to the file's FILE_END."""
        file_no = self.position.file_no
        path = layout.log_path(self._directory, file_no)
        with self._open(path) as mapped, memoryview(mapped) as view:
            offset = self.position.offset or self._data_offset(path, mapped)
            limit = len(view) if end is None else end
            while offset < limit or end is None:
                frames, next_offset, defect = scan_columns(view, offset, limit, BATCH_FRAMES)
                ending_at = frames.find(FrameType.FILE_END)
                ending = frames[ending_at] if ending_at < len(frames) else None
                if ending is not None and (ends_file_no is None or ending[4:6] != (ends_file_no, ending[0])):
                    raise TailLost(f"{path}: the file ends at offset {ending[0]}, where it should go on")
                if ending is None and (defect is not None or not frames):
                    raise TailLost(f"{path}: no frame at offset {next_offset}: {defect}")
                kept = frames.without(FRAMING_TYPES)
                if kept:
                    yield RecoveredFile(file_no, path, view, kept)
                offset = next_offset
                self.position = WalPosition(file_no, offset)
                if ending is not None:
                    return

    def _data_offset(self, path: str, mapped: mmap.mmap) -> int:
        return _parse(path, mapped[:_HEAD_BYTES])[1]

    def _start_of(self, path: str) -> tuple[FileStart, int]:
        with self._open(path) as mapped:
            return _parse(path, mapped[:_HEAD_BYTES])

    def _open(self, path: str) -> mmap.mmap:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise TailLost(f"{path}: is gone, though the log goes on in it") from error
        try:
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise TailLost(f"{path}: is empty") from error
        finally:
            os.close(fd)


def _parse(path: str, head: bytes) -> tuple[FileStart, int]:
    try:
        return parse_file_start(path, head)
    except NotALogFile as error:
        raise TailLost(f"{path}: is no log file: {error}") from error
