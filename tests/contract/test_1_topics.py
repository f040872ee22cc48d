"""api §1: configuration, state, lists, deletion, re-creation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, head_seq, missing, ok, put, refused, state, write
from tests.harness import Service, poll

DEFAULTS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}


# --- PUT


def test_put_creates_with_defaults_echoed_whole(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}", json={})
    assert answer.status_code == 201
    body = ok(answer)
    assert set(body) == {"topic", "created", "config", "performance"}
    assert (body["topic"], body["created"]) == (topic, True)
    assert body["config"] == DEFAULTS


def test_put_again_is_200_and_not_created(client: httpx.Client, topic: str) -> None:
    put(client, topic, dedupe_node=False)
    for config in ({"dedupe_node": False}, {"dedupe_node": True}):
        answer = client.put(f"/v0/topics/{topic}", json=config)
        assert answer.status_code == 200
        assert ok(answer)["created"] is False


def test_put_replaces_the_whole_configuration(client: httpx.Client, topic: str) -> None:
    put(client, topic, dedupe_node=False, idempotency_window_ms=5, durability="fsync", priority=7)
    body = put(client, topic, priority=8)
    assert body["config"] == DEFAULTS | {"priority": 8}
    assert state(client, topic)["config"] == DEFAULTS | {"priority": 8}
    assert ok(client.put(f"/v0/topics/{topic}"))["config"] == DEFAULTS


def test_put_keeps_the_records(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3)
    put(client, topic, durability="fsync")
    assert (head_seq(client, topic), len(diff(client, topic)["records"])) == (3, 3)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ({"durable": True}, {"durable": True, "durability": "fsync"}),
        ({"durable": False}, {"durable": False, "durability": "disk"}),
        ({"durability": "memory"}, {"durable": False, "durability": "memory"}),
        ({"durability": "ephemeral"}, {"durable": False, "durability": "ephemeral"}),
        ({"durability": "fsync"}, {"durable": True, "durability": "fsync"}),
        ({"durable": True, "durability": "memory"}, {"durable": False, "durability": "memory"}),
        ({"durable": False, "durability": "fsync"}, {"durable": True, "durability": "fsync"}),
        ({"priority": 5000}, {"priority": 1000}),
        ({"priority": -5000}, {"priority": -1000}),
        ({"priority": None}, {"priority": None}),
        ({"lease_ms": 1}, {"lease_ms": 100}),
        ({"lease_ms": 10**12}, {"lease_ms": 86_400_000}),
        ({"claim_jitter_ms": 9_999}, {"claim_jitter_ms": 5_000}),
        ({"idempotency_window_ms": 2**64 - 1}, {"idempotency_window_ms": 2**64 - 1}),
    ],
    ids=json.dumps,
)
def test_config_values(client: httpx.Client, topic: str, given: dict[str, Any], echoed: dict[str, Any]) -> None:
    assert put(client, topic, **given)["config"] == DEFAULTS | echoed


@pytest.mark.parametrize(
    "config",
    [
        {"type": "stack"},
        {"type": 1},
        {"durability": "paper"},
        {"durable": "yes"},
        {"discard": "new"},
        {"priority": "high"},
        {"priority": 1.5},
        {"auto_priority": 1},
        {"dedupe_node": None},
        {"dead_letter": "not a name"},
        {"dead_letter": 7},
    ],
    ids=json.dumps,
)
def test_bad_config_is_refused_by_name(client: httpx.Client, topic: str, config: dict[str, Any]) -> None:
    error = refused(client.put(f"/v0/topics/{topic}", json=config), 400, "invalid_request")
    if config.get("dead_letter") != "not a name":
        assert next(iter(config)) in error["message"]
    missing(client, topic)


def test_a_bad_change_changes_nothing(client: httpx.Client, topic: str) -> None:
    put(client, topic, priority=3)
    refused(client.put(f"/v0/topics/{topic}", json={"priority": 4, "durability": "paper"}), 400, "invalid_request")
    assert state(client, topic)["config"]["priority"] == 3


def test_dead_letter_must_be_another_topic(client: httpx.Client, topic: str) -> None:
    refused(client.put(f"/v0/topics/{topic}", json={"dead_letter": topic}), 400, "invalid_request")
    missing(client, topic)


def test_type_is_immutable_and_kept_when_omitted(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue")
    assert put(client, topic)["config"]["type"] == "queue"
    assert put(client, topic, type="queue", priority=1)["config"]["priority"] == 1
    error = refused(client.put(f"/v0/topics/{topic}", json={"type": "log"}), 409, "topic_exists_incompatible")
    assert error["detail"]["existing_type"] == "queue"
    assert error["detail"]["requested_type"] == "log"
    assert state(client, topic)["config"]["priority"] == 1


def test_of_two_creations_at_once_one_creates(service: Service, topic: str) -> None:
    def create(n: int) -> dict[str, Any]:
        with httpx.Client(base_url=service.url, timeout=20) as own:
            return put(own, f"{topic}.{n // 8}")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(create, range(64)))
    for group in range(8):
        created = [answer["created"] for answer in answers[group * 8 : group * 8 + 8]]
        assert sorted(created) == [False] * 7 + [True]


# --- GET


def test_fresh_state(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    body = state(client, topic)
    assert set(body) >= {
        *("topic", "type", "head_seq", "earliest_seq", "next_seq", "count", "bytes", "config"),
        *("effective_priority", "last_write_ts", "last_read_ts", "durable_seq", "performance"),
    }
    expected = {"topic": topic, "type": "log", "head_seq": 0, "earliest_seq": 1, "next_seq": 1, "count": 0, "bytes": 0}
    assert {key: body[key] for key in expected} == expected
    assert body["last_write_ts"] is None
    assert body["last_read_ts"] is None
    assert "queue" not in body


def test_state_after_writes(client: httpx.Client, topic: str) -> None:
    write(client, topic, "a" * 100)
    one = state(client, topic)
    write(client, topic, "b" * 100, "c" * 100)
    body = state(client, topic)
    assert (body["head_seq"], body["earliest_seq"], body["next_seq"], body["count"]) == (3, 1, 4, 3)
    assert one["bytes"] >= 100
    assert body["bytes"] == 3 * one["bytes"]
    assert body["last_write_ts"] == diff(client, topic)["records"][-1]["$ts"]


def test_a_read_is_seen_unless_it_asks_not_to_be(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    assert ok(client.get(f"/v0/topics/{topic}?touch=false"))["last_read_ts"] is None
    touched = ok(client.get(f"/v0/topics/{topic}"))["last_read_ts"]
    assert isinstance(touched, int)
    # By any other frontend, which may be asked next, it is seen a little later.
    poll("the read to be seen", lambda: state(client, topic)["last_read_ts"] == touched)


def test_get_never_creates(client: httpx.Client, topic: str) -> None:
    for _ in range(2):
        missing(client, topic)


def test_priority_is_effective(client: httpx.Client, topic: str) -> None:
    put(client, topic, priority=-400, auto_priority=False)
    plain = f"{topic}.plain"
    put(client, plain)
    assert state(client, topic)["effective_priority"] < state(client, plain)["effective_priority"]


# --- list


def names(body: dict[str, Any]) -> list[str]:
    return [entry["topic"] for entry in body["topics"]]


def test_list_is_sorted_by_bytes_and_filtered_by_prefix(client: httpx.Client, topic: str) -> None:
    suffixes = ["b", "a", "B", "a.b", "a-b", "a:b", "_", "0", "aa"]
    for suffix in suffixes:
        put(client, f"{topic}/{suffix}".replace("/", "."))
    put(client, f"{topic}-other")
    body = ok(client.get("/v0/topics", params={"prefix": f"{topic}."}))
    assert names(body) == sorted(f"{topic}.{suffix}" for suffix in suffixes)
    assert "next_cursor" not in body


def test_list_entries(client: httpx.Client, topic: str) -> None:
    put(client, topic, durability="fsync")
    write(client, topic, 1, 2)
    (entry,) = ok(client.get("/v0/topics", params={"prefix": topic}))["topics"]
    keys = {"topic", "head_seq", "earliest_seq", "count", "bytes", "durable", "effective_priority"}
    assert set(entry) >= keys
    assert (entry["topic"], entry["head_seq"], entry["earliest_seq"], entry["count"]) == (topic, 2, 1, 2)
    assert entry["durable"] is True
    assert entry["bytes"] == state(client, topic)["bytes"]


def test_list_leaves_no_trace_unless_asked(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    ok(client.get("/v0/topics", params={"prefix": topic}))
    assert state(client, topic)["last_read_ts"] is None
    ok(client.get("/v0/topics", params={"prefix": topic, "touch": "true"}))
    # Read recency crosses processes by shared memory, best effort.
    poll("the touch to be seen", lambda: state(client, topic)["last_read_ts"] is not None)


def test_an_empty_list(client: httpx.Client, topic: str) -> None:
    body = ok(client.get("/v0/topics", params={"prefix": topic}))
    assert body["topics"] == []
    assert "next_cursor" not in body


@pytest.mark.parametrize("page_size", [1, 3, 7, 20, 21])
def test_pages_meet_without_overlap_or_hole(client: httpx.Client, topic: str, page_size: int) -> None:
    expected = [f"{topic}.{n:02}" for n in range(20)]
    for name in expected:
        put(client, name)
    seen: list[str] = []
    params: dict[str, Any] = {"prefix": f"{topic}.", "page_size": page_size}
    for _ in range(40):
        body = ok(client.get("/v0/topics", params=params))
        assert len(body["topics"]) <= page_size
        seen += names(body)
        if "next_cursor" not in body:
            break
        params["cursor"] = body["next_cursor"]
    assert seen == expected


def test_pages_hold_while_others_come_and_go(client: httpx.Client, topic: str) -> None:
    stable = [f"{topic}.{n:02}" for n in range(0, 40, 2)]
    for name in stable:
        put(client, name)
    seen: list[str] = []
    params: dict[str, Any] = {"prefix": f"{topic}.", "page_size": 4}
    for turn in range(20):
        body = ok(client.get("/v0/topics", params=params))
        seen += names(body)
        put(client, f"{topic}.{turn * 2 + 1:02}")
        ok(client.delete(f"/v0/topics/{topic}.{turn * 2 - 9:02}"))
        if "next_cursor" not in body:
            break
        params["cursor"] = body["next_cursor"]
    assert len(seen) == len(set(seen))
    assert [name for name in seen if name in set(stable)] == stable


@pytest.mark.long
def test_page_size_defaults_to_100_and_ends_at_1000(client: httpx.Client, topic: str) -> None:
    made = [f"{topic}.{n:04}" for n in range(1001)]
    with ThreadPoolExecutor(8) as pool:  # each is a sync of the log, which requests at once share
        list(pool.map(lambda name: put(client, name), made))
    prefix = {"prefix": f"{topic}."}
    assert len(ok(client.get("/v0/topics", params=prefix))["topics"]) == 100
    assert len(ok(client.get("/v0/topics", params=prefix | {"page_size": "1000"}))["topics"]) == 1000
    assert len(ok(client.get("/v0/topics", params=prefix | {"page_size": "100000"}))["topics"]) == 1000
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: ok(client.delete(f"/v0/topics/{name}")), made))


@pytest.mark.parametrize("page_size", ["-1", "1.5", "x", ""])
def test_bad_page_size(client: httpx.Client, page_size: str) -> None:
    error = refused(client.get("/v0/topics", params={"page_size": page_size}), 400, "invalid_request")
    assert "page_size" in error["message"]


@pytest.mark.parametrize("cursor", ["%%%", "AAAA", "bm90IGEgY3Vyc29y", "é", "=" * 8])
def test_corrupt_cursor(client: httpx.Client, cursor: str) -> None:
    refused(client.get("/v0/topics", params={"cursor": cursor}), 400, "invalid_request")


@pytest.mark.parametrize("path", ["/v0/topics", "/v0/routers", "/v0/topics/{}/cursors"])
def test_a_cursor_that_lost_its_end_is_corrupt(client: httpx.Client, topic: str, path: str) -> None:
    for n in range(3):
        put(client, f"{topic}.{n}")
        ok(client.put(f"/v0/routers/{topic}.{n}", json={"source": f"{topic}.{n}", "dest": f"{topic}.d{n}"}))
        ok(client.put(f"/v0/topics/{topic}.0/cursors/{topic}.{n}", json={}))
    params = {"prefix": topic, "page_size": "1"}
    cursor = ok(client.get(path.format(f"{topic}.0"), params=params))["next_cursor"]
    ok(client.get(path.format(f"{topic}.0"), params=params | {"cursor": cursor}))
    for end in (1, 2, 3, 4):
        answer = client.get(path.format(f"{topic}.0"), params=params | {"cursor": cursor[:-end]})
        assert refused(answer, 400, "invalid_request")["detail"] == {"field": "cursor"}


# --- DELETE


def test_delete_and_delete_again(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    body = ok(client.delete(f"/v0/topics/{topic}"))
    assert set(body) == {"topic", "deleted", "routers_removed", "performance"}
    assert (body["topic"], body["deleted"], body["routers_removed"]) == (topic, True, [])
    missing(client, topic)
    refused(client.post(f"/v0/topics/{topic}/diff", json={}), 404, "topic_not_found")
    assert names(ok(client.get("/v0/topics", params={"prefix": topic}))) == []
    again = client.delete(f"/v0/topics/{topic}")
    assert again.status_code == 200
    assert ok(again)["deleted"] is False


def test_delete_if_empty(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    refused(client.delete(f"/v0/topics/{topic}", params={"if_empty": "true"}), 409, "topic_not_empty")
    assert head_seq(client, topic) == 1
    empty = f"{topic}.empty"
    put(client, empty)
    assert ok(client.delete(f"/v0/topics/{empty}", params={"if_empty": "true"}))["deleted"] is True
    assert ok(client.delete(f"/v0/topics/{empty}", params={"if_empty": "true"}))["deleted"] is False


def test_a_recreated_name_is_a_new_instance(client: httpx.Client, topic: str) -> None:
    put(client, topic, priority=9)
    write(client, topic, "old-1", "old-2", "old-3", idempotency_key="k")
    ok(client.delete(f"/v0/topics/{topic}"))
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": "new"}], "idempotency_key": "k"})
    assert answer.status_code == 201
    body = ok(answer)
    assert (body["first_seq"], body["created"], body["deduped"]) == (1, True, False)
    assert state(client, topic)["config"] == DEFAULTS
    assert [record["data"] for record in diff(client, topic)["records"]] == ["new"]


def test_a_cursor_beyond_the_head_of_a_recreated_topic_gets_a_tombstone(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(10))
    ok(client.delete(f"/v0/topics/{topic}"))
    write(client, topic, "a", "b")
    body = diff(client, topic, from_seq=10)
    tombstone = body["tombstone"]
    assert set(tombstone) == {"gap_from", "gap_to", "reason", "missed_estimate", "earliest_seq", "head_seq"}
    assert tombstone["reason"] == "recreated"
    assert (tombstone["gap_from"], tombstone["gap_to"]) == (1, 2)
    assert (tombstone["earliest_seq"], tombstone["head_seq"]) == (1, 2)
    assert [record["data"] for record in body["records"]] == ["a", "b"]
    assert body["next_from_seq"] == 2
    assert diff(client, topic, from_seq=2)["tombstone"] is None


def test_the_service_sorts_and_searches(client: httpx.Client, topic: str) -> None:
    """Figures come first that are largest, topics without one last in either order."""
    sizes = {f"{topic}.a": 3, f"{topic}.b": 1, f"{topic}.c": 2}
    for name, count in sizes.items():
        write(client, name, *range(count))
    put(client, f"{topic}.d", type="queue")
    ok(client.put(f"/v0/topics/{topic}.b/cursors/reader"))

    def listed(**asked: str) -> list[str]:
        body = ok(client.get("/v0/topics", params={"prefix": f"{topic}.", **asked}))
        assert body["matched"] >= len(body["topics"])
        return [name.rpartition(".")[2] for name in names(body)]

    poll("the look at all topics to be new", lambda: len(listed(sort="topic", kind="followed")) == 1)
    assert listed(sort="count") == ["a", "c", "b", "d"]
    assert listed(sort="count", order="asc") == ["d", "b", "c", "a"]
    assert listed(sort="topic", order="desc") == ["d", "c", "b", "a"]
    assert listed(sort="bytes", page_size="2") == ["a", "c"]
    assert listed(sort="lag")[:2] == ["b", "d"]
    assert listed(sort="lag", order="asc")[:2] == ["d", "b"]
    assert listed(sort="last_write_ts")[-1] == "d"
    assert listed(sort="topic", kind="queue") == ["d"]
    assert listed(sort="topic", contains=".c") == ["c"]
    body = ok(client.get("/v0/topics", params={"sort": "lag", "kind": "followed", "prefix": f"{topic}."}))
    (entry,) = body["topics"]
    assert (entry["lag"], entry["cursors"][0]["cursor"]) == (1, "reader")
    poll("the rates", lambda: "rate" in ok(client.get("/v0/topics", params={"sort": "rate"}))["topics"][0])
    for parameter in ("sort", "order", "kind"):
        asked = {"sort": "topic", parameter: "none"}
        assert client.get("/v0/topics", params=asked).json()["error"]["detail"]["field"] == parameter


@pytest.mark.parametrize("asked", [{"kind": "queue"}, {"contains": "x"}, {"order": "desc"}, {"kind": "none"}])
def test_a_filter_that_a_list_would_pass_over_is_refused(client: httpx.Client, asked: dict[str, str]) -> None:
    """All topics came with 200, as if each of them fitted."""
    error = refused(client.get("/v0/topics", params=asked), 400, "invalid_request")
    assert error["detail"] == {"field": next(iter(asked))}
    assert "sort=topic" in error["message"]


def test_a_sorted_list_has_no_further_pages(client: httpx.Client, topic: str) -> None:
    for name in (f"{topic}.a", f"{topic}.b"):
        write(client, name, 1)
    cursor = ok(client.get("/v0/topics", params={"prefix": f"{topic}.", "page_size": 1}))["next_cursor"]
    answer = client.get("/v0/topics", params={"sort": "topic", "cursor": cursor})
    assert refused(answer, 400, "invalid_request")["detail"] == {"field": "cursor"}


def test_a_sorted_list_may_count_as_a_read(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)

    def read_ts() -> int | None:
        seen: int | None = ok(client.get(f"/v0/topics/{topic}", params={"touch": "false"}))["last_read_ts"]
        return seen

    def listed(touch: str) -> bool:
        asked = {"sort": "topic", "prefix": topic, "touch": touch}
        return names(ok(client.get("/v0/topics", params=asked))) == [topic]

    poll("the look at all topics to be new", lambda: listed("false"))
    assert read_ts() is None
    assert listed("true")
    assert read_ts() is not None
