"""README.md is true: its commands and its program are run as they stand, and what it names is there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.shell import DEADLINE_S, ROOT
from tests.cli.test_handbook import examples
from tests.contract.api_page import Likeness, decode
from tests.harness import Service, clean_environment

PAGE = (ROOT / "README.md").read_text()
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):4000")
ENDLESS = re.compile(r"^curl -sN ")
JSON_LINE = re.compile(r"((?:data: )?)(\{.*)")
LINES_MAX = 113


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(shards=1, frontends=1) as running:
        yield running


@pytest.fixture
def environment(service: Service, tmp_path: Path) -> dict[str, str]:
    """Variables with which `topics` is a command, for this service."""
    (tmp_path / "bin").mkdir()
    topics = tmp_path / "bin" / "topics"
    program = "import sys; from topics.cli.main import main; sys.exit(main())"
    topics.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
    topics.chmod(0o755)
    path = f"{topics.parent}:{os.environ['PATH']}"
    return clean_environment({"TOPICS_URL": service.url, "PYTHONPATH": str(ROOT), "PATH": path})


def test_its_commands_and_its_program_do_what_it_shows(service: Service, environment: dict[str, str]) -> None:
    host = service.url.removeprefix("http://")
    likeness = Likeness()
    calls = list(calls_of(PAGE))
    assert len(calls) >= 6
    for command, shown in calls:
        printed = run(ADDRESS.sub(host, likeness.said(command)), environment, len(shown))
        assert len(printed) == len(shown), (command, printed)
        for expected, actual in zip(shown, printed, strict=True):
            check_line(expected, actual, likeness)
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)
    printed = run(shlex.join([sys.executable, "-c", ADDRESS.sub(host, program)]), environment, 4)
    assert printed == [
        "1 tea {'item': 'tea', 'price': 4.5}",
        "2 None {'item': 'milk'}",
        "3 tea {'item': 'tea'}",
        "orders 3",
    ]


def calls_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (command, lines that it prints); a command goes on over lines until its quotes are closed."""
    for first, rest in examples(page):
        command, shown = first, rest.splitlines()
        while command.count("'") % 2:
            command += "\n" + shown.pop(0)
        yield command, shown


def run(command: str, environment: dict[str, str], count: int) -> list[str]:
    """Return the lines that a command prints: all of them, or the first `count` of one that does not end."""
    process = subprocess.Popen(
        ["/bin/bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        if not ENDLESS.match(command):
            return process.communicate(timeout=DEADLINE_S)[0].splitlines()
        assert process.stdout is not None
        return [process.stdout.readline().rstrip("\n") for _ in range(count)]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def check_line(shown: str, actual: str, likeness: Likeness) -> None:
    expected, printed = JSON_LINE.fullmatch(shown), JSON_LINE.fullmatch(actual)
    if expected is None or printed is None:
        assert actual == shown
        return
    assert printed[1] == expected[1]
    likeness.check(decode(expected[2]), decode(printed[2]))


def test_targets_and_extras_that_it_names_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"`make (\w+)`", PAGE))
    assert named
    assert named <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"pip install '\.\[(\w+)\]'", PAGE))
    assert extras <= set(project["optional-dependencies"])


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= LINES_MAX
