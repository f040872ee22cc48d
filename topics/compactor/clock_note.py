"""Notes for the next start what time the shards go by (`storage/clock_file.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from topics.core.clock import Clock, TrustedTime
from topics.log import get_logger
from topics.shm.control import Cell
from topics.storage.clock_file import write_clock
from topics.storage.filesystem import FileSystem

NOTE_MS: Final = 60_000

log = get_logger()


class ClockNote:
    """Of the one service in `data_dir`; `shards` are the cells in which they say what they trust."""

    def __init__(self, fs: FileSystem, data_dir: str, boot_id: str, shards: Sequence[Cell], clock: Clock) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._boot_id = boot_id
        self._shards = shards
        self._clock = clock
        self._due_ms = clock.monotonic_ms()

    def keep(self) -> None:
        """Once every NOTE_MS. What cannot be written now is tried again by then."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._due_ms and self._write(now_ms):
            self._due_ms = now_ms + NOTE_MS

    def close(self) -> None:
        """A clean end."""
        self._write(self._clock.monotonic_ms())

    def _write(self, now_ms: int) -> bool:
        """False when no shard has looked at its clock yet."""
        offsets_ms = [offset_ms for cell in self._shards if (offset_ms := cell.clock_offset_ms) is not None]
        if not offsets_ms:
            return False
        try:
            write_clock(self._fs, self._data_dir, TrustedTime(self._boot_id, now_ms + min(offsets_ms), now_ms))
        except OSError as error:
            log.error("the time cannot be noted for the next start, which will be repeated", reason=str(error))
        return True
