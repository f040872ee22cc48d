"""The life of the compactor's process: its heartbeat, its stop, and the note of the time that the shards trust.

Heartbeat and note go on between the steps of a cut, however long it takes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from topics.core.clock import Clock, TrustedTime
from topics.log import get_logger
from topics.shm.control import HEARTBEAT_MS, Cell, ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.shm.ring import Wake
from topics.storage.filesystem import FileSystem
from topics.storage.notes import write_clock

ANSWER_POLL_MS: Final = 10
NOTE_MS: Final = 60_000

log = get_logger()


class Stopped(Exception):  # noqa: N818 — named for what it is
    """The process must stop: the time for its last cut is over, or a shard has stopped."""


class Life:
    """The heartbeat, sleep and stop of this process. Owns its handler of SIGTERM; `cell` is its control cell."""

    def __init__(self, shared: SharedMemory, cell: ProcessCell, clock: Clock, grace_ms: int) -> None:
        self.cell = cell
        self.clock = clock
        self.stopping = False
        self._wake: Wake = shared.compactor_wake
        self._shards = [shared.control.cell(Role.WALSHARD, shard) for shard in range(shared.shards)]
        self._grace_ms = grace_ms
        self._deadline_ms: int | None = None
        self._beat_ms = 0
        signal.signal(signal.SIGTERM, self._request)

    def alive(self) -> None:
        """Write the heartbeat; called between steps. Raise Stopped when there is no time for another step."""
        now_ms = self.clock.monotonic_ms()
        if now_ms - self._beat_ms >= HEARTBEAT_MS:
            self._beat_ms = now_ms
            self.cell.set("heartbeat_ms", self.clock.now_ms())
        if self._deadline_ms is not None and now_ms >= self._deadline_ms:
            raise Stopped("the time for the last cut is over")

    def wait(self) -> None:
        """Wait a little for a shard. Raise Stopped, also when a shard has stopped and will not answer any more."""
        self.alive()
        if self.stopping and any(cell.get("state") == ProcessState.STOPPED for cell in self._shards):
            raise Stopped("a shard has stopped")
        self._wake.sleep(ANSWER_POLL_MS)

    def sleep(self, timeout_ms: int) -> None:
        """Sleep until a signal comes or a shard wakes this process, at most `timeout_ms`."""
        self._wake.sleep(timeout_ms)

    def _request(self, _number: int, _frame: object) -> None:
        self._deadline_ms = self._deadline_ms or self.clock.monotonic_ms() + self._grace_ms
        self.stopping = True
        self._wake.signal_always()


class ClockNote:
    """The note of the time that the shards trust, for the next start (`storage/notes.py`).

    `shards` are their control cells, which have the offset of that time from the monotonic clock.
    """

    def __init__(self, fs: FileSystem, data_dir: str, boot_id: str, shards: Sequence[Cell], clock: Clock) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._boot_id = boot_id
        self._shards = shards
        self._clock = clock
        self._due_ms = clock.monotonic_ms()

    def keep(self) -> None:
        """Write the note once every NOTE_MS."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._due_ms and self._write(now_ms):
            self._due_ms = now_ms + NOTE_MS

    def close(self) -> None:
        """Write the note at a clean end."""
        self._write(self._clock.monotonic_ms())

    def _write(self, now_ms: int) -> bool:
        """Write the note. False when no shard has set its offset yet."""
        offsets_ms = [offset_ms for cell in self._shards if (offset_ms := cell.clock_offset_ms) is not None]
        if not offsets_ms:
            return False
        try:
            write_clock(self._fs, self._data_dir, TrustedTime(self._boot_id, now_ms + min(offsets_ms), now_ms))
        except OSError as error:
            log.error("meta/clock.json could not be written, which will be repeated", reason=str(error))
        return True
