"""`make test-pythons`: which Pythons it finds, and what it says of those that are missing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path

import pytest

from tests import pythons, suite

RUNNING = "{}.{}".format(*sys.version_info)


def test_a_lock_file_gives_its_pins_without_hashes() -> None:
    lock = "httpx==0.28.1 \\\n    --hash=sha256:00\n    # via topicsd\nuvloop==0.22.1 ; sys_platform != 'win32' \\\n"
    assert pythons.constraints(lock) == "httpx==0.28.1\nuvloop==0.22.1\n"


def test_the_newest_build_of_pyenv_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pythons, "BUILDS", tmp_path)
    monkeypatch.setattr(pythons.shutil, "which", lambda _: None)
    for version in ("3.99.2", "3.99.10", "3.98.1"):
        (tmp_path / version / "bin").mkdir(parents=True)
        program = tmp_path / version / "bin" / "python"
        program.write_text(f"#!/bin/sh\necho {version.rpartition('.')[0]}\n")
        program.chmod(0o755)
    assert pythons.interpreter("3.99") == tmp_path / "3.99.10" / "bin" / "python"
    (tmp_path / "3.98.1" / "bin" / "python").write_text("#!/bin/sh\necho not chosen >&2; exit 127\n")
    assert pythons.interpreter("3.98") is None
    assert pythons.interpreter(RUNNING) == Path(sys.executable)


@pytest.mark.parametrize(("others", "passes", "code"), [([], True, 1), (["3.99"], True, 0), (["3.99"], False, 1)])
def test_what_is_missing_is_said_and_the_running_one_alone_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], others: list[str], passes: bool, code: int
) -> None:
    here = {RUNNING: Path(sys.executable)} | {version: Path("/python") for version in others}
    monkeypatch.setattr(pythons, "interpreter", here.get)
    monkeypatch.setattr(pythons, "run_on", lambda *_: passes)
    monkeypatch.setattr(sys, "argv", ["pythons", "/venv", RUNNING, "3.99", "3.100"])
    assert pythons.main() == code
    said = capsys.readouterr().out
    missing = "3.100" if others else "3.99, 3.100"
    assert f"not here: {missing}\n" in said
    assert bool(re.search("no Python here but the running one", said)) is not bool(others)


def imported(paths: list[Path]) -> Iterator[str]:
    """Yield the foreign packages that modules import, with what they import of `tests` and `bench`."""
    seen: set[Path] = set()
    while paths:
        path = paths.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.parse(path.read_text()).body:
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in named:
                first = name.partition(".")[0]
                if first in ("tests", "bench"):
                    folder = pythons.ROOT / name.replace(".", "/")
                    paths += [folder.with_suffix(".py"), folder / "__init__.py"]
                elif first not in sys.stdlib_module_names and first not in ("topics", "topicsd"):
                    yield first


def distribution(requirement: str) -> str:
    """Return the normal name of the distribution that a requirement names."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def with_what_they_need(names: set[str]) -> set[str]:
    """Return these distributions and all that they need without their extras."""
    found: set[str] = set()
    while left := names - found:
        found |= left
        needed = [one for name in left for one in requires(name) or () if "extra ==" not in one]
        names = found | {distribution(one) for one in needed if is_installed(distribution(one))}
    return found


def is_installed(name: str) -> bool:
    return any(distributions(name=name))


def test_each_environment_has_what_its_suites_import() -> None:
    project = tomllib.loads((pythons.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in pythons.EXTRAS for one in extras[extra])]
    installed = with_what_they_need({distribution(one) for one in wanted})
    places = [pythons.ROOT / path for name in pythons.SUITES for path in suite.paths(name)]
    modules = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])]
    packages = set(imported([pythons.ROOT / "tests" / "conftest.py", *modules]))
    assert "pytest" in packages
    owners = packages_distributions()
    for package in packages:
        assert set(map(distribution, owners[package])) & installed, f"{package}: no extra of {pythons.EXTRAS} has it"
