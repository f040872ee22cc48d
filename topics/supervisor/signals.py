"""Signals to a process, and how one has ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final, Self

from topics.shm.control import EXIT_REFUSED

STOP: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_WATCHED: Final = STOP | {signal.SIGHUP, signal.SIGCHLD}


class Signals:
    """Blocks the watched signals while it is entered, and returns them one by one."""

    def __enter__(self) -> Self:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        return self

    def __exit__(self, *_error: object) -> None:
        # A second stop request must not change the exit code of the finished stop, not even while the interpreter ends.
        # To ignore a signal also drops it if it is pending.
        for number in STOP:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, timeout_ms: int) -> signal.Signals | None:
        """Return the next signal, None after the time-out. CPython invents one after a SIGSTOP; that counts as none."""
        info = signal.sigtimedwait(_WATCHED, max(0, timeout_ms) / 1000)
        return signal.Signals(info.si_signo) if info is not None and info.si_signo in _WATCHED else None


def exit_code_of(wait_status: int) -> int:
    """Return the exit code, for a signal 128 + its number, as shells do."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def show_exit(exit_code: int) -> str:
    """Return `SIGKILL` for 137, `refused (78)` for EXIT_REFUSED, else the number."""
    if exit_code == EXIT_REFUSED:
        return f"refused ({EXIT_REFUSED})"
    with suppress(ValueError):
        return signal.Signals(exit_code - 128).name
    return str(exit_code)
