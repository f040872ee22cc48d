"""Measures a restore, and how soon the restored service answers reads: with all data copied, and with most of them
left in the archive.

`python -m bench.restore [records] [delay ms]`: a service with that many records of 100 bytes, backed up into a folder,
or with a delay into a bucket on this machine that adds so much to each request. Each restore gives the seconds until
the directory is there, until the service has answered its first read of the oldest and of the newest record, and until
no data are borrowed any more.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx

from bench.wire import write_body
from tests.archive.services import backup, run
from tests.buckets import Proxy, start_server
from tests.harness import Service

RECORDS: Final = 10_000_000
BATCH: Final = 1_000
TOPICS: Final = ("a", "b", "c", "d")


def main(records: int, delay_ms: int) -> None:
    if not delay_ms:
        with TemporaryDirectory() as place:
            measure(records, place, {})
        return
    server = start_server()
    proxy = Proxy(server)
    try:
        place = f"s3://{server.new_bucket()}/bench"
        print(f"{type(server).__name__}, +{delay_ms} ms a request", flush=True)
        proxy.delay_s = delay_ms / 1000
        measure(records, place, proxy.env)
    finally:
        proxy.close()
        server.close()


def measure(records: int, place: str, env: dict[str, str]) -> None:
    with Service(shards=2, frontends=2, wal_file_bytes=None, env=env) as service:
        fill(service, records)
        began_s = time.perf_counter()
        done = backup(service, place, env=env)
        print(
            f"{records:,} records; backup: {time.perf_counter() - began_s:.1f} s, {done['objects']} objects", flush=True
        )
    with TemporaryDirectory() as folder:
        for name, options in (("copied", ["--copy"]), ("borrowed", [])):
            data_dir = Path(folder, name)
            began_s = time.perf_counter()
            run("restore", place, "--data-dir", data_dir, *options, env=env)
            restored_s = time.perf_counter() - began_s
            with Service(shards=2, frontends=2, wal_file_bytes=None, env=env, data_dir=data_dir) as other:
                started_s = time.perf_counter() - began_s
                first_s, last_s = read_both(other, records, began_s)
                print(
                    f"{name}: restored after {restored_s:.1f} s, ready {started_s:.1f} s, oldest read {first_s:.1f} s,"
                    f" newest {last_s:.1f} s",
                    flush=True,
                )
                note = data_dir / "meta" / "borrowed.json"
                while note.exists():
                    time.sleep(0.1)
                print(f"  all home after {time.perf_counter() - began_s:.1f} s", flush=True)


def fill(service: Service, records: int) -> None:
    def write(topic: str) -> None:
        with httpx.Client(base_url=service.url, timeout=60, headers={"Content-Type": "application/json"}) as client:
            for _ in range(records // BATCH // len(TOPICS)):
                body = write_body(BATCH)
                client.post(f"/v0/topics/{topic}?return_seqs=false", content=body).raise_for_status()

    with ThreadPoolExecutor(len(TOPICS)) as pool:
        list(pool.map(write, TOPICS))


def read_both(service: Service, records: int, began_s: float) -> tuple[float, float]:
    """Return when the oldest record of a topic was read, and the newest one of another."""
    times = []
    for topic, from_seq in ((TOPICS[0], 0), (TOPICS[-1], records // len(TOPICS) - 1)):
        page = service.client.post(f"/v0/topics/{topic}/diff", json={"from_seq": from_seq, "limit": 1})
        assert page.raise_for_status().json()["records"], page.text
        times.append(time.perf_counter() - began_s)
    return times[0], times[1]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RECORDS, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
