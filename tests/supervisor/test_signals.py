"""Signals wait until they are asked for. Tried in a process of its own: a signal to this one may reach any thread."""

from __future__ import annotations

import signal
import subprocess
import sys

ONE_AFTER_THE_OTHER = """
import os, signal
from topics.supervisor.supervision import Signals
with Signals() as signals:
    assert signals.wait(0) is None
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    assert {signals.wait(0), signals.wait(0)} == {signal.SIGHUP, signal.SIGTERM}
    assert signals.wait(0) is None
"""
ASKED_AGAIN_AT_THE_END = """
import os, signal, sys
from topics.supervisor.supervision import Signals
with Signals():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(4)
"""

ASKED_WHILE_THE_INTERPRETER_ENDS = ASKED_AGAIN_AT_THE_END.replace(
    "sys.exit(4)", "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGTERM); sys.exit(4)"
)


def exit_code(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode


def test_they_come_one_after_the_other_when_asked_for() -> None:
    assert exit_code(ONE_AFTER_THE_OTHER) == 0


def test_a_stop_asked_for_again_does_not_end_the_process_at_its_end() -> None:
    """It would exit with -15 and not with what the first stop came to."""
    assert exit_code(ASKED_AGAIN_AT_THE_END) == 4
    unheeded = ASKED_AGAIN_AT_THE_END.replace("with Signals():", "if True:")
    assert exit_code(unheeded) == -signal.SIGTERM


def test_nor_does_one_that_comes_while_the_interpreter_ends() -> None:
    assert exit_code(ASKED_WHILE_THE_INTERPRETER_ENDS) == 4
