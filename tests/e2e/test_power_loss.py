"""Reads over HTTP after a power loss; a kill or a stop shows nothing of the kind."""

from __future__ import annotations

import os

import httpx
import pytest

from tests.contract.asking import diff, ok
from tests.contract.stream import Stream, position_id, watch
from tests.contract.working import claim, queue
from tests.harness import Service, poll
from topics.storage import layout
from topics.storage.verify import verify


def write(client: httpx.Client, topic: str, *values: int) -> int:
    """Write records one by one; return the head."""
    for value in values:
        head_seq = ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": value}]}))["head_seq"]
    return int(head_seq)


def wait_durable(client: httpx.Client, topic: str, seq: int) -> None:
    poll("the background sync", lambda: diff(client, topic)["durable_seq"] >= seq or None)


def cut(service: Service, offset: int) -> None:
    """Leave of the log what a power loss leaves that takes everything behind `offset`."""
    path = layout.log_path(layout.wal_dir(str(service.data_dir)), 1)
    size_bytes = os.path.getsize(path)
    os.truncate(path, offset)
    os.truncate(path, size_bytes)


@pytest.mark.parametrize("memory", ["kept", "gone"])
def test_a_lost_tail_is_a_gap_for_its_readers(memory: str) -> None:
    """`memory`: the shared memory of the former service is there (the log was cut), or not (a power loss)."""
    with Service(shards=1, frontends=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "3600000"}) as service:
        client = service.client
        write(client, "t", *range(1, 6))
        ok(client.put("/v0/topics/t/cursors/mine", json={"from_seq": 5}))
        wait_durable(client, "t", 5)
        synced = service.status()["shards"][0]["wal_offset"]
        write(client, "t", *range(6, 11))
        before = diff(client, "t", limit=100)
        assert before["next_from_seq"] == 10
        service.kill_group()
        cut(service, synced)
        if memory == "gone":
            for entry in service.shared_memory():
                if entry.is_file():
                    entry.unlink()
        assert verify(str(service.data_dir), lambda *_: None).damage == []
        service.start()
        client = service.client
        head_seq = diff(client, "t", from_seq=0)["head_seq"]
        assert head_seq > 10
        new = [write(client, "t", value) for value in range(11, 18)]
        assert new == [*range(head_seq + 1, head_seq + 8)]
        for from_seq in (5, 10):
            answer = diff(client, "t", from_seq=from_seq, limit=100)
            assert answer["epoch"] == before["epoch"]
            tombstone = answer["tombstone"]
            assert (tombstone["gap_from"], tombstone["gap_to"]) == (from_seq + 1, head_seq)
            assert tombstone["reason"] == "lost_tail"
            assert [record["data"] for record in answer["records"]] == list(range(11, 18))
        whole = diff(client, "t", limit=100)
        assert [record["data"] for record in whole["records"]] == list(range(1, 6))
        named = ok(client.post("/v0/topics/t/cursors/mine/read", json={"limit": 100}))
        assert named["tombstone"]["reason"] == "lost_tail"
        assert [record["data"] for record in named["records"]] == list(range(11, 18))
        service.kill_group()
        service.start()
        assert diff(service.client, "t", from_seq=10, limit=100)["tombstone"]["gap_to"] == head_seq
        assert write(service.client, "t", 18) == head_seq + 8


def test_a_kill_or_a_stop_skips_no_seq() -> None:
    with Service(shards=2, frontends=1) as service:
        for round_no, end in enumerate((service.kill_group, service.stop, service.kill_group, service.kill_supervisor)):
            for topic in "abc":
                assert write(service.client, topic, 1, 2, 3) == 3 * round_no + 3
            end()
            service.start()
            for topic in "abc":
                answer = diff(service.client, topic, limit=100)
                assert (answer["tombstone"], answer["head_seq"]) == (None, 3 * round_no + 3)


def test_a_router_has_one_gap_for_the_lost_tail_of_its_source() -> None:
    with Service(shards=1, frontends=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "3600000"}) as service:
        client = service.client
        ok(client.put("/v0/topics/copies", json={}))
        ok(client.put("/v0/routers/r", json={"source": "t", "dest": "copies"}))
        write(client, "t", *range(1, 6))
        poll("the copies", lambda: diff(client, "copies")["head_seq"] == 5 or None)
        wait_durable(client, "copies", 5)
        wait_durable(client, "t", 5)
        synced = service.status()["shards"][0]["wal_offset"]
        write(client, "t", *range(6, 11))
        poll("the copies", lambda: diff(client, "copies")["head_seq"] == 10 or None)
        service.kill_group()
        cut(service, synced)
        service.start()
        client = service.client
        write(client, "t", *range(11, 14))

        def copied() -> list[int] | None:
            found = [record["data"] for record in diff(client, "copies", from_seq=10, limit=100)["records"]]
            return found if len(found) == 3 else None

        assert poll("the copies", copied) == [11, 12, 13]


def test_streams_say_a_lost_tail_and_queues_go_on_behind_it() -> None:
    with Service(shards=1, frontends=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "3600000"}) as service:
        queue(service.client, "jobs", *range(1, 6))
        write(service.client, "t", *range(1, 6))
        wait_durable(service.client, "t", 5)
        wait_durable(service.client, "jobs", 5)
        synced = service.status()["shards"][0]["wal_offset"]
        write(service.client, "t", *range(6, 11))
        write(service.client, "jobs", *range(6, 11))
        assert len(claim(service.client, "jobs", max=20)) == 10
        service.kill_group()
        cut(service, synced)
        service.start()
        head_seq = diff(service.client, "t")["head_seq"]
        write(service.client, "t", 11)
        for seen in (7, 10):
            wid = watch(service.client, {"t": {"from_seq": seen}})["wid"]
            with Stream(service.url, wid, {"Last-Event-ID": position_id({"t": seen})}) as stream:
                gap = stream.event("tombstone").json
                assert (gap["gap_from"], gap["gap_to"], gap["reason"]) == (seen + 1, head_seq, "lost_tail")
                assert [record["data"] for record in stream.records(1)] == [11]
        first_new = write(service.client, "jobs", 11)
        assert first_new > 10
        jobs = claim(service.client, "jobs", max=20)
        assert [job["data"] for job in jobs] == [1, 2, 3, 4, 5, 11]
        assert jobs[-1]["$seq"] == first_new


def test_a_gap_goes_around_a_cycle_of_routers_once() -> None:
    with Service(shards=2, frontends=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "3600000"}) as service:
        for name, source, dest in (("ab", "a", "b"), ("bc", "b", "c"), ("ca", "c", "a")):
            route = {"source": source, "dest": dest, "allow_cycle": True}
            ok(service.client.put(f"/v0/routers/{name}", json=route))
        write(service.client, "a", 1)
        service.kill_group()
        for entry in service.shared_memory():
            if entry.is_file():
                entry.unlink()
        service.start()
        write(service.client, "a", 2)
        looks: list[list[int]] = []

        def settled() -> bool:
            """Look at all, which brings what comes around one further; true if 20 looks have found nothing new."""
            looks.append([diff(service.client, topic)["head_seq"] for topic in "abc"])
            return looks[-20:] == looks[-1:] * 20

        poll("the gaps to come to an end", settled)
        for topic in "abc":
            position, gaps, values = 0, 0, []
            while True:
                page = diff(service.client, topic, from_seq=position, limit=1000)
                position = page["next_from_seq"]
                gaps += page["tombstone"] is not None
                values += [record["data"] for record in page["records"]]
                if page["caught_up"]:
                    break
            assert set(values) == {1, 2}
            assert 1 <= gaps <= 3
