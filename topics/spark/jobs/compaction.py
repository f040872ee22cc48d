"""Compaction: the many small Parquet files of a day become one. It can be killed at any step and repeated.

    1. the day's rows are written to <out>/_compacting/<topic>/<date>
    2. <out>/_compaction.json names the directories that it replaces           ← a later run carries it out from here on
    3. the new directory is moved in; the old ones and the plan are removed

A reader that lists the directory between the move and the removal sees rows twice: compact while nobody reads.
"""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import SparkSession


def compact(spark: SparkSession, out: str, files_max: int) -> int:
    """Compact every day of more than `files_max` files; return how many."""
    lake = Lake(spark, out)
    lake.finish()
    days = 0
    for topic in lake.directories(out, "topic="):
        for day in lake.directories(topic, "date="):
            batches = lake.directories(day, "batch=")
            files = sum(map(lake.count_files, batches))
            if len(batches) > 1 and files > files_max:
                lake.compact_day(day, batches)
                days += 1
    return days


class Lake:
    """The lake's directories, on any file system of Hadoop, and the plan of a compaction in it."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        jvm: Any = spark.sparkContext._jvm
        self._spark = spark
        self._out = out.rstrip("/")
        self._path = jvm.org.apache.hadoop.fs.Path
        self._fs = self._path(self._out).getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
        self._plan = f"{self._out}/_compaction.json"

    def directories(self, path: str, prefix: str) -> list[str]:
        if not self._fs.exists(self._path(path)):
            return []
        found = [one.getPath() for one in self._fs.listStatus(self._path(path)) if one.isDirectory()]
        return sorted(one.toString() for one in found if one.getName().startswith(prefix))

    def count_files(self, path: str) -> int:
        names = [one.getPath().getName() for one in self._fs.listStatus(self._path(path))]
        return sum(not name.startswith(("_", ".")) for name in names)

    def compact_day(self, day: str, batches: list[str]) -> None:
        names = [batch.rsplit("/", 1)[1].removeprefix("batch=").removeprefix("c") for batch in batches]
        new = f"{self._out}/_compacting/{'/'.join(day.rsplit('/', 2)[1:])}"
        frame = self._spark.read.parquet(*batches)
        frame.coalesce(1).write.mode("overwrite").parquet(new)
        self.write_plan({"new": new, "place": f"{day}/batch=c{max(names)}", "old": batches})
        self.finish()

    def finish(self) -> None:
        """Carry out the plan, if there is one, from the step at which it was interrupted."""
        if not self._fs.exists(self._path(self._plan)):
            return
        stream = self._fs.open(self._path(self._plan))
        plan = json.loads(bytes(stream.readAllBytes()).decode())
        stream.close()
        new, place = self._path(plan["new"]), self._path(plan["place"])
        if self._fs.exists(new):
            self._fs.delete(place, True)  # an earlier compaction has this name; it is among the old directories
            if not self._fs.rename(new, place):
                raise OSError(f"{plan['new']} cannot be moved to {plan['place']}")
        for old in plan["old"]:
            if old != plan["place"]:
                self._fs.delete(self._path(old), True)
        self._fs.delete(self._path(self._plan), False)

    def write_plan(self, plan: dict[str, Any]) -> None:
        tmp = self._path(f"{self._plan}.tmp")
        stream = self._fs.create(tmp, True)
        stream.write(bytearray(json.dumps(plan).encode()))
        stream.close()
        if not self._fs.rename(tmp, self._path(self._plan)):
            raise OSError(f"{self._plan} cannot be written")
