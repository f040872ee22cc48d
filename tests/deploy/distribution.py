"""Builds the wheel and the sdist, and checks each as a user would: `python -m tests.deploy.distribution DIR`.

Each is installed into a bare environment, with the extra of the service. The service is started there, and gets a write
and a read. The wheel is run by uvx, too, which makes an environment of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tests.harness import STOP_GRACE_MS, clean_environment, poll

ROOT: Final = Path(__file__).resolve().parents[2]
UV: Final = "uv==0.13.9"
INSTALL_TIMEOUT_S: Final = 600
SOURCES: Final = ("topics", "deploy", "pyproject.toml", "README.md", "pyspark_topics.py", "topicsd.py")
RECORDS: Final = '{"item": "tea"}\n{"item": "milk"}\n'


def build(directory: Path) -> tuple[Path, Path]:
    """Build both from a copy of the sources, so that nothing of an earlier build gets in; return (wheel, sdist)."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        copy_sources(copy)
        for kind in ("sdist", "wheel"):
            program = f"from setuptools import build_meta; build_meta.build_{kind}({str(directory)!r})"
            run([sys.executable, "-c", program], cwd=copy)
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, sdist


def copy_sources(folder: Path) -> None:
    """Copy what the package is built from into a folder."""
    for source in SOURCES:
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, folder / source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, folder)


def run(command: Sequence[str | Path], *, cwd: Path | None = None, given: str | None = None) -> str:
    """Run a command; return what it printed, raise AssertionError with all of it when it fails."""
    environment = clean_environment({})
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def environment_with(requirement: str, directory: Path) -> Path:
    """Make a bare environment with `requirement` in it; return its folder of programs."""
    venv.create(directory, with_pip=True)
    run([directory / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", requirement])
    return directory / "bin"


def check(supervisor: Sequence[str | Path], programs: Path, scratch: Path) -> None:
    """Start the service by the command `supervisor`; write and read with the programs of an installation."""
    port_file, log_file = scratch / "port", scratch / "log"
    settings = {"TOPICS_DATA_DIR": str(scratch / "data"), "TOPICS_PORT": "0", "TOPICS_PORT_FILE": str(port_file)}
    settings["TOPICS_SHUTDOWN_GRACE_MS"] = str(STOP_GRACE_MS)
    with log_file.open("wb") as log:
        service = subprocess.Popen(
            [*supervisor, "run"],
            cwd=scratch,
            env=clean_environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:

        def url() -> str | None:
            assert service.poll() is None, log_file.read_text()
            return f"http://{port_file.read_text()}" if port_file.exists() else None

        found = poll("the service", url, INSTALL_TIMEOUT_S)
        command: list[str | Path] = [programs / "topics-supervisor", "status", "--data-dir", scratch / "data"]
        ask = partial(subprocess.run, command, env=clean_environment({}), stdout=subprocess.DEVNULL, check=False)
        poll("all processes to be ready", lambda: ask().returncode == 0)
        written = run([programs / "topics", "write", "shop", "--url", found], cwd=scratch, given=RECORDS)
        assert '"count":2' in written
        read = run([programs / "topics", "read", "shop", "--url", found], cwd=scratch)
        assert re.findall(r'"data":(\{[^}]*\})', read) == RECORDS.splitlines(), read
        # uvx starts the service as its child, and passes a signal on to it.
        service.send_signal(signal.SIGTERM)
        assert service.wait(INSTALL_TIMEOUT_S) == 0, log_file.read_text()
    finally:
        if service.poll() is None:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait()


def check_installed(distribution: Path, scratch: Path) -> None:
    """Check a wheel or an sdist in a bare environment."""
    programs = environment_with(f"{distribution}[server]", scratch / "venv")
    check([programs / "topics-supervisor"], programs, scratch)
    units = {path.name for path in (scratch / "venv" / "share" / "topics").iterdir()}
    assert {"topics.service", "topics.socket"} <= units


def check_with_uvx(wheel: Path, scratch: Path) -> None:
    """Check that `uvx` runs the service from the wheel alone."""
    programs = environment_with(UV, scratch / "uv")
    requirement = f"topicsd[server] @ {wheel.resolve().as_uri()}"
    run([programs / "uv", "--quiet", "venv", "--python", sys.executable, scratch / "venv"])
    run([programs / "uv", "--quiet", "pip", "install", "--python", scratch / "venv" / "bin" / "python", requirement])
    uvx: list[str | Path] = [
        programs / "uvx",
        "--quiet",
        "--python",
        sys.executable,
        "--from",
        requirement,
        "topics-supervisor",
    ]
    check(uvx, scratch / "venv" / "bin", scratch)


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.deploy.distribution DIRECTORY")
    wheel, sdist = build(Path(sys.argv[1]).resolve())
    for subject, checked in [(wheel, check_installed), (sdist, check_installed), (wheel, check_with_uvx)]:
        with tempfile.TemporaryDirectory(prefix="topics-dist-") as scratch:
            checked(subject, Path(scratch))
        print(f"{subject}: {checked.__name__.replace('_', ' ')}: ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
