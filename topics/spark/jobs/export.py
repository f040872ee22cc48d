"""`topics spark export`: topics into a lake of Parquet files, incrementally, each record once.

    <out>/topic=<name>/date=<day>/batch=<n>/part-….parquet        n: the query's batch, 10 digits
    <out>/topic=<name>/date=<day>/batch=c<n>/…                    batches up to n, compacted
    <out>/_checkpoint                                             the position for the next run

A batch overwrites the files of its earlier attempt with the same records, so repeating a run that died makes the same
files. Readers of Parquet ignore names with `_`. With `--format delta` the lake is a Delta table: `delta.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from topics.spark.jobs import delta, program
from topics.spark.jobs.compaction import compact


def main(arguments: Sequence[str] | None = None) -> int:
    made = program.parser("export", "Export topics to partitioned Parquet (or Delta), incrementally, each record once.")
    program.topics_arguments(made)
    made.add_argument("--out", required=True, help="the directory of the lake")
    made.add_argument("--format", choices=("parquet", "delta"), default="parquet", help="delta: needs topicsd[delta]")
    made.add_argument("--max-records", type=int, default=1_000_000, help="records a batch")
    made.add_argument("--schema", default=None, help="DDL of columns to parse out of data")
    made.add_argument("--tombstones", choices=("fail", "rows", "ignore"), default="fail", help="what to do with gaps")
    made.add_argument("--compact", type=int, default=0, metavar="FILES", help="merge days of more files than this")
    return program.run("export", made, _work, arguments, check=_check)


def _check(options: argparse.Namespace) -> None:
    if options.format == "delta":
        delta.check(options.out)


def _work(spark: SparkSession, options: argparse.Namespace) -> dict[str, Any]:
    written = export(
        spark,
        program.source_options(options) | ({} if options.schema is None else {"schema": options.schema}),
        options.out,
        max_records=options.max_records,
        tombstones=options.tombstones,
        format=options.format,
    )
    days = 0
    if options.compact and options.format == "delta":
        days = delta.compact(options.out, options.compact)
    elif options.compact:
        days = compact(spark, options.out, options.compact)
    return {"out": options.out, "records": written, "days_compacted": days}


def export(
    spark: SparkSession,
    source: dict[str, str],
    out: str,
    *,
    max_records: int = 1_000_000,
    tombstones: str = "fail",
    format: str = "parquet",
) -> int:
    """Export the records that were not exported before; return how many rows."""
    written = 0
    append = delta.DeltaLake(spark, out).append if format == "delta" else partial(_overwrite, out)

    def write(batch: DataFrame, batch_id: int) -> None:
        nonlocal written
        frame = batch.persist()
        try:
            rows = frame.count()
            if rows:
                append(frame, batch_id)
            written += rows
        finally:
            frame.unpersist()

    frame = (
        spark.readStream.format("topics")
        .options(**source)
        .options(startingOffsets="earliest", maxOffsetsPerTrigger=max_records, tombstones=tombstones)
        .load()
    )
    # A gap has no time: it goes to the day of its batch, which Spark keeps for a batch that is repeated.
    frame = frame.withColumn("date", f.to_date(f.coalesce(f.col("timestamp"), f.current_timestamp())))
    program.run_to_end(frame.writeStream.foreachBatch(write).option("checkpointLocation", f"{out}/_checkpoint"))
    return written


def _overwrite(out: str, frame: DataFrame, batch_id: int) -> None:
    writer = frame.withColumn("batch", f.lit(f"{batch_id:010d}")).write.partitionBy("topic", "date", "batch")
    writer.mode("overwrite").option("partitionOverwriteMode", "dynamic").parquet(out)


if __name__ == "__main__":
    sys.exit(main())
