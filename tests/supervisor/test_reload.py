"""`topics-supervisor reload` beside a service that begins another life, as it does when it takes over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from topics.shm import shm_names
from topics.supervisor.command import reload

BETWEEN_LIVES = """
import signal, sys
from topics.shm import shm_names
from topics.shm.control import ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage.lock import DataDirLock

def life(number, state):
    shared = SharedMemory.create(shm_names.identity(sys.argv[1]), 1, 1, 1 << 16)
    shared.control.header.set("started_ms", number)
    shared.control.header.set("state", state)
    return shared

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
lock = DataDirLock.acquire(sys.argv[1])
left = life(1, ProcessState.STOPPED) if sys.argv[2] == "left" else None
print("ready", flush=True)
signal.sigwait({signal.SIGHUP})
if left is not None:
    left.destroy()
next = life(2, ProcessState.READY)
next.control.header.set("keys_serial", 1)
next.control.cell(Role.FRONTEND, 0).set("keys_serial", 1)
next.control.header.set("reloads", 1)
signal.pause()
"""


@pytest.mark.parametrize("memory", ["left", "gone"])
def test_a_reload_between_two_lives_is_the_next_ones(tmp_path: Path, memory: str) -> None:
    command = [sys.executable, "-c", BETWEEN_LIVES, str(tmp_path), memory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout
        assert service.stdout.readline() == "ready\n"
        try:
            assert reload(str(tmp_path), 10_000) == service.pid
        finally:
            service.kill()
            shm_names.unlink_all(shm_names.identity(str(tmp_path)))


def test_a_reload_of_a_service_that_ends_meanwhile_finds_none(tmp_path: Path) -> None:
    """It does not wait for it until its time is over."""
    script = BETWEEN_LIVES.replace("signal.sigwait({signal.SIGHUP})", "signal.sigwait({signal.SIGHUP}); sys.exit()")
    command = [sys.executable, "-c", script, str(tmp_path), "gone"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout
        assert service.stdout.readline() == "ready\n"
        assert reload(str(tmp_path), 10_000) is None
        assert service.wait() == 0
