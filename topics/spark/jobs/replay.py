"""`topics spark replay`: a lake (any Parquet with the column `data`), or a topic, back into a topic, each row once.

The source is read as a stream whose batches are those of the sink, so after a crash the next run goes on where the last
one stopped, and repeats nothing. The rate is that of the whole job; the rows of a batch become visible together.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from glob import glob
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from topics.spark.jobs import delta, program
from topics.spark.options import OptionError

_KEPT = ("data", "tag", "node", "meta")
BATCH_MAX_S = 600
"""The longest that a batch takes at --rate: staged rows expire (TOPICS_STAGE_TTL_MS, an hour)."""
_ROUTER_KEY = "_topics_router"  # the key of `meta` that only routers may write (api §6)


def main(arguments: Sequence[str] | None = None) -> int:
    made = program.parser("replay", "Replay Parquet or a topic into a topic, rate-limited, each row once.")
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--lake", help="the directory of Parquet files")
    source.add_argument("--from-topic", help="the topic to read, from its first record to its present head")
    made.add_argument("--data-dir", default=None, help="with --from-topic: TOPICS_DATA_DIR as it is mounted here")
    made.add_argument(
        "--cold-dir", default=None, help="with --from-topic: TOPICS_COLD_DIR as it is mounted here, or TOPICS_COLD_URL"
    )
    made.add_argument("--to-topic", required=True, help="the topic to write")
    made.add_argument("--checkpoint", required=True, help="directory for the job's position")
    made.add_argument("--rate", type=int, default=0, metavar="ROWS", help="rows a second; 0: no limit")
    made.add_argument("--files-per-batch", type=int, default=16, help="files of --lake that become visible together")
    made.add_argument(
        "--records-per-batch", type=int, default=100_000, help="records of --from-topic that become visible together"
    )
    return program.run("replay", made, _work, arguments, check=_check)


def _check(options: argparse.Namespace) -> None:
    if options.from_topic is None and (options.data_dir or options.cold_dir):
        raise OptionError("--data-dir and --cold-dir need --from-topic; a lake has its own files")
    if options.from_topic is not None and options.from_topic == options.to_topic:
        raise OptionError(
            f"--from-topic and --to-topic are both {options.to_topic!r}: the job would read what it writes"
        )
    if options.lake is not None and delta.is_table(options.lake):
        raise OptionError(
            f"--lake {options.lake} is a Delta table, whose files cannot be read as a stream: replay its topic instead"
        )


def _work(spark: SparkSession, options: argparse.Namespace) -> dict[str, Any]:
    rows = _of_lake(spark, options) if options.lake is not None else _of_topic(spark, options)
    if options.rate:
        # One task: the rate is that of each task.
        rows = rows.coalesce(1)
    writer = (
        _replayable(rows)
        .writeStream.format("topics")
        .options(**program.service_options(options), topic=options.to_topic, checkpointLocation=options.checkpoint)
    )
    if options.rate:
        writer = writer.option("recordsPerSecond", options.rate)
    query = program.run_to_end(writer)
    return {"to_topic": options.to_topic, "rows": sum(one["numInputRows"] for one in query.recentProgress)}


def _of_lake(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    begun = f"{options.checkpoint}/metadata"  # the first run makes it
    compacted = glob(f"{options.lake}/topic=*/date=*/batch=c*") if os.path.exists(begun) else []
    if any(os.path.getmtime(path) > os.path.getmtime(begun) for path in compacted):
        what = f"--lake {options.lake} was compacted since this checkpoint was made, so its rows would come again"
        raise OptionError(f"{what}: replay the topic instead, or all rows with another checkpoint into another topic")
    schema = spark.read.parquet(options.lake).schema
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", options.files_per_batch).parquet(options.lake)
    return rows.where("kind = 'record'") if "kind" in schema.fieldNames() else rows


def _of_topic(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    source = program.service_options(options) | {"subscribe": options.from_topic, "startingOffsets": "earliest"}
    if options.data_dir is not None:
        source |= {"mode": "segments", "dataDir": options.data_dir}
        source |= {} if options.cold_dir is None else {"coldDir": options.cold_dir}
    reader = spark.readStream.format("topics").options(**source)
    most = min(options.records_per_batch, (options.rate or options.records_per_batch) * BATCH_MAX_S)
    return reader.option("maxOffsetsPerTrigger", most).load()


def _replayable(rows: DataFrame) -> DataFrame:
    """Return the columns of `rows` that are part of a record."""
    kept = rows.select(*[name for name in _KEPT if name in rows.columns])
    if "meta" not in rows.columns:
        return kept
    return kept.withColumn("meta", f.map_filter("meta", lambda key, _: key != _ROUTER_KEY))


if __name__ == "__main__":
    sys.exit(main())
