"""Records as columns: the schema that users see, and the Arrow batches that fill it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from topics.client import Record
from topics.spark.errors import OptionError
from topics.spark.meta_arrow import meta_array
from topics.spark.offsets import Gap
from topics.spark.options import ReadOptions
from topics.spark.parsed import ParsedColumns

RECORD_COLUMNS: Final = (
    "topic STRING, seq BIGINT, timestamp TIMESTAMP, node STRING, tag STRING, data STRING, meta MAP<STRING, STRING>"
)
GAP_COLUMNS: Final = "kind STRING, gap_from BIGINT, gap_to BIGINT, reason STRING"
_RECORD_COUNT: Final = 7
_GAP_COUNT: Final = 4


def schema_ddl(options: ReadOptions) -> str:
    """The columns of a read; `kind` and the gap's come with `tombstones=rows`, parsed ones last."""
    parts = [RECORD_COLUMNS]
    if options.tombstones == "rows":
        parts.append(GAP_COLUMNS)
    if options.parsed_schema is not None:
        parts.append(options.parsed_schema)
    return ", ".join(parts)


class Columns:
    """Builds batches of one schema, which `schema_ddl` described."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        names = schema.fieldNames()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise OptionError(
                f"option schema: {', '.join(twice)} would be there twice; leave it out, or parse the column data "
                "with from_json under a name of your own"
            )
        self._arrow = _arrow_schema(schema)
        self._with_tags = options.include_tags
        self._with_gaps = options.tombstones == "rows"
        self._parsed = ParsedColumns(schema.fields[_RECORD_COUNT + (_GAP_COUNT if self._with_gaps else 0) :])

    def records(self, topic: str, records: Sequence[Record]) -> pa.RecordBatch:
        return self.from_arrays(
            topic,
            pa.array([record.seq for record in records], pa.int64()),
            pa.array([record.ts for record in records], pa.int64()),
            pa.array([record.node for record in records], pa.string()),
            pa.array([record.tag for record in records], pa.string()),
            pa.array([str(record.raw, "utf-8") for record in records], pa.string()),
            _meta_of(records),
        )

    def from_arrays(
        self,
        topic: str,
        seq: pa.Array,
        ts_ms: pa.Array,
        node: pa.Array,
        tag: pa.Array,
        data: pa.Array,
        meta: pa.Array,
    ) -> pa.RecordBatch:
        """Of columns that are there already; `data` is JSON text."""
        count = len(seq)
        times = pc.multiply(ts_ms, 1000).cast(self._arrow.field(2).type)
        if not self._with_tags:
            tag = pa.nulls(count, pa.string())
        topics = pa.repeat(pa.scalar(topic, pa.string()), count)
        columns: list[pa.Array] = [topics, seq, times, node, tag, data, meta.cast(self._arrow.field(6).type)]
        if self._with_gaps:
            columns.append(pa.repeat(pa.scalar("record", pa.string()), count))
            columns += [pa.nulls(count, self._arrow.field(at).type) for at in range(8, 11)]
        columns += self._parsed.of(data, self._arrow)
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def gap(self, topic: str, gap: Gap) -> pa.RecordBatch:
        """One row that stands for what cannot be read."""
        assert self._with_gaps
        row = {
            "topic": topic,
            "kind": "gap",
            "gap_from": gap.first_seq,
            "gap_to": gap.last_seq,
            "reason": gap.reason,
        }
        return pa.RecordBatch.from_pylist([row], schema=self._arrow)


def _meta_of(records: Sequence[Record]) -> pa.Array:
    with_meta = [(number, record.meta) for number, record in enumerate(records) if record.meta is not None]
    numbers = np.fromiter((number for number, _ in with_meta), np.int64, len(with_meta))
    return meta_array(len(records), numbers, [meta for _, meta in with_meta])


def _arrow_schema(schema: StructType) -> pa.Schema:
    """As Spark wants it. Before 4.2 the zone is no parameter, and UTC."""
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)
