"""`topics spark rollup`: events per tag and window of event time, from a live topic or from an exported lake.

A live topic is followed with a watermark. A window is written once, when the watermark has passed its end; events that
come later are left out and counted. From a lake each run computes all windows completely.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from topics.spark.jobs import delta, program
from topics.spark.jobs.export import export
from topics.spark.options import OptionError


def main(arguments: Sequence[str] | None = None) -> int:
    made = program.parser("rollup", "Count events by tag and window of event time, into a topic and into Parquet.")
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--topics", help="live topics, comma-separated")
    which.add_argument("--lake", help="the directory of an export")
    made.add_argument("--window", default="7 days", help="length of a window")
    made.add_argument(
        "--start", default="4 days", help="offset of windows from 1970-01-01, a Thursday: 4 days = Monday"
    )
    made.add_argument("--watermark", default="1 day", help="how long a window waits for late events")
    made.add_argument("--time-field", default=None, help="field of data with the event's time, s since the epoch")
    made.add_argument("--checkpoint", default=None, help="directory of the query's state (live topics)")
    made.add_argument("--to-topic", default=None, help="topic for the counts")
    made.add_argument("--to-parquet", default=None, help="directory for the counts")
    return program.run("rollup", made, _work, arguments, check=_check)


def _check(options: argparse.Namespace) -> None:
    if options.to_topic is None and options.to_parquet is None:
        raise OptionError("nowhere to write: give --to-topic, --to-parquet or both")
    if options.lake is None and (options.checkpoint is None or options.to_topic is None):
        raise OptionError("a live roll-up needs --checkpoint and --to-topic; --to-parquet is written from that topic")


def _work(spark: SparkSession, options: argparse.Namespace) -> dict[str, Any]:
    time = event_time(options.time_field)
    if options.lake is not None:
        events = delta.read(spark, options.lake) if delta.is_table(options.lake) else spark.read.parquet(options.lake)
        counts = by_window(events, time, options.window, options.start).persist()
        if options.to_parquet is not None:
            counts.coalesce(1).write.mode("overwrite").parquet(options.to_parquet)
        if options.to_topic is not None:
            _records(counts).write.format("topics").options(
                **program.service_options(options), topic=options.to_topic
            ).mode("append").save()
        return {"windows": counts.count(), "late_events": 0}
    source = program.service_options(options) | {"subscribe": options.topics, "startingOffsets": "earliest"}
    events = spark.readStream.format("topics").options(**source).load()
    events = events.withColumn("event_time", time).withWatermark("event_time", options.watermark)
    writer = (
        _records(by_window(events, f.col("event_time"), options.window, options.start))
        .writeStream.format("topics")
        .options(**program.service_options(options), topic=options.to_topic, checkpointLocation=options.checkpoint)
    )
    query = program.run_to_end(writer.outputMode("append"))
    states = [state for progress in query.recentProgress for state in progress["stateOperators"]]
    report = {
        "windows": sum(progress["sink"].get("numOutputRows", -1) for progress in query.recentProgress),
        "late_events": sum(state["numRowsDroppedByWatermark"] for state in states),
    }
    if options.to_parquet is not None:
        export(spark, program.service_options(options) | {"subscribe": options.to_topic}, options.to_parquet)
    return report


def event_time(field: str | None) -> Column:
    """Return the time of an event: a field of its data, or else the time at which it was written."""
    if field is None:
        return f.col("timestamp")
    return f.timestamp_seconds(f.get_json_object("data", f"$.{field}").cast("double"))


def by_window(events: DataFrame, time: Column, window: str, start: str) -> DataFrame:
    """Return (start, end, tag, events); null counts as a tag."""
    counted = events.groupBy(f.window(time, window, startTime=start), "tag").agg(f.count("*").alias("events"))
    return counted.select(f.col("window.start").alias("start"), f.col("window.end").alias("end"), "tag", "events")


def _records(counts: DataFrame) -> DataFrame:
    return counts.select(f.to_json(f.struct("start", "end", "tag", "events")).alias("data"), "tag")


if __name__ == "__main__":
    sys.exit(main())
