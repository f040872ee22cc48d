"""Processes are killed at random while batches are committed over several topics: each once, all or none of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time

import httpx
import msgspec
import pytest

from tests.harness import Service, is_running, poll
from topics.client import Client, Record, Retry, ServiceBusyError, UnreachableError
from topics.client.calls import Call

KILLS = int(os.environ.get("TOPICS_TXN_KILLS", "10"))
TOPICS = [f"out-{number}" for number in range(4)]


def commit(client: Client, batch: int, gate: threading.Lock) -> None:
    """Commit a batch. Stage again at every attempt, as a sink does whose tasks were run again, until the batch is
    there.
    """
    while True:
        with gate, contextlib.suppress(UnreachableError, ServiceBusyError):
            stages = [stage(client, topic, batch) for topic in TOPICS]
            client.call(_post("/v0/txn/sink/commit", {"batch": batch, "stages": stages}))
            return


def stage(client: Client, topic: str, batch: int) -> object:
    body = {"txn": f"b{batch}", "records": records(topic, batch)}
    return client.call(_post(f"/v0/stage/{topic}", body))["stage"]


def records(topic: str, batch: int) -> list[dict[str, object]]:
    return [{"data": f"{topic}/{batch}/{number}"} for number in range(3)]


def _post(path: str, body: object) -> Call[dict[str, object]]:
    # Not repeated by the client: what a lost answer means is what is tested.
    return Call("POST", path, msgspec.json.decode, msgspec.json.encode(body), repeatable=False)


@pytest.mark.timeout(60 + 30 * KILLS)
def test_each_batch_once_and_all_or_none_whatever_is_killed() -> None:
    seed = int(os.environ.get("TOPICS_SEED", str(random.randrange(2**32))))
    print(f"TOPICS_SEED={seed}")
    chance = random.Random(seed)
    with (
        Service(shards=3, frontends=2, wal_file_bytes=1 << 20) as service,
        Client(service.url, retry=Retry(total_s=0.5)) as client,
        Client(service.url) as reader,
    ):
        done = threading.Event()
        gate = threading.Lock()
        committed: list[int] = []

        def run() -> None:
            for batch in itertools.count():
                if done.is_set():
                    return
                commit(client, batch, gate)
                committed.append(batch)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            for _ in range(KILLS):
                role = chance.choice(["walshard", "walshard", "frontend", "frontend", "all"])
                victim = service.pid if role == "all" else running(service, role, chance.randrange(2))
                at = len(committed) + 1
                poll("progress", lambda: len(committed) >= at, 60)
                time.sleep(chance.random() * 0.03)  # anywhere in the next batch
                if role != "all":
                    os.kill(victim, signal.SIGKILL)
                    poll("the killed one to be gone", lambda: not is_running(victim))
                    continue
                service.kill_group()
                with gate:
                    service.start()
                    settled(service)
                    heads = {reader.get_topic(topic, touch=False).head_seq for topic in TOPICS}
                    assert len(heads) == 1, f"after the crash topics end at {heads}"
        finally:
            done.set()
            thread.join(60)
        assert committed == list(range(len(committed)))
        settled(service)
        for topic in TOPICS:
            found = [item.data for item in reader.read(topic) if isinstance(item, Record)]
            assert found == [record["data"] for batch in committed for record in records(topic, batch)]


def running(service: Service, role: str, index: int) -> int:
    """The pid of that process, and not of its former life, which may still be listed."""

    def found() -> int | None:
        pid = service.pid_of(role, index)
        return pid if is_running(pid) else None

    return poll(f"{role} {index} to run", found, 30)


def settled(service: Service) -> None:
    """Wait until batches that were decided before the crash are published: frontends do that by themselves."""
    poll("the sink to answer", lambda: _answers(service), 30)


def _answers(service: Service) -> bool:
    try:
        return httpx.get(f"{service.url}/v0/txn/sink", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
