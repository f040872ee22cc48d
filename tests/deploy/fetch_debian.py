"""Makes a bare Debian for the tests: `python -m tests.deploy.fetch_debian DIRECTORY`.

debootstrap makes it from the archive that this system's apt uses, and checks the signatures. It is unpacked from its
package and not installed. Without root, apt or an archive this says so and succeeds: the tests that need a bare Debian
are then skipped, and say so, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

RELEASE: Final = "trixie"
"""The release that docs/install.md and deploy/Containerfile start from."""
TIMEOUT_S: Final = 600


class CannotFetchError(Exception):
    """The reason why there is no bare Debian."""


def fetch(directory: Path) -> None:
    """Make `directory` a root file system, whole or not at all."""
    if directory.exists():
        return
    if os.geteuid() != 0:
        raise CannotFetchError("only root can make one")
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        work = Path(name)
        archive = _archive(work)
        _run(["apt-get", "--quiet", "-o", "APT::Sandbox::User=root", "download", "debootstrap"], work)
        _run(["dpkg-deb", "--extract", *map(str, work.glob("*.deb")), str(work / "unpacked")], work)
        program, scripts = work / "unpacked/usr/sbin/debootstrap", work / "unpacked/usr/share/debootstrap"
        options = ["--variant=minbase", "--include=ca-certificates", RELEASE, str(work / "root"), archive]
        _run([str(program), *options], work, DEBOOTSTRAP_DIR=str(scripts))
        (work / "root").rename(directory)


def _archive(work: Path) -> str:
    """Return the address of the archive that this system's packages come from."""
    command = ["apt-get", "indextargets", "--format", "$(SITE) $(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    for update in (False, True):
        if update:
            _run(["apt-get", "--quiet", "update"], work)
        found = [line.split()[1] for line in _run(command, work).splitlines()]
        found = [address for address in found if "security" not in address]
        if found:
            return found[0]
    raise CannotFetchError("apt knows no archive of Debian")


def _run(command: list[str], work: Path, **environ: str) -> str:
    environment = os.environ | {"LC_ALL": "C"} | environ
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        raise CannotFetchError(str(error)) from None
    if done.returncode:
        raise CannotFetchError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.deploy.fetch_debian DIRECTORY")
    directory = Path(sys.argv[1]).resolve()
    try:
        fetch(directory)
    except CannotFetchError as error:
        print(f"fetch_debian: none: {error}; the tests that need it will be skipped", file=sys.stderr)
    else:
        print(f"fetch_debian: {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
