"""Data directories of other versions (`tests/golden`): clients see what they saw of them, or the start is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contract.asking import diff_records, ok, state, write
from tests.e2e.test_kill_points import verify
from tests.golden.make import HERE, LOCK_NAME, SHARDS, at_any_time, opened, seen, unstarted
from tests.harness import COMMAND, Service
from topics.storage.verify import verify as check_offline

UNSETTLED = HERE / "0.1.0" / "routers-unsettled.tar.xz"
SETTLED = HERE / "0.1.0" / "routers-settled.tar.xz"
PACKED = sorted(path for path in HERE.glob("*/*.tar.xz") if path != UNSETTLED)


def expectation_of(packed: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(packed.with_name(packed.name.replace(".tar.xz", ".expected.json")).read_text())
    return found


@pytest.mark.parametrize("packed", PACKED, ids=[f"{path.parent.name}-{path.name.partition('.')[0]}" for path in PACKED])
def test_all_of_it_is_there_and_goes_on(packed: Path) -> None:
    expected = expectation_of(packed)
    with opened(packed) as service:
        client = service.client
        assert json.loads((service.data_dir / "meta" / "format.json").read_text()) == {"version": 2}
        assert at_any_time(seen(client)) == at_any_time(expected)
        for one in expected["repeatable"]:
            answer = ok(client.post(f"/v0/topics/{one['topic']}", json=one["body"]))
            assert (answer["deduped"], answer["seqs"]) == (True, one["seqs"])
        sources = {router["source"] for router in expected["routers"].values()}
        dests = {router["dest"] for router in expected["routers"].values()}
        for source in sources - dests:
            write(client, source, "of this version")
        copied = [router["dest"] for router in expected["routers"].values() if reaches_all(expected, router)]
        assert copied
        before = seen(client)
        for dest in copied:
            assert before["topics"][dest]["head_seq"] == expected["topics"][dest]["head_seq"] + 1
            assert before["topics"][dest]["records"][-1]["data"] == '"of this version"'
        service.restart()
        assert at_any_time(without_ram(seen(service.client))) == at_any_time(without_ram(before))
        service.stop()
        verify(service.data_dir)


def reaches_all(expected: dict[str, Any], router: dict[str, Any]) -> bool:
    """Return whether the dest of a router gets every record at once."""
    return router["filter"] is None and not router["dest"].startswith("full.")


def without_ram(found: dict[str, Any]) -> dict[str, Any]:
    """Without the topics whose records end with the service."""
    topics = {name: topic for name, topic in found["topics"].items() if topic["durability"] != "ephemeral"}
    return {**found, "topics": topics}


@pytest.mark.parametrize("shards", [SHARDS, SHARDS + 1])
def test_copies_that_are_in_no_log_are_not_given_up(shards: int) -> None:
    dests = {router["dest"] for router in expectation_of(UNSETTLED)["routers"].values()}
    with unstarted(UNSETTLED, shards) as service:
        sentence = (
            f"{service.data_dir}: version 0.1.0 has left copies of routers that are in no log, of {len(dests)} topics, "
            f"the first is {min(dests)!r}: start version 0.1.0 on the directory once more, write nothing for two "
            "checkpoint intervals (2 minutes by default), stop it with SIGTERM, then start this version"
        )
        before = content_of(service.data_dir)
        looked_at = run(service, "check")
        assert looked_at.returncode == 1
        assert f"FAIL data format: {sentence}\n" in looked_at.stdout
        refused = run(service, "run")
        assert refused.returncode == 78
        assert sentence in [json.loads(line).get("reason") for line in (refused.stdout + refused.stderr).splitlines()]
        assert content_of(service.data_dir) == before
        assert sentence in check_offline(str(service.data_dir), lambda *_: None).notes


def test_another_shard_count_at_the_first_start() -> None:
    expected = at_any_time(expectation_of(SETTLED))
    with unstarted(SETTLED, SHARDS + 1) as service:
        found = at_any_time(seen(service.start().client))
        for topics in (found["topics"], expected["topics"]):
            for topic in topics.values():
                del topic["shard"]
        assert found == expected


def content_of(data_dir: Path) -> dict[str, bytes | None]:
    """All files and directories, without the lock, which every start makes."""
    return {
        str(path.relative_to(data_dir)): path.read_bytes() if path.is_file() else None
        for path in data_dir.rglob("*")
        if path.name != LOCK_NAME
    }


def run(service: Service, command: str) -> subprocess.CompletedProcess[str]:
    """A command of the supervisor that ends by itself."""
    return subprocess.run(
        [str(COMMAND), command], env=service.environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_a_full_dest_takes_what_waited_once_there_is_room() -> None:
    topics = expectation_of(SETTLED)["topics"]
    full = next(name for name in topics if name.startswith("full."))
    source = next(name for name in topics if name.startswith("source."))
    waiting = [record["data"] for record in topics[source]["records"] if record["seq"] > topics[full]["head_seq"]]
    with opened(SETTLED) as service:
        client = service.client
        ok(client.post(f"/v0/topics/{full}/delete", json={"before_seq": 4}))
        assert [one.data.decode() for one in diff_records(client, full)][2:] == waiting[:3]
        assert state(client, full)["head_seq"] == topics[full]["head_seq"] + 3
