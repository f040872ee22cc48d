"""Data directories of other versions (`tests/golden`): what clients saw of them, they see still."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.asking import diff_records, ok, state, write
from tests.e2e.test_kill_points import verify
from tests.golden.make import HERE, at_any_time, opened, seen

PACKED = sorted(HERE.glob("*/*.tar.xz"))


def expectation_of(packed: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(packed.with_name(packed.name.replace(".tar.xz", ".expected.json")).read_text())
    return found


@pytest.mark.parametrize("packed", PACKED, ids=[f"{path.parent.name}-{path.name.partition('.')[0]}" for path in PACKED])
def test_all_of_it_is_there_and_goes_on(packed: Path) -> None:
    expected = expectation_of(packed)
    with opened(packed) as service:
        client = service.client
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
    """Whether the dest of a router gets every record at once."""
    return router["filter"] is None and not router["dest"].startswith("full.")


def without_ram(found: dict[str, Any]) -> dict[str, Any]:
    """Without the topics whose records end with the service."""
    topics = {name: topic for name, topic in found["topics"].items() if topic["durability"] != "ephemeral"}
    return {**found, "topics": topics}


def test_a_full_dest_takes_what_waited_once_there_is_room() -> None:
    packed = HERE / "0.1.0" / "routers-settled.tar.xz"
    topics = expectation_of(packed)["topics"]
    full = next(name for name in topics if name.startswith("full."))
    source = next(name for name in topics if name.startswith("source."))
    waiting = [record["data"] for record in topics[source]["records"] if record["seq"] > topics[full]["head_seq"]]
    with opened(packed) as service:
        client = service.client
        ok(client.post(f"/v0/topics/{full}/delete", json={"before_seq": 4}))
        assert [one.data.decode() for one in diff_records(client, full)][2:] == waiting[:3]
        assert state(client, full)["head_seq"] == topics[full]["head_seq"] + 3
