"""Sockets that a service manager has opened, by the protocol of sd_listen_fds(3)."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness import COMMAND, clean_environment, poll
from topics.supervisor.listeners import inherited, share

FIRST_FD = 3


def tcp(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    return socket.create_server((address, port), reuse_port=True)


class Manager:
    """A service manager, as systemd is to a socket unit: it keeps the sockets, and starts the service with them."""

    def __init__(self, root: Path, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self.log = root / "log"
        self._environment = clean_environment(
            {
                "TOPICS_DATA_DIR": str(root / "data"),
                "TOPICS_PORT": "1",  # no user but root may have it
                "TOPICS_WAL_SHARDS": "1",
                "TOPICS_FRONTENDS": "2",
                "TOPICS_SHUTDOWN_GRACE_MS": "30000",
                "LISTEN_FDS": str(len(sockets)),
                "LISTEN_FDNAMES": ":".join(["topics.socket"] * len(sockets)),
            }
        )

    def start(self, **environ: str) -> subprocess.Popen[bytes]:
        wanted = range(FIRST_FD, FIRST_FD + len(self.sockets))
        high = [fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, wanted.stop) for listener in self.sockets]

        def pass_sockets() -> None:
            for fd, target in zip(high, wanted, strict=True):
                os.dup2(fd, target)

        with self.log.open("ab") as log:
            service = subprocess.Popen(
                ["/bin/sh", "-c", f'LISTEN_PID=$$ exec "{COMMAND}" run'],
                env=self._environment | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(wanted),
                preexec_fn=pass_sockets,  # noqa: PLW1509 - system calls only
            )
        for fd in high:
            os.close(fd)
        return service


class Asker:
    """Asks one question after another, each on a connection of its own, and keeps what went wrong."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers = 0
        self.errors: list[str] = []

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._end.is_set():
            try:
                self.answers += httpx.get(f"{self._url}/v0/health", timeout=30).status_code == 200
            except (httpx.RemoteProtocolError, httpx.ReadError):
                pass  # accepted in the last moment before the drain, and closed before the request was there
            except httpx.HTTPError as error:
                self.errors.append(repr(error))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    first = tcp()
    made = Manager(tmp_path, [first, tcp(port=first.getsockname()[1])])
    yield made
    for listener in made.sockets:
        listener.close()


@pytest.mark.long
def test_a_restart_refuses_no_connection(manager: Manager) -> None:
    url = f"http://127.0.0.1:{manager.sockets[0].getsockname()[1]}"
    service = manager.start()
    try:
        poll("the service to be ready", lambda: httpx.get(f"{url}/v0/ready", timeout=30).status_code == 200)
        with Asker(url) as asker, Asker(url) as other:
            for _ in range(3):
                before = asker.answers
                poll("answers", lambda: asker.answers > before + 10)
                service.send_signal(signal.SIGTERM)
                assert service.wait(40) == 0, manager.log.read_text()
                time.sleep(0.2)  # the time in which a connection was refused
                service = manager.start()
            before = asker.answers
            poll("answers of the last one", lambda: asker.answers > before + 10)
        assert asker.errors + other.errors == []
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(40) == 0, manager.log.read_text()


def test_an_address_that_others_reach_needs_keys_whoever_opened_it(tmp_path: Path) -> None:
    with tcp("0.0.0.0") as anywhere:
        service = Manager(tmp_path, [anywhere]).start()
        assert service.wait(30) == 2
    assert "--host=0.0.0.0: other machines reach this address" in (tmp_path / "log").read_text()


def test_a_socket_that_is_not_tcp_is_refused_in_words(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        service = Manager(tmp_path, [local]).start()
        assert service.wait(30) == 1
    assert "cannot start: the service manager passes AF_UNIX SOCK_STREAM" in (tmp_path / "log").read_text()


def test_a_descriptor_that_is_no_socket_is_refused_in_words(tmp_path: Path) -> None:
    with tcp() as listener:
        service = Manager(tmp_path, [listener]).start(LISTEN_FDS="2")
        assert service.wait(30) == 1
    log = (tmp_path / "log").read_text()
    assert log.startswith(
        "topics-supervisor: cannot start: the service manager passes 2 sockets, but descriptor 4 is"
    ), log


def test_sockets_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert inherited(environ) == []
    assert environ == {"HOME": "/"}
    assert inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) == []


@pytest.mark.parametrize(
    ("given", "processes", "each"), [(1, 1, [1]), (1, 3, [1, 1, 1]), (2, 2, [1, 1]), (3, 2, [2, 1]), (2, 3, [1, 1, 1])]
)
def test_every_process_has_a_socket_and_every_socket_a_process(given: int, processes: int, each: list[int]) -> None:
    first = tcp()
    port = first.getsockname()[1]
    listeners = [first, *(tcp(port=port) for _ in range(given - 1))]
    inodes = {os.fstat(listener.fileno()).st_ino for listener in listeners}
    rows = share(listeners, processes)
    try:
        assert [len(row) for row in rows] == each
        assert {os.fstat(listener.fileno()).st_ino for row in rows for listener in row} == inodes
        assert all(listener.fileno() == -1 for listener in listeners)
    finally:
        for row in rows:
            for listener in row:
                listener.close()


def test_each_address_is_shared_by_itself() -> None:
    rows = share([tcp(), tcp("127.0.0.2")], 2)
    try:
        hosts = [sorted(listener.getsockname()[0] for listener in row) for row in rows]
        assert hosts == [["127.0.0.1", "127.0.0.2"]] * 2
    finally:
        for row in rows:
            for listener in row:
                listener.close()
