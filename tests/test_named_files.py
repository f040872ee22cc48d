"""Files that the documentation and the comments name exist, and so do functions and classes named with a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in ("topics", "tests", "bench", "examples", "deploy", "docs")
    for path in (ROOT / folder).rglob("*.*")
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "topics").rglob("*.py"))]
SOMEBODY_ELSES = {"app.py", "job.py", "main.py", "worker.py"}
"""Names that examples give to files of their readers."""


def named(page: str) -> set[str]:
    """Return the names of files in backquotes, such as `a/b.py` or `b.py:Class.method`, and those with a path."""
    return set(re.findall(r"`([\w/.-]+\.(?:py|md|service))(?::[\w.]+)?`", page)) | set(
        re.findall(r"\b(?:topics|tests|docs|bench|examples|deploy)/[\w/-]+\.(?:py|md|service)\b", page)
    )


def missing(page: str) -> list[str]:
    return sorted(name for name in named(page) - SOMEBODY_ELSES if not matching(name))


@cache
def matching(name: str) -> list[str]:
    """Return the files of that name, which may lack the first folders."""
    return [file for file in FILES if file == name or file.endswith(f"/{name.removeprefix('../')}")]


def missing_definitions(page: str) -> list[str]:
    """Return those of `a/b.py:name` and `a/b.py:Class.name` that no file of that name defines."""
    pointers = re.findall(r"`([\w/.-]+\.py):([A-Za-z_][\w.]*)`", page)
    return sorted(
        f"{file}:{name}" for file, name in pointers if not any(name in definitions(one) for one in matching(file))
    )


@cache
def definitions(file: str) -> set[str]:
    """Return the functions, classes and variables of a module, and `Class.name` for what a class defines."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        found |= defined(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for item in node.body for name in defined(item)}
    return found


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    return {ast.unparse(target) for target in node.targets} if isinstance(node, ast.Assign) else set()


@pytest.mark.parametrize("guard", [missing, missing_definitions])
def test_what_is_named_exists(guard: Callable[[str], list[str]]) -> None:
    found = {page.relative_to(ROOT).as_posix(): guard(page.read_text()) for page in PAGES}
    assert not {page: names for page, names in found.items() if names}, "name what is there now"


def test_the_guard_sees() -> None:
    assert missing("as `frontend/wires.py` and docs/decisions/9999-no.md say, not `core/fold.py`") == [
        "docs/decisions/9999-no.md",
        "frontend/wires.py",
    ]


def test_the_guard_sees_definitions() -> None:
    page = "`core/fold.py:Fold.finish`, `core/fold.py:Fold.begin`, `core/fold.py:Folds`, `nowhere.py:Fold`"
    assert missing_definitions(page) == ["core/fold.py:Fold.begin", "core/fold.py:Folds", "nowhere.py:Fold"]


def test_architecture_names_the_place_of_each_rule() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("\n## Where each rule is\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ") and not row.startswith("| question")]
    assert len(rows) > 30
    assert not [row for row in rows if not re.search(r"`[\w/]+\.py:\w", row)]


def strays(table: str) -> list[str]:
    """Return the modules that a row of the map names, and that are not in the folder of that row."""
    found, folder = [], ""
    for row in table.splitlines():
        _, place, subject = row.split("|")[:3]
        names = re.findall(r"`([\w/.]+)`", place)
        if place.startswith(" `"):
            folder = names[0]
        folders = names if place.startswith(" `") else [f"{folder}/{name}" for name in names]
        modules = re.findall(r"`(\w+\.py)`", subject)
        found += [f"{place.strip()}: {one}" for one in modules if not FILES & {f"{here}/{one}" for here in folders}]
    return found


def test_the_map_names_modules_where_they_are() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## The map\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith(("| `", "| — `"))]
    assert len(rows) > 20
    assert not strays("\n".join(rows))


def test_the_guard_sees_strays() -> None:
    table = (
        "| `topics/archive` | `origin.py`, `main.py` |\n"
        "| `topics/walshard` | `shard.py` |\n"
        "| — `commit` | `logs.py`, `shard.py` |"
    )
    assert strays(table) == ["`topics/archive`: origin.py", "— `commit`: shard.py"]


@pytest.mark.parametrize("page", ["reliability.md", "bugs-found.md"])
def test_reliability_names_its_tests(page: str) -> None:
    assert len({name for name in named((ROOT / "docs" / page).read_text()) if "/test_" in name}) > 40
