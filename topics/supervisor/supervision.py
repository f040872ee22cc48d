"""The supervisor's loop (reap, restart, drain), and the signals it waits for.

The supervisor waits for signals and gets them as values; no handler interrupts it. It blocks them before the first
fork, so that none hits a child that is not set up yet. A child unblocks them itself, SIGHUP only when it can reload.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from functools import partial
from typing import Final

from topics.core.clock import Clock
from topics.core.keys import KeyRing
from topics.log import get_logger
from topics.settings import Settings, SettingsError, read_keys
from topics.shm.control import EXIT_AGAIN, EXIT_NEXT_LIFE, EXIT_REFUSED, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.supervisor.children import Child, ChildMains
from topics.supervisor.listeners import close_all
from topics.supervisor.notify import Notify
from topics.supervisor.signals import STOP, Signals, exit_code_of

EXIT_OK: Final = 0
EXIT_FORCED: Final = 4
"""The service stopped, but a process had to be killed."""
FRONTEND_SHARE: Final = (3, 4)
"""The share of the grace after which a frontend is killed. It gives up by itself after half of the grace."""
COMPACTOR_SHARE: Final = (7, 8)
"""The same share for the compactor. Its last cut may take a quarter of the grace (Settings.compactor_grace_ms)."""
BEAT_MS: Final = 1000
SAME_STOP_MS: Final = 1000
"""Stop signals within this time are one: `timeout` and terminals signal twice. A later one means: do not wait."""

log = get_logger()


@dataclass(eq=False)
class Supervisor:
    """Runs the children until a signal stops it. It owns the children, but not the shared memory and the listeners."""

    _settings: Settings
    keys: KeyRing
    _mains: ChildMains
    _shared: SharedMemory
    _listeners: list[list[socket.socket]]
    _clock: Clock
    _signals: Signals
    _notify: Notify
    _reshard: Child | None = None
    _exit_code: int = EXIT_OK
    _stopping: list[tuple[list[Child], int]] | None = None
    """(children, deadline) of the groups that still have to stop, in this order; None while the service runs."""
    _signalled: bool = False  # true if the first of these groups was told to stop
    _stop_began_ms: int = 0

    def __post_init__(self) -> None:
        self._header = self._shared.control.header
        self._frontends = [self._child(Role.FRONTEND, index) for index in range(self._settings.frontends)]
        self._shards = [self._child(Role.WALSHARD, index) for index in range(self._settings.wal_shards)]
        self._compactor = self._child(Role.COMPACTOR, 0)
        self._archivers = [self._child(Role.ARCHIVER, 0)] if self._shared.control.has_archiver else []

    def run(self, *, reshard: bool) -> int:
        """Run until no child is left; return the exit code of the service, or EXIT_AGAIN if it must start all children
        again. `reshard`: prepare the logs first.
        """
        try:
            self._start(reshard)
            while self._stopping is None or self._stopping:
                self._header.set("heartbeat_ms", self._clock.now_ms())
                self._on_signal(self._signals.wait(self._timeout_ms()))
                self._reap()
                self._start_due()
                if self._stopping is None and not self._shared.is_there:
                    self._stop(EXIT_AGAIN, "somebody removed its shared memory from /dev/shm")
                self._stop_next_group()
                self._notify.tell(self._shared.control)
        except BaseException:
            self._kill_all()  # nothing would restart them
            raise
        return self._exit_code

    # -- starting

    def _child(self, role: Role, index: int) -> Child:
        cell = self._shared.control.cell(role, index).supervisor
        return Child(self._shared.control.name_of(role), index, partial(self._run, role, index), cell, self._clock)

    def _run(self, role: Role | None, index: int, incarnation: int) -> int:
        """Run the main of a child, inside the child. `role` None is the child that prepares the logs."""
        # A process that outlives the supervisor must not hold the port.
        self._close_listeners(but=index if role is Role.FRONTEND else None)
        mains, settings, shared = self._mains, self._settings, self._shared
        if role is None:
            return mains.reshard(settings, shared)
        if role is Role.FRONTEND:
            return mains.frontend(settings, self.keys, shared, index, incarnation, self._listeners[index])
        if role is Role.WALSHARD:
            return mains.walshard(settings, shared, index, incarnation)
        if role is Role.COMPACTOR:
            return mains.compactor(settings, shared, incarnation)
        main = mains.archiver if settings.follow is None else mains.follower
        return main(settings, shared, incarnation)

    def _start(self, reshard: bool) -> None:
        for child in self._frontends:
            child.start()
        if reshard:
            log.info("preparing the logs", shards=self._settings.wal_shards)
            self._header.set("state", ProcessState.RECOVERING)
            self._reshard = Child("reshard", 0, partial(self._run, None, 0), None, self._clock)
            self._reshard.start()
        else:
            self._start_shards()

    def _start_shards(self) -> None:
        self._header.set("state", ProcessState.READY)
        for child in self._shards:
            child.start()
        if self._settings.follow is None:  # for a follower the leader's compactor does the work
            self._compactor.start()
        for child in self._archivers:
            child.start()

    # -- running

    def _children(self) -> list[Child]:
        others = [self._compactor, *self._archivers, *([self._reshard] if self._reshard else [])]
        return [*self._frontends, *self._shards, *others]

    def _timeout_ms(self) -> int:
        """Return the time until the next deadline, or the next heartbeat."""
        now_ms = self._clock.monotonic_ms()
        moments = [child.due_ms for child in self._children() if child.due_ms is not None] + [now_ms + BEAT_MS]
        if self._stopping:
            moments.append(self._stopping[0][1])
        if self._notify.due_ms is not None:
            moments.append(self._notify.due_ms)
        return max(0, min(moments) - now_ms)

    def _on_signal(self, number: signal.Signals | None) -> None:
        if number is None or number == signal.SIGCHLD:
            return
        if number not in STOP:
            self._reload()
        elif self._stopping is None:
            self._stop(EXIT_OK, f"{number.name} received")
        elif self._exit_code == EXIT_AGAIN:
            self._exit_code, self._stop_began_ms = EXIT_OK, self._clock.monotonic_ms()
            self._notify.stopping()
            self._close_listeners()
        elif self._clock.monotonic_ms() - self._stop_began_ms > SAME_STOP_MS:
            log.warning("signal received again, killing what still runs", signal=number.name)
            self._exit_code = self._exit_code or EXIT_FORCED
            self._kill_all()

    def _reload(self) -> None:
        """Read the keys again and have the frontends do so. If the keys cannot be used, the former keys stay."""
        serial = self.keys.serial + 1
        self._notify.reloading()
        try:
            self.keys = read_keys(self._settings, serial)
        except SettingsError as error:
            log.error("keys not reloaded, the former ones stay", problems=error.problems)
        else:
            log.info("keys reloaded", keys=len(self.keys.keys))
            self._header.set("keys_serial", serial)
            for child in self._frontends:
                child.send(signal.SIGHUP)
        self._header.add("reloads")

    def _reap(self) -> None:
        """Reap every child that has ended; one SIGCHLD may stand for many."""
        running = {child.pid: child for child in self._children() if child.pid is not None}
        while running:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            # Ignore other pids: as pid 1 of a container this process inherits orphans.
            if (child := running.pop(pid, None)) is not None:
                self._on_end(child, exit_code_of(wait_status))

    def _on_end(self, child: Child, exit_code: int) -> None:
        if not child.wanted:
            child.stopped(exit_code)
        elif exit_code == EXIT_NEXT_LIFE:
            child.stopped(exit_code)
            child.wanted = self._stopping is None
            if child.wanted:
                child.start()
        elif exit_code == EXIT_AGAIN:
            child.stopped(exit_code)
            if self._stopping is None:  # a service that was told to stop must not start again
                self._stop(EXIT_AGAIN, f"{child.name} wants all processes to start again")
        elif exit_code == EXIT_REFUSED:
            child.stopped(exit_code)
            self._stop(EXIT_REFUSED, f"{child.name} {child.index} refuses to run, its last log line says why")
        elif child is self._reshard and exit_code == EXIT_OK:
            child.stopped(exit_code)
            self._reshard = None
            if self._stopping is None:
                self._start_shards()
        else:
            child.died(exit_code)
            if child in self._frontends:
                # The shards end the frontend's watches and streams (`walshard/handlers/frontends.py`).
                for wake in self._shared.shard_wakes:
                    wake.signal()

    def _start_due(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for child in self._children():
            if child.due_ms is not None and child.due_ms <= now_ms:
                child.start()

    # -- stopping

    def _stop(self, exit_code: int, reason: str) -> None:
        """Begin to drain: frontends first, then the compactor, then the shards, because the former need the shards
        until their end. The archiver comes last: it ships what the shards wrote last.
        """
        self._exit_code = self._exit_code or exit_code
        if self._stopping is not None:
            return
        log.info("stopping", reason=reason, grace_ms=self._settings.shutdown_grace_ms)
        self._header.set("state", ProcessState.DRAINING)
        if exit_code != EXIT_AGAIN:
            self._notify.stopping()
            self._close_listeners()
        self._stop_began_ms = now_ms = self._clock.monotonic_ms()
        grace_ms = self._settings.shutdown_grace_ms
        last = [*self._shards, *([self._reshard] if self._reshard else [])]
        self._stopping = [
            (self._frontends, now_ms + grace_ms * FRONTEND_SHARE[0] // FRONTEND_SHARE[1]),
            ([self._compactor], now_ms + grace_ms * COMPACTOR_SHARE[0] // COMPACTOR_SHARE[1]),
            (last, now_ms + grace_ms),
            (self._archivers, now_ms + grace_ms),
        ]

    def _stop_next_group(self) -> None:
        while self._stopping:
            group, deadline_ms = self._stopping[0]
            if not self._signalled:
                self._signalled = True
                for child in group:
                    child.stop()
            if any(child.pid is not None for child in group):
                if self._clock.monotonic_ms() >= deadline_ms:
                    self._force(group)
                return
            self._stopping.pop(0)
            self._signalled = False

    def _force(self, group: list[Child]) -> None:
        """Kill the children that did not stop in time, and wait for them: SIGKILL cannot be ignored."""
        for child in group:
            if child.pid is not None:
                log.error("process did not stop in time, killing it", process=child.name, index=child.index)
                child.stop(signal.SIGKILL)
                child.stopped(exit_code_of(os.waitpid(child.pid, 0)[1]))
        self._exit_code = self._exit_code or EXIT_FORCED

    def _kill_all(self) -> None:
        for child in self._children():
            child.stop(signal.SIGKILL)

    def _close_listeners(self, but: int | None = None) -> None:
        for index, listeners in enumerate(self._listeners):
            if index != but:
                close_all(listeners)
