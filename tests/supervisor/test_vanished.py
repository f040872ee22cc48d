"""A client whose host has vanished: the kernel knows of every accepted connection how long it may be missed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import time
from pathlib import Path

import pytest

from tests.harness import Service, poll
from topics.frontend.http1_parser import HttpLimits
from topics.frontend.pulse import STALL_MAX_MS
from topics.frontend.stream import RETRY_AFTER_MS
from topics.supervisor import listeners
from topics.supervisor.listeners import GONE_MS, listen

SYS_PIDFD_GETFD = 438


def sockets_of(pid: int) -> dict[str, int]:
    """Inode → descriptor of the sockets of a process."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(link)] = int(link.name)
    return found


def connection_inode(client: socket.socket) -> str:
    """Of the other end of `client`, as /proc/<pid>/fd names it."""
    (_, port), (_, peer_port) = client.getsockname(), client.getpeername()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1].endswith(f":{peer_port:04X}") and words[2].endswith(f":{port:04X}"):
            return f"socket:[{words[9]}]"
    return ""


def accepted_by(service: Service, client: socket.socket) -> socket.socket:
    """A duplicate of the service's own end of a connection."""
    libc = ctypes.CDLL(None, use_errno=True)

    def find() -> socket.socket | None:
        inode = connection_inode(client)
        for index in range(2):
            pid = service.pid_of("frontend", index)
            number = sockets_of(pid).get(inode)
            if number is None:
                continue
            process = os.pidfd_open(pid)
            try:
                descriptor = libc.syscall(SYS_PIDFD_GETFD, process, number, 0)
            finally:
                os.close(process)
            if descriptor < 0:
                pytest.skip(f"descriptors of others may not be looked at here: {os.strerror(ctypes.get_errno())}")
            return socket.socket(fileno=descriptor)
        return None

    return poll("the connection to be accepted", find)


@pytest.mark.parametrize("protocol", ["httptools", "stock"])
def test_every_accepted_connection_knows_how_long_its_client_may_be_missed(protocol: str) -> None:
    with Service(env={"TOPICS_HTTP_PROTOCOL": protocol}) as service:
        for preface in (b"GET /v0/health HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", service.port), timeout=10) as client:
                client.sendall(preface)
                assert client.recv(1)
                with accepted_by(service, client) as accepted:
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == GONE_MS


def test_the_kernel_cuts_who_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does at the end of that time: with a client that never reads, the nearest to one without power."""
    monkeypatch.setattr(listeners, "GONE_MS", 500)
    (listener,) = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            accepted.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while accepted.send(b"x" * 65_536):
                    pass
            gone = select.poll()
            gone.register(accepted, select.POLLERR)
            deadline_s = time.monotonic() + 30
            while not gone.poll(100):
                assert time.monotonic() < deadline_s, "it is fed for ever"
            with pytest.raises(TimeoutError):
                accepted.send(b"x")
        assert client.fileno() >= 0


def test_who_reads_nothing_has_its_last_words_before_it_is_cut() -> None:
    """Each in its turn, and all looked at once a second: the hub's `error`, the frontend's cut, the kernel's."""
    told_by_ms = STALL_MAX_MS + RETRY_AFTER_MS
    limits = HttpLimits()
    assert told_by_ms + 10_000 <= limits.write_stall_timeout_ms, "and has some time to read them"
    assert limits.write_stall_timeout_ms <= GONE_MS
    assert limits.write_time_s(0) * 1000 == limits.write_stall_timeout_ms
