"""The servers that are compared: how each is started on a fresh directory, and what its acknowledgement promises.

A server that the machine has no program for is left out, with a word (`Contender.missing`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from bench import machine
from tests.harness import Service

ROOT: Final = Path(__file__).parents[2]
START_DEADLINE_S: Final = 120.0
POSTGRES_PLACES: Final = "/usr/lib/postgresql/*/bin"
SUPERVISOR: Final = ROOT / ".venv" / "bin" / "topics-supervisor"
"""Our service runs in the project's environment, as the peers' servers run in theirs; the clients share one."""


class Contender(NamedTuple):
    """One server in one setting. `synced` says whether its acknowledgement means that the disk has the record."""

    name: str
    family: str
    synced: bool
    promise: str


CONTENDERS: Final = (
    Contender("topics disk", "topics", False, "survives the death of every process; synced within about a second"),
    Contender("topics fsync", "topics", True, "synced before the ack"),
    Contender("redis everysec", "redis", False, "AOF, synced once a second; a kill loses what it has not written yet"),
    Contender("redis always", "redis", True, "AOF, synced before the ack"),
    Contender("jetstream", "jetstream", False, "file store, one replica, synced every 2 minutes (its default)"),
    Contender("jetstream always", "jetstream", True, "file store, one replica, `sync_interval: always`"),
    Contender("postgres async", "postgres", False, "`synchronous_commit = off`: synced within 600 ms"),
    Contender("postgres", "postgres", True, "synced before the commit is answered"),
)


class Address(NamedTuple):
    """The family and the port of a server."""

    family: str
    port: int


class Server:
    """A server that runs, on a directory of its own. It owns both; `kill` and `start` keep the directory."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.root = Path(tempfile.mkdtemp(prefix="topics-peers-"))
        self.port = free_port()
        self._service: Service | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if contender.family == "topics":
            self._service = Service(shards=2, frontends=2, wal_file_bytes=None, command=SUPERVISOR)
        elif contender.family == "postgres":
            self._init_postgres()
        self.start()

    @property
    def address(self) -> Address:
        return Address(self.contender.family, self.port)

    def start(self) -> None:
        """Start it and wait until it serves."""
        if self._service is not None:
            self._service.start()
            self.port = self._service.port
            return
        command, *options = _COMMANDS[self.contender.family](self)
        log = (self.root / "log").open("ab")
        user = _POSTGRES_USER if self.contender.family == "postgres" and os.geteuid() == 0 else None
        self._process = subprocess.Popen([command, *options], stdout=log, stderr=log, user=user, cwd=self.root)
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._serves():
            assert self._process.poll() is None, (self.root / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.contender.name} does not start"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._service is not None:
            self._service.kill_group()
        elif self._process is not None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for process in family:  # some end by themselves when the first one is gone
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family)

    def close(self) -> None:
        self.kill()
        if self._service is not None:
            self._service.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def held_bytes(self) -> float:
        """Return the memory of all of its processes, each shared page once, and of its objects in /dev/shm."""
        if self._service is not None:
            return float(machine.memory_of(self._service.family(), self._service.shared_memory()).held)
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        pids = [first.pid, *(one.pid for one in first.children(recursive=True))]
        held = 0
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # PostgreSQL has workers that come and go
                held += machine.proportional_bytes(pid)
        return float(held)

    def _serves(self) -> bool:
        if self.contender.family == "postgres":
            ask = [program("pg_isready"), "--quiet", "--host", str(self.root), "--port", str(self.port)]
            return subprocess.run(ask, check=False).returncode == 0
        if self.contender.family == "redis":
            return _ask(self.port, b"PING\r\n").startswith(b"+PONG")  # -LOADING while it reads its file
        # Its streams are there before it listens.
        return _ask(self.port, b"").startswith(b"INFO")

    def _init_postgres(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.root, _POSTGRES_USER)
        user = _POSTGRES_USER if os.geteuid() == 0 else None
        init = [program("initdb"), "--pgdata", str(self.root / "data"), "--username", "bench", "--auth", "trust"]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, user=user, cwd=self.root)


_POSTGRES_USER: Final = "postgres"
"""PostgreSQL refuses to run as root; its package makes this user."""


def _redis(server: Server) -> list[str]:
    sync = "always" if server.contender.synced else "everysec"
    options = {"port": server.port, "bind": "127.0.0.1", "dir": server.root, "appendonly": "yes", "appendfsync": sync}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [program("redis-server"), *flags, "--save", ""]


def _jetstream(server: Server) -> list[str]:
    sync = "sync_interval: always\n" if server.contender.synced else ""
    config = server.root / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{server.port}"\njetstream {{\n  store_dir: "{server.root}"\n  {sync}}}\n')
    return [program("nats-server"), "--config", str(config)]


def _postgres(server: Server) -> list[str]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": server.port,
        "unix_socket_directories": server.root,
        "max_connections": 200,
        "shared_buffers": "1GB",
        "synchronous_commit": "on" if server.contender.synced else "off",
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return [program("postgres"), "-D", str(server.root / "data"), *flags]


_COMMANDS: Final[dict[str, Callable[[Server], list[str]]]] = {
    "redis": _redis,
    "jetstream": _jetstream,
    "postgres": _postgres,
}
_PROGRAMS: Final = {
    "topics": str(SUPERVISOR),
    "redis": "redis-server",
    "jetstream": "nats-server",
    "postgres": "initdb",
}


def find_program(name: str) -> str | None:
    """Return the path of a program: beside this Python, on the PATH, or where PostgreSQL's packages are."""
    beside = str(Path(sys.executable).parent)
    postgres = ":".join(str(path) for path in sorted(Path("/").glob(POSTGRES_PLACES[1:]), reverse=True))
    return shutil.which(name, path=f"{beside}:{os.environ['PATH']}:{postgres}")


def program(name: str) -> str:
    found = find_program(name)
    assert found is not None, name
    return found


def missing(contender: Contender) -> str | None:
    """Return the name of the program that this machine lacks for it."""
    name = _PROGRAMS[contender.family]
    return None if find_program(name) else name


def versions(contenders: Sequence[Contender]) -> dict[str, str]:
    """Return what the programs of these peers say of their version."""
    programs = {"redis": "redis-server", "jetstream": "nats-server", "postgres": "postgres"}
    found = {}
    for family in dict.fromkeys(one.family for one in contenders if one.family in programs):
        said = subprocess.run([program(programs[family]), "--version"], check=True, capture_output=True, text=True)
        number = re.search(r"\d+\.\d+(\.\d+)?", said.stdout)
        assert number is not None, said.stdout
        found[family] = number[0]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(port: int, request: bytes) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(request)
            return connection.recv(4096)
    except OSError:
        return b""


@contextmanager
def serving(contender: Contender) -> Iterator[Server]:
    """Start this server on a fresh directory; remove both."""
    server = Server(contender)
    try:
        yield server
    finally:
        server.close()


def wanted(names: Sequence[str]) -> list[Contender]:
    """Return ours and those of these families, or all. What cannot be started here is left out, with a word."""
    found = []
    for contender in CONTENDERS:
        if names and contender.family not in names and contender.family != "topics":
            continue
        lacking = missing(contender)
        if lacking:
            print(f"peers: {contender.name} is left out: there is no {lacking} on this machine", file=sys.stderr)
        else:
            found.append(contender)
    return found
