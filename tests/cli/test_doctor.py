"""Every check of `topics doctor`: what is right, what is wrong, and the way out."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Shell, values
from tests.harness import Service, poll
from topics import __version__
from topics.cli.doctor import clock, disk_room, examine, extras, judge_checks, key_file, packages, unit

GIB = 1 << 30
NOW_S = 1_800_000_000.0


def walk_beside_a_delete(walk: Callable[[str], Iterator[Any]], top: str) -> Iterator[Any]:
    for found in walk(top):
        if found[0].endswith("deleted"):
            os.rmdir(found[0])
        yield found


def test_a_folder_that_goes_meanwhile_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that was deleted while the command looked ended it with `No such file or directory`."""
    (tmp_path / "topics" / "deleted").mkdir(parents=True)
    for name, walk in (("walk", os.walk), ("fwalk", os.fwalk)):
        monkeypatch.setattr(os, name, partial(walk_beside_a_delete, walk))
    options = argparse.Namespace(environment={}, data_dir=str(tmp_path))
    assert "clock" in [one.subject for one in examine(options, None)]
    assert not (tmp_path / "topics" / "deleted").exists()


def test_a_data_directory_behind_a_link_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    options = argparse.Namespace(environment={}, data_dir=str(tmp_path / "link"))
    assert "clock" in [one.subject for one in examine(options, None)]


def levels(found: object) -> list[str]:
    return [one.level for one in found]  # type: ignore[attr-defined]


def test_packages() -> None:
    (fine,) = packages({"topicsd": __version__})
    assert fine.level == "ok"
    (old,) = packages({"topicsd": "0.0.1"})
    assert (old.level, "--force-reinstall topicsd" in old.text) == ("bad", True)
    assert levels(packages({})) == ["note"]
    _, stranger = packages({"topicsd": __version__, "topics": "0.2.5"})
    assert stranger.level == "bad"
    assert "pip uninstall topics" in stranger.text


def test_an_extra_that_is_missing_is_worth_a_note() -> None:
    server, spark = extras({"server": ["h2", "uvloop"], "spark": []})
    assert (server.level, spark.level) == ("note", "ok")
    assert "pip install 'topicsd[server]'" in server.text


def test_checks_of_the_service() -> None:
    address = "address 127.0.0.1:4000"
    checks: list[list[str | None]] = [
        ["lock", None],
        [address, "cannot listen; stop it"],
        ["open files (9)", "raise the limit"],
    ]
    assert levels(judge_checks(json.dumps(checks), "")) == ["ok", "bad", "bad"]
    checks[0][1] = "a service holds it (process 7); stop that one"
    assert levels(judge_checks(json.dumps(checks), "")) == ["ok", "ok", "bad"], "the service that runs has its address"
    (bad,) = judge_checks("", "topics-supervisor: TOPICS_PORT=x: not a number\n")
    assert (bad.level, bad.text) == ("bad", "TOPICS_PORT=x: not a number")


@pytest.mark.parametrize(("total", "free", "level"), [(100, 50, "ok"), (100, 4, "bad"), (4, 0.5, "bad")])
def test_disk(total: float, free: float, level: str) -> None:
    assert disk_room("/data", int(total * GIB), int(free * GIB)).level == level


def test_clock() -> None:
    assert clock(NOW_S, NOW_S - 5, True).level == "ok"
    assert clock(NOW_S, None, True).level == "ok"
    assert clock(NOW_S, NOW_S - 5, False).level == "note"
    wrong = clock(86_400.0, None, True)
    assert (wrong.level, "1970" in wrong.text) == ("bad", True)
    back = clock(NOW_S, NOW_S + 3600, True)
    assert (back.level, "3600 s in the future" in back.text) == ("bad", True)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert key_file(str(path)).level == "bad"
    path.write_text("secret")
    for mode, level in ((0o600, "ok"), (0o400, "ok"), (0o640, "bad"), (0o604, "bad")):
        path.chmod(mode)
        found = key_file(str(path))
        assert found.level == level
        assert level == "ok" or f"chmod 600 {path}" in found.text
        assert "secret" not in found.text


def test_units() -> None:
    assert unit("x", "[Service]\nExecStart=/bin/sh -c true\n").level == "ok"
    assert unit("x", "[Service]\nExecStart=-/no/such/program run\n").level == "bad"
    assert unit("x", "[Unit]\n").level == "bad"


@pytest.mark.long
def test_a_service_that_is_well_and_one_that_is_not(tmp_path: Path) -> None:
    with Service(shards=1, frontends=1, env={"TOPICS_API_KEYS": "some-key:r"}) as service:
        shell = Shell(service)
        key = tmp_path / "key"
        key.write_text("some-key")
        key.chmod(0o600)
        arguments = ("doctor", "--json", "--data-dir", str(service.data_dir))
        done = shell.run(*arguments, "--key-file", str(key))
        found = {one["subject"]: one for one in values(done.stdout)}
        assert done.returncode == 0, found
        assert found[f"service {service.url}"]["text"].endswith("the key may read")
        assert found["lock"]["level"] == "ok"
        # Asked with another data directory, as from another folder, it blamed the service for having its address.
        elsewhere = ("doctor", "--json", "--data-dir", str(tmp_path / "other"), "--key-file", str(key))
        done = shell.run(*elsewhere, env={"TOPICS_PORT": str(service.port)})
        assert [one for one in values(done.stdout) if one["level"] == "bad"] == []
        shard = service.pid_of("walshard")
        os.kill(shard, signal.SIGSTOP)
        poll("it to miss the heartbeats", lambda: service.status()["state"] == "degraded")
        done = shell.run(*arguments, "--key-file", str(key))
        assert (done.returncode, values(done.stdout)[-1]["level"]) == (6, "bad")
        assert "shards [0] have no heartbeat" in values(done.stdout)[-1]["text"]
        os.kill(shard, signal.SIGCONT)
        done = shell.run(*arguments)
        assert done.returncode == 6
        assert "--key-file" in values(done.stdout)[-1]["text"]
        done = shell.run("doctor", "--data-dir", str(service.data_dir), env={"TOPICS_PRT": "1"})
        assert "TOPICS_PRT" in done.stdout
    done = shell.run("doctor", "--patience-s", "0", "--data-dir", str(tmp_path))
    assert done.returncode == 6
    assert "topics-supervisor run" in done.stdout.splitlines()[-1]
    assert os.listdir(tmp_path) == ["key"], "it makes nothing"
