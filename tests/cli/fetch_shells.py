"""Fetches zsh and fish for the tests of completions: `python -m tests.cli.fetch_shells DIRECTORY`.

They come from the system's packages (Debian and its kin), which are unpacked and not installed;
`tests/cli/test_completions.py` mounts them over /usr. Where there is no apt, or it cannot fetch, this says so and
succeeds: the tests then read the scripts for that shell and do not press TAB in it. Those that are in
PATH are used as they are.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.contract.fetch_promtool import CannotFetchError, download, run_apt

PACKAGES: Final = {"zsh": ("zsh", "zsh-common", "libcap2"), "fish": ("fish", "fish-common", "libpcre2-32-0")}
"""The shells, with what a small system may lack of the packages that they need."""


def fetch(directory: Path, shell: str) -> None:
    """Make `directory`/`shell` a `/usr` that has the shell, whole or not at all."""
    made = directory / shell
    if made.exists():
        return
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        root = Path(name, "root")
        for package in PACKAGES[shell]:
            work = Path(name, package)
            work.mkdir()
            run_apt(["dpkg-deb", "--extract", str(download(work, [package])), str(root)], work)
        for merged in ("bin", "lib"):
            # Older packages have files outside of /usr, which has them on every system of today.
            if (root / merged).exists():
                shutil.copytree(root / merged, root / "usr" / merged, symlinks=True, dirs_exist_ok=True)
        (root / "usr").rename(made)


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.cli.fetch_shells DIRECTORY")
    directory = Path(sys.argv[1]).resolve()
    for shell in PACKAGES:
        if found := shutil.which(shell):
            print(f"fetch_shells: {found}")
            continue
        try:
            fetch(directory, shell)
        except CannotFetchError as error:
            print(f"fetch_shells: no {shell}: {error}; its scripts are read, and not tried in it", file=sys.stderr)
        else:
            print(f"fetch_shells: {directory / shell}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
