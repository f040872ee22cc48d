"""api §11: caps that hold over all processes together. Service by service: a cap is the whole service's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, envelope, ok, put, refused, state, write
from tests.contract.stream import Stream, follow, open_streams, watch
from tests.harness import Service, poll

pytestmark = pytest.mark.long

AT_ONCE = 8


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts a service with these caps; two shards, two frontends."""
    with ExitStack() as stack:
        yield lambda **caps: stack.enter_context(
            Service(env={f"TOPICS_{name.upper()}": str(most) for name, most in caps.items()})
        )


def throttled(answer: httpx.Response, limit: str, most: int) -> None:
    error = refused(answer, 429, "throttled")
    assert error["detail"] == {"limit": limit, "max": most}
    assert int(answer.headers["retry-after"]) >= 1


def at_once(service: Service, method: str, paths: list[str], body: Any) -> list[int]:
    """Statuses of requests that each have a connection of their own, so that all frontends get some."""

    def ask(path: str) -> int:
        return httpx.request(method, service.url + path, json=body, timeout=20).status_code

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, paths))


def names(service: Service) -> list[str]:
    listed = ok(service.client.get("/v0/topics", params={"page_size": "1000"}))["topics"]
    return [entry["topic"] for entry in listed]


@pytest.mark.parametrize(("method", "body"), [("PUT", {}), ("POST", {"records": [{"data": 1}]})])
def test_topics_made_at_once_never_exceed_the_cap(start: Any, method: str, body: Any) -> None:
    service = start(max_topics=10)
    statuses = at_once(service, method, [f"/v0/topics/t{n}" for n in range(60)], body)
    assert set(statuses) == {201, 429}
    made = statuses.count(201)
    assert made == len(names(service)) <= 10
    # At the border two may have refused each other; one at a time finds what room is left.
    for n in range(made, 10):
        put(service.client, f"u{n}")
    throttled(service.client.put("/v0/topics/one-more", json={}), "max_topics", 10)
    throttled(service.client.post("/v0/topics/one-more", json={"records": [{"data": 1}]}), "max_topics", 10)
    assert len(names(service)) == 10


def test_what_exists_is_never_refused(start: Any) -> None:
    service = start(max_topics=2)
    put(service.client, "a")
    write(service.client, "b", 1)
    throttled(service.client.put("/v0/topics/c", json={}), "max_topics", 2)
    assert put(service.client, "a", ttl_ms=60_000)["created"] is False
    assert write(service.client, "a", 1)["first_seq"] == 1
    assert write(service.client, "b", 2)["first_seq"] == 2
    refused(service.client.get("/v0/topics/c"), 404, "topic_not_found")
    ok(service.client.delete("/v0/topics/a"))
    assert write(service.client, "c", 1)["created"] is True
    throttled(service.client.put("/v0/topics/a", json={}), "max_topics", 2)


def test_the_cap_counts_what_a_restart_brings_back_and_a_lower_one_takes_nothing(start: Any) -> None:
    service = start(max_topics=6)
    for n in range(6):
        write(service.client, f"t{n}", n)
    service.restart()
    throttled(service.client.put("/v0/topics/more", json={}), "max_topics", 6)
    service.stop()
    service.env["TOPICS_MAX_TOPICS"] = "3"
    service.start()
    assert [state(service.client, f"t{n}")["head_seq"] for n in range(6)] == [1] * 6
    assert write(service.client, "t5", 2)["first_seq"] == 2
    throttled(service.client.put("/v0/topics/more", json={}), "max_topics", 3)
    for n in range(4):
        ok(service.client.delete(f"/v0/topics/t{n}"))
    put(service.client, "more")


def test_topics_of_a_shard_that_is_down_count(start: Any) -> None:
    service = start(max_topics=12)
    for n in range(12):
        write(service.client, f"t{n}", n)
    for _ in range(3):
        killed = [service.kill("walshard", index) for index in range(service.shards)]
        statuses = at_once(service, "PUT", [f"/v0/topics/u{n}" for n in range(16)], {})
        assert set(statuses) <= {429, 503}
        for pid in killed:
            service.wait_healed(pid)
    assert len(names(service)) == 12


def test_zero_is_no_limit(start: Any) -> None:
    service = start(max_topics=0, max_watch_sessions=0, max_sse_connections=0, max_total_bytes=0)
    statuses = at_once(service, "PUT", [f"/v0/topics/t{n}" for n in range(40)], {})
    assert statuses == [201] * 40
    with follow(service, {"t1": {}}) as stream:
        stream.event("caught-up")


def test_watch_sessions(start: Any) -> None:
    service = start(max_watch_sessions=7)
    put(service.client, "t")
    wid = watch(service.client, {"t": {}})["wid"]
    statuses = at_once(service, "POST", ["/v0/watch"] * 40, {"topics": {"t": {}}})
    assert set(statuses) == {200, 429}
    made = 1 + statuses.count(200)
    assert made <= 7
    for _ in range(made, 7):
        watch(service.client, {"t": {}})
    throttled(service.client.post("/v0/watch", json={"topics": {"t": {}}}), "max_watch_sessions", 7)
    # A stream of a session that exists is no new session.
    with Stream(service.url, wid) as stream:
        stream.event("caught-up")
    throttled(service.client.post("/v0/watch", json={"topics": {"t": {}}}), "max_watch_sessions", 7)


def test_event_streams_over_all_frontends(start: Any) -> None:
    service = start(max_sse_connections=5)
    put(service.client, "t")
    wids = [watch(service.client, {"t": {}})["wid"] for _ in range(24)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        streams = list(pool.map(lambda wid: Stream(service.url, wid), wids))
    try:
        admitted = [stream for stream in streams if stream.response.status_code == 200]
        assert len(admitted) <= 5
        for stream in streams:
            if stream not in admitted:
                throttled(stream.response, "max_sse_connections", 5)
        poll("them to be counted", lambda: sum(open_streams(service).values()) == len(admitted))
        refused_wids = [wid for wid, stream in zip(wids, streams, strict=True) if stream not in admitted]
        for wid in refused_wids[: 5 - len(admitted)]:  # an admitted one's stream would only be taken over
            streams.append(Stream(service.url, wid))
            assert streams[-1].response.status_code == 200
            admitted.append(streams[-1])
        with Stream(service.url, refused_wids[-1]) as one_more:
            throttled(one_more.response, "max_sse_connections", 5)
        for stream in admitted:
            stream.event("caught-up")
        write(service.client, "t", 1)
        assert [stream.records(1)[0]["$seq"] for stream in admitted] == [1] * 5
        admitted[0].close()

        def room() -> bool:
            with Stream(service.url, refused_wids[-1]) as again:
                return again.response.status_code == 200

        poll("the place of a closed stream to be free", room)
    finally:
        for stream in streams:
            stream.close()


def test_a_refused_stream_leaves_the_one_of_its_session_alone(start: Any) -> None:
    service = start(max_sse_connections=1)
    put(service.client, "t")
    wid = watch(service.client, {"t": {}})["wid"]
    with Stream(service.url, wid) as stream:
        stream.event("caught-up")
        with Stream(service.url, wid) as second:
            throttled(second.response, "max_sse_connections", 1)
        write(service.client, "t", 1)
        assert stream.event("record").json["to_seq"] == 1


def test_streams_of_a_killed_frontend_count_no_longer_when_it_is_back(start: Any) -> None:
    service = start(max_sse_connections=4)
    put(service.client, "t")
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(follow(service, {"t": {}})).event("caught-up")
        wid = watch(service.client, {"t": {}})["wid"]
        with Stream(service.url, wid) as refusal:
            throttled(refusal.response, "max_sse_connections", 4)
        busy = max(open_streams(service).items(), key=lambda item: item[1])[0]
        service.wait_healed(service.kill("frontend", busy))
        with Stream(service.url, wid) as stream:
            assert stream.response.status_code == 200
            stream.event("caught-up")


def test_total_bytes_over_all_shards(start: Any) -> None:
    most = 40_000
    service = start(max_total_bytes=most)
    body = {"records": [{"data": "x" * 900}]}
    statuses = at_once(service, "POST", [f"/v0/topics/t{n % 10}" for n in range(80)], body)
    assert set(statuses) <= {200, 201, 429}
    held = sum(state(service.client, name)["bytes"] for name in names(service))
    assert most * 0.8 < held <= most
    # A topic that was refused its first record was not made.
    assert all(state(service.client, name)["count"] for name in names(service))
    while service.client.post("/v0/topics/t0", json=body).status_code == 200:
        held = sum(state(service.client, name)["bytes"] for name in names(service))
        assert held <= most
    throttled(service.client.post("/v0/topics/t0", json=body), "max_total_bytes", most)
    # What deletes, reads and configures needs no room.
    head_seq = state(service.client, "t0")["head_seq"]
    assert diff(service.client, "t0")["records"]
    put(service.client, "t0", ttl_ms=0)
    ok(service.client.post("/v0/topics/t0/delete", json={"before_seq": head_seq}))
    assert write(service.client, "t0", "y" * 100)["first_seq"] == head_seq + 1
    service.restart()
    held = sum(state(service.client, name)["bytes"] for name in names(service))
    assert held <= most
    throttled(service.client.post("/v0/topics/t1", json={"records": [{"data": "x" * most}]}), "max_total_bytes", most)


def test_a_full_service_takes_a_topic_that_evicts_what_it_takes(start: Any) -> None:
    service = start(max_total_bytes=30_000)
    put(service.client, "ring", cap_records=5)
    for n in range(5):
        write(service.client, "ring", f"{n}" * 1000)
    while service.client.post("/v0/topics/log", json={"records": [{"data": "x" * 1000}]}).status_code < 300:
        pass
    for n in range(10):
        assert write(service.client, "ring", "z" * 1000)["first_seq"] == 6 + n
    answer = service.client.post("/v0/topics/log", json={"records": [{"data": "x" * 1000}]})
    throttled(answer, "max_total_bytes", 30_000)


def test_stages_and_commits_ask_for_total_bytes(start: Any) -> None:
    service = start(max_total_bytes=30_000)
    put(service.client, "ring", cap_records=5)
    for n in range(5):
        write(service.client, "ring", f"{n}" * 1000)

    def stage(topic: str, data: str = "x" * 1000) -> httpx.Response:
        return service.client.post(f"/v0/stage/{topic}", json={"txn": "t", "records": [{"data": data}]})

    def commit(batch: int, *stages: str) -> httpx.Response:
        return service.client.post("/v0/txn/s/commit", json={"batch": batch, "stages": list(stages)})

    early = [ok(stage("log", "x" * 12_000))["stage"] for _ in range(2)]
    while service.client.post("/v0/topics/log", json={"records": [{"data": "x" * 1000}]}).status_code < 300:
        pass
    throttled(stage("log"), "max_total_bytes", 30_000)
    throttled(commit(1, *early), "max_total_bytes", 30_000)
    assert ok(commit(1, ok(stage("ring"))["stage"]))["count"] == 1, "its cap makes the room"
    throttled(stage("ring", "x" * 5_000), "max_total_bytes", 30_000)
    ok(service.client.post("/v0/topics/log/delete", json={"before_seq": 15}))
    throttled(commit(2, *early), "max_total_bytes", 30_000)
    assert ok(commit(2, early[0]))["count"] == 1


def test_the_refusal_has_the_envelope_of_every_error(start: Any) -> None:
    service = start(max_topics=1)
    put(service.client, "a")
    answer = service.client.put("/v0/topics/b", json={})
    error = envelope(answer.content, answer.headers["content-type"], "throttled")
    assert "TOPICS_MAX_TOPICS" in error["message"]
