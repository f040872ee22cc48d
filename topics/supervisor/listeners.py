"""The listening sockets: the supervisor, or a service manager (systemd's socket units), binds them for the frontends.

Each frontend has its own socket on the same port, so the kernel spreads connections evenly. (On one shared socket the
process that wakes first takes a whole burst.) The socket of a dead frontend stays open: connections wait there for its
next life.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import MutableMapping
from itertools import groupby
from typing import Final

BACKLOG: Final = 4096
"""Connections that the kernel keeps waiting for a busy or restarting frontend (net.core.somaxconn may lower it)."""
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_WAY_OUT: Final = {
    errno.EADDRINUSE: "stop what listens there, or choose another TOPICS_PORT",
    errno.EADDRNOTAVAIL: "no interface of this machine has the address, correct TOPICS_HOST",
    errno.EACCES: "this user may not have that port, choose a TOPICS_PORT above 1023",
}


class AddressError(Exception):
    """The service cannot listen on the address; the message names it and the way out."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`, on one port (0: a free one). AddressError leaves none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise AddressError(f"cannot listen on {show(host, port)}: {error.strerror}; correct TOPICS_HOST") from error
    listeners: list[socket.socket] = []
    refusal: OSError | None = None
    for family, address in dict.fromkeys((family, str(sockaddr[0])) for family, _, _, _, sockaddr in found):
        try:
            listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            refusal = error
            if error.errno in _NOT_HERE:  # a host name may have an IPv6 address though this machine has no IPv6
                continue
            break
        listeners.append(listener)
        port = port_of(listeners)
    if refusal is not None and (not listeners or refusal.errno not in _NOT_HERE):
        close_all(listeners)
        raise _address_error(host, port, refusal) from refusal
    return listeners


def listen_for(host: str, port: int, processes: int) -> list[list[socket.socket]]:
    """Listen like `listen`, but with separate sockets for each process. Sockets with SO_REUSEPORT would share their
    port even with a second service. So first check with a socket without it that the port is free.
    """
    alone = listen(host, port)
    if processes == 1:
        return [alone]
    port = port_of(alone)
    addresses = [(listener.family, str(listener.getsockname()[0])) for listener in alone]
    close_all(alone)
    shared: list[list[socket.socket]] = []
    try:
        for _ in range(processes):
            shared.append([])
            for family, address in addresses:
                shared[-1].append(
                    socket.create_server((address, port), family=family, backlog=BACKLOG, reuse_port=True)
                )
    except OSError as error:
        for listeners in shared:
            close_all(listeners)
        raise _address_error(host, port, error) from error
    return shared


def inherited(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the sockets that the service manager has opened, see sd_listen_fds(3), and remove its variables."""
    pid, count, _ = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    listeners = []
    for fd in range(3, 3 + int(count)):
        try:
            os.set_inheritable(fd, False)
            listener = socket.socket(fileno=fd)
        except OSError as error:
            raise AddressError(
                f"the service manager passes {count} sockets, but descriptor {fd} is none ({error.strerror}); have only"
                " ListenStream= in topics.socket"
            ) from error
        if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
            raise AddressError(
                f"the service manager passes {listener.family.name} {listener.type.name}, and the service listens on"
                " TCP; correct ListenStream= in topics.socket"
            )
        listeners.append(listener)
    return listeners


def share(listeners: list[socket.socket], processes: int) -> list[list[socket.socket]]:
    """Return the sockets for each process and close the given ones. If there are enough sockets for an address
    (`ReusePort=yes` in systemd), each process gets its own. Otherwise they share, so that every socket has a process.
    """
    shared: list[list[socket.socket]] = [[] for _ in range(processes)]
    by_address = sorted(listeners, key=lambda listener: (listener.family, listener.getsockname()))
    for _, group in groupby(by_address, key=socket.socket.getsockname):
        same = list(group)
        for number in range(max(len(same), processes)):
            shared[number % processes].append(same[number % len(same)].dup())
    close_all(listeners)
    return shared


def _address_error(host: str, port: int, error: OSError) -> AddressError:
    number = error.errno or 0
    way_out = _WAY_OUT.get(number, "correct TOPICS_HOST or TOPICS_PORT")
    return AddressError(f"cannot listen on {show(host, port)}: {os.strerror(number)}; {way_out}")


def close_all(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def port_of(listeners: list[socket.socket]) -> int:
    port: int = listeners[0].getsockname()[1]
    return port


def show(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_port_file(path: str, address: str) -> None:
    """Write the address to the file atomically: a reader finds the whole address or no file. Raise AddressError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(address)
        os.rename(temporary, path)
    except OSError as error:
        raise AddressError(f"TOPICS_PORT_FILE={path}: cannot be written: {error.strerror}") from error
