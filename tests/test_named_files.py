"""Files that the documentation and the comments name are there: who follows a name finds what it means."""

from __future__ import annotations

import re
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
    """`a/b.py` and `b.py`, in backquotes or as a path."""
    return set(re.findall(r"`([\w/.-]+\.(?:py|md|service))`", page)) | set(
        re.findall(r"\b(?:topics|tests|docs|bench|examples|deploy)/[\w/-]+\.(?:py|md|service)\b", page)
    )


def missing(page: str) -> list[str]:
    return sorted(
        name
        for name in named(page) - SOMEBODY_ELSES
        if not any(file == name or file.endswith(f"/{name.removeprefix('../')}") for file in FILES)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_is_named_exists(page: Path) -> None:
    assert not missing(page.read_text())


def test_the_guard_sees() -> None:
    assert missing("as `frontend/wires.py` and docs/decisions/9999-no.md say, not `core/fold.py`") == [
        "docs/decisions/9999-no.md",
        "frontend/wires.py",
    ]


def test_reliability_names_its_tests() -> None:
    assert len({name for name in named((ROOT / "docs" / "reliability.md").read_text()) if "/test_" in name}) > 40
