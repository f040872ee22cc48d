"""The writer of one log: it plans, commits, rolls back and rotates, and handles failures of the disk.

`plan` returns the place of each write of a group. `commit` writes the group with one vectored write, syncs it if asked,
and only then moves the end of the log. A group lies in one file, so cutting that file undoes a failed commit.

A failed *write* costs only the group that was being written. A failed *sync* costs more: the kernel may have dropped
the dirty pages and call them clean, so the writer trusts neither that file nor another sync of it. It ends the file at
the last offset known to be on the disk. It reads back the committed frames behind that offset, checks them and writes
them to a new file, with that offset as its `previous_end`. If that fails too, the log becomes read-only.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from itertools import accumulate
from time import perf_counter_ns
from typing import Final, NamedTuple

from topics.storage import layout
from topics.storage.active_file import ActiveFile
from topics.storage.filesystem import FileSystem, make_dirs
from topics.storage.frame import Bytes
from topics.storage.logfile import (
    FILE_END_LEN,
    LOG_VERSION,
    FileStart,
    Preallocate,
    WalEnd,
    WalIdentity,
    WalPosition,
    create_log_file,
    file_end_frame,
    file_start_frame,
    is_at_work,
    note_committed,
    sync_mark_frame,
    write_current,
)

FILE_BYTES: Final = 64 * 1024 * 1024
FILE_BYTES_MIN: Final = 64 * 1024
"""The size of a file on a disk that has no room for a larger one."""
RESERVE_BYTES: Final = 1024 * 1024
"""Room kept for deletes, marks of checkpoints and small files, in addition to the room that a cut needs."""
ROOM_STEP_BYTES: Final = 64 * 1024
"""The writer asks for the room again after this many written bytes, or at every write while room is short."""


def room_beside_bytes(fs: FileSystem, directory: str, kept_bytes: int) -> int:
    """Return the free bytes of a file system less `kept_bytes`. Negative means that new records have to wait. If the
    file system cannot be asked, count it as empty.
    """
    try:
        return fs.free_bytes(directory) - kept_bytes
    except OSError:
        return sys.maxsize


def room_left_bytes(fs: FileSystem, directory: str, cut_bytes: Callable[[], int]) -> int:
    """Return the room for new records: the free bytes less RESERVE_BYTES and the bytes that a cut needs. Negative means
    that new records have to wait.

    A cut succeeds as long as records leave this much free. Then the compactor can remove files of deleted records.
    """
    return room_beside_bytes(fs, directory, RESERVE_BYTES + cut_bytes())


class Moved(NamedTuple):
    """The move of published frames: [start, end) of file `file_no` is now at `new_start` of file `new_file_no`."""

    file_no: int
    start: int
    end: int
    new_file_no: int
    new_start: int


class WalWriteError(Exception):
    """The group was not written. The log is as it was before, and the next commit may succeed."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class WalSyncError(Exception):
    """A sync failed, and nothing of the group is in the log. `.moved` is the new place of acknowledged frames that had
    not been synced. It is None if there were none, or if they could not be saved; then `WalWriter.read_only` has the
    reason.
    """

    def __init__(self, message: str, moved: Moved | None) -> None:
        super().__init__(message)
        self.moved = moved


class GroupPlan(NamedTuple):
    """The place of a group: write i begins at `offsets[i]` of file `file_no`. After a failed commit it is invalid."""

    file_no: int
    start: int
    mark: bytes  # SYNC_MARK in front of the group, b"" if none is due
    marked: int  # offset up to which a SYNC_MARK vouches once the group is written
    offsets: list[int]
    end: int


class CommitTimes(NamedTuple):
    write_us: float
    fsync_us: float


class WalWriter:
    """The only writer of one log. One thread uses it; only `sync_now` may run in another. It counts frames, batches,
    bytes_written, fsyncs and rotations for metrics. `read_only` is None, or the reason why the log takes no writes.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        identity: WalIdentity,
        end: WalEnd | None,
        *,
        file_bytes: int = FILE_BYTES,
        preallocate: Preallocate = "zero",
        helper: Executor | None = None,
        room_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Go on at the `end` that recovery found; None starts a new log. Raise WalWriteError if the file cannot be
        made or opened.

        `helper` (one thread is enough) makes the next file before it is needed. Without it, the commit that needs the
        file makes it. A file that was made in another boot gets no more writes: recovery relies on that to tell torn
        tails from corruption.
        """
        self._fs = fs
        self._directory = directory
        self._identity = identity
        self.log_id = end.log_id if end is not None else int.from_bytes(os.urandom(8), "little")
        """Random id of this log, the same in all its files. A snapshot identifies its logs by it."""
        self._file_bytes = file_bytes
        self._preallocate: Preallocate = preallocate
        self._helper = helper
        self._room_bytes = room_bytes
        self._room_seen_at = -ROOM_STEP_BYTES
        """`bytes_written` when the disk had room last."""
        self._spare: Future[int] | None = None
        self._current_file_no = 0
        self._end_is_noted = False
        self._start_next_file = False
        self.read_only: str | None = None
        self._undo_due: str | None = None
        self.refused: Callable[[], None] = lambda: None
        """Callback when a group failed for good; called before the log goes on in another file."""
        self.frames = self.batches = self.bytes_written = self.fsyncs = self.rotations = 0
        try:
            if end is None:
                make_dirs(fs, directory)
                note_committed(fs, directory, None)
                self._make_file(1, self._size_of_next())
                first_end = len(self._start_frame(1))
                self._active = ActiveFile(fs, directory, 1, first_end, marked=first_end)
                self._update_current()
            else:
                self._active = ActiveFile(fs, directory, end.file_no, end.offset, marked=0)
                self._current_file_no = end.file_no
                self._end_is_noted = not is_at_work(fs, directory)
                self._start_next_file = end.boot_id != identity.boot_id
        except OSError as error:
            raise WalWriteError(f"{directory}: cannot open the log for writing: {error}", error.errno) from error

    # -- where the log is

    @property
    def file_no(self) -> int:
        return self._active.file_no

    @property
    def offset(self) -> int:
        """End of the last committed group in file `file_no`."""
        return self._active.end

    @property
    def synced(self) -> WalPosition:
        """Place up to which everything, earlier files included, is on the disk."""
        return WalPosition(self._active.file_no, self._active.synced)

    @property
    def unsynced_bytes(self) -> int:
        return self._active.end - self._active.synced

    # -- commit

    def plan(self, lengths: Sequence[int]) -> GroupPlan:
        """Plan a group, given the length in bytes of each write. Nothing is written and nothing can fail.

        The plan of a group without writes has only the SYNC_MARK that is due, if any. Commit it when the log becomes
        idle: after a power loss the mark tells that the last writes were synced. No mark is due directly behind another
        one, or marks would follow each other for ever.
        """
        active = self._active
        mark, marked = b"", active.marked
        if active.synced > active.marked and (lengths or active.end > active.mark_end):
            mark, marked = sync_mark_frame(active.file_no, active.synced), active.synced
        file_no, start = active.file_no, active.end
        needed = len(mark) + sum(lengths) + FILE_END_LEN
        if self._start_next_file or start + needed > active.size_bytes:
            if not lengths:
                return GroupPlan(file_no, start, b"", active.marked, [], start)
            file_no += 1
            start = marked = len(self._start_frame(file_no))
            mark = b""
        offsets = list(accumulate(lengths, initial=start + len(mark)))
        end = offsets.pop()
        return GroupPlan(file_no, start, mark, marked, offsets, end)

    def require_room(self) -> None:
        """Raise WalWriteError (ENOSPC) if new records would use the room that is kept free."""
        if self._room_bytes is None or self.bytes_written < self._room_seen_at + ROOM_STEP_BYTES:
            return
        if self._room_bytes() < 0:
            why = "no room is left for records: what is free is kept for deletes, checkpoints and starts"
            raise WalWriteError(f"{self._directory}: {why}", errno.ENOSPC)
        self._room_seen_at = self.bytes_written

    def commit(self, plan: GroupPlan, buffers: Sequence[Bytes], sync: bool, frames: int = 0) -> CommitTimes:
        """Write the planned group, all of it or nothing. With `sync` it is on the disk when this returns. `buffers` are
        the bytes of all writes in order, in any number of pieces. Raise WalWriteError or WalSyncError.
        """
        if self.read_only is not None:
            raise WalWriteError(f"the log is read-only: {self.read_only}")
        if self._undo_due is not None:
            self._undo()
            if self._undo_due is not None:
                raise WalWriteError(self._undo_due)
        started_ns = perf_counter_ns()
        if plan.file_no != self._active.file_no:
            self._rotate(plan.end - plan.start)
        active = self._active
        assert (plan.file_no, plan.start) == (active.file_no, active.end), "a plan from before another commit"
        if self._current_file_no != active.file_no:
            self._update_current()
        if self._end_is_noted:
            self._note_end(None)
        pieces = [plan.mark, *buffers] if plan.mark else list(buffers)
        assert sum(map(len, pieces)) == plan.end - plan.start, "buffers and plan differ"
        if pieces:
            self._write(pieces, plan.start)
        written_ns = synced_ns = perf_counter_ns()
        if sync:
            self._sync()
            synced_ns = perf_counter_ns()
            active.synced = plan.end
        active.end = plan.end
        active.marked = plan.marked
        if plan.mark:
            active.mark_end = plan.start + len(plan.mark)
        self.batches += 1
        self.frames += frames
        self.bytes_written += plan.end - plan.start
        self._prepare_spare()
        return CommitTimes((written_ns - started_ns) / 1000, (synced_ns - written_ns) / 1000)

    def close(self, *, complete: bool = True) -> None:
        """Sync the log, write a SYNC_MARK that covers it, and close the file. If the log is `complete`, note its end in
        COMMITTED. Raise WalSyncError; the descriptors are closed even then.
        """
        try:
            if self.read_only is None:
                for _ in range(2):  # the log, then the mark that covers it
                    self.commit(self.plan([]), [], sync=True)
                if complete:
                    self._note_end(WalPosition(self.file_no, self.offset))
        except WalWriteError as error:
            raise WalSyncError(f"the log was not closed cleanly: {error}", None) from error
        finally:
            if self._spare is not None:
                self._spare.exception()  # waits for the spare; its failure does not matter any more
            self._active.close()

    # -- trimming

    def end_file(self) -> None:
        """Let the next group begin a new file, so that this one can be removed. Do nothing if it has no group yet."""
        if self._active.end > len(self._start_frame(self._active.file_no)):
            self._start_next_file = True

    def drop_files_below(self, file_no: int) -> int:
        """Remove the files below `file_no` that are finished, and return their number. Nothing in them may be needed.

        Remove them in ascending order, so that the rest has no hole. If this raises OSError, some may be left, and the
        next call removes them.
        """
        # A spare that is being made has a higher number than any of them.
        bound = min(file_no, self._current_file_no, self._active.file_no)
        numbers = [number for number in layout.list_log_files(self._fs, self._directory) if number < bound]
        for number in numbers:
            self._fs.unlink(layout.log_path(self._directory, number))
        if numbers:
            self._fs.fsync_dir(self._directory)
        return len(numbers)

    # -- background sync

    def sync_now(self) -> WalPosition:
        """Sync everything that is committed, in a helper thread. Pass the result to `note_synced` in the owner's
        thread, or call `sync_failed` there after an OSError.
        """
        active = self._active
        return WalPosition(active.file_no, active.sync_in_background())

    def note_synced(self, synced: WalPosition) -> None:
        """Take the result of `sync_now`. Ignore a file that the writer has finished since: finishing it synced it."""
        self.fsyncs += 1
        if synced.file_no == self._active.file_no:
            self._active.synced = max(self._active.synced, synced.offset)

    def sync_failed(self, file_no: int, error: OSError) -> Moved | None:
        """Take the failure of a `sync_now`: save un-synced frames of that file in a new one; return their place."""
        self.fsyncs += 1
        if file_no != self._active.file_no or self.read_only is not None:
            return None
        return self._save_tail(error)

    # -- writing and undoing

    def _write(self, pieces: list[Bytes], start: int) -> None:
        try:
            self._active.write(pieces, start)
        except OSError as error:
            self._undo()
            raise WalWriteError(f"{self._active.path}: write failed: {error}", error.errno) from error

    def _undo(self) -> None:
        """Erase the bytes behind the last committed group, durably: a power loss must not bring them back."""
        try:
            self._active.erase_uncommitted()
        except OSError as error:
            # This error may be as temporary as the error of the write: the next commit tries again.
            self._undo_due = f"{self._active.path}: a failed write could not be undone: {error}"
            self.refused()
            return
        self._undo_due = None
        self.refused()
        self._sync()

    def _sync(self) -> None:
        active = self._active
        self.fsyncs += 1
        try:
            active.sync()
        except OSError as error:
            message = f"{active.path}: sync failed: {error}"
            try:
                active.erase_uncommitted()
            except OSError as erase_error:
                # A restart finds the refused group only if the tail cannot be saved either.
                message += f"; the group could not be erased: {erase_error}"
            self.refused()
            raise WalSyncError(message, self._save_tail(error)) from error
        active.synced = active.end

    def _save_tail(self, cause: OSError) -> Moved | None:
        """Switch to a new file that begins with the un-synced frames of the active one, or become read-only."""
        active = self._active
        new_file_no = active.file_no + 1
        start_frame = self._start_frame(new_file_no, previous_end=active.synced)
        try:
            content = start_frame + active.read_unsynced()
            self._wait_for_spare()  # the spare has the same name as the file that is made here
            size_bytes = self._size_of_next(len(content) + FILE_END_LEN)
            create_log_file(self._fs, self._directory, new_file_no, content, size_bytes, self._preallocate)
            following = ActiveFile(self._fs, self._directory, new_file_no, len(content), marked=len(content))
        except OSError as error:
            self.read_only = f"{active.path}: sync failed ({cause}), then: {error}"
            return None
        self._switch_to(following)
        if active.synced == active.end:
            return None
        return Moved(active.file_no, active.synced, active.end, new_file_no, len(start_frame))

    # -- files

    def _rotate(self, group_bytes: int) -> None:
        """End the active file and switch to the next. On failure the log still ends where it did."""
        active = self._active
        next_file_no = active.file_no + 1
        start = len(self._start_frame(next_file_no))
        needed_bytes = start + group_bytes + FILE_END_LEN
        try:
            if self._wait_for_spare() < needed_bytes:
                self._make_file(next_file_no, self._size_of_next(needed_bytes))
            following = ActiveFile(self._fs, self._directory, next_file_no, start, marked=start)
        except OSError as error:
            raise WalWriteError(f"{self._directory}: the next log file cannot be made: {error}", error.errno) from error
        try:
            self._write([file_end_frame(active.file_no, active.end)], active.end)
            self._sync()
        except (WalWriteError, WalSyncError):
            following.close()
            raise
        self._switch_to(following)
        self.rotations += 1

    def _prepare_spare(self) -> None:
        active = self._active
        if self._helper is not None and self._spare is None and active.end * 2 > active.size_bytes:
            self._spare = self._helper.submit(self._make_file, active.file_no + 1, self._size_of_next())

    def _wait_for_spare(self) -> int:
        """Return the size of the spare, 0 if there is none. Then the caller makes the file and gets the error."""
        spare, self._spare = self._spare, None
        return spare.result() if spare is not None and spare.exception() is None else 0

    def _size_of_next(self, needed_bytes: int = 0) -> int:
        """Return the size in bytes for the next file: less than usual if the disk has little room."""
        size_bytes = self._file_bytes
        if self._room_bytes is not None and self._preallocate != "none":
            size_bytes = min(size_bytes, max(FILE_BYTES_MIN, self._room_bytes() // 3))
        return max(size_bytes, needed_bytes)

    def _make_file(self, file_no: int, size_bytes: int) -> int:
        create_log_file(self._fs, self._directory, file_no, self._start_frame(file_no), size_bytes, self._preallocate)
        return size_bytes

    def _switch_to(self, following: ActiveFile) -> None:
        """Switch to another file. CURRENT follows with the next commit."""
        left, self._active = self._active, following
        self._start_next_file = False
        left.close()

    def _update_current(self) -> None:
        try:
            write_current(self._fs, self._directory, self._active.file_no)
        except OSError as error:
            raise WalWriteError(f"{self._directory}: CURRENT cannot be replaced: {error}", error.errno) from error
        self._current_file_no = self._active.file_no

    def _note_end(self, position: WalPosition | None) -> None:
        try:
            note_committed(self._fs, self._directory, position)
        except OSError as error:
            raise WalWriteError(f"{self._directory}: COMMITTED cannot be written: {error}", error.errno) from error
        self._end_is_noted = position is not None

    def _start_frame(self, file_no: int, previous_end: int | None = None) -> bytes:
        identity = self._identity
        return file_start_frame(
            FileStart(
                LOG_VERSION, self.log_id, file_no, identity.shard, identity.shards, identity.boot_id, previous_end
            )
        )
