"""A program that is forked is used as one that is started: its exit code, its output, its signals, its end."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests import harness
from tests.forks import SUPERVISOR, TOPICS, Fork, Forks
from tests.harness import Service, is_running, poll


def begin(
    forks: Forks, tmp_path: Path, *arguments: str, program: str = SUPERVISOR, **environ: str
) -> tuple[Fork, Path]:
    written = tmp_path / "written"
    with written.open("wb") as file, open(os.devnull) as nothing:
        streams = {"stdin": nothing.fileno(), "stdout": file.fileno(), "stderr": file.fileno()}
        return forks.start([program, *arguments], env=environ, cwd=tmp_path, **streams), written


def open_files(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}


@pytest.fixture
def forks() -> Forks:
    assert harness.forks is not None
    return harness.forks


def test_it_says_what_the_command_says(forks: Forks, tmp_path: Path) -> None:
    for program, *arguments in (
        (SUPERVISOR, "status", "--data-dir", "none"),
        (SUPERVISOR, "--version"),
        (SUPERVISOR, "stop", "--help"),
        (SUPERVISOR, "run", "--port", "x"),
        (TOPICS, "archive", "list", "none"),
        (TOPICS, "write", "--help"),
    ):
        fork, written = begin(forks, tmp_path, *arguments, program=program, COLUMNS="80")
        command = [str(harness.COMMAND.with_name(program)), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env={"COLUMNS": "80"}, capture_output=True, check=False)
        assert (fork.wait(), written.read_bytes()) == (done.returncode, done.stdout + done.stderr)
        assert fork.poll() == fork.wait() == done.returncode


def test_it_has_only_the_environment_and_the_descriptors_that_it_is_given(forks: Forks, tmp_path: Path) -> None:
    with Service(shards=1, frontends=1) as first, Service(shards=1, frontends=1) as second:
        assert {fd for fd in open_files(first.pid) & open_files(second.pid) if "anon_inode" not in fd} == {os.devnull}
        assert os.getsid(second.pid) == second.pid
        assert os.readlink(f"/proc/{second.pid}/cwd") == str(second.root)
    fork, written = begin(forks, tmp_path, "status", TOPICS_DATA_DIR=str(tmp_path / "some"))
    assert fork.wait() == 3
    assert "some" in written.read_text()


def test_it_ends_by_a_signal_and_is_no_zombie(forks: Forks, tmp_path: Path) -> None:
    fork, _ = begin(forks, tmp_path, "run", "--port", "0", "--data-dir", "data")
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.01)
    assert fork.poll() is None
    fork.kill()
    assert fork.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(fork.pid)
    fork.kill()  # its number may be another one's


def test_a_server_that_dies_ends_its_forks_and_is_started_again(tmp_path: Path) -> None:
    forks = Forks()
    fork, _ = begin(forks, tmp_path, "run", "--port", "0", "--data-dir", "data")
    server = psutil.Process(fork.pid).parent()
    assert server is not None
    assert os.getsid(server.pid) == server.pid, "Ctrl-C at a terminal is not for it"
    server.kill()
    assert fork.wait(60) == -signal.SIGTERM
    poll("the fork to end", lambda: not is_running(fork.pid))
    with pytest.raises(BrokenPipeError):
        begin(forks, tmp_path, "--version")
    fork, written = begin(forks, tmp_path, "--version")
    assert (fork.wait(), written.read_text().startswith("topics ")) == (0, True)
    forks.close()


def test_many_short_ones_at_once_tell_their_own_ends(forks: Forks, tmp_path: Path) -> None:
    def one(number: int) -> int:
        place = tmp_path / str(number)
        place.mkdir()
        return begin(forks, place, *(["--version"] if number % 2 else ["status", "--data-dir", "none"]))[0].wait()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [3, 0] * 8


def test_no_fork_outlives_its_server(tmp_path: Path) -> None:
    forks = Forks()
    fork, _ = begin(forks, tmp_path, "run", "--port", "0", "--data-dir", "data")
    family = [fork.pid, *(one.pid for one in psutil.Process(fork.pid).children(recursive=True))]
    forks.close()
    poll("all to end", lambda: not any(is_running(pid) for pid in family))
