"""The writing end of the log, on a disk that fails: every call site, once and from then on, with every error.

Whatever fails: the writers of the group get an error, nothing of it is read later, what was acknowledged stays where
it was said to be, and the log goes on when the disk does, or says why not.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.executors import Inline
from tests.storage.faults import CHANGING_CALLS, ERRNOS, Crash, Fault, FaultyFileSystem
from tests.storage.logs import IDENTITY, LATER_BOOT, Place, appends, commit, content_at, kill, open_writer, read_log
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import FILE_END_LEN
from topics.storage.wal import Moved, WalSyncError, WalWriteError, WalWriter

FILE_BYTES = 900


class Workload:
    """Groups of all kinds, and the ledger of what was acknowledged."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self.directory = directory
        self.acked: list[Place] = []
        self.failed: list[bytes] = []
        self.next_seq = 1
        self.writer: WalWriter = open_writer(fs, directory, file_bytes=FILE_BYTES, helper=Inline())

    def run(self) -> None:
        for number in range(9):
            self.group(writes=1 + number % 3, sync=number % 4 == 1)
            if number % 3 == 2:
                self.background_sync()
        self.group(writes=25, sync=True)  # larger than a file
        self.group(writes=2, sync=False)
        self.writer_may_mark()

    def group(self, writes: int, sync: bool) -> bool:
        contents = []
        for _ in range(writes):
            contents.append(appends(self.next_seq, [b'"%d"' % self.next_seq, b'"second of two"']))
            self.next_seq += 2
        try:
            self.acked += commit(self.writer, *contents, sync=sync)
        except WalWriteError:
            self.failed += contents
        except WalSyncError as error:
            self.failed += contents
            self.relocate(error.moved)
        else:
            return True
        return False

    def background_sync(self) -> None:
        file_no = self.writer.file_no
        try:
            synced = self.writer.sync_now()
        except OSError as error:
            self.relocate(self.writer.sync_failed(file_no, error))
        else:
            self.writer.note_synced(synced)

    def writer_may_mark(self) -> None:
        try:
            self.writer.commit(self.writer.plan([]), [], sync=False)
        except WalWriteError:
            return
        except WalSyncError as error:
            self.relocate(error.moved)

    def relocate(self, moved: Moved | None) -> None:
        self.acked = [place.after(moved) for place in self.acked]

    @property
    def content(self) -> bytes:
        return b"".join(place.content for place in self.acked)


def calls_of_a_run(tmp_path: Path) -> list[str]:
    fs = FaultyFileSystem()
    workload = Workload(fs, str(tmp_path / "clean"))
    fs.log.clear()
    workload.run()
    kill(workload.writer)
    assert not workload.failed
    return fs.log


def check(workload: Workload, context: str) -> None:
    """Check what holds after any fault."""
    for place in workload.acked:
        assert content_at(workload.directory, place) == place.content, context
    kill(workload.writer)
    if workload.writer.read_only is None:
        for identity in (IDENTITY, LATER_BOOT):
            assert read_log(workload.directory, identity).content == workload.content, context
    else:
        # The disk took neither the group nor its removal: whole writes of it may come back, never a part of one.
        read = read_log(workload.directory).content
        allowed = [workload.content + b"".join(workload.failed[:count]) for count in range(len(workload.failed) + 1)]
        assert read in allowed, context
    assert read_log(workload.directory).recovery.report == [], context


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("error", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_an_error_at_each_call(tmp_path: Path, error: int, always: bool) -> None:
    calls = calls_of_a_run(tmp_path)
    struck: set[str] = set()
    for nth in range(1, len(calls) + 1):
        context = f"{errno.errorcode[error]} at call {nth}, {calls[nth - 1]}, always={always}"
        fs = FaultyFileSystem()
        workload = Workload(fs, str(tmp_path / f"{nth}"))
        fs.arm(Fault(nth, error, always))
        workload.run()
        assert fs.struck, context
        struck.add(calls[nth - 1])
        fs.arm(None)
        if not always:
            assert workload.writer.read_only is None, context
        if workload.writer.read_only is None:
            assert workload.group(writes=2, sync=True), context
        else:
            assert not workload.group(writes=1, sync=False), context
        check(workload, context)
    assert len(calls) >= 80
    # "sync_all" is no call of a log; the others come only after an error, see below.
    assert struck == CHANGING_CALLS - {"mkdir", "rmdir", "unlink", "ftruncate", "sync_all"}


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_a_short_write_at_each_write(tmp_path: Path, always: bool) -> None:
    writes = calls_of_a_run(tmp_path).count("pwritev")
    for nth in range(1, writes + 1):
        fs = FaultyFileSystem()
        workload = Workload(fs, str(tmp_path / f"{nth}"))
        fs.arm(Fault(nth, Fault.SHORT, always, frozenset({"pwritev"})))
        workload.run()
        assert fs.struck
        assert workload.writer.read_only is None
        fs.arm(None)
        assert workload.group(writes=2, sync=True)
        check(workload, f"short write {nth}, always={always}")


@pytest.mark.parametrize("second", sorted(CHANGING_CALLS - {"mkdir", "rmdir"}))
@pytest.mark.parametrize("first", ["pwritev", "fdatasync"])
def test_a_second_error_while_the_first_is_handled(tmp_path: Path, first: str, second: str) -> None:
    """The first failing write or sync, then from there on every call of another kind."""
    for nth in range(1, 5):
        workload = Workload(fs := SecondFault(first, nth, second), str(tmp_path / f"{nth}"))
        fs.armed = True
        workload.run()
        fs.armed = False
        if workload.writer.read_only is None:
            assert workload.group(writes=1, sync=True)
        check(workload, f"{first} {nth}, then every {second}")


class SecondFault(FaultyFileSystem):
    def __init__(self, first: str, nth: int, second: str) -> None:
        super().__init__()
        self._first, self._nth, self._second = first, nth, second
        self._struck_first = False
        self.armed = False

    def _strikes(self, call: str) -> int | None:
        if not self.armed:
            return None
        if not self._struck_first:
            self._nth -= call == self._first
            self._struck_first = self._nth == 0
            return errno.EIO if self._struck_first else None
        return errno.EIO if call == self._second else None


def test_a_failed_sync_is_final_for_the_file(tmp_path: Path) -> None:
    """No retry as if nothing had been: un-synced good frames go to a new file, the group is gone."""
    fs = FaultyFileSystem()
    writer = open_writer(fs, str(tmp_path / "wal"))
    commit(writer, appends(1, [b'"synced"']), sync=True)
    synced = writer.offset
    (unsynced,) = commit(writer, appends(2, [b'"not synced"']))
    good_end = writer.offset
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    with pytest.raises(WalSyncError, match=r"wal-0+1\.log: sync failed: .*Input/output error") as caught:
        commit(writer, appends(3, [b'"refused"']), sync=True)
    moved = caught.value.moved
    assert moved is not None
    assert (moved.file_no, moved.start, moved.end, moved.new_file_no) == (1, synced, good_end, 2)
    assert content_at(str(tmp_path / "wal"), unsynced.after(moved)) == unsynced.content
    assert content_at(str(tmp_path / "wal"), unsynced) == unsynced.content  # a reader may still be at the old place
    assert (writer.file_no, writer.unsynced_bytes, writer.read_only) == (2, 0, None)
    (after,) = commit(writer, appends(3, [b'"next"']))
    assert after.file_no == 2
    kill(writer)
    assert read_log(str(tmp_path / "wal")).content == b"".join(
        [appends(1, [b'"synced"']), unsynced.content, after.content]
    )


def test_a_failed_background_sync_saves_the_tail(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    writer = open_writer(fs, str(tmp_path / "wal"))
    (place,) = commit(writer, appends(1, [b"1"]))
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    with pytest.raises(OSError, match="Input/output") as caught:
        writer.sync_now()
    moved = writer.sync_failed(1, caught.value)
    assert content_at(str(tmp_path / "wal"), place.after(moved)) == place.content
    assert place.after(moved).file_no == 2
    assert writer.sync_failed(1, caught.value) is None  # an echo about the file that was left
    assert writer.read_only is None
    kill(writer)


def test_a_failed_write_is_undone_on_the_disk_before_anything_else(tmp_path: Path) -> None:
    """Otherwise a power loss could bring frames back whose writer was told that they failed."""
    fs = FaultyFileSystem()
    writer = open_writer(fs, str(tmp_path / "wal"))
    fs.arm(Fault(1, Fault.SHORT, calls=frozenset({"pwritev"})))
    fs.log.clear()
    with pytest.raises(WalWriteError, match=r"write failed: .*short write"):
        commit(writer, appends(1, [b"1"]))
    assert fs.log == ["pwritev", "pwritev", "ftruncate", "ftruncate", "fdatasync"], "the second one tells the reason"
    kill(writer)


def test_a_group_whose_sync_failed_is_not_read_even_if_the_tail_cannot_be_saved(tmp_path: Path) -> None:
    directory = str(tmp_path / "wal")
    fs = SecondFault("fdatasync", 1, "fallocate")
    writer = open_writer(fs, directory)
    (acked,) = commit(writer, appends(1, [b'"acked"']))
    fs.armed = True
    with pytest.raises(WalSyncError):
        commit(writer, appends(2, [b'"refused"']), sync=True)
    assert writer.read_only is not None
    assert "sync failed" in writer.read_only
    kill(writer)
    assert read_log(directory).content == acked.content


class DeferredExecutor(Inline):
    """Runs what is submitted when somebody waits for it: as late as a thread may be."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        submit = super().submit

        class Deferred(Future[Any]):
            def exception(self, timeout: float | None = None) -> BaseException | None:
                if not self.done():
                    done = submit(fn, *args, **kwargs)
                    error = done.exception()
                    self.set_result(done.result()) if error is None else self.set_exception(error)
                return super().exception(timeout)

        return Deferred()


def test_a_spare_under_way_does_not_overwrite_the_saved_tail(tmp_path: Path) -> None:
    directory = str(tmp_path / "wal")
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=400, helper=DeferredExecutor())
    places = [place for seq in range(1, 4) for place in commit(writer, appends(seq, [b'"%d"' % seq]))]
    assert writer.offset > 200  # a spare is being made
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    with pytest.raises(WalSyncError) as caught:
        commit(writer, appends(4, [b'"4"']), sync=True)
    places = [place.after(caught.value.moved) for place in places]
    while writer.file_no == 2:
        places += commit(writer, appends(4, [b'"x"' * 20]))
    writer.close()
    assert [content_at(directory, place) for place in places] == [place.content for place in places]
    assert read_log(directory).content == b"".join(place.content for place in places)


def test_a_tail_that_does_not_read_back_turns_the_log_read_only(tmp_path: Path) -> None:
    """After a failed sync the page cache may hold anything."""
    directory = str(tmp_path / "wal")
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory)
    (place,) = commit(writer, appends(1, [b'"was good"']))
    with open(layout.log_path(directory, 1), "r+b") as file:
        file.seek(place.offset + 50)
        file.write(b"X")
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    with pytest.raises(WalSyncError) as caught:
        commit(writer, appends(2, [b"2"]), sync=True)
    assert caught.value.moved is None
    assert writer.read_only is not None
    assert "do not read back as written" in writer.read_only
    with pytest.raises(WalWriteError, match="read-only"):
        commit(writer, appends(2, [b"2"]))
    writer.close()


def test_a_full_disk_refuses_and_goes_on_when_space_returns(tmp_path: Path) -> None:
    """ENOSPC where the next file should be made; the groups that fit are taken until then."""
    fs = FaultyFileSystem()
    workload = Workload(fs, str(tmp_path / "wal"))
    fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset({"fallocate"})))
    while workload.group(writes=1, sync=False):
        pass
    assert workload.writer.file_no == 1
    assert workload.acked
    for _ in range(3):
        with pytest.raises(WalWriteError, match=r"next log file cannot be made: .*No space left") as caught:
            commit(workload.writer, appends(1000, [b"1"] * 20))
        assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(workload.directory)) == [layout.COMMITTED_NAME, layout.CURRENT_NAME, layout.log_name(1)]
    fs.arm(None)
    assert workload.group(writes=1, sync=True)
    assert workload.writer.file_no == 2
    check(workload, "a full disk")


@pytest.mark.parametrize("error", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_a_first_file_that_cannot_be_made(tmp_path: Path, error: int) -> None:
    clean = FaultyFileSystem()
    kill(open_writer(clean, str(tmp_path / "clean")))
    assert {"mkdir", "fallocate", "pwritev", "fdatasync", "rename", "fsync_dir"} < set(clean.log)
    for nth in range(1, len(clean.log) + 1):
        directory = str(tmp_path / f"{nth}")
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        with pytest.raises(WalWriteError, match=rf"cannot be|cannot open the log for writing: .*{os.strerror(error)}"):
            open_writer(fs, directory)
        workload = Workload(FaultyFileSystem(), directory)
        assert workload.group(writes=1, sync=True)
        check(workload, f"{clean.log[nth - 1]} {nth}")


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.TORN_CRASH, Fault.LATE_CRASH], ids=["before", "torn", "after"])
@pytest.mark.parametrize("fault_before", [None, errno.EIO], ids=["healthy", "after-a-failed-sync"])
def test_a_kill_at_each_call(tmp_path: Path, error: int, fault_before: int | None) -> None:
    """SIGKILL: what was acknowledged is read back, then at most whole writes of the group under way."""

    def run(fs: FaultyFileSystem, directory: str) -> Workload:
        workload = Workload(FailingSync(fs) if fault_before else fs, directory)
        workloads.append(workload)
        workload.run()
        return workload

    workloads: list[Workload] = []
    clean = FaultyFileSystem()
    kill(run(clean, str(tmp_path / "clean")).writer)
    for nth in range(1, len(clean.log) + 1):
        directory = str(tmp_path / f"{nth}")
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        workloads.clear()
        with pytest.raises(Crash):
            run(fs, directory)
        fs.bury()
        acked = workloads[0].content if workloads else b""
        context = f"call {nth}, {clean.log[nth - 1]}"
        read = read_log(directory).content
        assert read.startswith(acked), context
        # Acknowledged writes are numbered without a hole, so what follows them must be the group that was under way.
        seq = workloads[0].next_seq if workloads else 1
        under_way = [appends(at, [b'"%d"' % at, b'"second of two"']) for at in range(1, seq + 60, 2)]
        whole_writes = read[len(acked) :]
        while whole_writes:
            write = next((write for write in under_way if whole_writes.startswith(write)), None)
            assert write is not None, context
            whole_writes = whole_writes[len(write) :]
        again = read_log(directory)
        assert (again.content, again.recovery.report) == (read, []), context


class FailingSync(FaultyFileSystem):
    """Every third sync fails; everything else is the inner file system's, crash included."""

    def __init__(self, inner: FaultyFileSystem) -> None:
        super().__init__(inner)
        self._crashing = inner
        self._syncs = -1  # the first is that of COMMITTED

    def fdatasync(self, fd: int) -> None:
        self._crashing.fdatasync(fd)
        self._syncs += 1
        if self._syncs and self._syncs % 3 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync_dir(self, path: str) -> None:
        self._crashing.fsync_dir(path)


def test_room_for_the_end_of_the_file_is_always_kept(tmp_path: Path) -> None:
    writer = open_writer(FaultyFileSystem(), str(tmp_path / "wal"), file_bytes=FILE_BYTES)
    free = FILE_BYTES - writer.offset
    assert writer.plan([free - FILE_END_LEN]).file_no == 1
    assert writer.plan([free - FILE_END_LEN + 1]).file_no == 2
    kill(writer)
