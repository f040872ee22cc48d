"""The data source `topics` as Spark sees it. Imported by every look-up of a source, so it imports little itself."""

from __future__ import annotations

from collections.abc import MutableMapping

import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from topics.spark.errors import TopicsSparkError
from topics.spark.options import ReadOptions, read_options, write_options

_SINCE = (4, 2)


class TopicsDataSource(DataSource):
    """`spark.read.format("topics")`, `spark.readStream`, `df.write`, `df.writeStream`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < _SINCE:
            raise TopicsSparkError(
                f"topics need PySpark 4.2 or newer, this is {pyspark.__version__}: sources in Python have no admission "
                "control, no AvailableNow and no Arrow writers for streams before"
            )
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "topics"

    def schema(self) -> str:
        from topics.spark.columns import schema_ddl

        return schema_ddl(self._read_options())

    def reader(self, schema: StructType) -> DataSourceReader:
        from topics.spark.batch import BatchReader, PushdownBatchReader

        options = self._read_options()
        if options.max_offsets_per_trigger is not None:
            raise TopicsSparkError("maxOffsetsPerTrigger is for streams; a batch reads up to endingOffsets")
        # Spark 4.3 keeps what the filters of one query left and gives it to the next query of the same DataFrame, also
        # to one without filters: rows would be missing in silence. So filters are taken only from who asks for that.
        return (PushdownBatchReader if options.push_filters else BatchReader)(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 — Spark's name
        from topics.spark.stream import StreamReader

        options = self._read_options()
        if options.ending is not None:
            raise TopicsSparkError("endingOffsets is for batches; a stream ends with Trigger.AvailableNow")
        return StreamReader(schema, options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from topics.spark.sink import BatchWriter

        if overwrite:
            raise TopicsSparkError("a topic is not overwritten: use mode('append'), or delete the topic first")
        return BatchWriter(schema, write_options(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 — Spark's name
        from topics.spark.sink import StreamWriter

        if overwrite:
            raise TopicsSparkError("outputMode complete would replace the topic at every batch: use append or update")
        return StreamWriter(schema, write_options(self.options))

    def _read_options(self) -> ReadOptions:
        return read_options(self.options)
