"""A supervisor in a process of its own, over the children of `program`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import clean_environment, poll
from topics.core.clock import SystemClock
from topics.shm import shm_names
from topics.supervisor.status import ProcessStatus, Status, StatusReader

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 40.0


class Service:
    """A service that a test starts, disturbs and looks at."""

    def __init__(self, root: Path, data_dir: Path, traits: dict[str, object], environ: dict[str, str]) -> None:
        self.data_dir = data_dir
        self.port_file = root / "port"
        self._journal = root / "journal"
        self._log = root / "log"
        self.reader = StatusReader(str(self.data_dir), SystemClock())
        environment = {
            "TOPICS_DATA_DIR": str(self.data_dir),
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(self.port_file),
            "TOPICS_WAL_SHARDS": "2",
            "TOPICS_FRONTENDS": "2",
            "TOPICS_LOG_FORMAT": "json",
            "TOPICS_RING_BYTES": "64KiB",
            "TOPICS_SHUTDOWN_GRACE_MS": "30000",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.supervisor.program", str(self._journal)]
                + [f"{name}={value}" for name, value in traits.items()],
                env=clean_environment(environment | environ),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def journal(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    def log_text(self) -> str:
        return self._log.read_text()

    def log(self, event: str) -> list[dict[str, Any]]:
        """The log lines of this event."""
        whole, _, _ = self.log_text().rpartition("\n")  # what comes after the last one is still being written
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def status(self) -> Status:
        return self.reader.read()

    def wait_state(self, state: str) -> Status:
        """The status, once it is `state`."""

        def seen() -> Status | None:
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.log_text()}"
            status = self.status()
            return status if status.state == state else None

        return poll(f"state {state}", seen, START_DEADLINE_S)

    def child(self, role: str, index: int) -> ProcessStatus:
        (found,) = [p for p in self.status().processes if (p.role, p.index) == (role, index)]
        return found

    def connect(self) -> int:
        """The pid that answers a connection."""
        host, _, port = self.port_file.read_text().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            return int(connection.makefile().read())

    def family(self) -> list[int]:
        status = self.status()
        return [self.process.pid, *(p.pid for p in status.processes if p.pid)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_at_once(self, *numbers: int) -> None:
        """All of them wait for it when it looks."""
        self.signal(signal.SIGSTOP)
        poll("it to stand still", lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)
        for number in numbers:
            self.signal(number)
        self.signal(signal.SIGCONT)

    def wait_exit(self) -> int:
        return self.process.wait(STOP_DEADLINE_S)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait_exit()

    def insist(self) -> int:
        """SIGTERM again and again, as somebody who does not want to wait for the drain; the exit code.

        Not once it has said that it stops at once: an interpreter that ends has no handlers any more.
        """

        def gone() -> bool:
            if not self.log("stopped"):
                self.signal(signal.SIGTERM)
            return self.process.poll() is not None

        poll("the impatient stop", gone, STOP_DEADLINE_S, every_s=1.1)  # what comes sooner counts as the same stop
        return self.wait_exit()

    def shared_memory(self) -> list[str]:
        return shm_names.objects(shm_names.identity(str(self.data_dir)))


Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(environ={…}, data_dir=…, **traits): a service that is gone when the test ends, whatever happened."""
    services: list[Service] = []

    def make(environ: dict[str, str] | None = None, data_dir: Path | None = None, **traits: object) -> Service:
        root = tmp_path / f"service-{len(services)}"
        root.mkdir()
        services.append(Service(root, data_dir or tmp_path / "data", traits, environ or {}))
        return services[-1]

    yield make
    for service in services:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(service.process.pid, signal.SIGKILL)  # its children are in its group, also without it
        service.process.wait()
        if service.data_dir.is_dir():
            shm_names.unlink_all(shm_names.identity(str(service.data_dir)))
