"""Spark in a process of its own, to be killed or in parts: what a test finds of it, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyspark

from tests.spark.conftest import ROOT, make_java_home, spark_environment

_WORKER = "pyspark.worker"
_EXECUTOR = "CoarseGrainedExecutorBackend"


class Driver:
    """`python -m module arguments` and whatever Spark starts from it."""

    def __init__(self, module: str, arguments: list[str], log: Path, directory: Path) -> None:
        """Its Java and what executors write lie in `directory`."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = os.environ | spark_environment(make_java_home(directory / "java"))
        self._environment["SPARK_HOME"] = str(_spark_home(directory / "spark"))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def kill(self) -> None:
        """Everything of it at once; gone on return."""
        assert self._process is not None
        family = self._family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, 30)
        self._process.wait(30)

    def workers(self) -> list[psutil.Process]:
        """The Python processes in which tasks run, or wait for one; not those in which the driver plans."""
        found = [one for one in self._family() if _is_worker(one)]
        daemons = {one.pid for one in found if _parent(one) not in {other.pid for other in found}}
        return [one for one in found if one.pid not in daemons]

    def at_work(self, port: int) -> psutil.Process | None:
        """A worker that has a connection to the service on that port: one whose task reads or writes."""
        return next((one for one in self.workers() if talks_to(one, port)), None)

    def executors(self) -> list[psutil.Process]:
        """Executors that are processes of their own, in `local-cluster`."""
        return [one for one in self._family() if any(_EXECUTOR in part for part in _command(one))]

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _spark_home(directory: Path) -> Path:
    """The installed Spark; executors of `local-cluster` make their directories in its home."""
    directory.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


def sigkill(process: psutil.Process) -> bool:
    """False when it had gone before."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def talks_to(process: psutil.Process, port: int) -> bool:
    """Return whether the process has a connection to that port of this machine."""
    try:
        connections = process.net_connections("tcp4")
    except psutil.Error:
        return False
    return any(one.raddr and one.raddr.port == port and one.status == "ESTABLISHED" for one in connections)


def _is_worker(process: psutil.Process) -> bool:
    return _command(process)[-1:] == [_WORKER]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None
