"""The data source `topics` as Spark sees it. Every look-up of any source imports it, so it imports little itself."""

from __future__ import annotations

import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from topics.spark.options import TopicsSparkError, read_options, write_options


class TopicsDataSource(DataSource):
    """`spark.read.format("topics")`, `spark.readStream`, `df.write`, `df.writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "topics"

    def schema(self) -> str:
        from topics.spark.columns import schema_ddl

        return schema_ddl(read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from topics.spark.batch import BatchReader

        options = read_options(self.options)
        if options.max_offsets_per_trigger is not None:
            raise TopicsSparkError("maxOffsetsPerTrigger is for streams; a batch reads up to endingOffsets")
        # Spark 4.3 reuses the partitions of a filtered query for the next query of the same DataFrame, even for one
        # without filters: rows would silently be missing. So filters are taken only on demand.
        if not options.push_filters:
            return BatchReader(schema, options)
        _require(
            (4, 1), "the option pushFilters", "before it Spark gives no filters to sources in Python; leave it out"
        )
        from topics.spark.pushdown import PushdownBatchReader

        return PushdownBatchReader(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 — Spark's name
        _require_streams()
        from topics.spark.spark_stream import StreamReader

        options = read_options(self.options)
        if options.ending is not None:
            raise TopicsSparkError("endingOffsets is for batches; a stream ends with Trigger.AvailableNow")
        return StreamReader(schema, options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from topics.spark.sink import BatchWriter

        if overwrite:
            raise TopicsSparkError("a topic is not overwritten: use mode('append'), or delete the topic first")
        return BatchWriter(schema, write_options(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 — Spark's name
        _require_streams()
        from topics.spark.spark_stream import StreamWriter

        if overwrite:
            raise TopicsSparkError("outputMode complete would replace the topic with every batch: use append or update")
        return StreamWriter(schema, write_options(self.options))


def _require(since: tuple[int, int], what: str, why: str) -> None:
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < since:
        wanted = ".".join(map(str, since))
        raise TopicsSparkError(f"{what}: topics need PySpark {wanted} for it, this is {pyspark.__version__}: {why}")


def _require_streams() -> None:
    why = "before it sources in Python have no admission control and no AvailableNow; batches can be read and written"
    _require((4, 2), "streams", why)
