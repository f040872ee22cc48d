"""The supervisor's children: forking one, how long to wait before it is forked again, and whether a process runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

import psutil

from topics import log
from topics.core.clock import Clock, doubled_ms
from topics.core.keys import KeyRing
from topics.settings import Settings
from topics.shm.control import EXIT_REFUSED, Cell, ProcessState
from topics.shm.instance import SharedMemory


def is_running(pid: int) -> bool:
    """False for a pid that is gone, and for a zombie, which only waits for its parent to notice."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


EXIT_CRASHED: Final = 70
"""Exit code of a child whose main raised; the log has the traceback."""
RESTART_DELAY_MS: Final = (50, 5_000)
"""First and longest pause before a restart, doubling in between; the first death of all is restarted at once."""
STABLE_AFTER_MS: Final = 10_000
"""A child that lived so long starts over with its pauses."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15

_libc = ctypes.CDLL(None, use_errno=True)
_logger = log.get_logger()

WalshardMain = Callable[[Settings, SharedMemory, int, int], int]
FrontendMain = Callable[[Settings, KeyRing, SharedMemory, int, int, list[socket.socket]], int]
CompactorMain = Callable[[Settings, SharedMemory, int], int]
ReshardMain = Callable[[Settings, SharedMemory], int]


class ChildMains(NamedTuple):
    """The main of each kind of child: (settings[, keys], shared[, index], incarnation[, listeners]) → exit code."""

    frontend: FrontendMain
    walshard: WalshardMain
    compactor: CompactorMain
    reshard: ReshardMain
    needs_reshard: Callable[[Settings], bool]


class RestartDelay:
    """The pause before the next start, which follows from how long the last lives were."""

    def __init__(self) -> None:
        self._deaths = 0

    def delay_ms(self, lived_ms: int) -> int:
        """Called once a death."""
        if lived_ms >= STABLE_AFTER_MS:
            self._deaths = 0
        deaths, self._deaths = self._deaths, self._deaths + 1
        shortest_ms, longest_ms = RESTART_DELAY_MS
        return doubled_ms(shortest_ms, deaths - 1, longest_ms) if deaths else 0


class Child:
    """One place in the service that a process fills, again and again.

    `cell` is the supervisor's part of the process's control cell (None for the one-off reshard child).
    """

    def __init__(self, name: str, index: int, main: Callable[[int], int], cell: Cell | None, clock: Clock) -> None:
        self.name = name
        self.index = index
        self.pid: int | None = None
        self.wanted = True
        """True if it is started again when it ends."""
        self.due_ms: int | None = None
        """When to start it (monotonic); None while it runs or is not wanted."""
        self._main = main
        self._cell = cell
        self._clock = clock
        self._incarnation = 0
        self._started_ms = 0
        self._restart_delay = RestartDelay()

    def start(self) -> None:
        """Forks it. A fork that fails counts as a life that ended at once."""
        self._incarnation += 1
        incarnation = self._incarnation
        self._started_ms = self._clock.monotonic_ms()
        self.due_ms = None
        self._note(state=ProcessState.STARTING, restarts=incarnation - 1, since_ms=self._clock.now_ms())
        try:
            self.pid = fork(self.name, self.index, lambda: self._main(incarnation))
        except OSError as error:
            self._note(state=ProcessState.DEAD)
            delay_ms = max(RESTART_DELAY_MS[0], self._restart_delay.delay_ms(0))
            _logger.error("cannot fork", process=self.name, index=self.index, reason=str(error), retry_in_ms=delay_ms)
            self.due_ms = self._started_ms + delay_ms
            return
        self._note(pid=self.pid)
        _logger.info("process started", process=self.name, index=self.index, pid=self.pid, incarnation=incarnation)

    def died(self, exit_code: int) -> None:
        """Its process ended unasked, and has been waited for; it is due again."""
        now_ms = self._clock.monotonic_ms()
        lived_ms = now_ms - self._started_ms
        delay_ms = self._restart_delay.delay_ms(lived_ms)
        _logger.warning(
            "process died",
            process=self.name,
            index=self.index,
            pid=self.pid,
            exit=show_exit(exit_code),
            lived_ms=lived_ms,
            restart_in_ms=delay_ms,
        )
        self._gone(ProcessState.DEAD, exit_code)
        self.due_ms = now_ms + delay_ms

    def stopped(self, exit_code: int) -> None:
        """Its process ended for good, and has been waited for."""
        _logger.info("process stopped", process=self.name, index=self.index, pid=self.pid, exit=show_exit(exit_code))
        self._gone(ProcessState.STOPPED, exit_code)
        self.wanted = False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Asks it to end; it is not started again."""
        self.wanted = False
        self.due_ms = None
        if self.pid is not None:
            # It has not been waited for, so the pid is still its own.
            os.kill(self.pid, number)

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal that does not end it; a child that does not run gets none."""
        if self.pid is not None:
            os.kill(self.pid, number)

    def _gone(self, state: ProcessState, exit_code: int) -> None:
        self.pid = None
        self._note(pid=0, state=state, last_exit=exit_code, since_ms=self._clock.now_ms(), ended=self._incarnation)

    def _note(self, **fields: int) -> None:
        if self._cell is not None:
            for field, value in fields.items():
                self._cell.set(field, value)


def exit_code_of(wait_status: int) -> int:
    """Returns the exit code, or 128 + signal as a shell has it."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def show_exit(exit_code: int) -> str:
    """`SIGKILL` for 137, `refused` for EXIT_REFUSED, else the number."""
    if exit_code == EXIT_REFUSED:
        return f"refused ({EXIT_REFUSED})"
    with contextlib.suppress(ValueError):
        return signal.Signals(exit_code - 128).name
    return str(exit_code)


def fork(name: str, index: int, main: Callable[[], int]) -> int:
    """Runs `main` in a child that ends with its exit code; returns the child's pid, never comes back in the child.

    The caller has the signals of its loop blocked: none of them can reach the child before it is set up.
    """
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    exit_code = EXIT_CRASHED
    try:
        _settle(name, index, parent_pid)
        exit_code = main()
    except BaseException:
        _logger.exception("process crashed")
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(exit_code)


def _settle(name: str, index: int, parent_pid: int) -> None:
    log.identify(name, index)
    _libc.prctl(_PR_SET_NAME, f"{name}-{index}".encode(), 0, 0, 0)
    # A dead supervisor is a stop: what cannot be restarted any more drains and goes.
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit("the supervisor died during the fork")
    # A terminal sends SIGINT to all of us; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A hang-up waits until the child is ready for it (a frontend), or for ever: the child must not die of it.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGHUP})
