"""api §2: writes, idempotency, conditions, durability classes, limits."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.asking import (
    Connection,
    diff,
    diff_records,
    envelope,
    head_seq,
    missing,
    ok,
    put,
    refused,
    state,
    write,
    write_raw,
)
from tests.contract.socket_client import Socket
from tests.harness import Service, poll


def post(client: httpx.Client, topic: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return client.post(f"/v0/topics/{topic}", json=body, headers=headers)


# --- the answer


def test_the_answer_of_a_creating_write(client: httpx.Client, topic: str) -> None:
    answer = post(client, topic, {"records": [{"data": n} for n in range(3)]})
    assert answer.status_code == 201
    body = ok(answer)
    expected = {"topic": topic, "first_seq": 1, "last_seq": 3, "seqs": [1, 2, 3], "head_seq": 3, "count": 3}
    assert {key: body[key] for key in expected} == expected
    assert (body["created"], body["deduped"]) == (True, False)


def test_later_writes_are_200(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = post(client, topic, {"records": [{"data": 2}, {"data": 3}]})
    assert answer.status_code == 200
    body = ok(answer)
    assert (body["first_seq"], body["last_seq"], body["seqs"], body["count"]) == (2, 3, [2, 3], 2)
    assert body["created"] is False


def test_the_first_write_to_a_put_topic_is_200(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    answer = post(client, topic, {"records": [{"data": 1}]})
    assert answer.status_code == 200
    assert ok(answer)["created"] is False


def test_return_seqs_false_drops_seqs(client: httpx.Client, topic: str) -> None:
    body = ok(client.post(f"/v0/topics/{topic}?return_seqs=false", json={"records": [{"data": 1}, {"data": 2}]}))
    assert "seqs" not in body
    assert (body["first_seq"], body["last_seq"], body["count"]) == (1, 2, 2)


# --- what is refused


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"records": []},
        {"records": None},
        {"records": {}},
        {"records": "x"},
        {"records": [1]},
        {"records": [None]},
        {"records": [[]]},
        {"records": [{}]},
        {"records": [{"tag": "x"}]},
        {"records": [{"data": 1}, {"meta": {}}]},
        {"records": [{"data": 1, "tag": 7}]},
        {"records": [{"data": 1, "node": ["n"]}]},
        {"records": [{"data": 1, "meta": []}]},
        {"records": [{"data": 1, "meta": "m"}]},
        {"records": [{"data": 1, "meta": {"k": 1}}]},
        {"records": [{"data": 1, "meta": {"k": None}}]},
        {"records": [{"data": 1, "meta": {"k": {"x": "y"}}}]},
        {"records": [{"data": 1}], "node": 1},
        {"records": [{"data": 1}], "create": "no"},
        {"records": [{"data": 1}], "config": []},
        {"records": [{"data": 1}], "config": {"durability": "paper"}},
        {"records": [{"data": 1}], "idempotency_key": 5},
        {"records": [{"data": 1}], "disable_backpressure": 1},
    ],
    ids=json.dumps,
)
def test_malformed_writes_append_nothing(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    refused(post(client, topic, body), 400, "invalid_request")
    missing(client, topic)


def test_an_empty_tag_is_none_and_an_empty_node_nobody(client: httpx.Client, topic: str) -> None:
    """docs/api.md §2: left out, not `""`, and no delete by tag ever finds it."""
    ok(post(client, topic, {"node": "all", "records": [{"data": 1, "tag": "", "node": ""}, {"data": 2, "tag": "t"}]}))
    first, second = diff(client, topic, include_tags=True)["records"]
    assert (first.keys(), second["$node"], second["$tag"]) == ({"$seq", "$ts", "data"}, "all", "t")
    for match in (["tag", "Eq", ""], ["tag", "Glob", "*"]):
        ok(client.post(f"/v0/topics/{topic}/delete", json={"match": match}))
    assert [record["data"] for record in diff(client, topic)["records"]] == [1]


def test_create_false(client: httpx.Client, topic: str) -> None:
    body: dict[str, Any] = {"records": [{"data": 1}], "create": False}
    assert refused(post(client, topic, body), 404, "topic_not_found")["detail"]["topic"] == topic
    missing(client, topic)
    put(client, topic)
    assert ok(post(client, topic, body))["first_seq"] == 1


# --- inline configuration


@pytest.mark.parametrize(
    "config", [{"ttl_ms": "x"}, 5, {"dead_letter": ""}, {"durability": "paper"}, {"durability": "archived"}], ids=repr
)
def test_what_inline_config_is_ignored_is_not_judged(client: httpx.Client, topic: str, config: Any) -> None:
    body = {"records": [{"data": 1}], "config": config}
    refused(client.post(f"/v0/topics/{topic}", json=body), 400, "invalid_request")
    missing(client, topic)
    put(client, topic, ttl_ms=7_000_000)
    assert ok(client.post(f"/v0/topics/{topic}", json=body))["first_seq"] == 1
    assert state(client, topic)["config"]["ttl_ms"] == 7_000_000


@pytest.mark.parametrize(("config", "field"), [(5, "config"), ([1], "config"), ({"ttl_ms": "x"}, "ttl_ms")])
def test_what_is_wrong_with_an_inline_config_is_named(
    client: httpx.Client, topic: str, config: Any, field: str
) -> None:
    """`$.ttl_ms` of "the body" named nothing that the body has."""
    error = refused(post(client, topic, {"records": [{"data": 1}], "config": config}), 400, "invalid_request")
    assert (error["detail"]["field"], error["message"].split()[0]) == (field, "config")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000], ids=["huge", "small", "long"])
def test_inline_config_with_a_number_that_json_cannot_hold(service: Service, topic: str, number: str) -> None:
    json_type = {"content-type": "application/json"}
    body = f'{{"records": [{{"data": 1}}], "config": {{"ttl_ms": {number}}}}}'
    path = f"/v0/topics/{topic}"
    refused(service.client.post(path, content=body, headers=json_type), 400, "invalid_request")
    with Socket(service) as ws:
        ws.wire.send(f'{{"op": "publish", "request_id": 1, "topic": "{topic}", {body[1:]}')
        assert ws.next("error")["code"] == "invalid_request"
    config = f'{{"ttl_ms": {number}}}'
    refused(service.client.put(path, content=config, headers=json_type), 400, "invalid_request")
    missing(service.client, topic)


def test_inline_config_counts_only_for_the_creating_write(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, config={"durability": "fsync", "priority": 4})
    config = state(client, topic)["config"]
    assert (config["durability"], config["durable"], config["priority"]) == ("fsync", True, 4)
    write(client, topic, 2, config={"durability": "memory", "priority": 9})
    assert state(client, topic)["config"] == config


# --- seqs


def test_concurrent_writes_share_one_gap_free_sequence(service: Service, topic: str) -> None:
    def writer(n: int) -> list[tuple[int, str]]:
        mine: list[tuple[int, str]] = []
        with httpx.Client(base_url=service.url, timeout=20) as own:
            for turn in range(25):
                values = [f"{n}.{turn}.{k}" for k in range(1 + turn % 3)]
                body = write(own, topic, *values)
                assert body["seqs"] == list(range(body["first_seq"], body["last_seq"] + 1))
                assert body["head_seq"] >= body["last_seq"]
                mine += zip(body["seqs"], values, strict=True)
        return mine

    with ThreadPoolExecutor(4) as pool:
        acked = sorted(pair for pairs in pool.map(writer, range(4)) for pair in pairs)
    assert [seq for seq, _ in acked] == list(range(1, len(acked) + 1))
    stored = diff(service.client, topic, limit=1000)["records"]
    assert [(record["$seq"], record["data"]) for record in stored] == acked
    stamps = [record["$ts"] for record in stored]
    assert stamps == sorted(stamps)


def test_ts_is_the_commit_time_in_ms(client: httpx.Client, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    write(client, topic, 1)
    after_ms = time.time_ns() // 1_000_000
    assert before_ms <= diff(client, topic)["records"][0]["$ts"] <= after_ms


def test_node_and_tag(client: httpx.Client, topic: str) -> None:
    records = [{"data": 0}, {"data": 1, "node": "own"}, {"data": 2, "tag": "red"}, {"data": 3, "node": "ö", "tag": "→"}]
    ok(post(client, topic, {"records": records, "node": "batch"}))
    got = diff_records(client, topic, include_tags=True)
    assert [record.node for record in got] == ["batch", "own", "batch", "ö"]
    assert [record.tag for record in got] == [None, None, "red", "→"]


# --- if_head_seq


def test_if_head_seq(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    error = refused(post(client, topic, {"records": [{"data": 3}], "if_head_seq": 1}), 409, "head_mismatch")
    assert error["detail"]["head_seq"] == 2
    assert head_seq(client, topic) == 2
    assert write(client, topic, 3, if_head_seq=2)["first_seq"] == 3
    refused(post(client, topic, {"records": [{"data": 4}], "if_head_seq": 2}), 409, "head_mismatch")


def test_if_head_seq_of_a_topic_that_is_not_there_yet(client: httpx.Client, topic: str) -> None:
    error = refused(post(client, topic, {"records": [{"data": 1}], "if_head_seq": 5}), 409, "head_mismatch")
    assert error["detail"]["head_seq"] == 0
    missing(client, topic)
    assert write(client, topic, 1, if_head_seq=0)["created"] is True


def test_of_writers_with_the_same_if_head_seq_one_wins(service: Service, topic: str) -> None:
    put(service.client, topic)

    def contend(n: int) -> int:
        with httpx.Client(base_url=service.url, timeout=20) as own:
            return post(own, topic, {"records": [{"data": n}], "if_head_seq": 0}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(contend, range(16))) == [200] + [409] * 15
    assert head_seq(service.client, topic) == 1


# --- idempotency (§0.9)


def test_a_repeat_answers_the_original_and_appends_nothing(client: httpx.Client, topic: str) -> None:
    body = {"records": [{"data": "a"}, {"data": "b"}], "idempotency_key": "once"}
    first = ok(post(client, topic, body))
    write(client, topic, "between")
    again = post(client, topic, body)
    assert again.status_code == 200
    second = ok(again)
    assert second["deduped"] is True
    assert second["created"] is False
    assert [second[key] for key in ("first_seq", "last_seq", "seqs")] == [1, 2, [1, 2]]
    assert [first[key] for key in ("first_seq", "last_seq", "seqs")] == [1, 2, [1, 2]]
    assert head_seq(client, topic) == 3


def test_the_key_decides_not_the_records(client: httpx.Client, topic: str) -> None:
    write(client, topic, "a", idempotency_key="k")
    body = write(client, topic, "x", "y", "z", idempotency_key="k")
    assert (body["deduped"], body["first_seq"], body["last_seq"]) == (True, 1, 1)
    assert head_seq(client, topic) == 1


def test_the_header_is_a_key_and_the_body_wins(client: httpx.Client, topic: str) -> None:
    records = {"records": [{"data": 1}]}
    header = {"Idempotency-Key": "h"}
    assert ok(post(client, topic, records, **header))["deduped"] is False
    assert ok(post(client, topic, records, **header))["deduped"] is True
    assert ok(post(client, topic, records | {"idempotency_key": "b"}, **header))["deduped"] is False
    assert ok(post(client, topic, records | {"idempotency_key": "b"}, **{"Idempotency-Key": "z"}))["deduped"] is True
    assert ok(post(client, topic, records | {"idempotency_key": "h"}))["first_seq"] == 1
    assert head_seq(client, topic) == 2


def test_keys_belong_to_their_topic(client: httpx.Client, topic: str) -> None:
    other = f"{topic}.other"
    write(client, topic, 1, idempotency_key="k")
    assert write(client, other, 1, idempotency_key="k")["deduped"] is False
    assert (head_seq(client, topic), head_seq(client, other)) == (1, 1)


def test_keys_have_at_most_256_characters(client: httpx.Client, topic: str) -> None:
    longest = "é" * 256
    write(client, topic, 1, idempotency_key=longest)
    assert write(client, topic, 1, idempotency_key=longest)["deduped"] is True
    refused(post(client, topic, {"records": [{"data": 1}], "idempotency_key": "k" * 257}), 400, "invalid_request")
    refused(post(client, topic, {"records": [{"data": 1}]}, **{"Idempotency-Key": "k" * 257}), 400, "invalid_request")
    assert head_seq(client, topic) == 1


def test_a_key_is_forgotten_after_its_window(client: httpx.Client, topic: str) -> None:
    put(client, topic, idempotency_window_ms=40)
    write(client, topic, "first", idempotency_key="k")
    poll("the window to end", lambda: write(client, topic, "again", idempotency_key="k")["deduped"] is False)
    first, second = diff(client, topic)["records"]
    assert second["$ts"] - first["$ts"] >= 40


def test_concurrent_repeats_append_once(service: Service, topic: str) -> None:
    def repeat(_: int) -> dict[str, Any]:
        with httpx.Client(base_url=service.url, timeout=20) as own:
            return write(own, topic, "x", "y", idempotency_key="same")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(repeat, range(24)))
    assert {tuple(answer["seqs"]) for answer in answers} == {(1, 2)}
    assert sorted(answer["deduped"] for answer in answers) == [False] + [True] * 23
    assert head_seq(service.client, topic) == 2


def test_a_failed_write_does_not_use_up_its_key(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    bad = {"records": [{"data": 1}], "if_head_seq": 9, "idempotency_key": "k"}
    refused(post(client, topic, bad), 409, "head_mismatch")
    assert write(client, topic, 1, idempotency_key="k")["deduped"] is False


# --- durability classes (§2.2)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_each_class_says_what_its_ack_promises(client: httpx.Client, topic: str, durability: str) -> None:
    put(client, topic, durability=durability)
    body = write(client, topic, "a", "b")
    assert body["durability"] == durability
    assert (body["performance"]["fsync_ms"] > 0) == (durability == "fsync")
    assert [record["data"] for record in diff(client, topic)["records"]] == ["a", "b"]


def test_an_fsync_ack_is_durable_when_it_is_given(client: httpx.Client, topic: str) -> None:
    put(client, topic, durability="fsync")
    for n in range(1, 6):
        write(client, topic, n)
        assert state(client, topic)["durable_seq"] == n
    assert diff(client, topic)["durable_seq"] == 5


def test_disk_becomes_durable_in_the_background(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(5))
    assert state(client, topic)["durable_seq"] <= 5
    poll("durable_seq to reach the head", lambda: state(client, topic)["durable_seq"] == 5)


def test_durability_can_change_in_place(client: httpx.Client, topic: str) -> None:
    assert write(client, topic, 1)["durability"] == "disk"
    put(client, topic, durability="fsync")
    body = write(client, topic, 2)
    assert body["durability"] == "fsync"
    assert state(client, topic)["durable_seq"] == 2


def test_what_was_ephemeral_is_on_the_disk_once_the_change_is_answered(client: httpx.Client, topic: str) -> None:
    put(client, topic, durability="ephemeral")
    for n in range(40):
        write(client, topic, f"{n}" + "x" * 100_000)  # several turns of the shard
    put(client, topic, durability="disk")
    assert state(client, topic)["durable_seq"] == 40
    found = [record for seq in range(0, 40, 10) for record in diff(client, topic, from_seq=seq, limit=10)["records"]]
    assert [record["data"].rstrip("x") for record in found] == [f"{n}" for n in range(40)]


# --- limits (§2.3)


def test_10000_records_pass_and_10001_do_not(client: httpx.Client, topic: str) -> None:
    body = write(client, topic, *range(10_000))
    assert (body["count"], body["last_seq"], len(body["seqs"])) == (10_000, 10_000, 10_000)
    refused(post(client, topic, {"records": [{"data": 1}] * 10_001}), 400, "batch_too_large")
    assert head_seq(client, topic) == 10_000


MIB = 1 << 20
TOO_MUCH = {
    "data": ({"data": "x" * MIB}, "record_too_large"),
    "data-and-meta": ({"data": "x" * (MIB - 100), "meta": {"k": "y" * 200}}, "record_too_large"),
    "meta-bytes": ({"data": 1, "meta": {"k": "x" * 16_384}}, "invalid_request"),
    "meta-keys": ({"data": 1, "meta": {str(n): "" for n in range(65)}}, "invalid_request"),
    "tag": ({"data": 1, "tag": "x" * 257}, "invalid_request"),
    "tag-bytes-not-characters": ({"data": 1, "tag": "é" * 129}, "invalid_request"),
    "node": ({"data": 1, "node": "x" * 129}, "invalid_request"),
    "node-bytes-not-characters": ({"data": 1, "node": "é" * 65}, "invalid_request"),
}
JUST_RIGHT = {
    "data": {"data": "x" * (MIB - 2)},
    "meta-keys": {"data": 1, "meta": {str(n): "" for n in range(64)}},
    "meta-bytes": {"data": 1, "meta": {"k": "x" * 16_000}},
    "tag": {"data": 1, "tag": "é" * 128},
    "node": {"data": 1, "node": "é" * 64},
}


@pytest.mark.parametrize(("record", "code"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_over_a_limit_the_whole_write_is_refused(
    service: Service, topic: str, record: dict[str, Any], code: str
) -> None:
    put(service.client, topic)
    connection = Connection(service)
    body = json.dumps({"records": [{"data": "fine"}, record]}, ensure_ascii=False).encode()
    status, content, content_type = connection.send("POST", f"/v0/topics/{topic}", body)
    assert status == 400
    envelope(content, content_type, code)
    assert head_seq(service.client, topic) == 0
    assert connection.send("POST", f"/v0/topics/{topic}", b'{"records":[{"data":1}]}')[0] == 200
    assert connection.kept
    connection.close()


@pytest.mark.parametrize("record", JUST_RIGHT.values(), ids=JUST_RIGHT.keys())
def test_at_a_limit_the_write_passes(client: httpx.Client, topic: str, record: dict[str, Any]) -> None:
    body = json.dumps({"records": [record]}, ensure_ascii=False, separators=(",", ":")).encode()
    assert write_raw(client, topic, body).status_code == 201
    (stored,) = diff(client, topic, include_tags=True)["records"]
    assert stored["data"] == record["data"]
    assert stored.get("meta") == record.get("meta")
    assert stored.get("$tag") == record.get("tag")


def test_the_batch_node_has_the_same_limit(client: httpx.Client, topic: str) -> None:
    refused(post(client, topic, {"records": [{"data": 1}], "node": "x" * 129}), 400, "invalid_request")
    missing(client, topic)


def test_a_large_write_passes_whole(client: httpx.Client, topic: str) -> None:
    values = [str(n) * 1000 for n in range(5000)]
    assert write(client, topic, *values)["count"] == 5000
    got: list[str] = []
    while len(got) < 5000:
        body = diff(client, topic, from_seq=len(got), limit=1000, max_batch_bytes=8 << 20)
        assert body["records"]
        got += [record["data"] for record in body["records"]]
    assert got == values


def test_disable_backpressure_is_accepted(client: httpx.Client, topic: str) -> None:
    assert write(client, topic, 1, disable_backpressure=True)["first_seq"] == 1
