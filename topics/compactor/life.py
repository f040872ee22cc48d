"""What the compactor's process says while it works: that it lives, and the time by which the shards go.

Both go on between the steps of a cut, however long it takes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from topics.core.clock import Clock, TrustedTime
from topics.log import get_logger
from topics.shm.control import Cell, ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.shm.ring import Wake
from topics.storage.clock_file import write_clock
from topics.storage.filesystem import FileSystem

HEARTBEAT_MS: Final = 250
ANSWER_POLL_MS: Final = 10
NOTE_MS: Final = 60_000

log = get_logger()


class Stopped(Exception):  # noqa: N818 — named for what it is
    """There is no more time, or nobody left to talk to."""


class Life:
    """The life of this process: it says that it lives, sleeps, and ends when its time is over.

    Owns the handler of SIGTERM. `cell` is the process's control cell.
    """

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
        """Called between two steps. Raises Stopped when there is no time for another one."""
        now_ms = self.clock.monotonic_ms()
        if now_ms - self._beat_ms >= HEARTBEAT_MS:
            self._beat_ms = now_ms
            self.cell.set("heartbeat_ms", self.clock.now_ms())
        if self._deadline_ms is not None and now_ms >= self._deadline_ms:
            raise Stopped("the time for the last cut is over")

    def wait(self) -> None:
        """Waits a little for a shard. Raises Stopped also when a shard has stopped and will do nothing any more."""
        self.alive()
        if self.stopping and any(cell.get("state") == ProcessState.STOPPED for cell in self._shards):
            raise Stopped("a shard has stopped")
        self._wake.sleep(ANSWER_POLL_MS)

    def sleep(self, timeout_ms: int) -> None:
        """Sleeps until a signal or a shard says something, at most so long."""
        self._wake.sleep(timeout_ms)

    def _request(self, _number: int, _frame: object) -> None:
        self._deadline_ms = self._deadline_ms or self.clock.monotonic_ms() + self._grace_ms
        self.stopping = True
        self._wake.signal_always()


class ClockNote:
    """Notes the time that the shards trust for the next start (`storage/clock_file.py`).

    `shards` are their control cells, which say how far that time is from the monotonic clock.
    """

    def __init__(self, fs: FileSystem, data_dir: str, boot_id: str, shards: Sequence[Cell], clock: Clock) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._boot_id = boot_id
        self._shards = shards
        self._clock = clock
        self._due_ms = clock.monotonic_ms()

    def keep(self) -> None:
        """Writes the note once every NOTE_MS. If that fails now, it is tried again by then."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._due_ms and self._write(now_ms):
            self._due_ms = now_ms + NOTE_MS

    def close(self) -> None:
        """Writes the note at a clean end."""
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
