"""Event streams of the real service when its processes die or stop, and over HTTP/2 (api §7)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.contract.asking import ok, put, state, write
from tests.contract.stream import Stream, follow, position_id, until_streams_are_over, watch
from tests.harness import Service, poll
from topics.core.names import owner_shard
from topics.shm.control import ControlPage, Role
from topics.shm.shm_names import identity, shm_name

pytestmark = pytest.mark.long


@pytest.fixture
def service() -> Iterator[Service]:
    """A service of its own: these tests break it. Requests wait for a shard's next life however long that takes."""
    with Service(shards=2, frontends=2, env={"TOPICS_SHARD_WAIT_MS": "30000"}) as running:
        yield running


def counted(service: Service, field: str) -> int:
    """A counter of all frontends together."""
    page = ControlPage.attach(shm_name(identity(str(service.data_dir)), "control"))
    return sum(page.cell(Role.FRONTEND, index).get(field) for index in range(service.frontends))


def serving_frontend(service: Service) -> int:
    """Return the frontend that has the one open stream."""
    page = ControlPage.attach(shm_name(identity(str(service.data_dir)), "control"))
    (index,) = (
        index for index in range(service.frontends) if page.cell(Role.FRONTEND, index).get("sse_connections") == 1
    )
    return index


def seqs(stream: Stream, count: int) -> list[int]:
    return [record["$seq"] for record in stream.records(count)]


def test_the_frontend_dies_and_the_id_knows_more_than_the_session(service: Service) -> None:
    write(service.client, "t", *range(5))
    wid = watch(service.client, {"t": {}})["wid"]
    with Stream(service.url, wid) as stream:
        frame = stream.event("record")
        assert frame.positions == {"t": 5}
        pid = service.kill("frontend", serving_frontend(service))
        with pytest.raises(httpx.TransportError):
            seqs(stream, 1)
    service.wait_healed(pid)
    write(service.client, "t", 5)
    with Stream(service.url, wid, {"Last-Event-ID": frame.id}) as stream:
        assert seqs(stream, 1) == [6]
    with Stream(service.url, wid, {"Last-Event-ID": frame.id}) as stream:
        assert seqs(stream, 1) == [6], "this end was in order, and an id may still rewind it"


def test_the_frontend_dies_and_the_client_has_kept_nothing(service: Service) -> None:
    write(service.client, "t", *range(5))
    wid = watch(service.client, {"t": {"from_seq": 2}})["wid"]
    with Stream(service.url, wid) as stream:
        assert seqs(stream, 3) == [3, 4, 5]
        pid = service.kill("frontend", serving_frontend(service))
    service.wait_healed(pid)
    with Stream(service.url, wid) as stream:
        assert seqs(stream, 3) == [3, 4, 5], "again rather than never"


def test_shards_die_under_streams_that_go_on(service: Service) -> None:
    names = [next(f"t{n}" for n in range(100) if owner_shard(f"t{n}", 2) == shard) for shard in range(2)]
    for name in names:
        put(service.client, name)
    wid = watch(service.client, {name: {} for name in names})["wid"]
    seen: dict[str, list[int]] = {name: [] for name in names}
    with Stream(service.url, wid) as stream:
        written = 0
        for shard in (0, 1, 0):
            service.kill("walshard", shard)
            for name in names:
                # The request waits for the shard's next life.
                write(service.client, name, *range(3))
            written += 3
            while any(len(got) < written for got in seen.values()):
                frame = stream.event()
                if frame.event == "record":
                    seen[frame.json["topic"]] += [record["$seq"] for record in frame.json["records"]]
        assert seen == {name: list(range(1, written + 1)) for name in names}
    until_streams_are_over(service)
    for name in names:
        write(service.client, name, "more")
    with Stream(service.url, wid) as stream:
        assert [record["$seq"] for record in stream.records(2)] == [written + 1] * 2


def test_a_stop_ends_streams_at_once(service: Service) -> None:
    write(service.client, "t", 1)
    streams = [follow(service, {"t": {}}, heartbeat_ms=60_000) for _ in range(10)]
    try:
        for stream in streams:
            assert seqs(stream, 1) == [1]
        service.stop()
        for stream in streams:
            stream.until_caught_up(1)
            assert stream.next().json["code"] == "server_shutting_down"
            with pytest.raises(StopIteration):  # the end of the answer, not a broken connection
                stream.next()
    finally:
        for stream in streams:
            stream.close()
    lines = [json.loads(line) for line in service.log_path.read_text().splitlines()]
    assert not [line for line in lines if "cut" in line["event"]]


def test_connections_are_counted_and_given_back(service: Service) -> None:
    write(service.client, "t", 1, 2)
    streams = [follow(service, {"t": {}}) for _ in range(5)]
    for stream in streams:
        seqs(stream, 2)
    assert counted(service, "sse_connections") == 5
    poll("what was sent to be counted", lambda: counted(service, "records_out") == 10)
    assert counted(service, "sse_frames") >= 5
    for stream in streams:
        stream.close()
    poll("all streams to be gone", lambda: counted(service, "sse_connections") == 0)


def test_head_does_not_open_a_stream(service: Service) -> None:
    put(service.client, "t")
    wid = watch(service.client, {"t": {}})["wid"]
    assert service.client.head(f"/v0/watch/{wid}").status_code == 405


def test_a_strong_watch_of_an_ephemeral_topic_is_refused(service: Service) -> None:
    put(service.client, "ram", durability="ephemeral")
    answer = service.client.post("/v0/watch", json={"topics": {"ram": {}}, "consistency": "strong"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert "ram" in answer.json()["error"]["message"]
    write(service.client, "ram", 1)
    with follow(service, {"ram": {}}) as stream:
        assert seqs(stream, 1) == [1]


def test_over_http2() -> None:
    """No push extension there: the same streams through plain ASGI, bounded as well."""
    with Service(shards=1, frontends=1) as service:
        put(service.client, "t")
        wids = [watch(service.client, {"t": {}})["wid"] for _ in range(3)]
        with (
            Stream(service.url, wids[0], http2=True) as slow,
            Stream(service.url, wids[1], http2=True) as quick,
            Stream(service.url, wids[2], http2=True) as leaving,
        ):
            for stream in (slow, quick, leaving):
                stream.until_caught_up(1)
            leaving.close()
            poll("its end to be noticed", lambda: counted(service, "sse_connections") == 2)
            written = 0
            for _ in range(20):
                write(service.client, "t", *["x" * 10_000] * 60)
                written += 60
                assert len(quick.records(60)) == 60
            assert seqs(slow, written) == list(range(1, written + 1))
        poll("all to be gone", lambda: counted(service, "sse_connections") == 0)
        assert state(service.client, "t")["head_seq"] == written
        with Stream(service.url, wids[2], http2=True) as again:
            assert seqs(again, 60)[:60] == list(range(1, 61))


def test_a_deleted_topic_stays_ended_for_who_has_heard_of_it(service: Service) -> None:
    write(service.client, "gone", 1)
    write(service.client, "stays", 1)
    wid = watch(service.client, {"gone": {}, "stays": {}})["wid"]
    with Stream(service.url, wid) as stream:
        stream.records(2)
        stream.until_caught_up(2)
        ok(service.client.delete("/v0/topics/gone"))
        ended = stream.event("topic-deleted")
        assert ended.positions == {"stays": 1}
    until_streams_are_over(service)
    write(service.client, "gone", "another instance")
    write(service.client, "stays", 2)
    with Stream(service.url, wid, {"Last-Event-ID": ended.id}) as stream:
        assert stream.event("record").json["topic"] == "stays"
        stream.event("caught-up")
    until_streams_are_over(service)
    unheard = position_id({"gone": 1, "stays": 2})
    with Stream(service.url, wid, {"Last-Event-ID": unheard}) as stream:
        assert {stream.event().event, stream.event().event} == {"topic-deleted", "caught-up"}
