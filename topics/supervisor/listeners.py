"""The service's address: bound by the supervisor for as long as the service lives, accepted on by the frontends.

Each frontend has a socket of its own on the one port, and the kernel deals connections out evenly. On one shared
socket the process that wakes first takes a whole burst and keeps it. A frontend that dies leaves its socket, which the
supervisor holds as well, to its successor: connections wait there for the few ms, none is refused.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

BACKLOG: Final = 4096
"""Connections the kernel keeps while all frontends are busy or being restarted (net.core.somaxconn may cut it)."""
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_WAY_OUT: Final = {
    errno.EADDRINUSE: "stop what listens there, or choose another TOPICS_PORT",
    errno.EADDRNOTAVAIL: "no interface of this machine has the address, correct TOPICS_HOST",
    errno.EACCES: "this user may not have that port, choose a TOPICS_PORT above 1023",
}


class AddressError(Exception):
    """The address cannot be listened on; the message names it and the way out."""


def listen(host: str, port: int) -> list[socket.socket]:
    """One listening socket for each address that `host` stands for, all on one port (0 = a free one).

    Raises AddressError, leaving nothing open.
    """
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
            if error.errno in _NOT_HERE:  # a name may stand for IPv6, too, on a machine without it
                continue
            break
        listeners.append(listener)
        port = listener.getsockname()[1]
    if refusal is not None and (not listeners or refusal.errno not in _NOT_HERE):
        _close(listeners)
        number = refusal.errno or 0
        way_out = _WAY_OUT.get(number, "correct TOPICS_HOST or TOPICS_PORT")
        raise AddressError(f"cannot listen on {show(host, port)}: {os.strerror(number)}; {way_out}") from refusal
    return listeners


def listen_for(host: str, port: int, processes: int) -> list[list[socket.socket]]:
    """What `listen` makes, for each of so many processes.

    Sockets that share a port would share it with a second service as well: a first one that does not is bound to find
    the port taken, and makes room.
    """
    alone = listen(host, port)
    if processes == 1:
        return [alone]
    port = port_of(alone)
    addresses = [(listener.family, str(listener.getsockname()[0])) for listener in alone]
    _close(alone)
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
            _close(listeners)
        way_out = _WAY_OUT.get(error.errno or 0, "correct TOPICS_HOST or TOPICS_PORT")
        raise AddressError(f"cannot listen on {show(host, port)}: {error.strerror}; {way_out}") from error
    return shared


def _close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def port_of(listeners: list[socket.socket]) -> int:
    port: int = listeners[0].getsockname()[1]
    return port


def show(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_port_file(path: str, address: str) -> None:
    """Whoever waits for the file finds it whole or not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(address)
        os.rename(temporary, path)
    except OSError as error:
        raise AddressError(f"TOPICS_PORT_FILE={path}: cannot be written: {error.strerror}") from error
