"""The examples of `docs/operations.md` "At a shell" are run as they stand; so are commands that look at one directory,
on these and other pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import ROOT
from tests.harness import Service, clean_environment

CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_ITS_TIME = (
    (re.compile(r'"(\$ts|deadline|deliver_at)":\d+'), r'"\1":0'),
    (re.compile(r"lease_[0-9a-f]{16}"), "lease_"),
    (re.compile(r'topics-cli@[^"]+'), "topics-cli@host"),
)


def handbook() -> str:
    page = (ROOT / "docs" / "operations.md").read_text()
    return page.split("\n### At a shell\n")[1].split("\n### ")[0]


def examples(page: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of each `$ ` line in its console blocks."""
    for block in CONSOLE.findall(page):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = example.partition("\n")
            yield command, printed


def timeless(printed: str) -> str:
    for pattern, instead in OF_ITS_TIME:
        printed = pattern.sub(instead, printed)
    return printed


@pytest.mark.long
def test_the_examples_print_what_they_say(tmp_path: Path) -> None:
    mine = [(command, printed) for command, printed in examples(handbook()) if re.search(r"(^|\| )topics ", command)]
    assert len(mine) >= 14
    (tmp_path / "bin").mkdir()
    topics = tmp_path / "bin" / "topics"
    program = "import sys; from topics.cli.main import main; sys.exit(main())"
    topics.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
    topics.chmod(0o755)
    with Service(shards=1, frontends=1) as service:
        path = f"{topics.parent}:{os.environ['PATH']}"
        environment = clean_environment({"TOPICS_URL": service.url, "PYTHONPATH": str(ROOT), "PATH": path})
        for command, printed in mine:
            done = subprocess.run(
                command,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=tmp_path,
                timeout=240,
                check=False,
            )
            assert timeless(done.stdout.decode()) == timeless(printed), command


LOOKS = ("topics-supervisor check ", "topics verify ")
FOLDER = re.compile(r"/var/lib/topics|\./topics-data")


def looks() -> list[tuple[str, str]]:
    """Return the (command, output) of examples outside of the handbook that look at a data directory."""
    operations = (ROOT / "docs" / "operations.md").read_text().replace(handbook(), "")
    found = [*examples(operations), *examples((ROOT / "docs" / "storage-format.md").read_text())]
    return [(command, printed) for command, printed in found if any(look in command for look in LOOKS)]


@pytest.mark.parametrize(("command", "printed"), looks())
def test_a_command_that_looks_at_a_directory_prints_what_its_page_says(
    command: str, printed: str, tmp_path: Path
) -> None:
    """All but the figures, which are those of the page's directory."""
    with Service(data_dir=tmp_path / "data", shards=1, frontends=1) as service:
        service.client.post("/v0/topics/t", json={"records": [{"data": 1}]}).raise_for_status()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        FOLDER.sub(str(tmp_path / "data"), command),
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment({"TOPICS_PORT": "0", "PATH": path}),
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    expected = FOLDER.sub(str(tmp_path / "data"), printed).replace("127.0.0.1:4000", "127.0.0.1:0")
    assert without_figures(done.stdout) == without_figures(expected)


def without_figures(text: str) -> str:
    """Return a text as it is with any figures: one record, and two records, are 0 record."""
    return re.sub(r"\b(frame|record|segment|snapshot)s\b", r"\1", re.sub(r"\d+", "0", text))
