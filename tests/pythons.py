"""Runs the short suite on several Pythons: `python -m tests.pythons PREFIX VERSION…`.

Each version gets an environment PREFIX-VERSION with the dependencies that requirements.lock pins, but without Spark and
its tests.
A version that this machine does not have is named and passed over; it is an error if only the running one is there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests import suite

ROOT: Final = Path(__file__).resolve().parents[1]
SUITES: Final = [name for part in suite.PARTS["short"] for name in part.split() if name != "spark"]
EXTRAS: Final = ("server", "bucket", "dev")
BUILDS: Final = Path("~/.pyenv/versions").expanduser()


def interpreter(version: str) -> Path | None:
    """Return a Python of this version (`3.13`): the running one, one in PATH, one that pyenv has built; or None."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    builds = sorted(
        BUILDS.glob(f"{version}.*/bin/python"), key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))]
    )
    for found in [shutil.which(f"python{version}"), *map(str, reversed(builds))]:
        if found is not None and _works(found, version):
            return Path(found)
    return None


def _works(python: str, version: str) -> bool:
    """Return whether a program is what its name says: pyenv's stand-ins fail for versions that are not chosen."""
    program = "import sys, venv; print('{}.{}'.format(*sys.version_info))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def constraints(lock: str) -> str:
    """Return the pins of a lock file without its hashes, which pip would demand of our own folder, too."""
    return "\n".join(re.findall(r"^[\w.-]+==[^\s\\;]+", lock, re.MULTILINE)) + "\n"


def run_on(python: Path, directory: Path) -> bool:
    """Run the suites in an environment of this Python; return whether they passed."""
    subprocess.run([python, "-m", "venv", directory], check=True)
    pins = directory / "constraints.txt"
    pins.write_text(constraints((ROOT / "requirements.lock").read_text()))
    pip: list[str | Path] = [
        directory / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--constraint", pins, "--editable", f"{ROOT}[{','.join(EXTRAS)}]"], check=True)
    tests = [path for name in SUITES for path in suite.paths(name)]
    return not subprocess.run(
        [directory / "bin" / "python", "-m", "pytest", "-m", suite.CHOSEN_BY["short"], *tests], cwd=ROOT, check=False
    ).returncode


def main() -> int:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m tests.pythons PREFIX VERSION...")
    prefix, versions = Path(sys.argv[1]).absolute(), sys.argv[2:]
    found = {version: python for version in versions if (python := interpreter(version)) is not None}
    failed = []
    for version, python in found.items():
        print(f"test-pythons: {version}: {python}", flush=True)
        if not run_on(python, prefix.with_name(f"{prefix.name}-{version}")):
            failed.append(version)
    missing = [version for version in versions if version not in found]
    for word, those in [("passed", [v for v in found if v not in failed]), ("failed", failed), ("not here", missing)]:
        print(f"test-pythons: {word}: {', '.join(those) or 'none'}")
    if all(python == Path(sys.executable) for python in found.values()):
        print("test-pythons: there is no Python here but the running one; install another, for instance with pyenv")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
