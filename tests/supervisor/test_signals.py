"""Signals wait until they are asked for. Tried in a process of its own: a signal to this one may reach any thread."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.harness import poll

ONE_AFTER_THE_OTHER = """
import os, signal
from topics.supervisor.signals import Signals
with Signals() as signals:
    assert signals.wait(0) is None
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    assert {signals.wait(0), signals.wait(0)} == {signal.SIGHUP, signal.SIGTERM}
    assert signals.wait(0) is None
"""
ASKED_AGAIN_AT_THE_END = """
import os, signal, sys
from topics.supervisor.signals import Signals
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


STOPPED_NOW_AND_THEN = """
import os, sys
from topics.supervisor.signals import Signals
with Signals() as signals:
    print("waits", flush=True)
    while not os.path.exists(sys.argv[1]):
        assert signals.wait(1) is None
"""


def test_who_is_stopped_while_it_waits_has_no_signal(tmp_path: Path) -> None:
    """CPython made one up, of any number: it ended the supervisor, who killed all processes, and `status --watch`."""
    over = tmp_path / "over"
    with subprocess.Popen([sys.executable, "-c", STOPPED_NOW_AND_THEN, over], stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"waits\n"
        process = psutil.Process(waiting.pid)
        for _ in range(300):
            waiting.send_signal(signal.SIGSTOP)
            poll("it to stand still", lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
            waiting.send_signal(signal.SIGCONT)
        over.touch()
        assert waiting.wait(60) == 0
