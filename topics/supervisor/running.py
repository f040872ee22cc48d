"""A service that runs as another process: found by its data directory, told to stop or to read its keys again."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from topics.shm import shm_names
from topics.shm.control import ControlPage, ProcessState, Role
from topics.storage.lock import holder_pid


class RunningSupervisor(NamedTuple):
    """The supervisor of a data directory. `process_fd` means this one process for good; the number may go to another
    one after its end.
    """

    pid: int
    process_fd: int

    def signal(self, number: signal.Signals) -> None:
        """Raises PermissionError when it belongs to somebody else, ProcessLookupError when it has ended."""
        signal.pidfd_send_signal(self.process_fd, number)


@contextmanager
def holder(data_dir: str) -> Iterator[RunningSupervisor | None]:
    """Finds the supervisor that holds the lock of `data_dir`, None when nothing runs."""
    pid = holder_pid(data_dir)
    process_fd = None
    if pid is not None:
        try:
            process_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            pid = None
    try:
        if pid is None or process_fd is None or holder_pid(data_dir) != pid:
            yield None
        else:
            yield RunningSupervisor(pid, process_fd)
    finally:
        if process_fd is not None:
            os.close(process_fd)


def stop(data_dir: str, patience_ms: int) -> int | None:
    """Sends SIGTERM to the data directory's service, and waits for its end.

    Returns the pid that has ended, None when nothing ran. Raises TimeoutError when it still runs after `patience_ms`
    and PermissionError when it belongs to somebody else.
    """
    with holder(data_dir) as service:
        if service is None:
            return None
        try:
            service.signal(signal.SIGTERM)
        except ProcessLookupError:
            return None
        poll = select.poll()
        poll.register(service.process_fd, select.POLLIN)
        if not poll.poll(patience_ms):
            raise TimeoutError(f"process {service.pid} still runs after {patience_ms} ms")
        return service.pid


POLL_S: Final = 0.01
_WITHOUT_CONNECTIONS: Final = (ProcessState.NONE, ProcessState.DEAD, ProcessState.STOPPED)


class ReloadRefused(Exception):  # noqa: N818 — named for what it is
    """The service looked at its keys, found them unusable and goes on with the former ones."""


def reload(data_dir: str, patience_ms: int) -> int | None:
    """Sends SIGHUP to the data directory's service; returns when every frontend goes by the keys as they are now.

    Returns the service's pid, None when nothing ran. Raises ReloadRefused, TimeoutError when it is not done after
    `patience_ms`, PermissionError when the service belongs to somebody else, and OSError or ValueError when its control
    page cannot be read.
    """
    with holder(data_dir) as service:
        if service is None:
            return None
        page = ControlPage.attach(shm_names.shm_name(shm_names.identity(data_dir), "control"))
        header = page.header
        reloads, serial = header.get("reloads"), header.get("keys_serial")
        try:
            service.signal(signal.SIGHUP)
        except ProcessLookupError:
            return None
        deadline_s = time.monotonic() + patience_ms / 1000
        while True:
            if header.get("reloads") != reloads:
                if header.get("keys_serial") == serial:
                    raise ReloadRefused
                if _everywhere(page):
                    return service.pid
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"process {service.pid} has not done it after {patience_ms} ms")
            time.sleep(POLL_S)


def _everywhere(page: ControlPage) -> bool:
    """True if the newest keys count in every frontend; one that does not run begins with them."""
    serial = page.header.get("keys_serial")
    cells = [page.cell(Role.FRONTEND, index) for index in range(page.frontends)]
    return all(
        cell.get("keys_serial") >= serial or cell.supervisor.get("state") in _WITHOUT_CONNECTIONS for cell in cells
    )
