"""Fetches Prometheus' own promtool for the tests: `python -m tests.contract.fetch_promtool DIRECTORY`.

It comes from the system's package (Debian and its kin), which is unpacked and not installed: apt checks its signature.
Where there is no apt, or it cannot fetch, this says so and succeeds: the tests that need promtool are then skipped, and
say so, too. One that is in PATH is used as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PACKAGES: Final = ("promtool", "prometheus")
"""Newer systems have it in a package of its own, older ones beside the server."""
APT_TIMEOUT_S: Final = 180
COMMAND: Final = "promtool"


class CannotFetchError(Exception):
    """The reason why there is no promtool."""


def fetch(directory: Path) -> None:
    """Makes `directory` with the program in it, whole or not at all."""
    if (directory / COMMAND).exists():
        return
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        work = Path(name)
        package = download(work, PACKAGES)
        run_apt(["dpkg-deb", "--extract", str(package), str(work / "unpacked")], work)
        made = work / "made"
        made.mkdir()
        shutil.move(work / "unpacked" / "usr" / "bin" / COMMAND, made / COMMAND)
        run_apt([str(made / COMMAND), "--version"], work)
        made.rename(directory)


def download(work: Path, packages: Sequence[str]) -> Path:
    """Return the first of these packages that there is; with lists of our own if those of the system do not know it."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise CannotFetchError(f"there is no {program}")
    reasons = []
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True)
    for options in ([], ["-o", f"Dir::State::Lists={lists}"]):
        if options:
            run_apt(["apt-get", *options, "--quiet", "update"], work)
        for package in packages:
            try:
                run_apt(["apt-get", *options, "--quiet", "download", package], work)
            except CannotFetchError as error:
                reasons.append(str(error))
            else:
                return next(work.glob("*.deb"))
    raise CannotFetchError("; ".join(reasons))


def run_apt(command: list[str], work: Path) -> None:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotFetchError(f"{command[0]} did not end within {APT_TIMEOUT_S} s") from None
    if done.returncode:
        raise CannotFetchError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.contract.fetch_promtool DIRECTORY")
    directory = Path(sys.argv[1]).resolve()
    found = shutil.which(COMMAND)
    if found is not None:
        print(f"fetch_promtool: {found}")
        return 0
    try:
        fetch(directory)
    except CannotFetchError as error:
        print(f"fetch_promtool: none: {error}; the tests that need it will be skipped", file=sys.stderr)
    else:
        print(f"fetch_promtool: {directory / COMMAND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
