"""The compactor: turns the logs of all shards into segments and snapshots until it is told to stop."""

from __future__ import annotations

import os
import signal
from typing import Final

from topics.core.clock import Clock, SystemClock
from topics.settings import Settings
from topics.shm.control import OVER_LIVES, ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory

HEARTBEAT_MS: Final = 250


def run(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    """The process."""
    clock = SystemClock()
    cell = shared.control.cell(Role.COMPACTOR, 0)
    _start(cell, incarnation, clock)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    cell.set("state", ProcessState.READY)
    while signal.sigtimedwait({signal.SIGTERM}, HEARTBEAT_MS / 1000) is None:
        cell.set("heartbeat_ms", clock.now_ms())
    cell.set("state", ProcessState.STOPPED)
    return 0


def _start(cell: ProcessCell, incarnation: int, clock: Clock) -> None:
    cell.clear(OVER_LIVES[Role.COMPACTOR])
    cell.set("incarnation", incarnation)
    cell.set("pid", os.getpid())
    cell.set("started_ms", clock.now_ms())
    cell.set("heartbeat_ms", clock.now_ms())
    cell.set("state", ProcessState.STARTING)
