"""The two logs of a shard: how a group gets into them, and how they are synced in the background.

The durable log takes what must outlive the service. The RAM log (same format, in a RAM-backed directory) takes the
records of `ephemeral` topics, and watch sessions. A group may need both. Its durable part goes first, because that has
the creation of topics; if it fails, nothing of the group is committed.

A background sync brings `disk` and `memory` records to the disk after a second or 8 MiB. So a power loss takes a
bounded tail, and `durable_seq` follows `head_seq`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from topics.core.clock import Clock
from topics.core.errors import TopicsError, storage_unavailable
from topics.log import LastingFailures, SparseLines
from topics.shm.append_messages import add_times
from topics.shm.control import ProcessCell, latency_bucket
from topics.shm.journal import JournalEntry
from topics.shm.ring import Wake
from topics.storage.logfile import WalEnd, WalPosition
from topics.storage.wal import GroupPlan, Moved, WalSyncError, WalWriteError, WalWriter
from topics.walshard.commit.archive_wait import ArchiveWait
from topics.walshard.commit.draft import LogWrite
from topics.walshard.hosted.hosted import Hosted

LOG_EVERY_S: Final = 1.0
SYNC_INTERVAL_MS: Final = 1_000
UNSYNCED_BYTES: Final = 8 * 1024 * 1024
UNSYNCED_BYTES_MAX: Final = 8 * UNSYNCED_BYTES
"""Unsynced bytes from which on the shard waits for the disk, so that a power loss takes a bounded tail."""
MOVED_MAX: Final = 256
"""Topics that one `poll` returns at most. Requests wait while they are published, which takes 3 ms."""
_NOT_SYNCED: Final = "background sync failed"
_COUNTERS: Final = ("wal_frames", "wal_batches", "wal_fsyncs", "wal_bytes_written", "wal_rotations")
"""Counters of the durable log's writer. In the cell they go on over the lives of the shard."""

Failed = list[tuple[LogWrite, TopicsError]]


@dataclass(eq=False)
class Logs:
    """Writes groups to the logs of one shard. It owns both writers, and shows their counters in the cell.

    `open_ram` makes the RAM log when it is first needed. `moved` is called when published frames have moved to another
    file. `refused(ram_only)` is called when a planned group will never be in the log, before anything else is written.
    """

    wal: WalWriter
    ram: WalWriter | None
    """The RAM log; None until something has to go there."""
    _open_ram: Callable[[], WalWriter]
    _moved: Callable[[Moved], None]
    _refused: Callable[[bool], None]
    _cell: ProcessCell
    _recovered: tuple[WalEnd | None, WalEnd | None]
    _clock: Clock
    _plans: tuple[GroupPlan | None, GroupPlan | None] = (None, None)
    lost_tails: int = 0
    """Number of topics that lost their last records with the end of the log, while the log does not say so yet."""
    lacks_room: bool = False
    """True if the durable log had no room for records at the last try. An append then calls `require_room` before it
    joins a group: the log refuses a group as a whole.
    """

    def __post_init__(self) -> None:
        self.wal.refused = partial(self._refused, False)
        if self.ram is not None:
            self.ram.refused = partial(self._refused, True)
        self._refusals = SparseLines(LOG_EVERY_S, lambda: self._clock.monotonic_ms() / 1000)
        self.lasting = LastingFailures(lambda: self._clock.monotonic_ms() / 1000)
        self._former_lives = {counter: self._cell.get(counter) for counter in _COUNTERS}

    def holds(self, entry: JournalEntry) -> bool:
        """Return whether the write of a request that the former incarnation journalled is in the recovered log."""
        end = self._recovered[entry.ram_log]
        return end is not None and (entry.file_no, entry.end_offset) <= (end.file_no, end.offset)

    def plan(self, durable: list[LogWrite], ram: list[LogWrite]) -> list[JournalEntry]:
        """Return journal entries that say where the requests of the group will lie in the logs. The journal must have
        them before `commit` is called with the same group. Raise WalWriteError if there can be no RAM log.
        """
        durable_plan = self.wal.plan([write.length for write in durable]) if durable else None
        ram_plan = self._ram_log().plan([write.length for write in ram]) if ram else None
        self._plans = (durable_plan, ram_plan)
        entries: list[JournalEntry] = []
        for writes, plan, in_ram in ((durable, durable_plan, False), (ram, ram_plan, True)):
            if plan is None:
                continue
            for write, offset in zip(writes, plan.offsets, strict=True):
                request = write.request
                if request is not None and request.reply is not None:
                    end_offset = offset + write.length
                    entries.append(
                        JournalEntry(
                            request.frontend, request.position, in_ram, plan.file_no, end_offset, bytes(request.reply)
                        )
                    )
        return entries

    def commit(self, durable: list[LogWrite], ram: list[LogWrite]) -> Failed:
        """Write the planned group and apply the writes that are in the log. Return the others, each with its error."""
        durable_plan, ram_plan = self._plans
        self._plans = (None, None)
        if durable_plan is not None:
            failed = self._write(self.wal, durable_plan, durable)
            if failed:
                self._refused(False)
                return failed + [(write, failed[0][1]) for write in ram]
            self.count()
        if ram_plan is None or self.ram is None:
            return []
        failed = self._write(self.ram, ram_plan, ram)
        if failed:
            self._refused(True)
        return failed

    def require_room(self, in_ram: bool = False) -> None:
        """Raise TopicsError if the durable log (`in_ram`: the RAM log) has no room for records."""
        try:
            (self._ram_log() if in_ram else self.wal).require_room()
        except WalWriteError as error:
            raise self.refusal(error) from error
        if not in_ram:
            self.lacks_room = False

    def sync_failed(self, file_no: int, error: OSError) -> None:
        """Save what a failed background sync should have covered in a new file, or make the log read-only."""
        self._relocate(self.wal.sync_failed(file_no, error))
        self.lasting.failed(_NOT_SYNCED, error, read_only=self.wal.read_only)
        self.count()

    def sync(self) -> bool:
        """Sync everything that is committed. False when that fails."""
        if not self.wal.unsynced_bytes:
            return True
        try:
            self.wal.commit(self.wal.plan([]), [], sync=True)
        except (WalWriteError, WalSyncError) as error:
            self.refusal(error)
            return False
        self.count()
        return True

    def mark_idle(self) -> None:
        """Write a mark that says up to where the log is synced, since no other write is about to carry one."""
        plan = self.wal.plan([])
        if plan.mark and self.wal.read_only is None:
            try:
                self.wal.commit(plan, [], sync=False)
            except (WalWriteError, WalSyncError) as error:
                self.refusal(error)
            self.count()

    def close(self) -> None:
        """End the logs: everything is on the disk, and a mark says so."""
        self.wal.close(complete=not self.lost_tails)
        if self.ram is not None:
            self.ram.close()

    def _ram_log(self) -> WalWriter:
        if self.ram is None:
            self.ram = self._open_ram()
            self.ram.refused = partial(self._refused, True)
        return self.ram

    def _write(self, wal: WalWriter, plan: GroupPlan, writes: list[LogWrite]) -> Failed:
        buffers = [buffer for write in writes for buffer in write.buffers]
        sync = any(write.sync for write in writes)
        try:
            if any(write.takes_room for write in writes):
                wal.require_room()
            times = wal.commit(plan, buffers, sync, sum([write.frames for write in writes]))
        except (WalWriteError, WalSyncError) as error:
            is_full = isinstance(error, WalWriteError) and error.errno == errno.ENOSPC
            self.lacks_room |= is_full and wal is self.wal
            refusal = self.refusal(error)
            return [(write, refusal) for write in writes]
        wal_us, fsync_us = int(times.write_us), int(times.fsync_us)
        for write, offset in zip(writes, plan.offsets, strict=True):
            if write.place is not None:
                write.place(plan.file_no, offset)
            if write.apply is not None:
                write.apply()
            request = write.request
            if request is not None and request.reply is not None:
                add_times(request.reply, wal_us, fsync_us if write.sync else 0)
        if sync:
            self._cell.add(f"fsync_us_{latency_bucket(fsync_us):02d}")
            self._cell.add("fsync_us_sum", fsync_us)
        return []

    def refusal(self, error: WalWriteError | WalSyncError) -> TopicsError:
        """Count and log the failure of a group; return the error with which its requests are answered."""
        self._cell.add("write_errors")
        if isinstance(error, WalSyncError):
            self._relocate(error.moved)
            cause = "sync"
        else:
            cause = errno.errorcode.get(error.errno or 0, "write")
        self.count()  # the failure may have moved the log to another file
        # A full disk refuses every write.
        self._refusals.error("commit failed", error=str(error), read_only=self.wal.read_only)
        return storage_unavailable(
            "the log cannot be written now, nothing of this write was committed; see the service's log",
            cause=cause,
            read_only=self.wal.read_only is not None,
        )

    def _relocate(self, moved: Moved | None) -> None:
        if moved is not None:
            self._moved(moved)

    @property
    def end_word(self) -> int:
        """The end of the durable log as a `committed` word: file no << 32 | offset."""
        return self.wal.file_no << 32 | self.wal.offset

    def count(self) -> None:
        """Publish the end and the counters of the durable log in the cell."""
        wal, before = self.wal, self._former_lives
        self._cell.set_all(
            {
                "wal_file": wal.file_no,
                "wal_offset": wal.offset,
                "committed": self.end_word,
                "lost_tails": self.lost_tails,
                "wal_frames": before["wal_frames"] + wal.frames,
                "wal_batches": before["wal_batches"] + wal.batches,
                "wal_fsyncs": before["wal_fsyncs"] + wal.fsyncs,
                "wal_bytes_written": before["wal_bytes_written"] + wal.bytes_written,
                "wal_rotations": before["wal_rotations"] + wal.rotations,
                "wal_unsynced_bytes": wal.unsynced_bytes,
                "wal_read_only": int(wal.read_only is not None),
            }
        )


class BackgroundSync:
    """Syncs the durable log in a helper thread, for records whose writers do not wait for the disk. It owns the topics
    whose records are not on the disk yet, and those that became durable and are not published yet. It tells `archive`
    of the same topics; None without an archive.
    """

    def __init__(self, logs: Logs, helper: Executor, wake: Wake, now_ms: int, archive: ArchiveWait | None) -> None:
        self._logs = logs
        self._archive = archive
        self._helper = helper
        self._wake = wake
        self._unsynced: dict[int, Hosted] = {}
        self._covered: list[tuple[Hosted, int]] = []
        self._due: dict[int, tuple[Hosted, int]] = {}
        """Topics that `poll` is to return, by their ids, each with the seq up to which it is on the disk."""
        self._running: tuple[Future[WalPosition], int] | None = None
        self._last_ms = now_ms
        self._looked = (now_ms, self._logs.wal.synced)
        """Monotonic ms of the last look whether the log is idle, and the position up to which it was synced then."""

    def committed(self, touched: dict[int, Hosted]) -> None:
        """Note the topics of a group that the durable log has taken, before they are published."""
        self._unsynced.update(touched)
        if self._archive is not None:
            self._archive.committed(touched.values(), self._logs.end_word)
        if not self._logs.wal.unsynced_bytes:
            for id, hosted in self._unsynced.items():
                if id in touched:
                    _move_durable(hosted, hosted.topic.head_seq)
                elif hosted.topic.head_seq > hosted.topic.durable_seq:
                    self._note(hosted, hosted.topic.head_seq)
            self._unsynced.clear()

    def forget(self, hosted: Hosted) -> None:
        """Forget a deleted topic."""
        self._unsynced.pop(hosted.topic.id, None)
        self._due.pop(hosted.topic.id, None)
        if self._archive is not None:
            self._archive.forget(hosted)
        self._covered = [(other, head_seq) for other, head_seq in self._covered if other is not hosted]

    def poll(self, now_ms: int) -> list[Hosted]:
        """Start and end syncs as they are due. Return at most MOVED_MAX topics whose durable_seq or archived_seq moved.
        `now_ms` is monotonic.
        """
        if self._running is not None:
            self._end()
        if self._archive is not None:
            for hosted in self._archive.poll():
                self._note(hosted, hosted.topic.durable_seq)
        unsynced_bytes = self._logs.wal.unsynced_bytes
        if not unsynced_bytes and self._unsynced:
            # A mark, the creation of a topic, or the end of a checkpoint has synced them.
            self.committed({})
        if now_ms - self._looked[0] >= SYNC_INTERVAL_MS:
            self._mark_idle(now_ms)
        due = unsynced_bytes >= UNSYNCED_BYTES or (unsynced_bytes and now_ms - self._last_ms >= SYNC_INTERVAL_MS)
        # Once a sync of a file has failed, a later sync that succeeds proves nothing: see `wal.py`.
        if self._running is None and due and self._logs.wal.read_only is None:
            self._start(now_ms)
        if self._running is not None and unsynced_bytes >= UNSYNCED_BYTES_MAX:
            self._running[0].exception()  # waits
            self._end()
        if not self._due:
            return []
        found = list(islice(self._due.values(), MOVED_MAX))
        for hosted, synced_seq in found:
            del self._due[hosted.topic.id]
            _move_durable(hosted, synced_seq)
        return [hosted for hosted, _ in found]

    def _note(self, hosted: Hosted, synced_seq: int) -> None:
        _, known_seq = self._due.get(hosted.topic.id, (hosted, 0))
        self._due[hosted.topic.id] = hosted, max(synced_seq, known_seq)

    def _mark_idle(self, now_ms: int) -> None:
        """Mark the synced end once nothing was written for a while, so that it counts after a power loss."""
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

    def _end(self) -> None:
        """End the sync that runs, if it is done."""
        assert self._running is not None
        future, file_no = self._running
        if not future.done():
            return
        self._running = None
        covered, self._covered = self._covered, []
        error = future.exception()
        if error is not None:
            if not isinstance(error, OSError):
                raise error
            self._unsynced.update({hosted.topic.id: hosted for hosted, _ in covered})
            self._logs.sync_failed(file_no, error)
            return
        self._logs.lasting.over(_NOT_SYNCED)
        self._logs.wal.note_synced(future.result())
        self._logs.count()
        for hosted, head_seq in covered:
            if head_seq > hosted.topic.durable_seq:
                self._note(hosted, head_seq)


def _move_durable(hosted: Hosted, synced_seq: int) -> None:
    """Move durable_seq to `synced_seq`, never back. A topic that became `ephemeral` was synced at that time."""
    topic = hosted.topic
    if topic.config.durability != "ephemeral":
        topic.durable_seq = max(topic.durable_seq, synced_seq)
