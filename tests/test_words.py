"""The lint of words sees what it is meant to see, and nothing else; nothing is left to rewrite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words

ROOT = Path(__file__).parent.parent
PATHS = ("bench", "examples", "tests", "topics")


@pytest.mark.long  # `make lint`, a part of `make test`, does the same
@pytest.mark.parametrize("path", PATHS)
def test_each_docstring_names_its_subject(path: str) -> None:
    found = [f"{file}:{one.line}: {one.text}" for file in words.files([str(ROOT / path)]) for one in found_in(file)]
    assert not found, "python -m tests.words --help shows how to write them"


def found_in(file: Path) -> list[words.Finding]:
    return words.findings(file.read_text())


@pytest.mark.parametrize(
    ("docstring", "beginning"),
    [
        ("Of a claimed job, its lease.", "Of"),
        ("As `read`, once.", "As"),
        ("What waits.", "What"),
        ("Whether it is full.", "Whether"),
        ("Whoever asks gets it.", "Whoever"),
        ("However many ask.", "However"),
        ("So many are read at once.", "So many"),
        ("By how much it grows, with its parts.", "By how"),
        ("For whom a place is kept: nobody else.", "For whom"),
        ("Up to where records were looked at, with gaps.", "Up to where"),
        ("In this turn.", "In this turn"),
        ("By topic id. Empty between groups.", "By topic id"),
        ("None while nobody waits.", "None while"),
        ("And nothing else.", "And"),
        ("Only of jobs that have one.", "Only of"),
        ("Until it has looked once more.", "Until it has looked once more"),
        ("To be called often; cheap.", "To be"),
        ("\n    Whose end they wait for.\n    ", "Whose"),
        ("Return whether it is full.", ""),
        ("Whole chunks, as many as there are.", ""),
        ("Offsets of blocks.", ""),
        ("None of them", "None of"),
        ("None: it runs.", ""),
        ("Nothing below `seq` is live.", ""),
        ("From drafts to the logs: requests become frames.", ""),
        ("After a failed sync the page cache may hold anything.", ""),
        ("If the disk is full, the log stops.", ""),
        ("Sort e.g. names. Which ones?", ""),
        ("Thatcher.", ""),
    ],
)
def test_beginnings_without_a_subject(docstring: str, beginning: str) -> None:
    assert words.opening(docstring) == beginning


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is read anew.", ["anew"]),
        ("Who has it at hand,\n    indeed.", ["at hand", "indeed"]),
        ("Its topic is no more.", ["is no more"]),
        ("Notices are no more than a token.", []),
        ("As long as there are no more.", []),
        ("It lets go of files.", ["lets go"]),
        ("Let go.", ["Let go"]),
        ("Has go what can; it has to go on.", ["Has go"]),
        ("Clients wait, for it may take long.", ["for it may"]),
        ("Call `shall` and `let_go`.", []),
        ("See to it that it is closed.", []),
        ("Renewal of a handle.", []),
    ],
)
def test_literary_words(text: str, found: list[str]) -> None:
    assert words.literary(text) == found


def test_docstrings_and_comments_are_found_where_they_are() -> None:
    source = '''"""What it is."""
class A:
    """How it is."""
    x = "Of a value, not a docstring: read anew"
    """Where it is."""
    # It is read anew.
    def f(self) -> None:  # noqa: indeed
        """Return it."""
'''
    assert [(one.line, one.reason) for one in words.findings(source)] == [
        (1, "no subject"),
        (3, "no subject"),
        (5, "no subject"),
        (6, "literary"),
    ]


def test_the_exit_code_says_whether_anything_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Return it."""\n')
    assert words.main([str(tmp_path)]) == 0
    file.write_text('"""What it is."""\n')
    assert words.main([str(file)]) == 1
    assert capsys.readouterr().out == f"{file}:1: no subject: What it is\n"
