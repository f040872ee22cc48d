"""`topics-supervisor promote`: a service that follows another one takes over from it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final

import msgspec

from topics.core.clock import SystemClock
from topics.shm.control import ProcessState, Role
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note
from topics.storage.lock import holder_pid, may_hold, running_supervisor
from topics.supervisor.status import StatusReader
from topics.terminal import plural

POLL_S: Final = 0.02


class NotFollowingError(Exception):
    """The service leads already: it follows nobody from whom it could take over."""


class Promoted(msgspec.Struct, frozen=True):
    """A promotion that is complete: process `pid` leads `data_dir`, `took_ms` after it was told to."""

    data_dir: str
    pid: int
    topics: int
    took_ms: int

    @property
    def words(self) -> str:
        return f"process {self.pid} leads with {plural(self.topics, 'topic')}, after {self.took_ms} ms"


def promote(data_dir: str, timeout_ms: int) -> Promoted | None:
    """Have the service of a data directory take over, and wait until it leads and is ready. None when nothing runs.
    Raise NotFollowingError, TimeoutError, OSError or ValueError when it belongs to somebody else or cannot be read.
    """
    reader = StatusReader(data_dir, SystemClock())
    try:
        with running_supervisor(data_dir):
            began_s = time.monotonic()
    except ProcessLookupError:
        return None
    told_life = 0
    while True:
        if holder_pid(data_dir) is None:
            raise OSError("the service has stopped; its log says why")
        page = reader.page()
        if page is not None and page.follows:
            life, cell = page.header.get("started_ms"), page.cell(Role.ARCHIVER, 0)
            pid = cell.get("pid") if cell.get("state") == ProcessState.READY else 0  # earlier, the signal would end it
            if told_life and life != told_life and not _is_under_way(data_dir):
                raise OSError("it follows again, as another service has taken over or its directory was copied anew")
            if pid and not told_life and may_hold(data_dir, pid):  # the pid of a dead process may be a stranger's now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                    told_life = life
        elif page is not None:
            if not told_life and page.is_taken_over:
                raise OSError("another service took over from it: start it with --follow on an empty directory first")
            if not told_life:
                raise NotFollowingError
            status = reader.read()
            if status.state == "running" and status.pid is not None:
                return Promoted(data_dir, status.pid, status.topics, round((time.monotonic() - began_s) * 1000))
        if (time.monotonic() - began_s) * 1000 > timeout_ms:
            ends = "it goes on to try, also later when the archive is back: restart the service to end that"
            if _is_under_way(data_dir):
                ends = "it has begun to take over, and goes on by itself, also after a restart"
            raise TimeoutError(f"it does not lead after {timeout_ms} ms; its log says what it waits for; {ends}")
        time.sleep(POLL_S)


def _is_under_way(data_dir: str) -> bool:
    """Return whether the follower has closed the leader's archive, after which it goes on by itself."""
    note = read_note(OsFileSystem(), data_dir)
    return note is not None and bool(note.fence_id)
