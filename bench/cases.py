"""The cases. Each takes a `Bench` and returns its figures; a new case is a function and a line in CASES."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from bench import machine, wire
from bench.echo import echo_server
from bench.figures import Figure
from bench.idle_streams import IdleStreams, run_idle_streams
from bench.load import Outcome, Plan, closed_loop
from bench.machine import Cores
from bench.overload import Overload, run_overload
from bench.slow_reader import SlowReader, run_slow_reader
from bench.watchers import WatchPlan, deliver
from bench.worker_library import LibraryPlan, serve
from bench.workers import WorkPlan, work
from tests.harness import Service

MILLION = 1_000_000
FILL_BATCH = 1000
FILL_CONNECTIONS = 4
DIFF_RECORDS = 200_000
QUEUE_JOBS = 500_000
"""More than can be done in one measurement."""
DURABILITIES = ("disk", "fsync")


class Bench(NamedTuple):
    """The tools of every case: a pool of one process for load, the length of a measurement, the cores of each side."""

    pool: ProcessPoolExecutor
    cores: Cores
    seconds: float
    warm_up_s: float
    frontends: int
    shards: int
    quick: bool

    @contextmanager
    def service(self, shards: int | None = None) -> Iterator[Service]:
        """Start a fresh service with production settings, on the server's cores."""
        with Service(
            shards=shards or self.shards, frontends=self.frontends, wal_file_bytes=None, cpus=self.cores.server
        ) as service:
            yield service

    def measure(self, port: int, connections: list[list[bytes]]) -> Outcome:
        """Send these requests round and round for the length of a measurement."""
        plan = Plan(port, connections, warm_up_s=self.warm_up_s, duration_s=self.seconds)
        return self.pool.submit(closed_loop, plan).result()

    def fill(self, service: Service, topics: list[str], records: int) -> None:
        """Write so many records of 100 bytes, evenly over the topics, in large writes."""
        rounds = records // (FILL_BATCH * len(topics))
        before = self._heads(service, topics)
        self.run(service, [[wire.write(topic, FILL_BATCH)] for topic in topics], rounds)
        grown = [after - head for head, after in zip(before, self._heads(service, topics), strict=True)]
        assert grown == [rounds * FILL_BATCH] * len(topics), grown

    def run(self, service: Service, connections: list[list[bytes]], rounds: int) -> None:
        """Send these requests so many times."""
        self.pool.submit(closed_loop, Plan(service.port, connections, rounds=rounds)).result()

    def _heads(self, service: Service, topics: list[str]) -> list[int]:
        answers = [service.client.get(f"/v0/topics/{topic}") for topic in topics]
        return [0 if answer.status_code == 404 else answer.json()["head_seq"] for answer in answers]


def latency(outcome: Outcome) -> dict[str, float]:
    return {"p50_us": outcome.p50_us, "p99_us": outcome.p99_us, "requests_per_s": outcome.per_s}


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count > 1)


def make_topic(service: Service, topic: str, durability: str) -> str:
    service.client.put(f"/v0/topics/{topic}", json={"durability": durability}).raise_for_status()
    return topic


def fdatasync(bench: Bench) -> list[Figure]:
    """Measure the disk alone."""
    service = Service()
    try:
        times_us = sorted(machine.fdatasync_us(service.root, bench.seconds / 2))
    finally:
        service.close()
    p50_us, p99_us = times_us[len(times_us) // 2], times_us[len(times_us) * 99 // 100]
    return [Figure("fdatasync", "4 KiB", {"p50_us": p50_us, "p99_us": p99_us})]


def echo(bench: Bench) -> list[Figure]:
    """Measure the protocol stack alone."""
    with echo_server(bench.cores.server) as port:
        wait_answering(port)
        outcome = bench.measure(port, [[wire.write("t", 1)]] * 32)
    return [Figure("echo", "httptools, 32 connections", latency(outcome))]


def wait_answering(port: int) -> None:
    """Wait for the first answer: the listener queues connections before the process is up."""
    httpx.post(f"http://127.0.0.1:{port}/", json={}, timeout=30).raise_for_status()


def ack(bench: Bench) -> list[Figure]:
    """Measure the latency of a write of one record."""
    figures = []
    with bench.service() as service:
        for durability in DURABILITIES:
            for connections in (1, 32):
                topics = [
                    make_topic(service, f"{durability}-{connections}-{n}", durability) for n in range(connections)
                ]
                outcome = bench.measure(service.port, [[wire.write(topic, 1)] for topic in topics])
                figures.append(Figure("ack", f"{durability}, {plural(connections, 'connection')}", latency(outcome)))
    return figures


def throughput(bench: Bench) -> list[Figure]:
    """Measure acknowledged records a second."""
    figures = []
    for durability in DURABILITIES:
        for batch in (1, 100, 1000):
            # A service for each: none works in the memory and the log files that another filled.
            with bench.service() as service:
                for writers in (1, 16):
                    topics = [make_topic(service, f"w{writers}-{n}", durability) for n in range(writers)]
                    outcome = bench.measure(service.port, [[wire.write(topic, batch)] for topic in topics])
                    values = {
                        "records_per_s": outcome.per_s * batch,
                        "p50_us": outcome.p50_us,
                        "p99_us": outcome.p99_us,
                    }
                    what = f"{durability}, batch {batch}, {plural(writers, 'writer')}"
                    figures.append(Figure("throughput", what, values))
    return figures


def diff(bench: Bench) -> list[Figure]:
    """Measure pages of a warm topic, read one after the other."""
    figures = []
    with bench.service() as service:
        topic = make_topic(service, "pages", "disk")
        bench.fill(service, [topic], DIFF_RECORDS)
        for limit in (256, 1000):
            pages = [wire.diff(topic, start, limit) for start in range(0, DIFF_RECORDS - limit, limit)]
            for readers in (1, 4):
                # Each reader begins elsewhere: they do not ask for the same page at the same time.
                starts = [len(pages) * reader // readers for reader in range(readers)]
                outcome = bench.measure(service.port, [pages[start:] + pages[:start] for start in starts])
                values = {"records_per_s": outcome.per_s * limit, "p50_us": outcome.p50_us, "p99_us": outcome.p99_us}
                figures.append(Figure("diff", f"limit {limit}, {plural(readers, 'reader')}", values))
    return figures


def sse(bench: Bench) -> list[Figure]:
    """Measure the time from a write to its arrival at every watcher, with writes far below saturation, and then the
    rate without pauses.
    """
    figures = []
    with bench.service() as service:
        for watchers, writes_per_s in ((1, 200.0), (10, 200.0), (100, 50.0), (1000, 20.0)):
            topic = make_topic(service, f"watched-{watchers}", "disk")
            paths = []
            for _ in range(watchers):
                answer = service.client.post("/v0/watch", json={"topics": {topic: {}}}).raise_for_status()
                paths.append(answer.json()["stream_url"])
            plan = WatchPlan(service.port, topic, paths, writes_per_s, bench.seconds)
            outcome = bench.pool.submit(deliver, plan).result()
            values = {
                "p50_us": outcome.p50_us,
                "p99_us": outcome.p99_us,
                "max_us": outcome.max_us,
                "deliveries_per_s": outcome.deliveries_per_s,
            }
            figures.append(Figure("sse", plural(watchers, "watcher"), values))
    return figures


def queue(bench: Bench) -> list[Figure]:
    """Measure jobs claimed and acknowledged a second."""
    figures = []
    for durability in DURABILITIES:
        for batch in (1, 16):
            for workers in (1, 32):
                with bench.service() as service:
                    config = {"type": "queue", "durability": durability, "lease_ms": 3_600_000}
                    service.client.put("/v0/topics/jobs", json=config).raise_for_status()
                    bench.fill(service, ["jobs"], QUEUE_JOBS // 5 if bench.quick else QUEUE_JOBS)
                    plan = WorkPlan(service.port, "jobs", workers, batch, bench.warm_up_s, bench.seconds)
                    outcome = bench.pool.submit(work, plan).result()
                values = {"jobs_per_s": outcome.per_s, "p50_us": outcome.p50_us, "p99_us": outcome.p99_us}
                figures.append(Figure("queue", f"{durability}, batch {batch}, {plural(workers, 'worker')}", values))
    return figures + worker_library(bench)


def worker_library(bench: Bench) -> list[Figure]:
    """Measure jobs a second through the worker library, as a worker in Python uses it."""
    figures = []
    for durability in DURABILITIES:
        for threads, name in ((False, "AsyncQueue.run"), (True, "Queue.run")):
            for hands in (1, 32):
                with bench.service() as service:
                    config = {"type": "queue", "durability": durability}
                    service.client.put("/v0/topics/jobs", json=config).raise_for_status()
                    bench.fill(service, ["jobs"], QUEUE_JOBS // 5)
                    plan = LibraryPlan(service.port, "jobs", hands, threads, bench.warm_up_s, bench.seconds)
                    jobs_per_s = bench.pool.submit(serve, plan).result()
                figures.append(
                    Figure("queue", f"{durability}, {name}, {plural(hands, 'job')}", {"jobs_per_s": jobs_per_s})
                )
    return figures


def overload(bench: Bench) -> list[Figure]:
    """Measure delivery by priority while there is more to deliver than the service can."""
    figures = []
    with bench.service() as service:
        plan = Overload(service.port, seconds=2 * bench.seconds)
        outcome = bench.pool.submit(run_overload, plan).result()
        assert not outcome.odd, outcome.odd
        assert not outcome.missing, outcome.missing
        for priority, (p50_us, p99_us) in outcome.delivery_us.items():
            what = "automatic" if priority is None else f"{priority:+d}"
            figures.append(Figure("overload", f"priority {what}", {"p50_us": p50_us, "p99_us": p99_us}))
        peak = max(sample.pressure for sample in outcome.during)
        figures.append(Figure("overload", "960 streams, 24 writers", {"peak pressure": peak}))
    return figures


def slow_reader(bench: Bench) -> list[Figure]:
    """Measure delivery to 200 streams, first when all of them read, then with another one that does not."""
    with bench.service() as service:
        found = bench.pool.submit(run_slow_reader, SlowReader(service.port, seconds=bench.seconds)).result()
    assert not found.odd, found.odd
    assert not found.missing, found.missing
    return [
        Figure("slow", what, {"p50_us": p50_us, "p99_us": p99_us})
        for what, (p50_us, p99_us, _) in (("all 200 read", found.before_us), ("one does not", found.meanwhile_us))
    ]


def idle_streams(bench: Bench) -> list[Figure]:
    """Measure 2,000 streams of a topic that nobody writes to."""
    with bench.service() as service:
        plan = IdleStreams(
            service.port,
            service.family(),
            service.shared_memory(),
            streams=512 if bench.quick else 2048,
            seconds=2 * bench.seconds,
        )
        found = bench.pool.submit(run_idle_streams, plan).result()
    assert not found.odd, found.odd
    assert not found.closed, f"{found.closed} streams were closed"
    p50_us, p99_us = found.delivery_us
    return [
        Figure("idle", f"{plan.streams} streams", {"each_bytes": found.bytes_each}),
        Figure("idle", "longest between heartbeats", {"interval_us": found.heartbeats.silence_max_ms * 1000}),
        Figure("idle", "delivery beside them", {"p50_us": p50_us, "p99_us": p99_us}),
    ]


def recovery(bench: Bench) -> list[Figure]:
    """Measure the time from SIGKILL until ready, and the memory of the tail without a checkpoint, before and after."""
    records = MILLION // 10 if bench.quick else MILLION
    label = f"{records // 1000} k records" if bench.quick else "1 M records"
    topics = [f"tail-{n}" for n in range(FILL_CONNECTIONS)]
    with bench.service(shards=1) as service:
        idle = machine.memory_of(service.family(), service.shared_memory())
        service.kill_group()
        empty_s = start_s(service)
        bench.fill(service, topics, records)
        written = machine.memory_of(service.family(), service.shared_memory())
        service.kill_group()
        full_s = start_s(service)
        recovered = machine.memory_of(service.family(), service.shared_memory())
        heads = [service.client.get(f"/v0/topics/{topic}").json()["head_seq"] for topic in topics]
        assert sum(heads) == records, heads
    figures = [
        Figure("recovery", "start with an empty log", {"seconds": empty_s}),
        Figure("recovery", f"start with {label}", {"seconds": full_s}),
        Figure("recovery", f"{label}, one shard", {"seconds": full_s - empty_s}),
    ]
    for what, memory in (("idle", idle), (f"{label} written", written), (f"{label} recovered", recovered)):
        values = {
            "held_bytes": float(memory.held),
            "shm_bytes": float(memory.shared_objects),
            "rss_bytes": float(memory.rss),
            "per_record_bytes": 0.0 if memory is idle else (memory.held - idle.held) / records,
        }
        figures.append(Figure("memory", what, values))
    return figures


def start_s(service: Service) -> float:
    """Return the seconds from starting the command until `/v0/ready` is 200."""
    start = time.perf_counter()
    service.start()
    return time.perf_counter() - start


CASES: dict[str, Callable[[Bench], list[Figure]]] = {
    "fdatasync": fdatasync,
    "echo": echo,
    "ack": ack,
    "throughput": throughput,
    "diff": diff,
    "sse": sse,
    "queue": queue,
    "overload": overload,
    "slow_reader": slow_reader,
    "idle": idle_streams,
    "recovery": recovery,
}
