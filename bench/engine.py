"""The cases of the storage engine: checkpoints, restart, cold reads, and memory per record. Deletes: `deletes.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Final

from bench import machine, wire
from bench.cases import FILL_CONNECTIONS, MILLION, Bench, latency, make_topic, start_s
from bench.figures import Figure
from bench.load import Outcome
from tests.harness import Service, poll

NO_CHECKPOINTS: Final = {"TOPICS_CHECKPOINT_INTERVAL_MS": "86400000", "TOPICS_CHECKPOINT_WAL_BYTES": str(8 << 30)}
AT_ONCE: Final = {"TOPICS_CHECKPOINT_INTERVAL_MS": "100", "TOPICS_CHECKPOINT_WAL_BYTES": str(1 << 20)}
ABSORBED_DEADLINE_S: Final = 600.0
BESIDE_CUTS: Final = (10, 100)
"""Records of a write."""
ROUNDS: Final = 3
"""With the compactor held and with it at work, in turns; the middle one counts."""


@contextmanager
def service_with(bench: Bench, env: Mapping[str, str]) -> Iterator[Service]:
    """Start a fresh service with these settings, on the server's cores."""
    with Service(
        shards=bench.shards, frontends=bench.frontends, wal_file_bytes=None, cpus=bench.cores.server, env=env
    ) as service:
        yield service


def scaled(bench: Bench, records: int) -> tuple[int, str]:
    """Return the number of records and its label: a tenth in a quick run."""
    records = records // 10 if bench.quick else records
    return records, f"{records // MILLION} M records" if records >= MILLION else f"{records // 1000} k records"


def wait_absorbed(service: Service) -> None:
    """Wait until all records are in segments and the snapshot says so."""

    def absorbed() -> bool:
        return all(shard["lag_bytes"] < 1 << 16 for shard in service.status()["shards"])

    poll("the compactor to have absorbed the log", absorbed, ABSORBED_DEADLINE_S, every_s=0.05)


def checkpoint(bench: Bench) -> list[Figure]:
    """Measure how fast the compactor turns a log into segments while nobody writes, and how it slows writers down."""
    records, label = scaled(bench, MILLION)
    topics = [f"log-{n}" for n in range(FILL_CONNECTIONS)]
    with service_with(bench, NO_CHECKPOINTS) as service:
        bench.fill(service, topics, records)
        service.kill_group()
        service.env |= AT_ONCE
        service.start()
        start = time.perf_counter()
        wait_absorbed(service)
        seconds = time.perf_counter() - start
    figures = [Figure("checkpoint", label, {"records_per_s": records / seconds})]
    for batch in BESIDE_CUTS:
        with service_with(bench, {}) as service:
            names = [make_topic(service, f"w-{n}", "disk") for n in range(16)]
            outcomes: dict[str, list[Outcome]] = {"compactor held": [], "compactor at work": []}
            for _ in range(ROUNDS):
                for what, found in outcomes.items():
                    with held(service, "compactor") if what == "compactor held" else nullcontext():
                        found.append(bench.measure(service.port, [[wire.write(name, batch)] for name in names]))
                    wait_absorbed(service)
        for what, found in outcomes.items():
            middle = sorted(found, key=lambda one: one.p99_us)[ROUNDS // 2]
            figures.append(Figure("checkpoint", f"16 writers of {batch}, {what}", latency(middle)))
    return figures


@contextmanager
def held(service: Service, role: str) -> Iterator[None]:
    """Stop a process, so that it takes no time from the others."""
    pid = service.pid_of(role)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def retained(bench: Bench) -> list[Figure]:
    """Measure memory and restart as more and more records are in segments."""
    figures = []
    topics = [f"kept-{n}" for n in range(FILL_CONNECTIONS)]
    # As many segments of a topic as a long life has; nobody reads them.
    with service_with(bench, {"TOPICS_CHECKPOINT_WAL_BYTES": str(16 << 20)}) as service:
        service.restart()
        idle = machine.memory_of(service.family(), service.shared_memory())
        written = 0
        for target in (MILLION, 5 * MILLION, 10 * MILLION):
            records, label = scaled(bench, target)
            bench.fill(service, topics, records - written)
            written = records
            wait_absorbed(service)
            live = machine.memory_of(service.family(), service.shared_memory())
            service.kill_group()
            seconds = start_s(service)
            heads = [service.client.get(f"/v0/topics/{topic}").raise_for_status().json() for topic in topics]
            assert sum(head["count"] for head in heads) == records
            held = machine.memory_of(service.family(), service.shared_memory())
            figures.append(
                Figure(
                    "retained",
                    label,
                    {
                        "restart_s": seconds,
                        "held_bytes": float(held.held),
                        "rss_bytes": float(held.rss),
                        "per_record_bytes": grown_bytes(idle, held) / records,
                        "live_per_record_bytes": grown_bytes(idle, live) / records,
                    },
                )
            )
    return figures


def grown_bytes(before: machine.Memory, after: machine.Memory) -> int:
    """Return the growth of all memory that could be called the service's: a shared page counts once per process."""
    return after.rss + after.shared_objects - before.rss - before.shared_objects


def cold(bench: Bench) -> list[Figure]:
    """Measure pages of sealed segments: in the data directory, then in the cold one."""
    records, _ = scaled(bench, 400_000)
    limit = 1000
    with service_with(bench, {"TOPICS_CHECKPOINT_WAL_BYTES": str(4 << 20)}) as service:
        topic = make_topic(service, "history", "disk")
        bench.fill(service, [topic], records)
        service.restart()
        wait_absorbed(service)
        pages = [wire.diff(topic, start, limit) for start in range(0, records // 2, limit)]
        outcome = bench.measure(service.port, [pages])
        figures = [Figure("cold", "sealed, hot", latency(outcome) | {"records_per_s": outcome.per_s * limit})]
        service.env |= {"TOPICS_COLD_DIR": str(service.root / "cold"), "TOPICS_HOT_RETAIN_SEGMENTS": "1"} | AT_ONCE
        service.restart()
        wanted = records // 10_000 - 2
        poll(
            "old segments to be cold",
            lambda: service.status()["compactor"]["segments_relocated"] >= wanted,
            ABSORBED_DEADLINE_S,
        )
        answer = service.client.post(f"/v0/topics/{topic}/diff", json={"from_seq": 0, "limit": limit})
        assert answer.json()["performance"]["cold_segments_read"] == 1, answer.json()["performance"]
        outcome = bench.measure(service.port, [pages])
        figures.append(Figure("cold", "sealed, cold", latency(outcome) | {"records_per_s": outcome.per_s * limit}))
    return figures


CASES: dict[str, Callable[[Bench], list[Figure]]] = {"checkpoint": checkpoint, "retained": retained, "cold": cold}
