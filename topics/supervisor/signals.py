"""Signals as values that the supervisor asks for, instead of handlers that interrupt it.

They stay blocked from before the first fork: what arrives at any moment waits for the next `wait`, and none of it
can hit a child that has not set itself up yet (a child starts with nothing pending and unblocks them itself; SIGHUP
only when it can reload).
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Final, Self

STOP: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_WATCHED: Final = STOP | {signal.SIGHUP, signal.SIGCHLD}


class Signals:
    """Blocks what it watches for as long as it is entered."""

    def __enter__(self) -> Self:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who asks again for the stop that is over must not make its exit code another one, nor while the interpreter
        # ends, which takes a while: what is ignored is dropped, also what is pending.
        for number in STOP:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, timeout_ms: int | None) -> signal.Signals | None:
        """The next signal, or None after the time-out; without one it waits for ever."""
        if timeout_ms is None:
            return signal.Signals(signal.sigwaitinfo(_WATCHED).si_signo)
        info = signal.sigtimedwait(_WATCHED, max(0, timeout_ms) / 1000)
        return None if info is None else signal.Signals(info.si_signo)
