"""The supervisor's children: how one is forked, and how long to wait before it is forked again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from topics.core.clock import Clock, doubled_ms
from topics.core.keys import KeyRing
from topics.log import get_logger, identify
from topics.settings import Settings
from topics.shm.control import Cell, ProcessState
from topics.shm.instance import SharedMemory
from topics.supervisor.signals import show_exit

EXIT_CRASHED: Final = 70
"""Exit code of a child whose main raised; the log has the traceback."""
RESTART_DELAY_MS: Final = (50, 5_000)
"""The shortest and the longest pause before a restart; it doubles with each death. The first restart has none."""
STABLE_AFTER_MS: Final = 10_000
"""After a life this long the next restart is immediate again."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15

_libc = ctypes.CDLL(None, use_errno=True)
log = get_logger()


class ChildMains(NamedTuple):
    """The main of each kind of child: (settings[, keys], shared[, index], incarnation[, listeners]) → exit code. The
    last two fields are functions that the supervisor calls before it starts the children.
    """

    frontend: Callable[[Settings, KeyRing, SharedMemory, int, int, list[socket.socket]], int]
    walshard: Callable[[Settings, SharedMemory, int, int], int]
    compactor: Callable[[Settings, SharedMemory, int], int]
    archiver: Callable[[Settings, SharedMemory, int], int]
    follower: Callable[[Settings, SharedMemory, int], int]
    reshard: Callable[[Settings, SharedMemory], int]
    needs_reshard: Callable[[Settings], bool]
    take_role: Callable[[Settings], Settings]
    """Returns the settings for the service's present role: a follower may have been promoted."""


class RestartDelay:
    """The pause before the next start, computed from the lengths of the last lives."""

    def __init__(self) -> None:
        self._deaths = 0

    def delay_ms(self, lived_ms: int) -> int:
        """Return the pause after a life of `lived_ms`. Called once for each death."""
        if lived_ms >= STABLE_AFTER_MS:
            self._deaths = 0
        deaths, self._deaths = self._deaths, self._deaths + 1
        shortest_ms, longest_ms = RESTART_DELAY_MS
        return doubled_ms(shortest_ms, deaths - 1, longest_ms) if deaths else 0


class Child:
    """A child of the supervisor over all its lives: forks it, signals it, and notes its state in `cell`, the
    supervisor's part of the process's control cell (None for the one-off reshard child).
    """

    def __init__(self, name: str, index: int, main: Callable[[int], int], cell: Cell | None, clock: Clock) -> None:
        self.name = name
        self.index = index
        self.pid: int | None = None
        self.wanted = True  # true if it has to be started again when it ends
        self.due_ms: int | None = None  # monotonic ms at which to start it; None while it runs or is not wanted
        self._main = main
        self._cell = cell
        self._clock = clock
        self._incarnation = 0
        self._started_ms = 0
        self._restart_delay = RestartDelay()
        self._log = log.bind(process=name, index=index)

    def start(self) -> None:
        """Fork the process. A fork that fails counts as a life of 0 ms."""
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
            self._log.error("cannot fork", reason=str(error), retry_in_ms=delay_ms)
            self.due_ms = self._started_ms + delay_ms
            return
        self._note(pid=self.pid)
        self._log.info("process started", pid=self.pid, incarnation=incarnation)

    def died(self, exit_code: int) -> None:
        """Note that the process ended unasked (it has been waited for), and when to start it again."""
        now_ms = self._clock.monotonic_ms()
        lived_ms = now_ms - self._started_ms
        delay_ms = self._restart_delay.delay_ms(lived_ms)
        shown = show_exit(exit_code)
        self._log.warning("process died", pid=self.pid, exit=shown, lived_ms=lived_ms, restart_in_ms=delay_ms)
        self._end_life(ProcessState.DEAD, exit_code)
        self.due_ms = now_ms + delay_ms

    def stopped(self, exit_code: int) -> None:
        """Note that the process ended for good (it has been waited for)."""
        self._log.info("process stopped", pid=self.pid, exit=show_exit(exit_code))
        self._end_life(ProcessState.STOPPED, exit_code)
        self.wanted = False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the process to end; it is not started again."""
        self.wanted = False
        self.due_ms = None
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)  # it has not been waited for, so the pid is still its own

    def _end_life(self, state: ProcessState, exit_code: int) -> None:
        self.pid = None
        self._note(pid=0, state=state, last_exit=exit_code, since_ms=self._clock.now_ms(), ended=self._incarnation)

    def _note(self, **fields: int) -> None:
        if self._cell is not None:
            for field, value in fields.items():
                self._cell.set(field, value)


def fork(name: str, index: int, main: Callable[[], int]) -> int:
    """Run `main` in a child, which exits with its result; return its pid. The caller has blocked its signals before."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    exit_code = EXIT_CRASHED
    try:
        if _set_up(name, index, parent_pid):
            exit_code = main()
        else:
            log.info("not started: the supervisor ended during the fork")
    except BaseException:
        log.exception("process crashed")
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(exit_code)


def _set_up(name: str, index: int, parent_pid: int) -> bool:
    """Make this process a child of the supervisor. False when that has ended meanwhile."""
    identify(name, index)
    _libc.prctl(_PR_SET_NAME, f"{name}-{index}".encode(), 0, 0, 0)
    # When the supervisor dies, nobody restarts children any more: let this one get SIGTERM then, drain and end.
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        return False
    # A terminal sends SIGINT to the whole group; the supervisor alone acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGHUP stays blocked until a frontend can handle it, in other children for ever: it would end them.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGHUP})
    return True
