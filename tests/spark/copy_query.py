"""A query in a process of its own, to be killed: copies one topic into another, 50 records a batch, and ends."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from topics.spark import SMALL
from topics.spark.jobs.program import run_to_end


def main(url: str, source: str, sink: str, checkpoint: str) -> None:
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    for name, value in SMALL.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    frame = (
        spark.readStream.format("topics")
        .options(url=url, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="50", minPartitions="2")
        .load()
    )
    run_to_end(
        # Other tasks than those that read, and rows in whatever order they arrive.
        frame.selectExpr("data", "tag")
        .repartition(3)
        .writeStream.format("topics")
        .options(url=url, topic=sink, checkpointLocation=checkpoint, recordsPerStage="7")
    )
    print("copied", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
