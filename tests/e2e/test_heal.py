"""kill -9 of any one process: no acked write lost, healed by itself, reads of what is committed go on meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.stream import Stream, watch
from tests.e2e.load import PATIENT, REQUEST_TIMEOUT_S, Load, Writer, longest_gap_ms
from tests.e2e.test_crash import everything
from tests.harness import Service, poll

# Four of each class, so that both shards own some.
CLASSES = {f"{durability}-{n}": durability for durability in ("disk", "fsync", "ephemeral") for n in range(4)}
READ = [topic for topic, durability in CLASSES.items() if durability == "disk"]
PRELOADED = 50
KILLS = 2
VICTIMS = [("frontend", 0), ("frontend", 1), ("walshard", 0), ("walshard", 1), ("compactor", 0)]


def check_ledger(client: httpx.Client, topic: str, writer: Writer) -> None:
    """Acked: there exactly once, at the seq that was answered. In doubt: at most once. Nothing else."""
    stored = [(seq, json.loads(data)) for seq, data, _ in everything(client, topic)]
    assert [seq for seq, _ in stored] == list(range(1, len(stored) + 1))
    seq_of = {value: seq for seq, value in stored}
    assert len(seq_of) == len(stored), f"twice: {[v for v, n in Counter(v for _, v in stored).items() if n > 1]}"
    lost = {value: seq for value, seq in writer.acked.items() if seq_of.get(value) != seq}
    assert not lost, f"acked but not there, or elsewhere: {lost}"
    preloaded = {value for _, value in stored[:PRELOADED]}
    assert seq_of.keys() <= preloaded | writer.acked.keys() | set(writer.in_doubt)


@pytest.mark.parametrize(("role", "index"), VICTIMS, ids=[f"{role}-{index}" for role, index in VICTIMS])
def test_one_process_killed_under_load(role: str, index: int, record_property: Callable[[str, object], None]) -> None:
    with Service(shards=2, frontends=2, env=PATIENT) as service:
        with Load(service.url, CLASSES, PRELOADED, read=READ) as load:
            served_ms = []
            for _ in range(KILLS):
                pid = service.kill(role, index)
                start = time.monotonic()
                load.wait_progress(acks=1)
                served_ms.append(round((time.monotonic() - start) * 1000))
                service.wait_healed(pid)
                load.wait_progress()
        status = service.status()
        (victim,) = [p for p in status["processes"] if (p["role"], p["index"]) == (role, index)]
        assert victim["restarts"] == KILLS
        for reader in load.readers:
            assert not reader.wrong, reader.wrong
        for writer in load.writers.values():
            assert not writer.refused, writer.refused
        if role != "frontend":
            # A frontend stands between a client and a dead shard: nobody may notice but by waiting.
            assert not any(writer.in_doubt for writer in load.writers.values())
            assert not any(reader.dropped for reader in load.readers)
        for topic, writer in load.writers.items():
            check_ledger(service.client, topic, writer)
        figures = {
            "every_topic_written_and_read_after_ms": served_ms,
            "longest_write_gap_ms": round(max(longest_gap_ms(w.ack_times_s) for w in load.writers.values())),
            "longest_read_gap_ms": round(max(longest_gap_ms(r.answer_times_s) for r in load.readers)),
        }
        for name, value in figures.items():
            record_property(name, value)
        print(f"{role} {index}: {figures}")


def test_a_watch_session_outlives_the_frontend_that_served_it() -> None:
    with Service(shards=2, frontends=2, env=PATIENT) as service:
        service.client.post("/v0/topics/t", json={"records": [{"data": n} for n in range(10)]})
        wid = watch(service.client, {"t": {}}, limit=5)["wid"]
        with Stream(service.url, wid) as stream:
            first = stream.event("record")
        for index in range(2):
            service.wait_healed(service.kill("frontend", index))
        body = {"records": [{"data": 10}]}
        httpx.post(f"{service.url}/v0/topics/t", json=body, timeout=REQUEST_TIMEOUT_S).raise_for_status()
        with Stream(service.url, wid, {"Last-Event-ID": first.id}) as stream:
            assert [record["data"] for record in stream.records(6)] == list(range(5, 11))


def test_a_stream_goes_on_over_the_death_of_its_shard() -> None:
    """Committed records are read from shared memory and files: the stream does not even break."""
    with Service(shards=2, frontends=2, env=PATIENT) as service:
        topics = [f"t{n}" for n in range(8)]
        for topic in topics:
            service.client.put(f"/v0/topics/{topic}").raise_for_status()
        wid = watch(service.client, {topic: {} for topic in topics})["wid"]
        with Stream(service.url, wid) as stream:
            seen: dict[str, list[int]] = {topic: [] for topic in topics}
            for turn in range(4):
                if turn:
                    service.wait_healed(service.kill("walshard", turn % 2))
                for topic in topics:
                    answer = service.client.post(f"/v0/topics/{topic}", json={"records": [{"data": turn}]})
                    assert answer.status_code == 200, answer.text
                while any(len(values) <= turn for values in seen.values()):
                    frame = stream.event()
                    if frame.event == "record":
                        seen[frame.json["topic"]] += [record["data"] for record in frame.json["records"]]
            assert seen == {topic: [0, 1, 2, 3] for topic in topics}


def test_a_delete_goes_on_behind_the_death_of_its_shard() -> None:
    """It is done in turns, and ends at the head that it began with (api §5)."""
    with Service(shards=1, env=PATIENT) as service, ThreadPoolExecutor(1) as beside:
        for _ in range(20):
            records = [{"data": number, "tag": "old"} for number in range(5000)]
            service.client.post("/v0/topics/t?return_seqs=false", json={"records": records}).raise_for_status()

        def delete() -> dict[str, Any]:
            with httpx.Client(base_url=service.url, timeout=60) as own:
                answer: dict[str, Any] = (
                    own.post("/v0/topics/t/delete", json={"match": "old"}).raise_for_status().json()
                )
                return answer

        def begun() -> bool:
            return bool(service.client.get("/v0/topics/t").json()["count"] < 100_000)

        killed = service.pid_of("walshard")
        deleting = beside.submit(delete)
        poll("some to be gone", begun, every_s=0.001)
        os.kill(killed, signal.SIGKILL)
        service.client.post("/v0/topics/t", json={"records": [{"data": "new", "tag": "old"}]}).raise_for_status()
        service.wait_healed(killed)
        answer = deleting.result()
        state = service.client.get("/v0/topics/t").json()
        assert (answer["deleted"], state["count"], state["earliest_seq"]) == (100_000, 1, 100_001)
