"""Jobs a second through Redis: a list by hand (BLMOVE, LREM), and dramatiq, a worker library that people use.

    make peers        (needs redis-server on the machine)

Redis keeps an append-only file: `everysec` is held against our class `disk`, `always` against `fsync`. Each job is
taken, does nothing, and is acknowledged before the same worker takes the next one; payloads are of 100 bytes, as in
`python -m bench --only queue`. One JSON object a line goes to standard output.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

JOBS = int(os.environ.get("PEER_JOBS", "20000"))
WORKERS = 32
PAYLOAD = b"x" * 100
SYNCS = {"everysec": "disk", "always": "fsync"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis_server(sync: str) -> Iterator[int]:
    """Start a Redis server with an append-only file; yield its port."""
    command = shutil.which("redis-server")
    if command is None:
        sys.exit("peers: there is no redis-server on this machine; install your system's package of it")
    directory = tempfile.mkdtemp(prefix="topics-peers-")
    port = free_port()
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": directory,
        "appendonly": "yes",
        "appendfsync": sync,
        "save": "",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    server = subprocess.Popen([command, *flags], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port)
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)
        yield port
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(directory, ignore_errors=True)


def by_list(port: int, batch: int) -> float:
    """Return jobs a second, `batch` at a time, with one round trip for taking and one for acknowledging them."""
    filler = redis.Redis(port=port)
    for first in range(0, JOBS, 1000):
        filler.rpush("jobs", *[b"%d:%b" % (number, PAYLOAD) for number in range(first, first + 1000)])

    def work(worker: int) -> None:
        mine = f"leased:{worker}"
        client = redis.Redis(port=port)
        while True:
            with client.pipeline(transaction=False) as take:
                for _ in range(batch):
                    take.lmove("jobs", mine, "LEFT", "RIGHT")
                taken = [job for job in take.execute() if job is not None]
            if not taken:
                return
            with client.pipeline(transaction=False) as ack:
                for job in taken:
                    ack.lrem(mine, 1, job)
                ack.execute()

    return timed([threading.Thread(target=work, args=(number,)) for number in range(WORKERS)])


def timed(threads: list[threading.Thread]) -> float:
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return JOBS / (time.perf_counter() - start)


def by_dramatiq(port: int) -> float:
    """Return jobs a second through dramatiq's worker process, started as its users do, with 32 threads."""
    environment = os.environ | {"PEER_REDIS_PORT": str(port), "PYTHONPATH": str(Path(__file__).parents[2])}
    module = "bench.peers.dramatiq_jobs"
    subprocess.run([sys.executable, "-m", module, str(JOBS)], env=environment, check=True)
    counter = redis.Redis(port=port)
    worker = subprocess.Popen(
        [sys.executable, "-m", "dramatiq", module, "--processes", "1", "--threads", str(WORKERS)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = 0
        while done < JOBS // 10:  # its start does not count
            time.sleep(0.01)
            done = int(counter.get("done") or 0)
        start, before = time.perf_counter(), done
        while done < JOBS:
            time.sleep(0.01)
            done = int(counter.get("done") or 0)
        return (done - before) / (time.perf_counter() - start)
    finally:
        worker.terminate()
        worker.wait()


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    for sync, durability in SYNCS.items():
        for batch in (1, 16):
            with redis_server(sync) as port:
                say(peer="redis list", beside=durability, batch=batch, workers=WORKERS, jobs_per_s=by_list(port, batch))
        with redis_server(sync) as port:
            say(peer="dramatiq on redis", beside=durability, workers=WORKERS, jobs_per_s=by_dramatiq(port))


if __name__ == "__main__":
    main()
