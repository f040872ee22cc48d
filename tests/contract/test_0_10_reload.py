"""api §0.10 [+]: keys change while the service runs, on every frontend, or not at all."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import ok, refused
from tests.contract.stream import Stream
from tests.harness import Service, poll

pytestmark = pytest.mark.long

CONNECTIONS = 12
"""Enough that every frontend gets one of them."""


class Guarded:
    """A service and the file of its keys."""

    def __init__(self, file: Path, service: Service) -> None:
        self.file = file
        self.service = service

    def allow(self, *entries: str) -> None:
        self.file.write_text("\n".join(entries) + "\n")

    def reload(self) -> tuple[int, str]:
        """Exit code and what was said."""
        answer = self.service.run("reload")
        return answer.returncode, answer.stdout + answer.stderr

    def statuses(self, key: str) -> set[int]:
        """Return the statuses of a list for this key, over connections of their own."""
        found = set()
        for _ in range(CONNECTIONS):
            connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=10)
            connection.request("GET", "/v0/topics", headers={"Authorization": f"Bearer {key}"})
            found.add(connection.getresponse().status)
            connection.close()
        return found

    def post(self, path: str, key: str, body: Any) -> dict[str, Any]:
        return ok(self.service.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"}))

    def log(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.service.said() if line["event"] == event]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    file = tmp_path / "keys"
    file.write_text("old\n")
    with Service(env={"TOPICS_API_KEYS": "listed", "TOPICS_API_KEYS_FILE": str(file)}) as service:
        yield Guarded(file, service)


def test_after_a_reload_every_frontend_has_the_new_keys(guarded: Guarded) -> None:
    for turn in range(5):
        former = f"key-{turn - 1}" if turn else "old"
        assert guarded.statuses(former) == {200}
        guarded.allow(f"key-{turn}", "writer:w")
        assert guarded.statuses(former) == {200}, "not before it is told"
        code, said = guarded.reload()
        assert (code, said) == (0, f"process {guarded.service.pid} has reloaded its keys\n")
        assert guarded.statuses(former) == {401}
        assert guarded.statuses(f"key-{turn}") == {200}
        assert guarded.statuses("writer") == {403}
        assert guarded.statuses("listed") == {200}
    assert [line["keys"] for line in guarded.log("keys reloaded")] == [3] * 5
    assert {p["restarts"] for p in guarded.service.status()["processes"]} == {0}


@pytest.mark.parametrize("content", [None, "", "fresh:nonsense\n", "fresh\nfresh\n", "listed\n"])
def test_a_bad_file_changes_nothing(guarded: Guarded, content: str | None) -> None:
    guarded.file.unlink() if content is None else guarded.file.write_text(content)
    code, said = guarded.reload()
    assert code == 1
    assert "the former ones stay" in said
    assert guarded.statuses("old") == guarded.statuses("listed") == {200}
    assert guarded.statuses("fresh") == {401}
    (line,) = guarded.log("keys not reloaded, the former ones stay")
    assert (line["level"], line["role"]) == ("error", "supervisor")
    assert all(problem.startswith(f"TOPICS_API_KEYS_FILE={guarded.file}: ") for problem in line["problems"])
    assert "fresh" not in json.dumps(line)
    guarded.allow("fresh")
    assert guarded.reload()[0] == 0
    assert guarded.statuses("old") == {401}
    assert guarded.statuses("fresh") == {200}


def test_a_signal_does_it_too(guarded: Guarded) -> None:
    guarded.allow("new")
    os.kill(guarded.service.pid, signal.SIGHUP)
    poll("the new keys", lambda: guarded.statuses("new") == {200} and guarded.statuses("old") == {401})


def test_a_frontend_that_is_started_again_has_the_keys_of_the_reload_not_of_the_file(guarded: Guarded) -> None:
    guarded.allow("new")
    assert guarded.reload()[0] == 0
    guarded.file.write_text("broken:x:y:z\n")
    for index in range(2):
        guarded.service.wait_healed(guarded.service.kill("frontend", index))
    assert guarded.statuses("new") == {200}
    assert guarded.statuses("old") == guarded.statuses("broken") == {401}


def test_reloads_while_frontends_are_being_killed(guarded: Guarded) -> None:
    for turn in range(6):
        guarded.service.kill("frontend", turn % 2)
        guarded.allow(f"key-{turn}")
        assert guarded.reload()[0] == 0
        poll("the new key alone", partial(_everywhere, guarded, f"key-{turn}"))
        assert guarded.statuses(f"key-{turn - 1}" if turn else "old") == {401}
    poll("all to run", lambda: guarded.service.status()["state"] == "running")


def _everywhere(guarded: Guarded, key: str) -> bool:
    try:
        return guarded.statuses(key) == {200}
    except (OSError, http.client.HTTPException):  # of a connection that the killed frontend had accepted
        return False


def test_streams_end_with_the_right_to_them(guarded: Guarded) -> None:
    guarded.allow("gone", "narrowed", "less", "stays")
    assert guarded.reload()[0] == 0
    guarded.post("/v0/topics/t", "listed", {"records": [{"data": 1}]})
    wids, open_streams = {}, {}
    for key in ("gone", "narrowed", "less", "stays"):
        wids[key] = guarded.post("/v0/watch", key, {"topics": {"t": {}}})["wid"]
        open_streams[key] = Stream(guarded.service.url, wids[key], {"Authorization": f"Bearer {key}"})
        open_streams[key].until_caught_up(1)
    guarded.allow("narrowed:r:other", "less:w", "stays:r:t", "another")
    assert guarded.reload()[0] == 0
    for key in ("gone", "narrowed", "less"):
        final = open_streams[key].event("error")
        assert final.json["code"] == 410
        with pytest.raises(StopIteration):
            open_streams[key].next()
    guarded.post("/v0/topics/t", "listed", {"records": [{"data": 2}]})
    assert [record["data"] for record in open_streams["stays"].records(1)] == [2]
    for stream in open_streams.values():
        stream.close()
    client = guarded.service.client
    for maker, key, status, code in (
        ("gone", "gone", 401, "unauthorized"),
        ("gone", "another", 401, "unauthorized"),
        ("narrowed", "narrowed", 403, "forbidden"),
        ("less", "less", 403, "forbidden"),
    ):
        refused(client.get(f"/v0/watch/{wids[maker]}", headers={"Authorization": f"Bearer {key}"}), status, code)
    with Stream(guarded.service.url, wids["stays"], {"Authorization": "Bearer stays"}) as stream:
        stream.until_caught_up(1)


def test_reload_of_what_does_not_run() -> None:
    service = Service(frontends=1, shards=1)
    try:
        answer = service.run("reload")
        assert (answer.returncode, answer.stdout) == (3, "not running\n")
    finally:
        service.close()


def test_without_a_file_there_is_nothing_to_change() -> None:
    with Service(frontends=1, shards=1) as service:
        assert service.run("reload").returncode == 0
        assert httpx.get(f"{service.url}/v0/topics", timeout=20).status_code == 200
