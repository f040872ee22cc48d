"""api §5: deletion is permanent, at once, silent, point-in-time."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, ok, put, refused, state, write
from tests.harness import Service, poll


def delete(client: httpx.Client, topic: str, **body: Any) -> dict[str, Any]:
    return ok(client.post(f"/v0/topics/{topic}/delete", json=body))


def write_tagged(client: httpx.Client, topic: str, *tags: str | None) -> None:
    records = [{"data": n, "tag": tag} if tag else {"data": n} for n, tag in enumerate(tags, 1)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))


def live(client: httpx.Client, topic: str) -> list[int]:
    answer = diff(client, topic)
    assert answer["tombstone"] is None
    return [record["$seq"] for record in answer["records"]]


def test_before_seq_is_silent_and_moves_only_earliest(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(5))
    answer = delete(client, topic, before_seq=4)
    assert {key: answer[key] for key in ("topic", "deleted", "earliest_seq", "head_seq", "count")} == {
        "topic": topic,
        "deleted": 3,
        "earliest_seq": 4,
        "head_seq": 5,
        "count": 2,
    }
    assert answer["bytes"] == state(client, topic)["bytes"] > 0
    assert live(client, topic) == [4, 5]


def test_eq_glob_and_the_bare_string(client: httpx.Client, topic: str) -> None:
    write_tagged(client, topic, "chat-42:a", "chat-420:a", "chat-42:b", None, "x", "x*")
    assert delete(client, topic, match="chat-42:*")["deleted"] == 2
    assert delete(client, topic, match=["tag", "Eq", "x*"])["deleted"] == 1
    assert delete(client, topic, match=["tag", "Glob", "c*"])["deleted"] == 1
    assert live(client, topic) == [4, 5]
    assert delete(client, topic, match="x")["deleted"] == 1
    assert delete(client, topic, match="*")["deleted"] == 0, "untagged records never match"


def test_both_conditions_are_one(client: httpx.Client, topic: str) -> None:
    write_tagged(client, topic, "a", "b", "a", "a")
    assert delete(client, topic, before_seq=4, match="a")["deleted"] == 2
    assert live(client, topic) == [2, 4]


def test_it_is_point_in_time_and_idempotent(client: httpx.Client, topic: str) -> None:
    write_tagged(client, topic, "a")
    assert delete(client, topic, match="a")["deleted"] == 1
    write_tagged(client, topic, "a")
    assert live(client, topic) == [2]
    assert delete(client, topic, match="a")["deleted"] == 1
    assert delete(client, topic, match="a")["deleted"] == 0


def test_many_matches_are_one_delete(client: httpx.Client, topic: str) -> None:
    """Though the shard takes them in several turns; `before_seq` bounds all of these."""
    for _ in range(3):
        ok(
            client.post(
                f"/v0/topics/{topic}", json={"records": [{"data": n, "tag": f"t-{n % 3}"} for n in range(3000)]}
            )
        )
    assert delete(client, topic, match="t-1")["deleted"] == 3000
    assert delete(client, topic, match="t-*", before_seq=9000)["deleted"] == 5999
    answer = delete(client, topic, match="t-*")
    assert (answer["deleted"], answer["earliest_seq"], answer["count"], answer["bytes"]) == (1, 9001, 0, 0)


def test_what_fails_on_the_way_says_how_many_are_gone() -> None:
    """Here the tags of a segment are lost, and its frames with them; once they are back it is sent again."""
    small = {"TOPICS_SEGMENT_MAX_EVENTS": "1000", "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}
    with Service(shards=1, env=small) as own:
        client = own.client
        for _ in range(4):
            ok(client.post("/v0/topics/t", json={"records": [{"data": n, "tag": "a"} for n in range(1000)]}))
        rows = poll(
            "four sealed segments",
            lambda: found if len(found := ok(client.get("/v0/topics/t/segments"))["segments"]) == 4 else None,
        )
        data = own.data_dir / rows[3]["data_path"]
        lost = [data, data.with_suffix(".tags")]
        for path in lost:
            path.rename(path.with_suffix(path.suffix + "-away"))
        # Not storage_unavailable: that would say that nothing was done.
        error = refused(client.post("/v0/topics/t/delete", json={"match": "a"}), 503, "shard_unavailable")
        assert error["detail"]["reason"] == "storage_unavailable"
        gone = error["detail"]["deleted"]
        assert 0 < gone <= 3000
        assert f"before that {gone} records were deleted" in error["message"]
        assert state(client, "t")["count"] == 4000 - gone
        for path in lost:
            path.with_suffix(path.suffix + "-away").rename(path)
        answer = delete(client, "t", match="a")
        assert (answer["deleted"], answer["count"], answer["earliest_seq"]) == (4000 - gone, 0, 4001)


def test_when_nothing_is_left(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    answer = delete(client, topic, before_seq=100)
    assert (answer["earliest_seq"], answer["count"], answer["bytes"], answer["head_seq"]) == (3, 0, 0, 2)
    assert state(client, topic)["earliest_seq"] == 3
    assert write(client, topic, 3)["first_seq"] == 3


def test_a_cap_that_passes_deleted_slots_tombstones_for_the_live_ones(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=3)
    write_tagged(client, topic, "a", "b", "a")
    assert delete(client, topic, match="b")["deleted"] == 1
    write(client, topic, 4, 5)
    tombstone = diff(client, topic)["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("cap", 1, 2)


@pytest.mark.long
def test_a_deleted_record_stays_deleted_over_a_restart() -> None:
    topic = "t"
    with Service() as own:
        write_tagged(own.client, topic, "a", "b", "a", "b")
        delete(own.client, topic, match="a")
        own.kill_group()
        own.restart()
        assert live(own.client, topic) == [2, 4]
        assert state(own.client, topic)["count"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"match": ["tag", "Like", "x"]},
        {"match": ["node", "Eq", "x"]},
        {"match": ["tag", "Glob", "x"]},
        {"match": ["tag", "Eq"]},
        {"match": 5},
        {"before_seq": -1},
        {"before_seq": "1"},
        {"before_seq": 2**64},
    ],
)
def test_what_is_no_delete_is_refused(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    write(client, topic, 1)
    refused(client.post(f"/v0/topics/{topic}/delete", json=body), 400, "invalid_request")
    assert live(client, topic) == [1]


def test_other_ways_to_get_it_wrong(client: httpx.Client, topic: str) -> None:
    refused(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 1}), 404, "topic_not_found")
    for method in ("GET", "DELETE"):
        refused(client.request(method, f"/v0/topics/{topic}/delete"), 405, "method_not_allowed")
    unlabelled = client.post(f"/v0/topics/{topic}/delete", content=b"{}", headers={"Content-Type": "text/plain"})
    refused(unlabelled, 415, "unsupported_media_type")
