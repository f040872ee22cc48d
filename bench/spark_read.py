"""`python -m bench.spark_read`: a topic into Spark over HTTP and from its segments, beside Spark's own file source.

A topic of records of about 100 bytes with tags is written, sealed, and read by two queries: one that counts rows, and
one that needs every column. The same rows as JSON lines and as Parquet are read by the same queries. Of several
readings the fastest counts. All of it runs on this machine, so service and Spark share its cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.machine import describe
from tests.harness import Service, poll
from tests.spark.conftest import make_java_home, spark_environment
from topics.client import Client, NewRecord, calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

TOPIC: Final = "bench"
BATCH: Final = 1000
SERVICE: Final = {"TOPICS_CHECKPOINT_INTERVAL_MS": "1000"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.spark_read", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--readings", type=int, default=2, help="of each; the fastest counts")
    parser.add_argument("--quick", action="store_true", help="200,000 records, read once: does everything run?")
    options = parser.parse_args()
    records, readings = (200_000, 1) if options.quick else (options.records, options.readings)
    root = Path(tempfile.mkdtemp(prefix="topics-spark-bench-"))
    os.environ |= spark_environment(make_java_home(root / "java", flags=""))
    load_before = os.getloadavg()[0]
    try:
        with Service(env=SERVICE, shards=1, frontends=1, wal_file_bytes=None) as service:
            fill(service, records)
            spark = session()
            try:
                seconds = measure(spark, service, root, records, readings)
            finally:
                spark.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    machine = ", ".join(f"{name} {value}" for name, value in describe(Path(tempfile.gettempdir())).items())
    loads = f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M+00:00}; {machine}, {loads}; {records} records, local[2]\n")
    print("| | count | every column |\n|---|---|---|")
    for name, (count_s, every_s) in seconds.items():
        cells = (f"{records / took_s / 1000:.0f} k rows/s, {took_s:.1f} s" for took_s in (count_s, every_s))
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


def fill(service: Service, records: int) -> None:
    """Write the records, and wait until all but the last are in segments."""
    with Client(service.url) as client:
        for first in range(0, records, BATCH):
            batch = [
                NewRecord({"n": n, "user": f"user-{n % 977}", "text": "abcdefgh" * 6}, tag=f"t{n % 16}")
                for n in range(first, min(records, first + BATCH))
            ]
            client.append(TOPIC, batch)
        behind = 20_000
        poll(
            "segments",
            lambda: client.call(calls.segments(TOPIC, records - behind)).http_from_seq > records - behind,
            300.0,
            0.2,
        )


def session() -> SparkSession:
    """Make a session as on a small machine; the environment is that of `spark_environment`."""
    from pyspark.sql import SparkSession

    from topics.spark import SMALL, register

    builder = SparkSession.builder.master("local[2]").appName("bench")
    for name, value in (SMALL | {"spark.ui.enabled": "false"}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    return spark


def measure(
    spark: SparkSession, service: Service, root: Path, records: int, readings: int
) -> dict[str, tuple[float, float]]:
    """Return the seconds of a count and of a query that needs every column, by way of reading."""
    http = {"url": service.url, "subscribe": TOPIC}
    files = http | {"mode": "segments", "dataDir": str(service.data_dir)}
    plain = spark.read.format("topics").options(**files).load().drop("meta")
    plain.write.parquet(str(root / "parquet"))
    plain.write.json(str(root / "json"))
    frames: dict[str, Callable[[], DataFrame]] = {
        "topics, mode=http": lambda: spark.read.format("topics").options(**http).load(),
        "topics, mode=segments": lambda: spark.read.format("topics").options(**files).load(),
        "JSON lines": lambda: spark.read.schema(plain.schema).json(str(root / "json")),
        "Parquet": lambda: spark.read.parquet(str(root / "parquet")),
    }
    return {
        name: (
            min(_count_s(make(), records) for _ in range(readings)),
            min(_every_column_s(make(), records) for _ in range(readings)),
        )
        for name, make in frames.items()
    }


def _count_s(frame: DataFrame, records: int) -> float:
    started = time.perf_counter()
    rows = frame.count()
    took_s = time.perf_counter() - started
    assert rows == records, rows
    return took_s


def _every_column_s(frame: DataFrame, records: int) -> float:
    from pyspark.sql import functions as f

    started = time.perf_counter()
    row = frame.agg(
        f.count("*").alias("rows"),
        f.sum("seq").alias("seqs"),
        f.sum(f.length("data")).alias("chars"),
        f.max("timestamp"),
        f.approx_count_distinct("tag"),
        f.max("topic"),
        f.max("node"),
    ).first()
    took_s = time.perf_counter() - started
    assert row is not None
    assert (row.rows, row.seqs) == (records, records * (records + 1) // 2), row
    return took_s


if __name__ == "__main__":
    sys.exit(main())
