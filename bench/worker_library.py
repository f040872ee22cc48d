"""Jobs a second through the worker library, whole: `Queue.run` and `AsyncQueue.run` with a handler that does nothing.

python -m bench.worker_library

As part of `make peers` it prints what `bench/peers` prints of dramatiq: jobs/s of a process with 32 hands, one JSON
object a line.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Final, NamedTuple

from bench import machine, wire
from bench.load import LoadError, Plan, closed_loop, pin
from tests.harness import Service
from topics.client import AsyncClient, AsyncJob, Client, Job

JOBS: Final = 200_000
"""More than can be done in one measurement."""
FILL_BATCH: Final = 1000
HANDS: Final = 32
SECONDS: Final = 5.0
PEER_NAMES: Final = {True: "topics Queue.run", False: "topics AsyncQueue.run"}


class LibraryPlan(NamedTuple):
    """The load: so many hands (threads, or jobs at a time in one loop) at the jobs of `topic`, for `duration_s`."""

    port: int
    topic: str
    hands: int
    threads: bool
    warm_up_s: float
    duration_s: float


class _Clock:
    """The clock of a measurement: it counts the jobs begun within it, and stops the worker."""

    def __init__(self, plan: LibraryPlan, stop: Callable[[], None]) -> None:
        self._plan = plan
        self._stop = stop
        self._begin_s = self._end_s = 0.0
        self._guard = threading.Lock()
        self.jobs = 0

    def tick(self) -> None:
        now_s = time.perf_counter()
        if not self._begin_s:  # the first job: connections are made
            self._begin_s = now_s + self._plan.warm_up_s
            self._end_s = self._begin_s + self._plan.duration_s
        if now_s >= self._end_s:
            self._stop()
        elif now_s >= self._begin_s:
            with self._guard:
                self.jobs += 1


def serve(plan: LibraryPlan) -> float:
    """Return jobs a second, each acknowledged before its hand takes the next; LoadError when the jobs run out."""
    url = f"http://127.0.0.1:{plan.port}"
    with Client(url) as topics:
        clock = _threads(topics, plan) if plan.threads else asyncio.run(_tasks(url, plan))
        left = topics.get_topic(plan.topic).queue
        if left is None or not left.ready:
            raise LoadError("there were not enough jobs for the whole measurement")
    return clock.jobs / plan.duration_s


def _threads(topics: Client, plan: LibraryPlan) -> _Clock:
    queue = topics.queue(plan.topic)
    clock = _Clock(plan, queue.stop)

    def handle(job: Job) -> None:
        clock.tick()

    queue.run(handle, threads=plan.hands)
    return clock


async def _tasks(url: str, plan: LibraryPlan) -> _Clock:
    async with AsyncClient(url) as topics:
        queue = topics.queue(plan.topic)
        clock = _Clock(plan, queue.stop)

        async def handle(job: AsyncJob) -> None:
            clock.tick()

        await queue.run(handle, concurrency=plan.hands)
        return clock


def main() -> None:
    cores = machine.share_cores()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=pin, initargs=(cores.load,)) as pool:
        for durability in ("disk", "fsync"):
            for threads in (True, False):
                with Service(shards=1, frontends=1, wal_file_bytes=None, cpus=cores.server) as service:
                    config = {"type": "queue", "durability": durability}
                    service.client.put("/v0/topics/jobs", json=config).raise_for_status()
                    fill = Plan(service.port, [[wire.write("jobs", FILL_BATCH)]], rounds=JOBS // FILL_BATCH)
                    pool.submit(closed_loop, fill).result()
                    plan = LibraryPlan(service.port, "jobs", HANDS, threads, warm_up_s=1.0, duration_s=SECONDS)
                    jobs_per_s = pool.submit(serve, plan).result()
                said = {"peer": PEER_NAMES[threads], "beside": durability, "workers": HANDS, "jobs_per_s": jobs_per_s}
                print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
