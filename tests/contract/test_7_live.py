"""api §7: resume, many topics in a stream, deletion, consistency, slow and vanishing clients."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.contract.asking import ok, put, state, write
from tests.contract.stream import Stream, follow, open_streams, position_id, until_streams_are_over, watch
from tests.harness import Service, poll

WID = re.compile(r"wid_[A-Za-z0-9_-]{22}")


# --- resume


def test_resume_by_last_event_id_rewinds(service: Service, topic: str) -> None:
    write(service.client, topic, *range(6))
    wid = watch(service.client, {topic: {}}, limit=2)["wid"]
    with Stream(service.url, wid) as stream:
        first = stream.event("record")
        stream.event("record")
    with Stream(service.url, wid, {"Last-Event-ID": first.id}) as stream:
        assert [record["$seq"] for record in stream.records(4)] == [3, 4, 5, 6]


def test_resume_without_an_id_goes_on_at_the_sessions_position(service: Service, topic: str) -> None:
    write(service.client, topic, *range(3))
    wid = watch(service.client, {topic: {}})["wid"]
    with Stream(service.url, wid) as stream:
        stream.event("record")
        stream.event("caught-up")
    until_streams_are_over(service)
    write(service.client, topic, 3)
    with Stream(service.url, wid) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [4]


def test_a_client_that_had_no_whole_frame_makes_its_first_id(service: Service, topic: str) -> None:
    write(service.client, topic, *range(5))
    session = watch(service.client, {topic: {"from_seq": 2}})
    with Stream(service.url, session["wid"]) as stream:
        stream.event("record")
    until_streams_are_over(service)
    starts = {name: one["from_seq"] for name, one in session["topics"].items()}
    with Stream(service.url, session["wid"], {"Last-Event-ID": position_id(starts)}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [3, 4, 5]


def test_an_id_ahead_is_ignored(service: Service, topic: str) -> None:
    write(service.client, topic, *range(3))
    wid = watch(service.client, {topic: {}})["wid"]
    with Stream(service.url, wid, {"Last-Event-ID": position_id({topic: 2**40})}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [1, 2, 3]


def test_an_id_that_names_other_topics_changes_nothing(service: Service, topic: str) -> None:
    write(service.client, topic, 1)
    wid = watch(service.client, {topic: {}})["wid"]
    with Stream(service.url, wid, {"Last-Event-ID": position_id({f"{topic}.other": 0})}) as stream:
        assert [record["$seq"] for record in stream.event("record").json["records"]] == [1]


def test_no_record_is_lost_or_doubled_over_many_resumes(service: Service, topic: str) -> None:
    put(service.client, topic)
    wid = watch(service.client, {topic: {}}, limit=7)["wid"]
    seen: list[int] = []
    last_id: str | None = None
    for turn in range(12):
        write(service.client, topic, *range(turn * 10, turn * 10 + 10))
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        with Stream(service.url, wid, headers) as stream:
            frame = stream.event("record")
            seen += [record["$seq"] for record in frame.json["records"]]
            last_id = frame.id
    with Stream(service.url, wid, {"Last-Event-ID": last_id or ""}) as stream:
        seen += [record["$seq"] for record in stream.records(120 - len(seen))]
    assert seen == list(range(1, 121))


@pytest.mark.long
def test_a_session_is_reachable_on_every_frontend(service: Service, topic: str) -> None:
    """Connections land where they land: open them until each frontend holds some, all on sessions made before."""
    write(service.client, topic, "x")
    before = open_streams(service)
    streams: list[Stream] = []

    def spread() -> bool:
        streams.append(follow(service, {topic: {}}))
        assert streams[-1].records(1)[0]["data"] == "x"
        now = open_streams(service)
        return all(now[index] > before[index] for index in before)

    try:
        poll("streams on every frontend", spread, deadline_s=30)
        write(service.client, topic, "y")
        for stream in streams:
            assert stream.records(1)[0]["data"] == "y"
    finally:
        for stream in streams:
            stream.close()


# --- many topics


def test_many_topics_in_one_stream(service: Service, topic: str) -> None:
    names = [f"{topic}.{n:03}" for n in range(100)]
    for name in names:
        write(service.client, name, f"{name} first")
    with follow(service, {name: {} for name in names}) as stream:
        caught_up: set[str] = set()
        seen: dict[str, list[Any]] = {name: [] for name in names}
        while len(caught_up) < len(names):
            frame = stream.event()
            if frame.event == "caught-up":
                caught_up.add(frame.json["topic"])
            else:
                seen[frame.json["topic"]] += [record["data"] for record in frame.json["records"]]
            assert set(frame.positions) == set(names)
        for name in names:
            write(service.client, name, f"{name} second")
        while any(len(values) < 2 for values in seen.values()):
            frame = stream.event("record")
            seen[frame.json["topic"]] += [record["data"] for record in frame.json["records"]]
        assert seen == {name: [f"{name} first", f"{name} second"] for name in names}
        assert frame.positions == dict.fromkeys(names, 2)


def test_a_composite_position_rewinds_only_what_is_behind(service: Service, topic: str) -> None:
    left, right = f"{topic}.left", f"{topic}.right"
    write(service.client, left, *range(3))
    write(service.client, right, *range(3))
    wid = watch(service.client, {left: {}, right: {}})["wid"]
    with Stream(service.url, wid) as stream:
        stream.records(6)
        stream.until_caught_up(2)
    with Stream(service.url, wid, {"Last-Event-ID": position_id({left: 1, right: 3})}) as stream:
        records = stream.records(2)
        assert [record["$seq"] for record in records] == [2, 3]
        write(service.client, right, "more")
        frame = stream.event()
        while frame.event != "record":
            frame = stream.event()
        assert (frame.json["topic"], frame.json["from_seq"]) == (right, 3)


# --- deletion


def test_a_deleted_topic_ends_at_once_and_alone(service: Service, topic: str) -> None:
    gone, stays = f"{topic}.gone", f"{topic}.stays"
    write(service.client, gone, 1, 2)
    write(service.client, stays, 1)
    with follow(service, {gone: {}, stays: {}}, heartbeat_ms=60_000) as stream:
        stream.records(3)
        stream.until_caught_up(2)
        ok(service.client.delete(f"/v0/topics/{gone}"))
        frame = stream.event("topic-deleted")
        assert frame.json == {"topic": gone, "head_seq": 2, "reason": "deleted"}
        assert stays in frame.positions
        write(service.client, stays, 2)
        assert stream.event("record").json["topic"] == stays
        write(service.client, gone, "a new instance")
        write(service.client, stays, 3)
        assert stream.event("record").json["topic"] == stays


def test_a_session_whose_topics_are_all_gone_knows_that_its_client_was_told(service: Service, topic: str) -> None:
    gone = {f"{topic}.1", f"{topic}.2"}
    for name in gone:
        write(service.client, name, *range(5))
    wid = watch(service.client, {name: {} for name in gone}, heartbeat_ms=20)["wid"]
    with Stream(service.url, wid) as stream:
        stream.records(10)
        stream.until_caught_up(2)
        for name in sorted(gone):
            ok(service.client.delete(f"/v0/topics/{name}"))
            frame = stream.event("topic-deleted")
            gone.remove(name)
            assert frame.json == {"topic": name, "head_seq": 5, "reason": "deleted"}
            assert frame.positions == dict.fromkeys(gone, 5)
    write(service.client, f"{topic}.1", "of another instance")
    for headers in ({}, {"Last-Event-ID": frame.id}):
        until_streams_are_over(service)
        with Stream(service.url, wid, headers) as stream:
            assert stream.next().raw == b"retry: 2000"
            assert stream.next().raw.startswith(b": hb ")
    until_streams_are_over(service)
    # Who has not seen the last of it is told again, with where it ended as far as can be told.
    with Stream(service.url, wid, {"Last-Event-ID": position_id({f"{topic}.2": 5})}) as stream:
        frame = stream.event("topic-deleted")
        assert frame.json == {"topic": f"{topic}.2", "head_seq": 5, "reason": "deleted"}
        assert frame.positions == {}


# --- consistency


def test_strong_pushes_only_what_is_durable(service: Service, topic: str) -> None:
    put(service.client, topic)
    with follow(service, {topic: {}}, consistency="strong") as stream:
        for n in range(5):
            write(service.client, topic, n)
            to_seq = stream.records_to(n + 1)
            assert state(service.client, topic)["durable_seq"] >= to_seq


def test_a_strong_stream_says_that_its_topic_has_become_ephemeral(service: Service, topic: str) -> None:
    other = f"{topic}.other"
    for name in (topic, other):
        put(service.client, name, durability="fsync")
        write(service.client, name, 1)
    with follow(service, {topic: {}, other: {}}, consistency="strong") as stream:
        stream.records(2)
        stream.until_caught_up(2)
        put(service.client, topic, durability="ephemeral")
        frame = stream.event("error")
        assert (frame.json["code"], frame.json["topics"]) == (429, [topic])
        assert frame.json["retry_after_ms"] > 0
        assert "ephemeral" in frame.json["error"]
        write(service.client, other, 2)
        assert stream.event("record").json["topic"] == other
        put(service.client, topic, durability="fsync")
        assert stream.event("caught-up").json == {"topic": topic, "head_seq": 1}
        write(service.client, topic, 2)
        assert stream.event("record").json["topic"] == topic


# --- slow and vanishing clients


def test_a_slow_reader_holds_nobody_up_and_catches_up(service: Service, topic: str) -> None:
    put(service.client, topic)
    with follow(service, {topic: {}}) as slow, follow(service, {topic: {}}) as quick:
        written = 0
        for _ in range(30):
            write(service.client, topic, *["x" * 10_000] * 60)
            written += 60
            assert len(quick.records(60)) == 60
        # 18 MB are behind the slow one: more than any socket buffer holds.
        got = slow.records(written)
        assert [record["$seq"] for record in got] == list(range(1, written + 1))


def test_clients_that_vanish_leave_the_service_well(service: Service, topic: str) -> None:
    write(service.client, topic, *["x" * 1000] * 500)
    before = sum(open_streams(service).values())
    for _ in range(20):
        follow(service, {topic: {}}).close()
    poll("their connections to be gone", lambda: sum(open_streams(service).values()) <= before)
    assert write(service.client, topic, 1)["first_seq"] == 501
