"""Measures a cold tier in a bucket: requests, bytes, and cold reads where the bucket adds 20 ms a request.

`python -m bench.bucket [records]`: a service, a proxy that counts and delays, and an S3 server, all here.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from typing import Final

import httpx

from tests.buckets import Proxy, start_server
from tests.harness import Service, poll
from topics.storage.bucket_store import BucketStore

RECORDS: Final = 1_000_000
BATCH: Final = 1000
DELAY_S: Final = 0.02
RANDOM_READS: Final = 1000
DEADLINE_S: Final = 170.0
_NEXT: Final = re.compile(rb'"next_from_seq":(\d+)')


def main(records: int) -> None:
    server = start_server()
    proxy = Proxy(server)
    url = f"s3://{server.new_bucket()}/bench"
    env = proxy.env | {
        "TOPICS_COLD_URL": url,
        "TOPICS_HOT_RETAIN_SEGMENTS": "0",
        "TOPICS_CHECKPOINT_INTERVAL_MS": "500",
        "TOPICS_COLD_READ_TIMEOUT_MS": "60000",
    }
    print(type(server).__name__)
    try:
        with Service(shards=1, frontends=1, wal_file_bytes=None, env=env) as service:
            data = "x" * 100
            body = {"records": [{"data": data}] * BATCH}
            for _ in range(records // BATCH):
                service.client.post("/v0/topics/t", json=body).raise_for_status()
            segments = records // 10_000
            os.environ.update(proxy.env)
            store = BucketStore(f"{url}/topics", 30_000)
            seen = [0]

            def all_cold() -> bool:
                with proxy.lock:
                    puts, before = proxy.requests["PUT"], seen[0]
                seen[0] = puts
                time.sleep(0.5)
                return puts >= 3 * segments and puts == before

            poll("relocation", all_cold, DEADLINE_S)
            show(f"write {records} records of 100 bytes", proxy)
            objects = store.list("")
            print(f"  {len(objects)} objects, {sum(map(store.len, objects))} bytes")
            for delay_s in (DELAY_S, 0.0):
                service.restart()
                time.sleep(1)
                proxy.delay_s = delay_s
                proxy.reset()
                started = time.perf_counter()
                read = sequential(service.client, segments * 10_000)
                took_s = time.perf_counter() - started
                show(f"read {read} records in order, +{delay_s * 1000:.0f} ms: {read / took_s:.0f} records/s", proxy)
            service.restart()  # nothing is cached
            time.sleep(1)
            proxy.delay_s = DELAY_S
            proxy.reset()
            chosen = random.Random(18)
            started = time.perf_counter()
            for _ in range(RANDOM_READS):
                at = chosen.randrange(segments * 10_000)
                service.client.post("/v0/topics/t/diff", json={"from_seq": at, "limit": 1}).raise_for_status()
            took_s = time.perf_counter() - started
            show(f"read {RANDOM_READS} single records, +20 ms: {RANDOM_READS / took_s:.0f} reads/s", proxy)
            proxy.delay_s = 0.0
    finally:
        proxy.close()
        server.close()


def sequential(client: httpx.Client, end: int) -> int:
    at = 0
    while at < end:
        page = client.post("/v0/topics/t/diff", json={"from_seq": at, "limit": 1000}).raise_for_status().content
        found = _NEXT.search(page)
        assert found is not None
        at = int(found[1])
    return at


def show(what: str, proxy: Proxy) -> None:
    with proxy.lock:
        print(
            f"{what}: {dict(proxy.requests)}, up {proxy.sent_bytes} bytes, down {proxy.received_bytes} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RECORDS)
