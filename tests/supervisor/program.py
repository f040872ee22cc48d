"""A service whose children are made for the tests: real processes under the real supervisor, with little to do.

    python -m tests.supervisor.program JOURNAL [trait=value …]

Each child writes what happens to it into JOURNAL, a line per event, and keeps its control cell as a real one does.
Traits say what is different from a service where all is well.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import socket
import sys
from pathlib import Path

import msgspec

from topics.core.clock import SystemClock
from topics.core.keys import KeyRing
from topics.settings import Settings, load
from topics.shm.control import EXIT_AGAIN, EXIT_REFUSED, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.supervisor.children import ChildMains
from topics.supervisor.main import StartError, serve
from topics.supervisor.notify import Notify

BEAT_S = 1.0
"""Well within HEARTBEAT_STALE_MS."""


class Traits(msgspec.Struct, forbid_unknown_fields=True):
    """Indices are of shards, -1 is none."""

    shm_free_bytes: int | None = None
    user: int = 0
    """The user that runs the service, if it is not this one."""
    reshard: str = ""
    """`works`, `crashes` (in its first life), `refuses` or `endless`."""
    crashing: int = -1
    """Raises as soon as it lives, always."""
    leaving: int = -1
    """Ends with exit code 0, unasked, in its first life."""
    refusing: int = -1
    """Ends with EXIT_REFUSED in its second life."""
    recovering: int = -1
    """Stays in recovery, at 25 %."""
    stubborn: str = ""
    """The role that does not listen to SIGTERM."""
    slow_to_drain: str = ""
    """A file that shards wait for before they end."""
    again: str = ""
    """A file: the shard that is told to end while it is there removes it, and wants all to start again."""


class Child:
    """Journal and control cell of one process, and its wait for SIGTERM."""

    def __init__(self, role: Role, index: int, incarnation: int, shared: SharedMemory) -> None:
        self.role = role.name.lower()
        self.name = f"{self.role} {index}"
        self.cell = shared.control.cell(role, index)
        self.cell.clear()
        self.cell.set("incarnation", incarnation)
        self.cell.set("pid", os.getpid())
        note(f"{self.name} started {incarnation}")

    def serve(self, listeners: list[socket.socket]) -> None:
        """Answers every connection with its pid until SIGTERM."""
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        if traits.stubborn == self.role:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.set_wakeup_fd(wake_writer)
            signal.signal(signal.SIGTERM, lambda *_: None)
        self._beat()
        self.cell.set("state", ProcessState.READY)
        for listener in listeners:
            listener.setblocking(False)
        waiting = {listener.fileno(): listener for listener in listeners}
        readable: list[int] = []
        while wake_reader not in readable:
            readable, _, _ = select.select([wake_reader, *waiting], [], [], BEAT_S)
            self._beat()
            for fd in readable:
                if fd in waiting:
                    self._answer(waiting[fd])
        note(f"{self.name} stopping")

    def _beat(self) -> None:
        self.cell.set("heartbeat_ms", SystemClock().now_ms())

    def _answer(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # another frontend was quicker
            return
        self.cell.add("requests")  # before the client can know of it
        with connection:
            connection.sendall(b"%d" % os.getpid())


def note(event: str) -> None:
    with journal.open("a") as file:
        file.write(f"{event}\n")


def frontend(
    settings: Settings,
    keys: KeyRing,
    shared: SharedMemory,
    index: int,
    incarnation: int,
    listeners: list[socket.socket],
) -> int:
    child = Child(Role.FRONTEND, index, incarnation, shared)
    child.cell.set("records_in", len(keys.keys))
    child.serve(listeners)
    return 0


def walshard(settings: Settings, shared: SharedMemory, index: int, incarnation: int) -> int:
    child = Child(Role.WALSHARD, index, incarnation, shared)
    if index == traits.crashing:
        raise RuntimeError("planned")
    if index == traits.leaving and incarnation == 1:
        return 0
    if index == traits.refusing and incarnation == 2:
        return EXIT_REFUSED
    if index == traits.recovering:
        child.cell.set("progress_ppm", 250_000)
        child.cell.set("state", ProcessState.RECOVERING)
        signal.pause()
    child.serve([])
    if traits.again and os.path.exists(traits.again):
        os.unlink(traits.again)
        return EXIT_AGAIN
    while traits.slow_to_drain and not os.path.exists(traits.slow_to_drain):
        select.select([], [], [], 0.01)
    note(f"{child.name} stopped")
    return 0


def compactor(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    Child(Role.COMPACTOR, 0, incarnation, shared).serve([])
    note("compactor 0 stopped")
    return 0


def archiver(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    Child(Role.ARCHIVER, 0, incarnation, shared).serve([])
    note("archiver 0 stopped")
    return 0


def reshard(settings: Settings, shared: SharedMemory) -> int:
    first = not journal.exists() or "reshard started" not in journal.read_text()
    note("reshard started")
    if traits.reshard == "crashes" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if traits.reshard == "refuses":
        return EXIT_REFUSED
    if traits.reshard == "endless":
        shared.control.header.set("reshard_ppm", 500_000)
        signal.pause()
    note("reshard done")
    return 0


def free_bytes(path: str) -> os.statvfs_result:
    """The real figures with the free blocks that the trait says."""
    figures = list(os.statvfs(path))
    if traits.shm_free_bytes is not None:
        figures[1], figures[4] = 1, traits.shm_free_bytes  # f_frsize, f_bavail
    return os.statvfs_result(figures)


if __name__ == "__main__":
    journal = Path(sys.argv[1])
    traits = msgspec.convert(dict(trait.split("=", 1) for trait in sys.argv[2:]), Traits, strict=False)
    mains = ChildMains(
        frontend, walshard, compactor, archiver, archiver, reshard, lambda _: bool(traits.reshard), lambda told: told
    )
    if traits.user:
        for encoding in ("idna", "ascii"):
            codecs.lookup(encoding)  # modules that are needed later, and that user may not be able to read
        os.setresuid(traits.user, traits.user, traits.user)
    try:
        sys.exit(serve(load(os.environ), mains, Notify.of(os.environ, SystemClock()), statvfs=free_bytes))
    except StartError as refusal:
        sys.exit(f"cannot start: {refusal}")
