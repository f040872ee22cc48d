"""One service per data directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from topics.storage.layout import lock_path
from topics.storage.lock import (
    DataDirLock,
    DataDirLocked,
    DataDirNotWritable,
    holder_pid,
    is_running,
    running_supervisor,
)

OWN_FDS = Path("/proc/self/fd")
HOLD = """
import sys
from topics.storage.lock import DataDirLock
lock = DataDirLock.acquire(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def hold(data_dir: str) -> subprocess.Popen[str]:
    """Another process that holds the lock until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, data_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_holder_is_refused_and_told_the_pid(tmp_path: Path) -> None:
    with hold(str(tmp_path)) as first:
        assert holder_pid(str(tmp_path)) == first.pid
        with pytest.raises(DataDirLocked, match=f"in use by process {first.pid}; stop that service or") as caught:
            DataDirLock.acquire(str(tmp_path))
        assert caught.value.pid == first.pid
        assert first.poll() is None
        first.communicate("")
    assert holder_pid(str(tmp_path)) is None
    DataDirLock.acquire(str(tmp_path)).release()


def test_a_pid_that_is_a_thread_now_is_no_process(tmp_path: Path) -> None:
    """`stop` of a service in a container ended with `Invalid argument`, if its pid was a thread's here."""
    lock, ended, started = DataDirLock.acquire(str(tmp_path)), threading.Event(), threading.Event()

    def live() -> None:
        started.set()
        ended.wait()

    thread = threading.Thread(target=live)
    thread.start()
    started.wait()
    try:
        assert thread.native_id is not None
        Path(lock.path).write_text(f"{thread.native_id}\n")
        assert not is_running(thread.native_id)
        with pytest.raises(OSError, match="here is not the service"), running_supervisor(str(tmp_path)):
            pass
    finally:
        ended.set()
        thread.join()
        lock.release()


def test_a_zombie_runs_no_more() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert is_running(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(process.pid)


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    with hold(str(tmp_path)) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert Path(lock_path(str(tmp_path))).read_text() == f"{first.pid}\n"
    assert holder_pid(str(tmp_path)) is None
    lock = DataDirLock.acquire(str(tmp_path))
    assert holder_pid(str(tmp_path)) == os.getpid()
    lock.release()
    assert Path(lock_path(str(tmp_path))).read_text() == ""
    assert holder_pid(str(tmp_path)) is None


def test_a_forked_child_keeps_the_lock_until_it_ends(tmp_path: Path) -> None:
    """No file ever has two writers: the children of a killed service hold its lock until the last has drained."""
    DataDirLock.acquire(str(tmp_path))
    go, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done)
        os.read(go, 1)
        os._exit(0)
    os.close(go)
    (fd,) = (int(path.name) for path in OWN_FDS.iterdir() if path.resolve() == Path(lock_path(str(tmp_path))))
    os.close(fd)  # the parent dies
    with pytest.raises(DataDirLocked):
        DataDirLock.acquire(str(tmp_path))
    os.close(done)
    os.waitpid(child, 0)
    DataDirLock.acquire(str(tmp_path)).release()


def test_a_directory_is_made_on_first_use(tmp_path: Path) -> None:
    DataDirLock.acquire(str(tmp_path / "a" / "b")).release()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert holder_pid(str(tmp_path / "never")) is None


def test_a_directory_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataDirNotWritable, match=r"file is not writable: .*; give user \d+ write access to it or choose"
    ):
        DataDirLock.acquire(str(tmp_path / "file"))
    with pytest.raises(DataDirNotWritable, match="proc/topics-data is not writable"):
        DataDirLock.acquire("/proc/topics-data")


def test_a_place_where_not_even_root_writes() -> None:
    with pytest.raises(DataDirNotWritable, match="/sys/topics-data is not writable"):
        DataDirLock.acquire("/sys/topics-data")
