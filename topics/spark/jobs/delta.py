"""An export as a Delta table (`topicsd[delta]`), each batch once: the table's log has the last one (`txn`).

    <out>/_delta_log/…                                          Delta's
    <out>/topic=<name>/date=<day>/<query>-<batch>-<n>.parquet   files in the log are the table, others are not
    <out>/_delta_staging/<query>/<batch>                        a batch that is being written

Spark's executors write the files; the driver moves them in and commits them together with delta-rs. After a crash the
next run repeats the batch: if it is not in the log, its files are written again under the same names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from topics.spark.options import OptionError, TopicsSparkError

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction

PARTITIONS: Final = ("topic", "date")
_QUERY_ID: Final = "sql.streaming.queryId"


def check(out: str) -> str:
    """Return the directory of a table. OptionError when it is not a local one, or deltalake is not installed."""
    try:
        import deltalake  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"--format delta needs the package deltalake: pip install 'topicsd[delta]' ({error})"
        ) from None
    return _directory(out)


def is_table(lake: str) -> bool:
    return "://" not in lake and os.path.isdir(os.path.join(lake, "_delta_log"))


def read(spark: SparkSession, lake: str) -> DataFrame:
    """Return the table as it is now, also to a Spark without Delta's package."""
    from deltalake import DeltaTable

    out = check(lake)
    paths = [os.path.join(out, unquote(path)) for path in _files(DeltaTable(out))["path"].to_pylist()]
    return spark.read.option("basePath", out).parquet(*paths)


def compact(out: str, files_max: int) -> int:
    """Compact every day of more than `files_max` files; return how many. Readers see the same rows throughout."""
    from deltalake import DeltaTable

    table = DeltaTable(_directory(out))
    files = _files(table)
    of_days = Counter(zip(*(files[f"partition.{name}"].cast("string").to_pylist() for name in PARTITIONS), strict=True))
    crowded = [day for day, count in of_days.items() if count > files_max]
    for day in crowded:
        table.optimize.compact([(name, "=", value) for name, value in zip(PARTITIONS, day, strict=True)])
    return len(crowded)


def _files(table: DeltaTable) -> pa.Table:
    """Return the log's entries of the table's files; `path` is a URI, relative to its directory."""
    return pa.table(table.get_add_actions(flatten=True))


class DeltaLake:
    """The table that an export appends to."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        self._spark = spark
        self._out = check(out)
        # Delta does not have INT96, Spark's default.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")

    def append(self, frame: DataFrame, batch: int) -> None:
        """Append `frame` to the table, if this batch of the running query is not in it yet."""
        from deltalake import CommitProperties, Transaction

        query = self._spark.sparkContext.getLocalProperty(_QUERY_ID)
        if query is None:
            raise TopicsSparkError(
                "Spark did not say which query this batch belongs to, so exactly once cannot be guaranteed"
            )
        table = self._table(frame)
        application = f"topics-export:{query}"
        committed = table.transaction_version(application)
        if committed is not None and committed >= batch:
            return
        staging = os.path.join(self._out, "_delta_staging", query, str(batch))
        frame.write.partitionBy(*PARTITIONS).mode("overwrite").parquet(staging)
        table.create_write_transaction(
            actions=list(self._moved_in(staging, f"{query}-{batch:010d}")),
            mode="append",
            schema=table.schema(),
            partition_by=list(PARTITIONS),
            commit_properties=CommitProperties(app_transactions=[Transaction(application, batch)]),
        )
        shutil.rmtree(os.path.dirname(staging))

    def _table(self, frame: DataFrame) -> DeltaTable:
        from deltalake import DeltaTable, Schema

        # Delta writes schemas as Spark does.
        schema = Schema.from_json(frame.schema.json())
        if not is_table(self._out):
            return DeltaTable.create(self._out, schema, mode="ignore", partition_by=list(PARTITIONS))
        table = DeltaTable(self._out)
        if table.schema() != schema:
            there, new = ([f"{field.name} {field.type}" for field in one.fields] for one in (table.schema(), schema))
            differs = ", ".join(sorted(set(there) ^ set(new)))
            raise TopicsSparkError(
                f"the Delta table {self._out} has other columns than this export ({differs}): export to another "
                "directory, or with the options as they were"
            )
        return table

    def _moved_in(self, staging: str, name: str) -> Iterator[AddAction]:
        """Move the files of a batch to their places; yield their entries in the log."""
        for directory, _, files in sorted(os.walk(staging)):
            values = dict(part.split("=", 1) for part in os.path.relpath(directory, staging).split("/") if "=" in part)
            for number, file in enumerate(sorted(file for file in files if file.endswith(".parquet"))):
                relative = os.path.join(os.path.relpath(directory, staging), f"{name}-{number}.parquet")
                path = os.path.join(self._out, relative)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.replace(os.path.join(directory, file), path)
                yield _add_action(path, relative, {key: unquote(value) for key, value in values.items()})


def _add_action(path: str, relative: str, values: dict[str, str | None]) -> AddAction:
    from deltalake.transaction import AddAction

    footer = pq.read_metadata(path)
    stats: dict[str, Any] = {"numRecords": footer.num_rows}
    seq = footer.schema.names.index("seq")
    of_groups = [footer.row_group(number).column(seq).statistics for number in range(footer.num_row_groups)]
    if of_groups and all(one is not None and one.has_min_max for one in of_groups):
        stats["minValues"] = {"seq": min(one.min for one in of_groups)}
        stats["maxValues"] = {"seq": max(one.max for one in of_groups)}
    found = os.stat(path)
    return AddAction(relative, found.st_size, values, found.st_mtime_ns // 1_000_000, True, json.dumps(stats))


def _directory(out: str) -> str:
    url = urlparse(out)
    if url.scheme not in ("", "file"):
        raise OptionError(f"--format delta writes to a directory of this machine or a mounted one, not to {out!r}")
    return os.path.abspath(unquote(url.path) if url.scheme else out)
