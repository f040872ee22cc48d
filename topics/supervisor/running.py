"""Commands for a running service, found by its data directory: stop, and read the keys again."""

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

POLL_S: Final = 0.01
_WITHOUT_CONNECTIONS: Final = (ProcessState.NONE, ProcessState.DEAD, ProcessState.STOPPED)


class RunningSupervisor(NamedTuple):
    """The supervisor of a data directory. `process_fd` stays with this process; its pid may be used again later."""

    pid: int
    process_fd: int

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. PermissionError when it is another user's, ProcessLookupError when it has ended."""
        signal.pidfd_send_signal(self.process_fd, number)


@contextmanager
def running_supervisor(data_dir: str) -> Iterator[RunningSupervisor | None]:
    """Finds the supervisor that holds the lock of `data_dir`; None when nothing runs."""
    pid = holder_pid(data_dir)
    try:
        process_fd = None if pid is None else os.pidfd_open(pid)
    except ProcessLookupError:
        process_fd = None
    if pid is None or process_fd is None:
        yield None
        return
    try:
        yield RunningSupervisor(pid, process_fd) if holder_pid(data_dir) == pid else None
    finally:
        os.close(process_fd)


def stop(data_dir: str, timeout_ms: int) -> int | None:
    """Sends SIGTERM to the data directory's service and waits for its end.

    Returns the pid that has ended, None when nothing ran. Raises TimeoutError when it still runs after `timeout_ms`
    and PermissionError when it belongs to another user.
    """
    with running_supervisor(data_dir) as service:
        if service is None:
            return None
        try:
            service.signal(signal.SIGTERM)
        except ProcessLookupError:
            return None
        poll = select.poll()
        poll.register(service.process_fd, select.POLLIN)
        if not poll.poll(timeout_ms):
            raise TimeoutError(f"process {service.pid} still runs after {timeout_ms} ms")
        return service.pid


class ReloadRefused(Exception):  # noqa: N818 — named for what it is
    """The service read its keys again, found them unusable and keeps the former ones."""


def reload(data_dir: str, timeout_ms: int) -> int | None:
    """Sends SIGHUP to the data directory's service and waits until every frontend uses the new keys.

    Returns the service's pid, None when nothing ran. Raises ReloadRefused; TimeoutError when a frontend still uses the
    former keys after `timeout_ms`; PermissionError when the service belongs to another user; OSError or ValueError when
    its control page cannot be read.
    """
    with running_supervisor(data_dir) as service:
        if service is None:
            return None
        page = ControlPage.attach(shm_names.shm_name(shm_names.identity(data_dir), "control"))
        header = page.header
        reloads, serial = header.get("reloads"), header.get("keys_serial")
        try:
            service.signal(signal.SIGHUP)
        except ProcessLookupError:
            return None
        deadline_s = time.monotonic() + timeout_ms / 1000
        while True:
            if header.get("reloads") != reloads:
                if header.get("keys_serial") == serial:
                    raise ReloadRefused
                if _all_use_newest_keys(page):
                    return service.pid
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"process {service.pid} has not reloaded its keys after {timeout_ms} ms")
            time.sleep(POLL_S)


def _all_use_newest_keys(page: ControlPage) -> bool:
    """True if every frontend uses the newest keys; one that does not run will start with them."""
    serial = page.header.get("keys_serial")
    cells = [page.cell(Role.FRONTEND, index) for index in range(page.frontends)]
    return all(
        cell.get("keys_serial") >= serial or cell.supervisor.get("state") in _WITHOUT_CONNECTIONS for cell in cells
    )
