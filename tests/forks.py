"""`topics-supervisor` as a fork of a process that has imported it: it starts in a fraction of the processor's time.

A run of pytest starts thousands of services, and four fifths of such a start are imports. The server (`python -m
tests.forks FD`) imports the program once and forks for each start; `Forks` asks it to. A fork has the environment, the
directory and the descriptors that it is given, and then runs what the installed command runs.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

PROGRAM: Final = "topics-supervisor"
REQUEST_BYTES_MAX: Final = 1 << 17
NUMBER: Final = struct.Struct("<i")
PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


class Fork:
    """A process that was forked, to be used as a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], told: int) -> None:
        """`told` is a pipe, now this object's: the process's pid comes from it, and when it has ended its exit code."""
        self.args = list(arguments)
        self.returncode: int | None = None
        self._told = told
        self.pid: int = NUMBER.unpack(os.read(told, NUMBER.size))[0]
        self._process_fd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process_fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = NUMBER.unpack(os.read(self._told, NUMBER.size))[0]
        os.close(self._told)
        os.close(self._process_fd)


class Forks:
    """The client of one server, which it starts with the first request, and which ends with this process."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None

    def start(
        self, arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdin: int, stdout: int, stderr: int
    ) -> Fork:
        """Start the program with these arguments, in a session of its own, with these descriptors."""
        if self._server is None:
            self._server, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its_end:
                command = [sys.executable, "-m", "tests.forks", str(its_end.fileno())]
                root = Path(__file__).parents[1]
                subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, pass_fds=[its_end.fileno()])
        told, tells = os.pipe()
        request = json.dumps({"arguments": list(arguments), "environ": dict(env), "cwd": str(cwd)}).encode()
        try:
            socket.send_fds(self._server, [request], [stdin, stdout, stderr, tells])
        finally:
            os.close(tells)
        return Fork([PROGRAM, *arguments], told)

    def close(self) -> None:
        """End the server, and with it all forks, by SIGTERM."""
        if self._server is not None:
            self._server.close()
            self._server = None


class _Child(NamedTuple):
    pid: int
    tells: int


def serve(asked: socket.socket) -> Sequence[str] | None:
    """Fork at each request. Return in each fork, with the arguments of its program, and in the server at the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, _Child):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell(key.data, os.waitstatus_to_exitcode(os.waitpid(key.data.pid, 0)[1]))
                    os.close(key.data.tells)
                    continue
                data, fds, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 4)
                if not data:
                    return None
                *streams, tells = fds
                server_pid, pid = os.getpid(), os.fork()
                if not pid:
                    others = [one for one in selector.get_map().values() if isinstance(one.data, _Child)]
                    for fd in (tells, *(fd for one in others for fd in (one.fd, one.data.tells))):
                        os.close(fd)
                    return _become(json.loads(data), streams, server_pid)
                for fd in streams:
                    os.close(fd)
                _tell(_Child(pid, tells), pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, _Child(pid, tells))


def _tell(child: _Child, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(child.tells, NUMBER.pack(number))


def _become(request: dict[str, Any], streams: Sequence[int], server_pid: int) -> Sequence[str]:
    """Turn this fork into what a command would have started; return its arguments."""
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
    arguments: list[str] = request["arguments"]
    return arguments


def main() -> int:
    import topicsd

    importlib.import_module("topics.supervisor.command")
    importlib.import_module("topics.supervisor.run_command")
    importlib.import_module("topics.supervisor.promote")
    gc.freeze()  # no collection in a fork writes to the pages that all share
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        arguments = serve(asked)
    if arguments is None:
        return 0
    sys.argv = [PROGRAM, *arguments]
    return topicsd.topics_supervisor()


if __name__ == "__main__":
    sys.exit(main())
