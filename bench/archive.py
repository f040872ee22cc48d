"""Measures the archive where a bucket adds 20 ms a request: what it costs writers, its lag, and `archived` answers.

`python -m bench.archive [seconds]`: a service, a proxy that counts and delays, and an S3 server, all on this machine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.load import Outcome, Plan, closed_loop
from bench.wire import write
from tests.buckets import Proxy, start_server
from tests.harness import Service, poll
from topics.core.clock import SystemClock
from topics.supervisor.status import ArchiverStatus, StatusReader

SECONDS: Final = 20.0
BATCH: Final = 100
DELAY_S: Final = 0.02
SAMPLE_S: Final = 0.1


def main(seconds: float) -> None:
    server = start_server()
    proxy = Proxy(server)
    try:
        print(f"{type(server).__name__}, +{DELAY_S * 1000:.0f} ms a request, {seconds:g} s each")
        without = run({}, "disk", 16, seconds)[0]
        print(f"no archive: {without.per_s * BATCH:.0f} records/s, 16 writers, batches of {BATCH}")
        with TemporaryDirectory() as folder:
            show("folder", run({"TOPICS_ARCHIVE_URL": Path(folder).as_uri()}, "disk", 16, seconds), "disk", 16)
        for durability, writers in (("disk", 16), ("archived", 1), ("archived", 64)):
            url = f"s3://{server.new_bucket()}/bench"
            proxy.delay_s = DELAY_S
            proxy.reset()
            found = run(proxy.env | {"TOPICS_ARCHIVE_URL": url}, durability, writers, seconds)
            proxy.delay_s = 0.0
            show("bucket", found, durability, writers)
            with proxy.lock:
                print(f"  {proxy.requests['PUT']} puts, {proxy.sent_bytes >> 20} MiB", flush=True)
    finally:
        proxy.close()
        server.close()


def show(place: str, found: tuple[Outcome, list[int]], durability: str, writers: int) -> None:
    outcome, lags = found
    print(
        f"{place}, {durability}, {writers} writers: {outcome.per_s * BATCH:.0f} records/s, answers p50"
        f" {outcome.p50_us / 1000:.1f} ms, p99 {outcome.p99_us / 1000:.1f} ms; lag p50 {at(lags, 0.5)} ms, p99"
        f" {at(lags, 0.99)} ms",
        flush=True,
    )


def run(env: dict[str, str], durability: str, writers: int, seconds: float) -> tuple[Outcome, list[int]]:
    """Write for so long; return what came of it, and samples of the archive's lag in ms."""
    with Service(shards=2, frontends=2, wal_file_bytes=None, env=env) as service:
        service.client.put("/v0/topics/t", json={"durability": durability}).raise_for_status()
        reader = StatusReader(str(service.data_dir), SystemClock())

        def archiver() -> ArchiverStatus:
            found = reader.read().archiver
            assert found is not None
            return found

        if env:
            poll("a first base", lambda: archiver().bases > 0)
        plan = Plan(service.port, [[write("t", BATCH)]] * writers, 1.0, seconds)
        lags: list[int] = []
        over = threading.Event()
        sampler = threading.Thread(target=sample, args=(lambda: archiver().lag_ms, lags, over))
        if env:
            sampler.start()
        try:
            return closed_loop(plan), lags
        finally:
            over.set()
            if env:
                sampler.join()


def sample(read: Callable[[], int], into: list[int], over: threading.Event) -> None:
    while not over.wait(SAMPLE_S):
        into.append(read())


def at(samples: list[int], quantile: float) -> int:
    return sorted(samples)[int(len(samples) * quantile)] if samples else 0


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
