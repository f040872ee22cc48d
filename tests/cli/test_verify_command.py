"""`topics verify DIR`."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import topicsd
from tests.storage.test_verify import fill
from topics.cli.main import main
from topics.storage.lock import DataDirLock

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    fill(str(tmp_path))
    return str(tmp_path)


def test_the_installed_command_is_this_one() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = pyproject["project"]["scripts"]["topics"].partition(":")
    assert getattr(import_module(module), function) is topicsd.topics
    assert import_module(topicsd.COMMANDS["topics"]).main is main


def test_clean(data_dir: str, capsys: Capture) -> None:
    assert main(["verify", data_dir]) == 0
    out, err = capsys.readouterr()
    assert out == "clean: 8 log frames, 5 records in 2 segments, 1 of them sealed, 2 snapshots\n"
    assert err == ""


def test_damage(data_dir: str, capsys: Capture) -> None:
    path = next(Path(data_dir).rglob("*.tags"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert main(["verify", data_dir]) == 1
    out, err = capsys.readouterr()
    where = f"postings: {path}: offset 40: checksum does not match"
    assert out.splitlines()[0] == f"DAMAGE {where}"
    assert out.splitlines()[1].startswith("damaged: ")
    assert err == f"topics verify: {where}\n"


def test_json(data_dir: str, capsys: Capture) -> None:
    assert main(["verify", data_dir, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "data_dir": data_dir,
        "damage": [],
        "notes": [],
        "log_frames": 8,
        "segments": 2,
        "segment_records": 5,
        "postings": 1,
        "snapshots": 2,
    }
    path = next(Path(data_dir).rglob("*.bin"))
    path.write_bytes(b"")
    assert main(["verify", "--json", data_dir]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["damage"]
    assert finding == {
        "kind": "snapshot",
        "path": str(path),
        "offset": 0,
        "reason": "the file ends inside its header of 32 bytes",
    }


def test_a_running_service(data_dir: str, capsys: Capture) -> None:
    lock = DataDirLock.acquire(data_dir)
    assert main(["verify", data_dir]) == 2
    lock.release()
    assert "is in use by process" in capsys.readouterr().err


def test_another_directory(tmp_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a data directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["verify"], ["verify", "a", "b"], ["verify", "--what", "a"], ["other"]])
def test_usage(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: topics")


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "a", "--cold-url"],
        ["verify", "a", "--cold-dir"],
        ["backup", "--data-dir", "a", "--to"],
        ["backup", "--data-dir", "a", "--to", "b", "--cold-url"],
        ["backup", "--data-dir", "a", "--to", "b", "--cold-dir"],
        ["restore", "--data-dir", "a"],
        ["archive", "list"],
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "s3://key:secret@bucket/prefix"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "has credentials or options in the URL" in said
    assert "secret" not in said


@pytest.mark.parametrize("slashes", ["file:", "file:/"])
def test_a_file_url_with_other_than_three_slashes_is_no_place(tmp_path: Path, slashes: str, capsys: Capture) -> None:
    """`--to file://mnt/backup` wrote to `/backup`, and `--to file:/mnt/backup` to `./file:`, and said that it had."""
    with pytest.raises(SystemExit) as ended:
        main(["backup", "--data-dir", str(tmp_path), "--to", slashes + str(tmp_path)])
    assert ended.value.code == 2
    assert "or file:///directory" in capsys.readouterr().err


def test_a_time_without_a_unit_prunes_nothing(tmp_path: Path, capsys: Capture) -> None:
    """`--keep 7` was seven milliseconds."""
    with pytest.raises(SystemExit) as ended:
        main(["archive", "prune", str(tmp_path), "--keep", "7"])
    assert ended.value.code == 2
    assert "'7' is no duration: write 7d" in capsys.readouterr().err
