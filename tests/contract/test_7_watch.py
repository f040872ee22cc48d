"""api §7: watch sessions and their event streams."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, ok, put, records_of, refused, state, write, write_raw
from tests.contract.stream import Stream, follow, watch
from tests.harness import Service, poll

WID = re.compile(r"wid_[A-Za-z0-9_-]{22}")


# --- the session


def test_the_answer_of_a_watch(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3)
    body = watch(client, {topic: {}})
    assert set(body) >= {"wid", "stream_url", "session_ttl_ms", "topics", "performance"}
    assert WID.fullmatch(body["wid"])
    assert body["stream_url"].endswith(f"/v0/watch/{body['wid']}")
    assert body["session_ttl_ms"] == 300_000
    assert body["topics"] == {topic: {"from_seq": 0, "head_seq": 3, "earliest_seq": 1}}


def test_sessions_are_never_the_same(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    assert len({watch(client, {topic: {}})["wid"] for _ in range(50)}) == 50


def test_from_seq_is_resolved(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    first_ts = diff(client, topic)["records"][0]["$ts"]
    poll("a later ms", lambda: write(client, topic, 2) and state(client, topic)["last_write_ts"] > first_ts)
    head = state(client, topic)["head_seq"]

    def resolved(**start: Any) -> int:
        return int(watch(client, {topic: start})["topics"][topic]["from_seq"])

    assert resolved() == 0
    assert resolved(from_seq=1) == 1
    assert resolved(tail=True) == head
    assert resolved(from_ts=first_ts) == 0
    assert resolved(from_ts=2**53) == head
    assert 1 <= resolved(from_ts=first_ts + 1) < head
    assert resolved(from_seq=head + 1) == resolved(from_seq=2**64 - 1) == head


def test_the_cursor_of_a_former_topic_reads_this_one_from_its_first_record(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(9))
    ok(client.delete(f"/v0/topics/{topic}"))
    write(client, topic, "a", "b")
    assert watch(client, {topic: {"from_seq": 9}})["topics"] == {
        topic: {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}
    }
    assert watch(client, {topic: {"from_seq": 1}})["topics"][topic]["from_seq"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"topics": {}},
        {"topics": None},
        {"topics": []},
        {"topics": "x"},
        {"topics": {"a": 1}},
        {"topics": {"a": {"from_seq": -1}}},
        {"topics": {"a": {"from_seq": "0"}}},
        {"topics": {"a": {"tail": 1}}},
        {"topics": {f"t{n}": {} for n in range(257)}},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_bad_watches(client: httpx.Client, body: dict[str, Any]) -> None:
    refused(client.post("/v0/watch", json=body), 400, "invalid_request")


@pytest.mark.parametrize(
    "option",
    [
        {"limit": -1},
        {"limit": "x"},
        {"max_batch_bytes": 1.5},
        {"heartbeat_ms": -5},
        {"heartbeat_ms": "soon"},
        {"pace_ms": -1},
        {"node": 7},
        {"include_meta": "no"},
        {"include_tags": 1},
        {"include_data": None},
        {"consistency": "perfect"},
    ],
    ids=json.dumps,
)
def test_bad_options_are_refused_by_name(client: httpx.Client, topic: str, option: dict[str, Any]) -> None:
    put(client, topic)
    error = refused(client.post("/v0/watch", json={"topics": {topic: {}}} | option), 400, "invalid_request")
    assert next(iter(option)) in error["message"]


def test_clamped_options_are_never_errors(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    for option in (
        {"limit": 10**9},
        {"max_batch_bytes": 1 << 40},
        {"max_batch_bytes": 0},
        {"heartbeat_ms": 10**9},
        {"pace_ms": 10**9},
    ):
        watch(client, {topic: {}}, **option)
    watch(client, {topic: {}}, heartbeat_ms=0)


def test_an_unknown_topic_is_404_or_dropped(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    absent = f"{topic}.absent"
    body: dict[str, Any] = {"topics": {topic: {}, absent: {}}}
    assert refused(client.post("/v0/watch", json=body), 404, "topic_not_found")["detail"]["topic"] == absent
    assert set(ok(client.post("/v0/watch?lenient=true", json=body))["topics"]) == {topic}
    refused(client.get(f"/v0/topics/{absent}"), 404, "topic_not_found")


# --- the GET


@pytest.mark.parametrize("wid", ["wid_AAAAAAAAAAAAAAAAAAAAAA", "wid_", "x", "wid_" + "A" * 300, "wid_%00"])
def test_an_unknown_wid_is_404(client: httpx.Client, wid: str) -> None:
    refused(client.get(f"/v0/watch/{wid}", headers={"Accept": "text/event-stream"}), 404, "not_found")


def test_accept(service: Service, topic: str) -> None:
    put(service.client, topic)
    wid = watch(service.client, {topic: {}})["wid"]
    for other in ("application/json", "text/html", "text/event-stream;q=0"):
        refused(service.client.get(f"/v0/watch/{wid}", headers={"Accept": other}), 406, "not_acceptable")
    for accept in (None, "", ",", "*/*", "text/event-stream", "text/html, text/*;q=0.5"):
        headers = {} if accept is None else {"Accept": accept}
        with Stream(service.url, wid, headers) as stream:
            assert stream.response.status_code == 200
            assert stream.event("caught-up").json["topic"] == topic


def test_headers_and_opening(service: Service, topic: str) -> None:
    put(service.client, topic)
    with follow(service, {topic: {}}) as stream:
        headers = stream.response.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-store"
        assert headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in headers
        assert stream.next().raw == b"retry: 2000"


def test_over_http2_too(service: Service, topic: str) -> None:
    write(service.client, topic, "before")
    with Stream(service.url, watch(service.client, {topic: {}})["wid"], http2=True) as stream:
        assert stream.response.http_version == "HTTP/2"
        assert stream.records(1)[0]["data"] == "before"
        write(service.client, topic, "after")
        assert stream.records(1)[0]["data"] == "after"


# --- frames


def test_backlog_then_caught_up_then_live(service: Service, topic: str) -> None:
    write(service.client, topic, "a", "b")
    with follow(service, {topic: {}}) as stream:
        backlog = stream.event("record")
        assert backlog.raw.startswith(b"event: record\n")
        body = backlog.json
        assert {key: body[key] for key in ("topic", "from_seq", "to_seq", "head_seq")} == {
            "topic": topic,
            "from_seq": 0,
            "to_seq": 2,
            "head_seq": 2,
        }
        assert [(record["$seq"], record["data"]) for record in body["records"]] == [(1, "a"), (2, "b")]
        assert backlog.positions == {topic: 2}
        caught_up = stream.event("caught-up")
        assert caught_up.json == {"topic": topic, "head_seq": 2}
        assert caught_up.positions == {topic: 2}
        write(service.client, topic, "c")
        live = stream.event("record")
        assert (live.json["from_seq"], live.json["to_seq"]) == (2, 3)
        assert live.positions == {topic: 3}


def test_an_empty_topic_is_caught_up_at_once(service: Service, topic: str) -> None:
    put(service.client, topic)
    with follow(service, {topic: {}}) as stream:
        frame = stream.event("caught-up")
        assert frame.json == {"topic": topic, "head_seq": 0}
        assert frame.positions == {topic: 0}


def test_limit_cuts_the_backlog_into_frames_that_meet(service: Service, topic: str) -> None:
    write(service.client, topic, *range(10))
    with follow(service, {topic: {"from_seq": 1}}, limit=4) as stream:
        frames = [stream.event("record").json for _ in range(3)]
        assert [(frame["from_seq"], frame["to_seq"]) for frame in frames] == [(1, 5), (5, 9), (9, 10)]
        assert [record["data"] for frame in frames for record in frame["records"]] == list(range(1, 10))
        stream.event("caught-up")


def test_a_backlog_within_the_limits_is_one_frame(service: Service, topic: str) -> None:
    for n in range(50):
        write(service.client, topic, n)
    with follow(service, {topic: {}}) as stream:
        assert len(stream.event("record").json["records"]) == 50
        stream.event("caught-up")


def test_max_batch_bytes_cuts_frames(service: Service, topic: str) -> None:
    write(service.client, topic, *["x" * 1000] * 10)
    with follow(service, {topic: {}}, max_batch_bytes=3000) as stream:
        sizes = []
        while (frame := stream.event()).event == "record":
            sizes.append(len(frame.json["records"]))
        assert sum(sizes) == 10
        assert max(sizes) <= 3
        assert frame.event == "caught-up"
    with follow(service, {topic: {}}, max_batch_bytes=1) as stream:
        assert len(stream.event("record").json["records"]) == 1


def test_payloads_are_byte_identical_in_frames(service: Service, topic: str) -> None:
    values = [
        b"1.50",
        b'{"a":1,"a":2}',
        rb'"\u0041\/"',
        b'{ "x" : [ 1,\t2 ] }',
        b'{\n "a": 1,\n\n "b": 2\n}',
        b'"\xe2\x86\x92"',
    ]
    body = b'{"records":[' + b",".join(b'{"data":' + value + b"}" for value in values) + b"]}"
    assert write_raw(service.client, topic, body).status_code == 201
    with follow(service, {topic: {}}) as stream:
        assert [record.data for record in records_of(stream.event("record").data)] == values


def test_a_carriage_return_inside_data_does_not_break_the_frame(service: Service, topic: str) -> None:
    """CR ends a line of an event stream: the value must survive, its white space need not."""
    data = b'{"a":\r\n1,\r"b":2}'
    write_raw(service.client, topic, b'{"records":[{"data":' + data + b"}]}")
    with follow(service, {topic: {}}) as stream:
        frame = stream.event("record")
        assert b"\r" not in frame.raw
        assert frame.json["records"][0]["data"] == {"a": 1, "b": 2}


def test_include_flags(service: Service, topic: str) -> None:
    record = {"data": {"k": 1}, "tag": "t", "node": "n", "meta": {"m": "1"}}
    ok(service.client.post(f"/v0/topics/{topic}", json={"records": [record]}))

    def keys(**flags: bool) -> set[str]:
        with follow(service, {topic: {}}, **flags) as stream:
            return set(stream.event("record").json["records"][0])

    assert keys() == {"$seq", "$ts", "$node", "data", "meta"}
    assert keys(include_tags=True) == {"$seq", "$ts", "$node", "$tag", "data", "meta"}
    assert keys(include_meta=False) == {"$seq", "$ts", "$node", "data"}
    assert keys(include_data=False, include_tags=True) == {"$seq", "$ts", "$node", "$tag", "meta"}


# --- positions to start from


def test_tail_delivers_only_what_comes(service: Service, topic: str) -> None:
    write(service.client, topic, "old")
    with follow(service, {topic: {"tail": True}}) as stream:
        assert stream.event("caught-up").json["head_seq"] == 1
        write(service.client, topic, "new")
        assert [record["data"] for record in stream.event("record").json["records"]] == ["new"]


def test_from_seq_and_from_ts(service: Service, topic: str) -> None:
    write(service.client, topic, *range(5))
    stamp = diff(service.client, topic)["records"][0]["$ts"]
    with follow(service, {topic: {"from_seq": 3}}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [4, 5]
    with follow(service, {topic: {"from_ts": stamp}}) as stream:
        assert stream.event("record").json["records"][0]["$seq"] == 1


def test_from_ts_is_told_of_a_loss_that_may_be_as_late(service: Service, topic: str) -> None:
    put(service.client, topic, cap_records=2)
    write(service.client, topic, *range(6))
    stamp = diff(service.client, topic)["records"][0]["$ts"]
    with follow(service, {topic: {"from_ts": stamp}}) as stream:
        gap = stream.event("tombstone").json
        assert (gap["gap_from"], gap["gap_to"]) == (1, 4)
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [5, 6]


# --- node filter


def test_own_records_are_passed_over(service: Service, topic: str) -> None:
    write(service.client, topic, "mine", node="me")
    write(service.client, topic, "theirs", node="you")
    write(service.client, topic, "mine too", node="me")
    for node in ("me", ["me", "someone"]):
        with follow(service, {topic: {}}, node=node) as stream:
            frame = stream.event("record")
            assert [record["data"] for record in frame.json["records"]] == ["theirs"]
            assert frame.json["to_seq"] == 3
            assert frame.positions == {topic: 3}
            stream.event("caught-up")


def test_when_all_are_filtered_there_is_caught_up_but_no_record(service: Service, topic: str) -> None:
    write(service.client, topic, 1, 2, node="me")
    with follow(service, {topic: {}}, node="me") as stream:
        frame = stream.event()
        assert (frame.event, frame.json["head_seq"], frame.positions) == ("caught-up", 2, {topic: 2})
        write(service.client, topic, 3, node="me")
        write(service.client, topic, 4, node="you")
        assert [record["data"] for record in stream.records(1)] == [4]


# --- heartbeat


def test_a_heartbeat_when_idle(service: Service, topic: str) -> None:
    put(service.client, topic)
    before_ms = time.time_ns() // 1_000_000
    with follow(service, {topic: {}}, heartbeat_ms=30) as stream:
        stream.event("caught-up")
        beats = [stream.next().raw for _ in range(3)]
    stamps = [int(match.group(1)) for beat in beats if (match := re.fullmatch(rb": hb (\d{13})", beat))]
    assert len(stamps) == 3, beats
    assert before_ms <= stamps[0] < stamps[1] < stamps[2]
    assert stamps[2] - stamps[0] >= 30
