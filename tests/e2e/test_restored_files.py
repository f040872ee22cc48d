"""Files of segments that are cut or damaged, here or in the cold directory, while all processes have them open, and put
back: errors, and nobody dies. And files that are put back as they were once: what was deleted since stays so where
anything else says it, and else is found.
"""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from tests.contract.asking import diff, ok, refused
from tests.harness import Service, poll
from topics.storage.verify import verify

EVENTS = 10
RECORDS = 40
TAGS = ("a", "b")


def fill(client: httpx.Client, topic: str, untagged: int = 0) -> None:
    """The first `untagged` records have no tag."""
    for number in range(RECORDS):
        record = {"data": number} | ({"tag": TAGS[number % 2]} if number >= untagged else {})
        ok(client.post(f"/v0/topics/{topic}", json={"records": [record]}))


def delete(client: httpx.Client, topic: str, tag: str) -> httpx.Response:
    return client.post(f"/v0/topics/{topic}/delete", json={"match": tag})


def sealed(client: httpx.Client, topic: str) -> list[str]:
    def look() -> list[str] | None:
        found = ok(client.get(f"/v0/topics/{topic}/segments"))["segments"]
        return [row["data_path"] for row in found] if len(found) == RECORDS // EVENTS else None

    return poll("segments to be sealed", look)


def test_files_that_are_cut_in_place_are_errors_until_they_are_restored() -> None:
    small = {"TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS), "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}
    with Service(env=small, frontends=2) as service:
        client = service.client
        # A delete by tag is done in turns, and what it finds before the damage may be gone by then: here is nothing.
        fill(client, "t", untagged=EVENTS)
        fill(client, "other")
        cut = Path(service.data_dir, sealed(client, "t")[1])
        family = set(service.family())
        expected = diff(client, "t", limit=RECORDS)
        assert len(expected["records"]) == RECORDS
        assert ok(delete(client, "t", "none"))["deleted"] == 0
        files = [cut.with_suffix(suffix) for suffix in (".data", ".idx", ".tags")]
        contents = [path.read_bytes() for path in files]
        for path in files:
            os.truncate(path, 0)
        for _ in range(20):  # whichever of the frontends has the connection
            with httpx.Client(base_url=service.url) as another:
                error = refused(
                    another.post("/v0/topics/t/diff", json={"from_seq": EVENTS}), 503, "storage_unavailable"
                )
                assert f"{cut.stem}." in error["message"]
                refused(delete(another, "t", "a"), 503, "storage_unavailable")
        # The compactor and the shard go on.
        snapshots = service.status()["compactor"]["snapshots"]
        ok(client.post("/v0/topics/other", json={"records": [{"data": 1}]}))
        assert ok(delete(client, "other", "a"))["deleted"] == RECORDS // 2
        poll("two more snapshots", lambda: service.status()["compactor"]["snapshots"] > snapshots or None)
        assert set(service.family()) == family, "nobody died"
        for path, content in zip(files, contents, strict=True):
            copy = path.with_suffix(".copy")
            copy.write_bytes(content)
            copy.rename(path)
        assert diff(client, "t", limit=RECORDS)["records"] == expected["records"]
        poll("the deletion to find its records", lambda: delete(client, "t", "a").is_success or None)
        left = [record["data"] for record in diff(client, "t", limit=RECORDS)["records"]]
        assert left == [*range(EVENTS), *range(EVENTS + 1, RECORDS, 2)]
        assert set(service.family()) == family


def test_a_cold_object_that_is_damaged_is_an_error_until_it_is_restored() -> None:
    small = {
        "TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS),
        "TOPICS_CHECKPOINT_INTERVAL_MS": "20",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    with Service(env=small, frontends=2) as service:
        service.env["TOPICS_COLD_DIR"] = str(service.root / "cold")
        service.restart()
        fill(service.client, "t")
        first = sealed(service.client, "t")[0]
        poll("it to be cold", lambda: not Path(service.data_dir, first).exists() or None)
        path = service.root / "cold" / first
        whole = path.read_bytes()
        family = set(service.family())

        def answers() -> set[tuple[int, int]]:
            """(status, records), of whichever of the frontends has each connection."""
            found = set()
            for _ in range(20):
                with httpx.Client(base_url=service.url) as another:
                    answer = another.post("/v0/topics/t/diff", json={"from_seq": 0, "limit": EVENTS})
                    found.add((answer.status_code, len(answer.json().get("records", []))))
            return found

        path.write_bytes(bytes(len(whole)))
        assert answers() == {(503, 0)}
        copy = path.with_suffix(".copy")
        copy.write_bytes(whole)
        copy.rename(path)
        poll("its records", lambda: answers() == {(200, EVENTS)} or None)
        assert set(service.family()) == family


def older_index(service: Service, data_path: str) -> list[str]:
    """Every other record is deleted, and the index of that segment put back as it was before: what `verify` finds."""
    index = Path(service.data_dir, data_path).with_suffix(".idx")
    before = index.read_bytes()
    assert ok(delete(service.client, "t", "b"))["deleted"] == RECORDS // 2
    service.stop()  # with a snapshot: no log says it again
    places = str(service.data_dir), str(service.root / "cold")
    assert verify(places[0], lambda *_: None, places[1]).damage == []
    assert index.read_bytes() != before
    index.write_bytes(before)
    return [found.reason for found in verify(places[0], lambda *_: None, places[1]).damage]


def restarted_reads(service: Service) -> list[int]:
    service.start()
    return [record["data"] for record in diff(service.client, "t", limit=RECORDS)["records"]]


KEPT = {
    "TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS),
    "TOPICS_CHECKPOINT_INTERVAL_MS": "20",
    "TOPICS_SEGMENT_REWRITE_DEAD_RATIO": "0",
}


def test_an_index_of_before_a_deletion_brings_nothing_back_as_long_as_the_frames_say_so() -> None:
    with Service(env=KEPT, frontends=1) as service:
        fill(service.client, "t")
        found = older_index(service, sealed(service.client, "t")[0])
        assert [" is deleted here and live in the index" in reason for reason in found] == [True] * (EVENTS // 2)
        assert restarted_reads(service) == list(range(0, RECORDS, 2))


def test_an_index_of_before_a_deletion_is_found_where_it_alone_says_it() -> None:
    """The frames of a cold segment cannot be marked."""
    with Service(env=KEPT | {"TOPICS_HOT_RETAIN_SEGMENTS": "1"}, frontends=1) as service:
        service.env["TOPICS_COLD_DIR"] = str(service.root / "cold")
        service.restart()
        client = service.client
        fill(client, "t")
        first = sealed(client, "t")[0]
        poll("it to be cold", lambda: not Path(service.data_dir, first).exists() or None)
        (reason,) = older_index(service, first)
        live = RECORDS // 2
        assert reason.startswith(f"{live + EVENTS // 2} records live by its indexes and the log behind them, {live} by")
