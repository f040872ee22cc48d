"""`topics-supervisor promote`: a service that follows another one takes over from it; `--cancel` withdraws that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from topics.core.clock import SystemClock
from topics.shm.control import ControlPage, ProcessState, Role
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note
from topics.storage.lock import holder_pid, may_hold, running_supervisor
from topics.supervisor.status import StatusReader
from topics.terminal import plural

POLL_S: Final = 0.02
_BEGUN: Final = "it has begun to take over, and goes on by itself, also after a restart"
_WITHDRAWN: Final = "somebody has withdrawn it, or its process that follows has died, as its log says then"


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


class Withdrawn(msgspec.Struct, frozen=True):
    """A promotion that was withdrawn: process `pid` goes on to follow, in `data_dir`."""

    data_dir: str
    pid: int

    @property
    def words(self) -> str:
        return f"the promotion is withdrawn: process {self.pid} goes on to follow"


def promote(data_dir: str, timeout_ms: int) -> Promoted | None:
    """Have the service of a data directory take over, and wait until it leads and is ready. None when nothing runs.
    Raise NotFollowingError; OSError when it belongs to somebody else or cannot be read, TimeoutError.
    """
    if _pid(data_dir) is None:
        return None
    began_s, told_life, beats = time.monotonic(), 0, set[int]()
    reader = StatusReader(data_dir, SystemClock())
    for page in _pages(reader, data_dir, timeout_ms):
        if page is not None and page.follows:
            life = page.header.get("started_ms")
            if told_life and life != told_life and not _has_begun(page, data_dir):
                raise OSError("it follows again, as another service has taken over or its directory was copied anew")
            if told_life:
                beats.add(page.cell(Role.ARCHIVER, 0).get("heartbeat_ms"))
            # By the second beat after a signal the process has heard it.
            if len(beats) > 2 and not _is_wanted(page) and not _has_begun(page, data_dir):
                raise OSError(_WITHDRAWN)
            if not told_life and _signal(page, data_dir, signal.SIGUSR1):
                told_life = life
        elif page is not None:
            if not told_life:
                _refuse(page)
            status = reader.read()
            if status.state == "running" and status.pid is not None:
                return Promoted(data_dir, status.pid, status.topics, round((time.monotonic() - began_s) * 1000))
    ends = "it goes on to try, also later when the archive is back: `promote --cancel` ends that"
    if _has_begun(page, data_dir):
        ends = _BEGUN
    elif not told_life:
        ends = "it was not told to, as its process that follows was not ready"
    elif not _is_wanted(page):
        ends = _WITHDRAWN
    raise TimeoutError(f"it does not lead after {timeout_ms} ms; its log says what it waits for; {ends}")


def cancel(data_dir: str, timeout_ms: int) -> Withdrawn | None:
    """Withdraw a promotion that waits. None when nothing runs. Raise as `promote` does, and OSError if it has begun or
    none waits.
    """
    if (supervisor_pid := _pid(data_dir)) is None:
        return None
    told_life, is_asked = 0, False
    for page in _pages(StatusReader(data_dir, SystemClock()), data_dir, timeout_ms):
        if page is None:
            continue
        if not page.follows and not told_life:
            _refuse(page)
        life, is_wanted = page.header.get("started_ms"), _is_wanted(page)
        if not page.follows or _has_begun(page, data_dir):
            raise OSError(_BEGUN)
        if told_life and not (is_wanted and life == told_life):
            if not is_asked:
                raise OSError("no promotion waits")
            return Withdrawn(data_dir, supervisor_pid)
        is_asked |= is_wanted
        # Tell it in any case: a request that it has not heard yet comes before this one.
        if not told_life and _signal(page, data_dir, signal.SIGUSR2):
            told_life = life
    raise TimeoutError(f"its process that follows has not answered after {timeout_ms} ms; repeat it")


def _pid(data_dir: str) -> int | None:
    with suppress(ProcessLookupError), running_supervisor(data_dir) as (pid, _):
        return pid
    return None


def _pages(reader: StatusReader, data_dir: str, timeout_ms: int) -> Iterator[ControlPage | None]:
    """Yield the control page, None between two lives, until the time is over. Raise OSError once it stopped."""
    until_s = time.monotonic() + timeout_ms / 1000
    while True:
        if holder_pid(data_dir) is None:
            raise OSError("the service has stopped; its log says why")
        yield reader.page()
        if time.monotonic() > until_s:
            return
        time.sleep(POLL_S)


def _refuse(page: ControlPage) -> NoReturn:
    """Refuse a service that does not follow. Raise OSError if another one took over from it, else NotFollowingError."""
    if page.is_taken_over:
        raise OSError("another service took over from it: start it with --follow on an empty directory first")
    raise NotFollowingError


def _is_wanted(page: ControlPage | None) -> bool:
    return page is not None and page.follows and page.cell(Role.ARCHIVER, 0).get("promotion_ms") > 0


def _has_begun(page: ControlPage | None, data_dir: str) -> bool:
    """Return whether the follower has noted that it takes over. From then on it goes on by itself."""
    note = read_note(OsFileSystem(), data_dir)  # tells it also before the process has taken a step
    if note is not None and note.fence_id:
        return True
    return page is not None and page.follows and page.cell(Role.ARCHIVER, 0).get("promotion_begun") > 0


def _signal(page: ControlPage, data_dir: str, number: signal.Signals) -> bool:
    """Signal the follower's process. False if it is not ready: until then, the signal would end it."""
    cell = page.cell(Role.ARCHIVER, 0)
    pid = cell.get("pid") if cell.get("state") == ProcessState.READY else 0
    with suppress(ProcessLookupError):
        if pid and may_hold(data_dir, pid):  # the pid of a dead process may be a stranger's now
            os.kill(pid, number)
            return True
    return False
