"""api §7 and rules.md Watch, sentence by sentence: what `test_7_watch` and `test_7_live` leave open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.asking import ok, put, refused, state, write
from tests.contract.stream import Stream, follow, position_id, watch
from tests.contract.timing import now_ms
from tests.harness import Service, poll


def test_a_tombstone_on_connect_and_live(service: Service, topic: str) -> None:
    put(service.client, topic, cap_records=3)
    for n in range(5):
        write(service.client, topic, n)
    with follow(service, {topic: {}}) as stream:
        connect = stream.event("tombstone")
        assert connect.json == {
            "topic": topic,
            "reason": "from_seq_too_old",
            "gap_from": 1,
            "gap_to": 2,
            "earliest_seq": 3,
            "head_seq": 5,
        }
        assert connect.positions == {topic: 2}
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [3, 4, 5]
        stream.event("caught-up")
        write(service.client, topic, *range(6))
        live = stream.event("tombstone")
        assert (live.json["reason"], live.json["gap_from"], live.json["gap_to"]) == ("cap", 6, 8)
        assert live.positions == {topic: 8}
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [9, 10, 11]


def test_a_position_within_the_floors_has_no_tombstone(service: Service, topic: str) -> None:
    put(service.client, topic, cap_records=3)
    for n in range(5):
        write(service.client, topic, n)
    with follow(service, {topic: {"from_seq": 2}}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [3, 4, 5]


def test_a_gap_made_of_deletions_is_silent(service: Service, topic: str) -> None:
    write(service.client, topic, *range(5))
    ok(service.client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 4}))
    with follow(service, {topic: {}}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [4, 5]


def test_what_was_passed_over_and_then_expired_is_no_loss(service: Service, topic: str) -> None:
    put(service.client, topic)
    with follow(service, {topic: {}}, node="me", heartbeat_ms=20) as stream:
        stream.event("caught-up")
        # Nothing of these is sent to their writer, and the position follows: no loss either.
        write(service.client, topic, 1, 2, node="me")
        # The shard has said by its next answer that there is something new. That it was looked at shows in nothing but
        # that its frontend goes on.
        put(service.client, topic)
        said_ms = now_ms()
        heartbeats = 0
        while heartbeats < 2:
            frame = stream.next()
            heartbeats += frame.raw.startswith(b": hb ") and int(frame.raw[5:]) > said_ms
        put(service.client, topic, ttl_ms=1)
        poll("them to expire", lambda: state(service.client, topic)["count"] == 0)
        put(service.client, topic, ttl_ms=0)
        write(service.client, topic, 3)
        assert stream.event("record").json["to_seq"] == 3
    with follow(service, {topic: {}}) as stream:
        tombstone = stream.event("tombstone").json
        assert (tombstone["reason"], tombstone["gap_from"]) == ("from_seq_too_old", 1)


def test_a_cursor_beyond_the_head_of_a_recreated_topic(service: Service, topic: str) -> None:
    write(service.client, topic, *range(9))
    ok(service.client.delete(f"/v0/topics/{topic}"))
    write(service.client, topic, "a", "b")
    with follow(service, {topic: {"from_seq": 9}}) as stream:
        tombstone = stream.event("tombstone").json
        assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 2)
        assert [record["data"] for record in stream.records(2)] == ["a", "b"]


@pytest.mark.parametrize("consistency", ["eventual", "strong"])
def test_a_recreated_topic_that_grows_beyond_the_cursor_before_its_stream_begins(
    service: Service, topic: str, consistency: str
) -> None:
    other = f"{topic}.other"
    put(service.client, other)
    write(service.client, topic, *range(9))
    ok(service.client.delete(f"/v0/topics/{topic}"))
    put(service.client, topic, durability="fsync")
    write(service.client, topic, "a", "b")
    session = watch(service.client, {other: {}, topic: {"from_seq": 9}}, consistency=consistency)
    write(service.client, topic, *range(20))
    with Stream(service.url, session["wid"]) as stream:
        positions = stream.event("caught-up").positions
        assert positions == {other: 0, topic: positions[topic]}
        assert 22 < positions[topic] < 1 << 53, "JavaScript has no larger integers: it would send back another one"
        tombstone = stream.event("tombstone").json
        assert (tombstone["reason"], tombstone["gap_from"]) == ("recreated", 1)
        first = stream.event("record").json
        assert first["head_seq"] <= 22
        assert first["records"][0]["$seq"] == 1


def test_caught_up_on_each_transition(service: Service, topic: str) -> None:
    put(service.client, topic)
    with follow(service, {topic: {}}, limit=2) as stream:
        assert stream.event("caught-up").json["head_seq"] == 0
        write(service.client, topic, 1)
        stream.event("record")
        # More than a frame holds: the stream is behind again until the last of them.
        write(service.client, topic, 2, 3, 4, 5, 6)
        events = [stream.event().event for _ in range(4)]
        assert events == ["record", "record", "record", "caught-up"]
        write(service.client, topic, 7)
        stream.event("record")
        ok(service.client.delete(f"/v0/topics/{topic}"))
        stream.event("topic-deleted")


def test_a_topic_deleted_before_the_get_ends_at_once(service: Service, topic: str) -> None:
    gone, stays = f"{topic}.gone", f"{topic}.stays"
    write(service.client, gone, 1)
    write(service.client, stays, 1)
    wid = watch(service.client, {gone: {}, stays: {}})["wid"]
    ok(service.client.delete(f"/v0/topics/{gone}"))
    write(service.client, gone, "of another instance")
    with Stream(service.url, wid) as stream:
        seen = [stream.event() for _ in range(3)]
        assert sorted(frame.event for frame in seen) == ["caught-up", "record", "topic-deleted"]
        for frame in seen:
            assert frame.json["topic"] == (gone if frame.event == "topic-deleted" else stays)
        assert seen[-1].positions == {stays: 1}


@pytest.mark.parametrize("last_event_id", ["", "%%%", "bm90IGpzb24", "W10", "e30", "eyJ0IjotMX0", "A" * 20_000])
def test_an_id_that_never_was_one_changes_nothing(service: Service, topic: str, last_event_id: str) -> None:
    write(service.client, topic, 1)
    wid = watch(service.client, {topic: {}})["wid"]
    with Stream(service.url, wid, {"Last-Event-ID": last_event_id}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [1]


def test_lenient_with_nothing_left_is_a_silent_stream(service: Service, topic: str) -> None:
    body = {"topics": {f"{topic}.absent": {}}, "heartbeat_ms": 20}
    answer = ok(service.client.post("/v0/watch?lenient=true", json=body))
    assert answer["topics"] == {}
    with Stream(service.url, answer["wid"]) as stream:
        stream.next()
        assert stream.next().raw.startswith(b": hb ")


def test_max_batch_bytes_0_is_a_mebibyte(service: Service, topic: str) -> None:
    write(service.client, topic, *["x" * 100_000] * 15)
    with follow(service, {topic: {}}, max_batch_bytes=0) as stream:
        assert len(stream.event("record").json["records"]) == 10
    with follow(service, {topic: {}}) as stream:
        assert len(stream.event("record").json["records"]) == 2
    with follow(service, {topic: {}}, max_batch_bytes=1 << 40) as stream:
        assert len(stream.event("record").json["records"]) == 15


def test_strong_needs_a_topic_that_can_be_durable(service: Service, topic: str) -> None:
    put(service.client, topic, durability="ephemeral")
    body = {"topics": {topic: {}}, "consistency": "strong"}
    assert refused(service.client.post("/v0/watch", json=body), 400, "invalid_request")["detail"]["field"]


def test_a_record_frame_without_data(service: Service, topic: str) -> None:
    write(service.client, topic, {"k": 1}, node="n")
    with follow(service, {topic: {}}, include_data=False, include_meta=False) as stream:
        assert [set(record) for record in stream.records(1)] == [{"$seq", "$ts", "$node"}]


@pytest.mark.long
@pytest.mark.parametrize("http2", [False, True])
def test_256_topics_with_the_longest_names(service: Service, http2: bool) -> None:
    """The id of a frame names them all, and comes back as one header."""
    names = [f"{n:03}-{'x' * 251}" for n in range(256)]
    for name in names:
        write(service.client, name, 1)
    wid = watch(service.client, {name: {"tail": True} for name in names})["wid"]
    with Stream(service.url, wid, http2=http2) as stream:
        stream.until_caught_up(256)
        write(service.client, names[0], 2)
        frame = stream.event("record")
        assert len(frame.id) > 85_000
        head = frame.positions[names[0]]
    rewound = frame.positions | {names[1]: 0}
    with Stream(service.url, wid, {"Last-Event-ID": position_id(rewound)}, http2=http2) as stream:
        assert stream.response.status_code == 200
        write(service.client, names[0], 3)
        seen: dict[str, list[Any]] = {}
        while names[0] not in seen or names[1] not in seen:
            frame = stream.event()
            if frame.event == "record":
                seen.setdefault(frame.json["topic"], []).append(frame.json["from_seq"])
        assert seen == {names[1]: [0], names[0]: [head]}
