"""A real service for tests and benchmarks: `topics-supervisor run` in a process group of its own.

Nothing here reaches into the server: it is started by its command, or as a fork of it (`tests/forks.py`), found by its
port file, asked by `topics-supervisor status --json`, and stopped or killed by signals, as an operator would.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import psutil

from tests.forks import NEEDS_A_START, SUPERVISOR, Fork, Forks
from topics.shm.shm_names import identity

COMMAND = Path(sys.executable).with_name("topics-supervisor")
PATIENCE = 4.0
"""Tests wait so many times their deadline: a machine that others use, too, may stand still for some seconds."""
START_DEADLINE_S = 30.0
STOP_GRACE_MS = 30_000
"""Grace of a service that a test starts, unless it says otherwise. A process that is killed after its share of it fails
the test, and a machine that stands still for some seconds is no reason for that.
"""
STOP_MARGIN_S = 10.0
RUN_MAX_S = 240.0
HEAL_DEADLINE_S = 60.0
LOG_TAIL_BYTES = 16_384
SETTINGS = dict(pair.split("=", 1) for pair in os.environ.get("SERVICE_SETTINGS", "").split())
"""Settings of every service, unless a test says otherwise: `make eager`."""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

Result = TypeVar("Result")

forks: Forks | None = None
"""Starts the programs if it is there, as in a run of pytest (tests/conftest.py)."""

# Every service that a test has started and not yet put away: a failing test shows their logs.
open_services: list[Service] = []


def poll(what: str, probe: Callable[[], Result | None], deadline_s: float = 30.0, every_s: float = 0.005) -> Result:
    """The first result of `probe` that is neither None nor False; AssertionError naming `what` if there is none within
    `deadline_s`, on a machine of our own, and `PATIENCE` times that on any. It looks once more after that: this process
    may have stood still since it looked last.
    """
    end = time.monotonic() + deadline_s * PATIENCE
    while True:
        is_over = time.monotonic() > end
        result = probe()
        if result is not None and result is not False:
            return result
        if is_over:
            raise AssertionError(f"not within {deadline_s * PATIENCE:g} s: {what}")
        time.sleep(every_s)


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any TOPICS_* of the developer's shell, plus `extra`."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")} | dict(extra)


def is_running(pid: int) -> bool:
    """Return whether a process runs; False for a pid that is gone or a zombie, which may wait for its new parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _stop_with_parent() -> None:
    """SIGTERM for the child when this process is gone, even by SIGKILL: no service outlives its test run."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def reserved_port() -> tuple[socket.socket, int]:
    """Return a port, and the socket that keeps it: as long as that is open, and never listens, nobody is given the port
    who asks for any, but who asks for this one.
    """
    placeholder = socket.socket()
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    placeholder.bind(("127.0.0.1", 0))
    return placeholder, placeholder.getsockname()[1]


def size_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of those files that are there: a service removes files meanwhile."""
    size = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


OWN_URL = "{url}"
"""A setting with this value has the address of its service, which is not known before it starts."""


class Service:
    """One service on one data directory; start, kill and start it again, on the same port.

    Used as a context manager it starts on entry and stops on exit (asserting exit code 0 and no shared memory left
    behind), or, when the body failed, kills the group. The temporary directory goes in both cases.
    """

    def __init__(
        self,
        *,
        shards: int = 2,
        frontends: int = 2,
        port: int = 0,
        wal_file_bytes: int | None = 1 << 20,
        env: Mapping[str, str] | None = None,
        cpus: set[int] | None = None,
        data_dir: Path | None = None,
        command: Path | None = None,
    ) -> None:
        """`data_dir` is made below the temporary directory unless given; a given one is the caller's to remove.
        `command` is the `topics-supervisor` to run, which may be of another version; it is never a fork then.
        """
        self.root = Path(tempfile.mkdtemp(prefix="topics-test-"))
        self.data_dir = data_dir or self.root / "data"
        self.log_path = self.root / "log"
        self.port_file = self.root / "port"
        self.port = port
        self.shards = shards
        self.frontends = frontends
        self.env = dict(SETTINGS) | dict(env or {})
        if wal_file_bytes is not None:
            self.env.setdefault("TOPICS_WAL_FILE_BYTES", str(wal_file_bytes))
        self.env.setdefault("TOPICS_SHUTDOWN_GRACE_MS", str(STOP_GRACE_MS))
        self._cpus = cpus
        self._command = command
        self._process: subprocess.Popen[bytes] | Fork | None = None
        self._client: httpx.Client | None = None
        self._placeholder: socket.socket | None = None
        open_services.append(self)

    # --- life

    def start(self, *, wait_ready: bool = True) -> Self:
        """Start it; return once its port file is there and, unless told otherwise, `/v0/ready` is 200."""
        assert self._process is None, "already started"
        self.port_file.unlink(missing_ok=True)
        if not self.port:
            self._take_port()
        with self.log_path.open("ab") as log:
            self._process = self._begin("run", log=log.fileno())
        if self._cpus:
            # In time: it has not got as far as forking children, which inherit it.
            psutil.Process(self._process.pid).cpu_affinity(sorted(self._cpus))
        address = poll("the port file", self._port_file_text, START_DEADLINE_S)
        self.port = int(address.rpartition(":")[2])
        if wait_ready:
            poll("/v0/ready to be 200", self.is_ready, START_DEADLINE_S)
        return self

    def _begin(self, *arguments: str, log: int) -> subprocess.Popen[bytes] | Fork:
        environment = self.environment()
        with open(os.devnull) as nothing:
            if (forks := self._forks()) is not None:
                given = nothing.fileno()
                command = [SUPERVISOR, *arguments]
                return forks.start(command, env=environment, cwd=self.root, stdin=given, stdout=log, stderr=log)
            return subprocess.Popen(
                [str(self._command or COMMAND), *arguments],
                env=environment,
                stdin=nothing,
                stdout=log,
                stderr=log,
                cwd=self.root,
                start_new_session=True,
                preexec_fn=_stop_with_parent,  # noqa: PLW1509 - one system call, no lock that a thread could hold
            )

    def _forks(self) -> Forks | None:
        """Return None if a new process has to be started, for a program of another version, say."""
        is_ours = self._command is None and not any(name.startswith(NEEDS_A_START) for name in self.env)
        return forks if is_ours else None

    def _take_port(self) -> None:
        """Any, for all lives of this service: nobody else is given it while the service is down."""
        self._placeholder, self.port = reserved_port()

    def environment(self) -> dict[str, str]:
        """The whole environment of this service's commands."""
        return clean_environment(
            {
                "TOPICS_DATA_DIR": str(self.data_dir),
                "TOPICS_PORT": str(self.port),
                "TOPICS_PORT_FILE": str(self.port_file),
                "TOPICS_WAL_SHARDS": str(self.shards),
                "TOPICS_FRONTENDS": str(self.frontends),
                "TOPICS_LOG_FORMAT": "json",
                **{name: self.url if value == OWN_URL else value for name, value in self.env.items()},
            }
        )

    def stop(self) -> None:
        """SIGTERM; asserts exit code 0 and that no shared memory and no process of it is left."""
        process = self._running_process()
        family = self.family()
        process.send_signal(signal.SIGTERM)
        code = process.wait(self.stop_deadline_s)
        self._forget()
        assert code == 0, f"SIGTERM ended with exit code {code}\n{self.log_tail()}"
        survivors = [pid for pid in family if is_running(pid)]
        assert not survivors, f"left running after the stop: {survivors}\n{self.log_tail()}"
        left = self.shared_memory()
        assert not left, f"left in /dev/shm after the stop: {left}\n{self.log_tail()}"

    def kill_group(self) -> None:
        """SIGKILL to every process of the service at once; returns when all are gone."""
        process = self._running_process()
        family = self.family()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(self.stop_deadline_s)
        poll("every killed process to be gone", lambda: not any(is_running(pid) for pid in family))
        self._forget()

    def was_killed(self) -> None:
        """Note that something else has killed the whole group; it may be started again then."""
        self._running_process().wait(self.stop_deadline_s)
        self._forget()

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor alone; returns when its children, noticing, have gone as well."""
        process = self._running_process()
        family = self.family()
        process.kill()
        process.wait(self.stop_deadline_s)
        poll("the children to stop", lambda: not any(is_running(pid) for pid in family), self.stop_deadline_s)
        self._forget()

    def restart(self, *, wait_ready: bool = True) -> Self:
        """Stop gracefully if it runs, then start on the same port and directory."""
        if self._process is not None:
            self.stop()
        return self.start(wait_ready=wait_ready)

    def close(self) -> None:
        """Leave nothing behind: processes, shared memory, the temporary directory."""
        if self._process is not None:
            self.kill_group()
        for entry in self.shared_memory():
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)
        if self._placeholder is not None:
            self._placeholder.close()
        if self in open_services:
            open_services.remove(self)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException as error:
            error.add_note(self.log_tail())
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._process is not None:
                self.stop()
            elif error is not None:
                error.add_note(self.log_tail())
        finally:
            self.close()

    @contextlib.contextmanager
    def unstarted(self) -> Iterator[Self]:
        """Do as the service's own context manager does, but leave starting and stopping to the body."""
        try:
            yield self
        except BaseException as error:
            error.add_note(self.log_tail())
            raise
        finally:
            self.close()

    # --- what can be asked

    @property
    def pid(self) -> int:
        return self._running_process().pid

    @property
    def stop_deadline_s(self) -> float:
        """By then a stop is over, in good time or not."""
        return int(self.env["TOPICS_SHUTDOWN_GRACE_MS"]) / 1000 + STOP_MARGIN_S

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> httpx.Client:
        """One shared client; the time-out is above every long-poll of the tests."""
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=35.0)
        return self._client

    def is_ready(self) -> bool:
        process = self._running_process()
        assert process.poll() is None, f"ended by itself with exit code {process.returncode}\n{self.log_tail()}"
        # httpx makes a client for each look, which takes more of the processor than the start of the service.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/v0/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`topics-supervisor <arguments>` with this service's environment."""
        environment = self.environment() | dict(env or {})
        forks = self._forks()
        if forks is None or env:
            command = [str(self._command or COMMAND), *arguments]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=RUN_MAX_S, check=False, cwd=self.root
            )
        return forks.run([SUPERVISOR, *arguments], env=environment, cwd=self.root, timeout=RUN_MAX_S)

    def said(self) -> list[dict[str, Any]]:
        """The lines of its log so far; one that is just being written is none yet."""
        whole, _, _ = self.log_path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def status(self) -> dict[str, Any]:
        """`topics-supervisor status --json`, parsed."""
        answer = self.run("status", "--json")
        assert answer.stdout.strip(), f"status said nothing (exit {answer.returncode}): {answer.stderr}"
        status: dict[str, Any] = json.loads(answer.stdout)
        return status

    def pid_of(self, role: str, index: int = 0) -> int:
        """The pid of `frontend` or `walshard` number `index`, once it has one."""

        def find() -> int | None:
            for process in self.status()["processes"]:
                if process["role"] == role and process["index"] == index and process["pid"]:
                    return int(process["pid"])
            return None

        return poll(f"{role} {index} to have a pid", find, HEAL_DEADLINE_S)

    def kill(self, role: str, index: int = 0) -> int:
        """SIGKILL to one process; its pid, which is gone on return."""

        def send() -> int | None:
            """Send the signal; None when the process has just died by itself: there will be another one."""
            pid = self.pid_of(role, index)
            if not is_running(pid):
                return None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return pid
            return None

        pid = poll(f"{role} {index} to be there", send, HEAL_DEADLINE_S)
        poll(f"{role} {index} (pid {pid}) to be gone", lambda: not is_running(pid))
        return pid

    def wait_healed(self, killed_pid: int) -> dict[str, Any]:
        """The status, once every process is ready again and none of them is `killed_pid`."""

        def healed() -> dict[str, Any] | None:
            status = self.status()
            states = [(p["state"], p["pid"]) for p in status["processes"]]
            whole = status["state"] == "running" and all(s == "ready" and pid != killed_pid for s, pid in states)
            return status if whole else None

        return poll(f"all processes to be ready without pid {killed_pid}", healed, HEAL_DEADLINE_S)

    def family(self) -> list[int]:
        """The supervisor's pid and those of all its descendants."""
        try:
            supervisor = psutil.Process(self.pid)
            return [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def shared_memory(self) -> list[Path]:
        """Return the objects of this data directory's instances in /dev/shm right now."""
        if not self.data_dir.exists():
            return []
        return sorted(Path("/dev/shm").glob(f"*{identity(str(self.data_dir))}*"))

    def log_tail(self) -> str:
        if not self.log_path.exists():
            return "(no log)"
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            return f"--- log of the service on {self.data_dir}\n" + log.read().decode(errors="replace")

    def _port_file_text(self) -> str | None:
        process = self._running_process()
        assert process.poll() is None, f"ended by itself with exit code {process.returncode}\n{self.log_tail()}"
        return self.port_file.read_text() if self.port_file.exists() else None

    def _running_process(self) -> subprocess.Popen[bytes] | Fork:
        assert self._process is not None, "the service is not started"
        return self._process

    def _forget(self) -> None:
        self._process = None
        if self._client is not None:
            self._client.close()
            self._client = None


def tiered_service(segment_max_events: int, **settings: str) -> Service:
    """Return a service that makes small segments at once, and has a cold directory for all but the newest two."""
    env = {
        "TOPICS_SEGMENT_MAX_EVENTS": str(segment_max_events),
        "TOPICS_CHECKPOINT_INTERVAL_MS": "20",
        "TOPICS_HOT_RETAIN_SEGMENTS": "2",
    }
    service = Service(env=env | settings)
    service.env["TOPICS_COLD_DIR"] = str(service.root / "cold")
    return service
