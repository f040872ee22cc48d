"""Records as columns: the schema that users see, and the Arrow batches that fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from topics.client import Record
from topics.spark.errors import OptionError
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
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        self._with_tags = options.include_tags
        self._with_gaps = options.tombstones == "rows"
        self._parsed = ParsedColumns(schema.fields[_RECORD_COUNT + (_GAP_COUNT if self._with_gaps else 0) :])

    def records(self, topic: str, records: Sequence[Record]) -> pa.RecordBatch:
        count = len(records)
        texts = [str(record.raw, "utf-8") for record in records]
        columns: list[pa.Array] = [
            pa.repeat(pa.scalar(topic, pa.string()), count),
            pa.array([record.seq for record in records], pa.int64()),
            pa.array([record.ts * 1000 for record in records], pa.int64()).cast(self._arrow.field(2).type),
            pa.array([record.node for record in records], pa.string()),
            pa.array([record.tag if self._with_tags else None for record in records], pa.string()),
            pa.array(texts, pa.string()),
            pa.array(
                [None if record.meta is None else list(record.meta.items()) for record in records],
                self._arrow.field(6).type,
            ),
        ]
        if self._with_gaps:
            columns.append(pa.repeat(pa.scalar("record", pa.string()), count))
            columns += [pa.nulls(count, self._arrow.field(at).type) for at in range(8, 11)]
        columns += self._parsed.of([record.raw for record in records], self._arrow)
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
