"""api §10, a test a sentence, over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, ok, put, refused, state, write
from tests.harness import Service, poll


def make(client: httpx.Client, topic: str, name: str = "c", **body: Any) -> dict[str, Any]:
    """PUT a cursor; the answer."""
    return ok(client.put(f"/v0/topics/{topic}/cursors/{name}", json=body))


def look(client: httpx.Client, topic: str, name: str = "c") -> dict[str, Any]:
    return ok(client.get(f"/v0/topics/{topic}/cursors/{name}"))


def read(client: httpx.Client, topic: str, name: str = "c", **body: Any) -> list[Any]:
    """The data of one read."""
    answer = ok(client.post(f"/v0/topics/{topic}/cursors/{name}/read", json=body))
    return [record["data"] for record in answer["records"]]


BOTH = pytest.mark.parametrize("consistency", ["strictly_at_once", "at_least_once"])


@BOTH
def test_a_cursor_is_made_read_and_deleted(client: httpx.Client, topic: str, consistency: str) -> None:
    write(client, topic, *range(5))
    made = client.put(f"/v0/topics/{topic}/cursors/c", json={"consistency": consistency, "persist_every": 3})
    assert made.status_code == 201
    assert {key: value for key, value in made.json().items() if key != "performance"} == {
        "topic": topic,
        "cursor": "c",
        "consistency": consistency,
        "persist_every": 3,
        "cursor_seq": 0,
        "persisted_seq": 0,
        "created": True,
    }
    assert read(client, topic, limit=2) == [0, 1]
    assert read(client, topic) == [2, 3, 4]
    assert read(client, topic) == []
    assert look(client, topic)["cursor_seq"] == 5
    gone = ok(client.delete(f"/v0/topics/{topic}/cursors/c"))
    assert (gone["topic"], gone["cursor"], gone["deleted"]) == (topic, "c", True)
    assert ok(client.delete(f"/v0/topics/{topic}/cursors/c"))["deleted"] is False
    error = refused(client.get(f"/v0/topics/{topic}/cursors/c"), 404, "cursor_not_found")
    assert error["detail"] == {"topic": topic, "cursor": "c"}
    refused(client.post(f"/v0/topics/{topic}/cursors/c/read", json={}), 404, "cursor_not_found")


def test_a_read_answers_as_diff_does_plus_cursor_seq(client: httpx.Client, topic: str) -> None:
    body = {"records": [{"data": n, "tag": "t", "meta": {"n": str(n)}} for n in range(4)]}
    ok(client.post(f"/v0/topics/{topic}", json=body))
    make(client, topic)
    answer = ok(client.post(f"/v0/topics/{topic}/cursors/c/read", json={"limit": 3, "include_tags": True}))
    same = diff(client, topic, limit=3, include_tags=True)
    assert answer.pop("cursor_seq") == 3
    assert answer.pop("cursor") == "c"
    assert answer.pop("durable_seq") <= same.pop("durable_seq")  # a sync may have come in between
    for one in (answer, same):
        del one["performance"]
    assert answer == same


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_read_by_it_is_a_read_of_the_topic(client: httpx.Client, topic: str, checkpoint: bool) -> None:
    write(client, topic, 1)
    ok(client.put(f"/v0/topics/{topic}/cursors/c", json={"from_seq": 0}))
    assert ok(client.get(f"/v0/topics/{topic}?touch=false"))["last_read_ts"] is None
    ok(client.post(f"/v0/topics/{topic}/cursors/c/read", json={"checkpoint": checkpoint}))
    assert ok(client.get(f"/v0/topics/{topic}?touch=false"))["last_read_ts"] is not None


def test_where_it_begins(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(5))
    assert make(client, topic, "zero")["cursor_seq"] == 0
    assert make(client, topic, "from", from_seq=3)["cursor_seq"] == 3
    assert make(client, topic, "tail", tail=True)["cursor_seq"] == 5
    assert read(client, topic, "from") == [3, 4]
    assert read(client, topic, "tail") == []
    write(client, topic, 5)
    assert read(client, topic, "tail") == [5]


def test_beyond_the_head_is_the_head(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(3))
    assert make(client, topic, from_seq=5000)["cursor_seq"] == 3
    assert read(client, topic) == []
    write(client, topic, 3, 4)
    assert read(client, topic) == [3, 4]


def test_beyond_the_head_of_a_recreated_topic_is_its_beginning(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(9))
    ok(client.delete(f"/v0/topics/{topic}"))
    write(client, topic, "a", "b", "c")
    assert make(client, topic, from_seq=7)["cursor_seq"] == 0
    assert read(client, topic, limit=2) == ["a", "b"]
    assert read(client, topic) == ["c"]
    assert read(client, topic) == []
    assert make(client, topic, from_seq=2)["cursor_seq"] == 2


def test_put_again_moves_it_only_when_told_to(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(5))
    make(client, topic)
    read(client, topic, limit=2)
    again = client.put(f"/v0/topics/{topic}/cursors/c", json={"consistency": "strictly_at_once"})
    assert again.status_code == 200
    assert (again.json()["cursor_seq"], again.json()["created"]) == (2, False)
    assert make(client, topic, from_seq=1)["cursor_seq"] == 1
    assert read(client, topic, limit=1) == [1]


@BOTH
def test_put_changes_only_what_it_sends(client: httpx.Client, topic: str, consistency: str) -> None:
    def config() -> tuple[str, int]:
        shown = look(client, topic)
        return shown["consistency"], shown["persist_every"]

    write(client, topic, *range(5))
    make(client, topic, consistency=consistency, persist_every=3)
    assert read(client, topic, limit=2) == [0, 1]
    again = make(client, topic)
    assert (again["created"], again["cursor_seq"]) == (False, 2)
    assert (again["consistency"], again["persist_every"]) == config() == (consistency, 3)
    make(client, topic, from_seq=1)
    assert config() == (consistency, 3)
    make(client, topic, persist_every=7)
    assert config() == (consistency, 7)
    other = ({"strictly_at_once", "at_least_once"} - {consistency}).pop()
    make(client, topic, consistency=other)
    assert config() == (other, 7)
    make(client, topic, "new")
    shown = look(client, topic, "new")
    assert (shown["consistency"], shown["persist_every"]) == ("at_least_once", 1)


def test_all_are_listed_by_name(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    assert ok(client.get(f"/v0/topics/{topic}/cursors"))["cursors"] == []
    for name in ("b", "a.1", "Z"):
        make(client, topic, name)
    assert [one["cursor"] for one in ok(client.get(f"/v0/topics/{topic}/cursors"))["cursors"]] == ["Z", "a.1", "b"]


def test_the_list_comes_in_pages(client: httpx.Client, topic: str) -> None:
    """The list of cursors has pages like every list (api §0.8)."""
    put(client, topic)
    names = [f"c{n:03}" for n in range(130)]
    for name in names:
        make(client, topic, name)
    path = f"/v0/topics/{topic}/cursors"
    first = ok(client.get(path))
    assert [one["cursor"] for one in first["cursors"]] == names[:100]
    rest = ok(client.get(path, params={"cursor": first["next_cursor"]}))
    assert [one["cursor"] for one in rest["cursors"]] == names[100:]
    assert "next_cursor" not in rest
    whole = ok(client.get(path, params={"page_size": 130}))
    assert [one["cursor"] for one in whole["cursors"]] == names
    assert "next_cursor" not in whole
    few = ok(client.get(path, params={"page_size": 1, "cursor": first["next_cursor"]}))
    assert [one["cursor"] for one in few["cursors"]] == ["c100"]
    refused(client.get(path, params={"cursor": "YWZ0ZXI6"}), 400, "invalid_request")
    refused(client.get(path, params={"page_size": "-1"}), 400, "invalid_request")


def test_deleting_one_of_a_missing_topic_is_no_error(client: httpx.Client, topic: str) -> None:
    """api §0.9."""
    gone = ok(client.delete(f"/v0/topics/{topic}/cursors/c"))
    assert (gone["topic"], gone["cursor"], gone["deleted"]) == (topic, "c", False)
    refused(client.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


def test_checkpoint_false_peeks(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(3))
    make(client, topic)
    assert read(client, topic, checkpoint=False) == [0, 1, 2]
    assert read(client, topic, checkpoint=False, limit=1) == [0]
    assert look(client, topic)["cursor_seq"] == 0
    assert read(client, topic) == [0, 1, 2]


def test_max_bytes_counts_payload_only_and_one_record_always_comes(client: httpx.Client, topic: str) -> None:
    records = [{"data": "x" * 98, "tag": "t" * 50, "node": "n" * 50} for _ in range(4)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    make(client, topic)
    assert len(read(client, topic, max_bytes=1)) == 1
    assert len(read(client, topic, max_bytes=199, checkpoint=False)) == 1
    assert len(read(client, topic, max_bytes=200, checkpoint=False)) == 2
    with_meta = [{"data": "x" * 98, "meta": {"k": "v" * 92}} for _ in range(3)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": with_meta}))
    make(client, topic, "m", from_seq=4)
    assert len(read(client, topic, "m", max_bytes=399, checkpoint=False)) == 1
    assert len(read(client, topic, "m", max_bytes=400, checkpoint=False)) == 2


def test_limit_is_at_most_2000(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(2500))
    make(client, topic)
    assert len(read(client, topic, limit=2**40, max_bytes=2**40)) == 2000
    assert len(read(client, topic, limit=2**40)) == 500


def test_a_gap_is_a_tombstone_and_reading_goes_on(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=2)
    make(client, topic)
    write(client, topic, *range(5))
    answer = ok(client.post(f"/v0/topics/{topic}/cursors/c/read", json={}))
    assert (answer["tombstone"]["gap_from"], answer["tombstone"]["gap_to"]) == (1, 3)
    assert [record["data"] for record in answer["records"]] == [3, 4]


@pytest.mark.parametrize(
    "body",
    [
        {"consistency": "sometimes"},
        {"persist_every": 0},
        {"persist_every": -1},
        {"from_seq": -1},
        {"from_seq": 1, "tail": True},
        {"from_seq": 2**64},
    ],
)
def test_a_cursor_that_makes_no_sense_is_400(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    put(client, topic)
    refused(client.put(f"/v0/topics/{topic}/cursors/c", json=body), 400, "invalid_request")
    refused(client.get(f"/v0/topics/{topic}/cursors/c"), 404, "cursor_not_found")


def test_names_are_those_of_topics_and_topics_are_not_made(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    refused(client.put(f"/v0/topics/{topic}/cursors/-bad", json={}), 400, "invalid_request")
    refused(client.put(f"/v0/topics/{topic}-not/cursors/c", json={}), 404, "topic_not_found")
    refused(client.get(f"/v0/topics/{topic}-not/cursors"), 404, "topic_not_found")
    refused(client.get(f"/v0/topics/{topic}-not"), 404, "topic_not_found")


def test_cursors_end_with_their_topic(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    make(client, topic, tail=True)
    ok(client.delete(f"/v0/topics/{topic}"))
    write(client, topic, 1)
    refused(client.get(f"/v0/topics/{topic}/cursors/c"), 404, "cursor_not_found")


@pytest.mark.long
@BOTH
def test_readers_at_once_never_get_the_same_record(
    service: Service, client: httpx.Client, topic: str, consistency: str
) -> None:
    """No reader gets a record twice, and none is refused: they take turns."""
    readers = 40
    write(client, topic, *range(400))
    make(client, topic, consistency=consistency, persist_every=7)

    def drain(_: int) -> list[int]:
        got: list[int] = []
        with httpx.Client(base_url=service.url, timeout=20) as http:
            while page := read(http, topic, limit=5):
                assert page == list(range(page[0], page[0] + len(page)))
                got += page
        return got

    with ThreadPoolExecutor(readers) as pool:
        everything = [seq for got in pool.map(drain, range(readers)) for seq in got]
    assert sorted(everything) == list(range(400))


@pytest.mark.long
def test_at_least_once_is_persisted_every_n_reads_and_a_crash_takes_back_fewer_than_n() -> None:
    with Service(shards=1, frontends=1) as service:
        http = service.client
        write(http, "t", *range(100))
        make(http, "t", consistency="at_least_once", persist_every=4)
        for at in range(10):
            assert read(http, "t", limit=3) == [3 * at, 3 * at + 1, 3 * at + 2]
        assert (look(http, "t")["cursor_seq"], look(http, "t")["persisted_seq"]) == (30, 24)
        service.wait_healed(service.kill("walshard", 0))
        assert look(http, "t")["cursor_seq"] == 24
        assert read(http, "t", limit=1) == [24]
        service.kill_group()
        service.start()
        assert read(service.client, "t", limit=1) == [24]


@pytest.mark.long
@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_a_stop_in_order_takes_back_no_read(durability: str) -> None:
    with Service(shards=1, frontends=1) as service:
        client = service.client
        put(client, "t", durability=durability)
        write(client, "t", *range(30))
        make(client, "t", consistency="at_least_once", persist_every=5)
        for n in range(7):
            assert read(client, "t", limit=3) == [3 * n, 3 * n + 1, 3 * n + 2]
        assert poll("5 answers to be passed on", lambda: look(client, "t")["persisted_seq"] == 15)
        service.restart()
        shown = look(service.client, "t")
        assert (shown["cursor_seq"], shown["persisted_seq"]) == (21, 21)


@pytest.mark.long
def test_strictly_at_once_is_durable_before_the_records_are_sent() -> None:
    with Service(shards=1, frontends=1) as service:
        write(service.client, "t", *range(10))
        make(service.client, "t", consistency="strictly_at_once", persist_every=1000)
        before = fsyncs(service)
        for at in range(3):
            assert read(service.client, "t", limit=1) == [at]
        assert fsyncs(service) >= before + 3
        service.kill_group()
        service.start()
        assert read(service.client, "t", limit=1) == [3]
        assert state(service.client, "t")["count"] == 10


def fsyncs(service: Service) -> int:
    metrics = ok(service.client.get("/v0/metrics", headers={"Accept": "application/json"}))
    count: int = metrics["topics_wal_fsyncs_total"]
    return count


def test_a_record_whose_checksum_is_wrong_is_an_error_that_names_it() -> None:
    env = {"TOPICS_CHECKPOINT_INTERVAL_MS": "86400000"}  # the records stay in the log
    with Service(shards=1, frontends=1, env=env) as service:
        write(service.client, "t", "before", "DAMAGED-HERE", "after")
        make(service.client, "t")
        log = next(Path(service.data_dir, "wal").glob("wal-*1.log"))
        with log.open("r+b") as file:
            content = file.read()
            file.seek(content.index(b"DAMAGED-HERE"))
            file.write(b"X")
        assert read(service.client, "t") == ["before"]
        answer = service.client.post("/v0/topics/t/cursors/c/read", json={})
        error = refused(answer, 500, "internal")
        assert (error["detail"]["topic"], error["detail"]["seq"], error["detail"]["reason"]) == ("t", 2, "corrupt")
        assert content[error["detail"]["offset"] :].find(b"DAMAGED-HERE") < 100
        assert "log file 1" in error["message"]
        assert look(service.client, "t")["cursor_seq"] == 1
        make(service.client, "t", from_seq=2)
        assert read(service.client, "t") == ["after"]
        service.kill_group()
