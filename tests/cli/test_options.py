"""Options of every program are taken as they are spelled: an abbreviation may come to mean another one."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from topics.cli import shared
from topics.cli.create import parse_fields
from topics.cli.main import COMMANDS, main, make_parser
from topics.supervisor.command import _parser as supervisor_parser
from topics.supervisor.command import main as supervisor_main
from topics.terminal import arguments_of

ROOT = Path(__file__).parents[2]
COMMAND_LINE = re.compile(r"\btopics(?:-supervisor)? [a-z][^`|#\n]*(?:\\\n[^`|#\n]*)*")
DIGITS = "9" * 5000
SHOWN = "9" * 120
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def parsers() -> list[argparse.ArgumentParser]:
    """Return the parsers of both programs and of all their commands and verbs."""

    def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
        yield parser
        for _, verbs in arguments_of(parser):
            for verb in verbs.values():
                yield from below(verb)

    return [*below(make_parser(COMMANDS)), *below(supervisor_parser())]


def test_no_parser_takes_an_abbreviation() -> None:
    found = parsers()
    assert len(found) > 30
    assert not [parser.prog for parser in found if parser.allow_abbrev]


@pytest.mark.parametrize("job", ["export", "rollup", "replay", "audit"])
def test_no_job_of_spark_takes_one(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyspark")
    with pytest.raises(SystemExit) as end:
        main(["spark", job, "--maste", "local[1]", "--hel"])
    assert end.value.code == 2
    assert "usage: topics spark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "arguments", "told"),
    [
        (main, ["write", "t", "--ta", "x"], "topics write: error: unrecognized arguments: --ta"),
        (
            main,
            ["queue", "jobs", "claim", "--nod", "n"],
            "topics queue TOPIC claim: error: unrecognized arguments: --nod",
        ),
        (main, ["--vers"], "topics: error: "),
        (supervisor_main, ["status", "--js"], "topics-supervisor status: error: unrecognized arguments: --js"),
    ],
)
def test_an_abbreviation_is_named_in_the_error_of_its_verb(
    run: object, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(run)
    with pytest.raises(SystemExit) as end:
        run(arguments)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_the_pages_abbreviate_no_option() -> None:
    known = {option for parser in parsers() for action, _ in arguments_of(parser) for option in action.option_strings}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*"))]
    seen = 0
    for page in pages:
        if page.is_file() and page.suffix in (".md", ".service", ".sh", ".yaml", ".yml", ".conf"):
            for line in COMMAND_LINE.findall(page.read_text()):
                if line.startswith("topics spark"):
                    continue
                seen += 1
                assert not (cut := set(OPTION.findall(line)) - known), (page, line, cut)
    assert seen > 50


def test_a_value_that_is_no_json_is_a_text() -> None:
    """JSON that is nested too deeply was a traceback."""
    assert parse_fields(["dead_letter=[" + "[" * 5000]) == {"dead_letter": "[" * 5001}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["read", "t", "--from", DIGITS], f"'{SHOWN}' … has 5000 characters"),
        (["read", "t", "--limit", DIGITS], f"'{SHOWN}' … has 5000 characters"),
        (["read", "t", "--from-ts", DIGITS], f"'{SHOWN}' … has 5000 characters"),
        (["queue", "t", "ack", f"{DIGITS}:lease_1"], f"'{SHOWN}' … has 5000 characters"),
        (["restore", "a", "--data-dir", "b", "--to-seq", f"t={DIGITS}"], f"'{SHOWN}' … has 5000 characters"),
        (["archive", "prune", "a", "--keep", f"{DIGITS}d"], "is no duration: write 7d"),
        (["read", "t", "--limit", "0"], "'0' is not a whole number from 1"),
        (["write", "t", "--config", "[" * 5000], "is no configuration like"),
        (["write", "t", "--config", '{"ttl": 1}'], 'is no configuration like {"type": "queue"}: a topic\'s '),
    ],
)
def test_a_value_that_cannot_be_is_named(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Python refuses to convert so many digits, and the error named the function that had tried."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["backup", "--data-dir", "d", "--to", ""], "topics backup: error: argument --to: '' is no directory"),
        (["backup", "--data-dir", "", "--to", "a"], "topics backup: error: argument --data-dir: '' is no directory"),
        (["restore", "a", "--data-dir", ""], "topics restore: error: argument --data-dir: '' is no directory"),
        (["restore", "", "--data-dir", "d"], "topics restore: error: argument FROM: '' is no directory"),
        (["archive", "list", ""], "topics archive list: error: argument PLACE: '' is no directory"),
        (["backup", "--data-dir", "d", "--to", "s3:/b/x"], "argument --to: 's3:/b/x' is no place: write a directory"),
        (["verify", ""], "topics verify: error: argument DIR: '' is no directory"),
        (["queue", "q", "claim", "--node", ""], "topics queue TOPIC claim: error: argument --node: '' is no name"),
        (["list", "--url", ""], "topics list: url '' does not name a service"),
        (["list", "--key-file", ""], "topics list: key file '': No such file"),
    ],
)
def test_an_empty_argument_is_not_the_default(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--to "$UNSET"` made a backup in the working directory, `--url "$UNSET"` asked the service of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOPICS_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(shared, "end_in_order", lambda: None)  # its signals are those of pytest here
    with pytest.raises(SystemExit) as end:
        sys.exit(main(arguments))
    assert end.value.code == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
