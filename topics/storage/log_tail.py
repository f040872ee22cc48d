"""The end of a log that another process goes on writing, read by a process that never repairs it.

Committed bytes are always valid. So if the reader finds an invalid frame, it is in the wrong place.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final

from topics.storage import layout
from topics.storage.frame import FrameType
from topics.storage.frame_columns import scan_columns
from topics.storage.logfile import FileStart, NotALogFile, WalPosition, map_file, parse_file_start
from topics.storage.recovery import BATCH_FRAMES, FRAMING_TYPES, RecoveredFile

_HEAD_BYTES: Final = 4096


class TailLost(Exception):  # noqa: N818 — named for what it is
    """The log does not continue where this reader stopped: begin again from the newest snapshot."""


class LogTail:
    """A reader of one shard's log, up to the end of what the shard has committed. It yields every frame once.

    `position` is the place behind the last frame that it read.
    """

    def __init__(self, directory: str, position: WalPosition) -> None:
        self.directory = directory
        self.position = position

    def read(self, until: WalPosition) -> Iterator[RecoveredFile]:
        """Yield the frames up to `until`, a committed place, in batches and without frames of FRAMING_TYPES.

        `position` moves behind a batch when the caller asks for the next one. Raise TailLost and OSError.
        """
        if until < self.position:
            raise TailLost(f"{self.directory}: was read up to {self.position}, but is committed only up to {until}")
        while self.position.file_no < until.file_no:
            yield from self._rest_of_file()
        yield from self._read(until.offset)

    def log_id(self) -> int:
        """Return the log id of the file at `position`."""
        path = layout.log_path(self.directory, self.position.file_no)
        return self._start_of(path).log_id

    def _rest_of_file(self) -> Iterator[RecoveredFile]:
        """Read up to where the next file continues."""
        file_no = self.position.file_no
        following = self._start_of(layout.log_path(self.directory, file_no + 1))
        if following.previous_end is None:
            yield from self._read(None)
        elif self.position.offset < following.previous_end:
            yield from self._read(following.previous_end)
        # Frames behind `previous_end` come again in the next file; reading them twice changes nothing.
        self.position = WalPosition(file_no + 1, 0)

    def _read(self, end: int | None) -> Iterator[RecoveredFile]:
        """Read from `position` exactly to `end`, without one to the FILE_END that names the next file."""
        file_no = self.position.file_no
        path = layout.log_path(self.directory, file_no)
        with self._open(path) as mapped, memoryview(mapped) as view:
            offset = self.position.offset or _parse(path, mapped[:_HEAD_BYTES])[1]
            limit = len(view) if end is None else end
            while offset < limit or end is None:
                frames, next_offset, defect = scan_columns(view, offset, limit, BATCH_FRAMES, trusts_records=True)
                ending_at = frames.find(FrameType.FILE_END)
                ending = frames[ending_at] if ending_at < len(frames) else None
                if ending is not None and (end is not None or ending[4:6] != (file_no, ending[0])):
                    raise TailLost(f"{path}: ends at offset {ending[0]}, before its committed end")
                if ending is None and (defect is not None or not frames):
                    raise TailLost(f"{path}: has no frame at offset {next_offset}: {defect}")
                kept = frames.without(FRAMING_TYPES)
                if kept:
                    yield RecoveredFile(file_no, path, view, kept)
                offset = next_offset
                self.position = WalPosition(file_no, offset)
                if ending is not None:
                    return
            self.position = WalPosition(file_no, offset)  # also of a file without any frame

    def _start_of(self, path: str) -> FileStart:
        with self._open(path) as mapped:
            return _parse(path, mapped[:_HEAD_BYTES])[0]

    def _open(self, path: str) -> mmap.mmap:
        try:
            return map_file(path)
        except FileNotFoundError as error:
            raise TailLost(f"{path}: does not exist, but the log continues in it") from error
        except EOFError as error:
            raise TailLost(f"{path}: is empty") from error


def _parse(path: str, head: bytes) -> tuple[FileStart, int]:
    try:
        return parse_file_start(path, head)
    except NotALogFile as error:
        raise TailLost(f"{path}: is not a log file: {error}") from error
