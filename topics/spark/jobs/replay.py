"""`topics spark replay`: a lake (or any Parquet with the column `data`) back into a topic, each row once.

Files are read as a stream, so a run that dies goes on where it stopped and repeats nothing: its batches are the sink's.
The rate is that of the whole job; rows of a batch become visible together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topics.spark.jobs import program

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KEPT = ("data", "tag", "node", "meta")


def main(arguments: Sequence[str] | None = None) -> int:
    made = program.parser("replay", "Replay Parquet into a topic, rate-limited, each row once.")
    made.add_argument("--lake", required=True, help="the directory of Parquet files")
    made.add_argument("--to-topic", required=True, help="the topic to write")
    made.add_argument("--checkpoint", required=True, help="directory where the job keeps how far it is")
    made.add_argument("--rate", type=int, default=0, metavar="ROWS", help="rows a second, 0: as fast as it goes")
    made.add_argument("--files-per-batch", type=int, default=16, help="files that become visible together")
    return program.run("replay", made, _work, arguments)


def _work(spark: SparkSession, options: argparse.Namespace) -> dict[str, Any]:
    schema = spark.read.parquet(options.lake).schema
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", options.files_per_batch).parquet(options.lake)
    if "kind" in schema.fieldNames():
        rows = rows.where("kind = 'record'")
    if options.rate:
        # One task, so that the rate is one.
        rows = rows.coalesce(1)
    writer = (
        rows.select(*[name for name in _KEPT if name in schema.fieldNames()])
        .writeStream.format("topics")
        .options(**program.service_options(options), topic=options.to_topic, checkpointLocation=options.checkpoint)
    )
    if options.rate:
        writer = writer.option("recordsPerSecond", options.rate)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return {"to_topic": options.to_topic, "rows": sum(one["numInputRows"] for one in query.recentProgress)}


if __name__ == "__main__":
    sys.exit(main())
