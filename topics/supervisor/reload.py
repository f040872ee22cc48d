"""Having a service that runs as another process read its keys again, and seeing that it has."""

from __future__ import annotations

import signal
import time
from typing import Final

from topics.shm import names
from topics.shm.control import ControlPage, ProcessState, Role
from topics.supervisor.holder import holder

POLL_S: Final = 0.01
_WITHOUT_CONNECTIONS: Final = (ProcessState.NONE, ProcessState.DEAD, ProcessState.STOPPED)


class ReloadRefused(Exception):  # noqa: N818 — named for what it is
    """The service looked at its keys, found them unusable and goes on with the former ones."""


def reload(data_dir: str, patience_ms: int) -> int | None:
    """SIGHUP to the data directory's service; returns when every frontend goes by the keys as they are now.

    Returns the service's pid, None when nothing ran. Raises ReloadRefused, TimeoutError when it is not done after
    `patience_ms`, PermissionError when the service belongs to somebody else, and OSError or ValueError when its
    control page cannot be read.
    """
    with holder(data_dir) as service:
        if service is None:
            return None
        page = ControlPage.attach(names.shm_name(names.identity(data_dir), "control"))
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
    """Whether the newest keys count in every frontend; one that does not run begins with them."""
    serial = page.header.get("keys_serial")
    cells = [page.cell(Role.FRONTEND, index) for index in range(page.frontends)]
    return all(
        cell.get("keys_serial") >= serial or cell.supervisor.get("state") in _WITHOUT_CONNECTIONS for cell in cells
    )
