"""Measures a follower: what it costs its leader, how far it is behind, and how long a takeover takes.

`python -m bench.followers [seconds]`: a leader at 10,000 records/s with its archive in a folder, and a follower, here.
The takeover is of a service with a million records; its time ends with the first write that is acknowledged.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.harness import OWN_URL, Service, poll
from topics.client import Client

SECONDS: Final = 20.0
BATCH: Final = 100
PAUSE_S: Final = 0.01
RECORDS: Final = 1_000_000


def main(seconds: float) -> None:
    for env in ({}, {"TOPICS_ADVERTISE_URL": OWN_URL}):
        print("the leader tells what it commits" if env else "by the archive alone", flush=True)
        measure(env, seconds)


def measure(env: dict[str, str], seconds: float) -> None:
    with TemporaryDirectory() as folder:
        url = Path(folder).as_uri()
        with Service(shards=2, frontends=2, wal_file_bytes=None, env=env | {"TOPICS_ARCHIVE_URL": url}) as leader:
            poll("a first base", lambda: leader.status()["archiver"]["bases"] > 0)
            alone_s = cpu_of_writing(leader, seconds)
            with Service(shards=2, frontends=2, wal_file_bytes=None, env={"TOPICS_FOLLOW": url}) as follower:
                lags_ms = sorted(lags_while_writing(leader, follower, seconds))
                followed_s = cpu_of_writing(leader, seconds)
                own_s = cpu_s(follower)
                print(f"leader, CPU s of {seconds:g} s: {alone_s:.2f} alone, {followed_s:.2f} with a follower")
                print(f"follower, CPU s since its start: {own_s:.2f}")
                at = [lags_ms[int(len(lags_ms) * share)] for share in (0.5, 0.99)]
                print(f"a record is on the follower after: p50 {at[0]:.0f} ms, p99 {at[1]:.0f} ms")
                with Client(leader.url) as client:
                    for _ in range(RECORDS // 1000):
                        client.append("many", [{"n": 1}] * 1000)
                    poll("all of them", lambda: head_of(follower, "many") >= RECORDS, 120)
                leader.kill_group()
                began_s = time.perf_counter()
                promoting = threading.Thread(target=follower.run, args=("promote",))
                promoting.start()
                with Client([leader.url, follower.url]) as client:
                    client.append("many", [{"n": 2}])
                took_s = time.perf_counter() - began_s
                print(f"takeover with {RECORDS:,} records: a write is taken after {took_s:.2f} s")
                promoting.join()


def cpu_s(service: Service) -> float:
    status = service.status()
    own = status["supervisor"]["cpu_seconds"]
    return float(own + sum(process["cpu_seconds"] or 0 for process in status["processes"]))


def cpu_of_writing(leader: Service, seconds: float) -> float:
    before_s = cpu_s(leader)
    paced(leader, seconds)
    return cpu_s(leader) - before_s


def paced(leader: Service, seconds: float) -> None:
    with Client(leader.url) as client:
        due_s = time.perf_counter()
        end_s = due_s + seconds
        while due_s < end_s:
            client.append("paced", [{"at": time.time()}] * BATCH)
            due_s += PAUSE_S
            time.sleep(max(0.0, due_s - time.perf_counter()))


def lags_while_writing(leader: Service, follower: Service, seconds: float) -> list[float]:
    """Return, for each batch, the time in ms from its write until a reader of the follower has it."""
    poll("the topic", lambda: head_of(follower, "paced") >= 0)
    writing = threading.Thread(target=paced, args=(leader, seconds))
    lags_ms: list[float] = []
    with Client(follower.url) as client:
        records = client.follow({"paced": head_of(follower, "paced")}, tombstones="yield")
        writing.start()
        for _ in range(int(seconds / PAUSE_S)):
            for _ in range(BATCH):
                _, item = next(records)
            lags_ms.append((time.time() - item.data["at"]) * 1000)  # type: ignore[union-attr]
        records.close()
    writing.join()
    return lags_ms


def head_of(service: Service, topic: str) -> int:
    answer = service.client.get(f"/v0/topics/{topic}")
    return int(answer.json()["head_seq"]) if answer.status_code == 200 else -1


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
