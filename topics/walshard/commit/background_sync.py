"""Syncing what nobody waits for: `disk` and `memory` records reach the disk within a second or 8 MiB.

So a power loss takes a bounded tail, and `durable_seq` follows `head_seq`. The sync itself runs in a helper thread;
everything else here runs on the shard's own.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Final

from topics.shm.ring import Wake
from topics.storage.wal import Synced
from topics.walshard.commit.logs import Logs
from topics.walshard.hosted.hosted import Hosted

INTERVAL_MS: Final = 1_000
UNSYNCED_BYTES: Final = 8 * 1024 * 1024
UNSYNCED_BYTES_MAX: Final = 8 * UNSYNCED_BYTES
"""With this much un-synced the shard waits for the disk: the tail that a power loss takes stays bounded."""


class BackgroundSync:
    """Knows which topics have records that are not on the disk yet."""

    def __init__(self, logs: Logs, helper: Executor, wake: Wake, now_ms: int) -> None:
        self._logs = logs
        self._helper = helper
        self._wake = wake
        self._unsynced: dict[int, Hosted] = {}
        self._covered: list[tuple[Hosted, int]] = []
        self._running: tuple[Future[Synced], int] | None = None
        self._last_ms = now_ms
        self._looked = (now_ms, self._logs.wal.synced)
        """When it was looked last whether the log is idle, and up to where it was synced then."""

    def committed(self, touched: dict[int, Hosted]) -> list[Hosted]:
        """A group is in the durable log; returns the topics whose durable_seq moved, of the group and others."""
        self._unsynced.update(touched)
        if self._logs.wal.unsynced_bytes:
            return []
        moved = [hosted for hosted in self._unsynced.values() if _settle(hosted, hosted.topic.head_seq)]
        self._unsynced.clear()
        return moved

    def forget(self, hosted: Hosted) -> None:
        """The topic is gone."""
        self._unsynced.pop(hosted.topic.id, None)
        self._covered = [(other, head_seq) for other, head_seq in self._covered if other is not hosted]

    def poll(self, now_ms: int) -> list[Hosted]:
        """Starts and ends syncs as they are due; returns topics whose durable_seq moved. `now_ms` is monotonic."""
        moved = self._ended() if self._running is not None else []
        unsynced_bytes = self._logs.wal.unsynced_bytes
        if not unsynced_bytes and self._unsynced:
            # By what was no append: a mark, a topic that was made, the end of a checkpoint.
            moved += self.committed({})
        if now_ms - self._looked[0] >= INTERVAL_MS:
            self._mark_idle(now_ms)
        due = unsynced_bytes >= UNSYNCED_BYTES or (unsynced_bytes and now_ms - self._last_ms >= INTERVAL_MS)
        # A sync of a file of which one has failed says nothing: see `wal.py`.
        if self._running is None and due and self._logs.wal.read_only is None:
            self._start(now_ms)
        if self._running is not None and unsynced_bytes >= UNSYNCED_BYTES_MAX:
            self._running[0].exception()  # waits
            moved += self._ended()
        return moved

    def _mark_idle(self, now_ms: int) -> None:
        """Once nothing was written for a while: what was synced last is known as synced after a power loss."""
        wal = self._logs.wal
        if wal.synced == self._looked[1] and not wal.unsynced_bytes:
            self._logs.mark_idle()
        self._looked = (now_ms, wal.synced)

    def _start(self, now_ms: int) -> None:
        self._last_ms = now_ms
        self._covered = [(hosted, hosted.topic.head_seq) for hosted in self._unsynced.values()]
        self._unsynced = {}
        future = self._helper.submit(self._logs.wal.sync_now)
        future.add_done_callback(lambda _future: self._wake.signal_always())
        self._running = (future, self._logs.wal.file_no)

    def _ended(self) -> list[Hosted]:
        assert self._running is not None
        future, file_no = self._running
        if not future.done():
            return []
        self._running = None
        covered, self._covered = self._covered, []
        error = future.exception()
        if error is not None:
            if not isinstance(error, OSError):
                raise error
            self._unsynced.update({hosted.topic.id: hosted for hosted, _ in covered})
            self._logs.sync_failed(file_no, error)
            return []
        self._logs.wal.note_synced(*future.result())
        self._logs.count()
        return [hosted for hosted, head_seq in covered if _settle(hosted, head_seq)]


def _settle(hosted: Hosted, synced_seq: int) -> bool:
    """The log has its records up to there on the disk. True if its durable_seq moved. An `ephemeral` topic has not
    waited for it: the change of its class was synced with all before.
    """
    topic = hosted.topic
    if topic.config.durability == "ephemeral" or synced_seq <= topic.durable_seq:
        return False
    topic.durable_seq = synced_seq
    return True
