"""A batch read in a process of its own, whose executors are to be killed: every row's seq and data, as Parquet."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

from topics.spark import SMALL


def main(master: str, out: str, options: str) -> None:
    """Each of `options` (JSON, a list) is one reading, into <out>/<number>; it is said when one begins."""
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    # A task is run again as often as it is killed, also where one executor fails many of them.
    more = {"spark.task.maxFailures": "50", "spark.deploy.maxExecutorRetries": "-1", "spark.executor.memory": "512m"}
    for name, value in (SMALL | more).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    for number, given in enumerate(json.loads(options)):
        print(f"reading {number}", flush=True)
        frame = spark.read.format("topics").options(**given).load()
        frame.select("seq", "data").write.parquet(f"{out}/{number}")
    print("read", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
