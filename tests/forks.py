"""The programs as forks of a process that has imported them: they start in a fraction of the processor's time.

A run of pytest starts thousands of services and commands, and four fifths of such a start are imports. The server
(`python -m tests.forks FD`) imports them once and forks for each start; `Forks` asks it to. A fork has the environment,
the directory and the descriptors that it is given, and then runs what the installed command runs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

SUPERVISOR: Final = "topics-supervisor"
TOPICS: Final = "topics"
IMPORTED: Final = (
    *(f"topics.supervisor.{name}" for name in ("command", "run_command", "promote")),
    *(f"topics.cli.{name}" for name in ("main", "archive", "backup", "restore", "verify_command")),
)
LOST_SEQS_MAX: Final = 2000
"""Each seq of the gap behind a restored topic takes an entry of a segment, and segments of the tests are small."""
NEEDS_A_START: Final = ("LD_", "MALLOC_", "PYTHON")
"""Variables that begin so are read by what runs a program, before it is imported."""
REQUEST_BYTES_MAX: Final = 1 << 17
NUMBER: Final = struct.Struct("<i")
PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


class Fork:
    """A process that was forked, to be used as a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], told: socket.socket) -> None:
        """`told`, now this object's, has the pid with a descriptor of the process, and at its end the exit code."""
        self.args = list(arguments)
        self.returncode: int | None = None
        self._told, self._ending = told, threading.Lock()
        data, fds, _, _ = socket.recv_fds(told, NUMBER.size, 1)
        if not data:
            raise OSError(f"the server of forks is gone: {' '.join(arguments)} was not started")
        self.pid: int = NUMBER.unpack(data)[0]
        [self._process_fd] = fds

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            told = select.poll()
            told.register(self._told, select.POLLIN)
            if not told.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._ending:
            if self.returncode is None:
                data = self._told.recv(NUMBER.size)
                # Without an answer the server is dead, and all its forks are told to end.
                self.returncode = NUMBER.unpack(data)[0] if data else -signal.SIGTERM
                self._told.close()
                os.close(self._process_fd)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process_fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The client of one server, which it starts with the first request, and which ends with this process."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._starting = threading.Lock()

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdin: int, stdout: int, stderr: int
    ) -> Fork:
        """Start a program with its arguments, in a session of its own, with these descriptors."""
        told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"command": list(command), "environ": dict(env), "cwd": str(cwd)}).encode()
        with tells, self._starting:
            self._server = self._server or _server()
            try:
                socket.send_fds(self._server, [request], [stdin, stdout, stderr, tells.fileno()])
            except BrokenPipeError:
                self._server.close()
                self._server = None
                raise
        return Fork(command, told)

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; return its exit code, and what it has written."""
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            streams = {"stdin": nothing.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
            fork = self.start(command, env=env, cwd=cwd, **streams)
            try:
                code = fork.wait(timeout)
            except subprocess.TimeoutExpired:
                fork.kill()
                raise
            written = [(file.seek(0), file.read())[1] for file in (out, err)]
            return subprocess.CompletedProcess(command, code, *written)

    def close(self) -> None:
        """End the server, and with it all forks, by SIGTERM."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _server() -> socket.socket:
    """Start a server; return the socket by which it is asked, and at whose end it ends. Ctrl-C is not for it."""
    asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with asked:
        command, root = [sys.executable, "-m", "tests.forks", str(asked.fileno())], Path(__file__).parents[1]
        subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, pass_fds=[asked.fileno()], start_new_session=True)
    return asks


class _Child(NamedTuple):
    pid: int
    tells: socket.socket


def serve(asked: socket.socket) -> Sequence[str] | None:
    """Fork at each request. Return in each fork, with its command, and in the server at the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, _Child):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with key.data.tells as tells, suppress(BrokenPipeError):  # nobody waits for it any more
                        tells.send(NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(key.data.pid, 0)[1])))
                    continue
                data, fds, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 4)
                if not data:
                    return None
                *streams, tells_fd = fds
                tells = socket.socket(fileno=tells_fd)
                server_pid, pid = os.getpid(), os.fork()
                if not pid:
                    tells.close()
                    for one in selector.get_map().values():
                        if isinstance(one.data, _Child):
                            os.close(one.fd)
                            one.data.tells.close()
                    return _become(json.loads(data), streams, server_pid)
                for fd in streams:
                    os.close(fd)
                process_fd = os.pidfd_open(pid)  # before it is reaped: its number is nobody else's
                with suppress(BrokenPipeError):
                    socket.send_fds(tells, [NUMBER.pack(pid)], [process_fd])
                selector.register(process_fd, selectors.EVENT_READ, _Child(pid, tells))


def _become(request: dict[str, Any], streams: Sequence[int], server_pid: int) -> Sequence[str]:
    """Turn this fork into what a command would have started; return the command."""
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server_pid:
        os._exit(1)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    command: list[str] = request["command"]
    return command


def main() -> int:
    import topicsd

    for name in IMPORTED:
        importlib.import_module(name)
    mock.patch("topics.archive.directory_copy.LOST_SEQS_MAX", LOST_SEQS_MAX).start()
    gc.freeze()  # no collection in a fork writes to the pages that all share
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        command = serve(asked)
    if command is None:
        return 0
    sys.argv = list(command)
    return topicsd.topics() if command[0] == TOPICS else topicsd.topics_supervisor()


if __name__ == "__main__":
    sys.exit(main())
