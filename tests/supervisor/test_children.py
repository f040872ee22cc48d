"""Pauses between restarts, as values; and a child that never comes back into its parent's code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from topics.supervisor.children import RESTART_DELAY_MS, STABLE_AFTER_MS, RestartDelay
from topics.supervisor.signals import show_exit


def test_the_first_death_is_restarted_at_once_the_others_ever_later() -> None:
    restart_delay = RestartDelay()
    assert [restart_delay.delay_ms(1) for _ in range(10)] == [0, 50, 100, 200, 400, 800, 1600, 3200, 5000, 5000]


def test_pauses_stay_at_the_longest_for_ever() -> None:
    restart_delay = RestartDelay()
    delays = [restart_delay.delay_ms(0) for _ in range(10_000)]
    assert set(delays[8:]) == {RESTART_DELAY_MS[1]}


def test_a_long_life_starts_over() -> None:
    restart_delay = RestartDelay()
    for _ in range(5):
        restart_delay.delay_ms(STABLE_AFTER_MS - 1)
    assert restart_delay.delay_ms(STABLE_AFTER_MS) == 0
    assert restart_delay.delay_ms(STABLE_AFTER_MS - 1) == 50


@pytest.mark.parametrize(
    ("code", "shown"), [(0, "0"), (1, "1"), (70, "70"), (78, "refused (78)"), (137, "SIGKILL"), (143, "SIGTERM")]
)
def test_exit_codes_in_words(code: int, shown: str) -> None:
    assert show_exit(code) == shown


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("return 5", 5),
        ("raise RuntimeError('planned')", 70),
        ("sys.exit(3)", 70),
        ("sys.stdout.close(); return 6", 6),
        ("sys.stderr = None; raise RuntimeError('planned')", 70),
    ],
)
def test_a_child_ends_where_it_began(body: str, exit_code: int) -> None:
    program = f"""
import os, sys
from topics.log import configure_log
from topics.supervisor.children import fork
from topics.supervisor.signals import exit_code_of
def main():
    {body}
configure_log("error", "json")
pid = fork("child", 0, main)
print(exit_code_of(os.waitpid(pid, 0)[1]))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == f"{exit_code}\n"


def test_a_hangup_waits_until_the_child_wants_it() -> None:
    program = """
import os, signal
from topics.log import configure_log
from topics.supervisor.children import fork
from topics.supervisor.signals import exit_code_of
def main():
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.SIGHUP in signal.sigpending()
    taken = []
    signal.signal(signal.SIGHUP, lambda number, _: taken.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    return len(taken) * 7
configure_log("error", "json")
print(exit_code_of(os.waitpid(fork("child", 0, main), 0)[1]))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "7\n"


def test_a_child_whose_supervisor_died_during_the_fork_ends_without_a_traceback() -> None:
    program = """
import os
from topics.log import configure_log
from topics.supervisor.children import fork
configure_log("info", "json")
os.getppid = lambda: 1
pid = fork("child", 0, lambda: print("main ran"))
os.waitpid(pid, 0)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = answer.stdout + answer.stderr
    assert "the supervisor ended during the fork" in said
    assert "Traceback" not in said
    assert "main ran" not in said
