"""Records as columns: the schema that users see, and the Arrow batches that fill it.

The option `schema` adds parsed columns: top-level fields of `data` as Spark types. They follow Spark's `from_json` in
its permissive mode: a field that is missing or does not fit is null, never an error. A STRING takes any value: a text
as it is, everything else as JSON.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from topics.client import Record
from topics.spark.offsets import Gap
from topics.spark.options import ReadOptions
from topics.spark.spark_errors import OptionError

META: Final = pa.map_(pa.string(), pa.string())
_encode = msgspec.json.Encoder().encode


def meta_array(count: int, numbers: npt.NDArray[np.int64], metas: Sequence[Mapping[str, Any]]) -> pa.Array:
    """Returns a column of `count`, null but for `metas` at the ascending `numbers`. A value that is no string becomes
    JSON: an exactly_once router writes an object (api §6).
    """
    if not len(numbers):
        return pa.nulls(count, META)
    sizes = np.zeros(count, np.int64)
    sizes[numbers] = np.fromiter(map(len, metas), np.int64, len(metas))
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    missing = np.ones(count + 1, np.bool_)
    missing[numbers] = False
    missing[-1] = False
    values = list(chain.from_iterable(meta.values() for meta in metas))
    try:
        texts = pa.array(values, pa.string())
    except pa.ArrowTypeError:
        texts = pa.array(
            [value if isinstance(value, str) else _encode(value).decode() for value in values], pa.string()
        )
    names = pa.array(list(chain.from_iterable(metas)), pa.string())
    return pa.MapArray.from_arrays(pa.array(offsets, mask=missing), names, texts)


Convert = Callable[[Any], Any]

_INTEGERS: dict[type[types.DataType], int] = {
    types.ByteType: 8,
    types.ShortType: 16,
    types.IntegerType: 32,
    types.LongType: 64,
}
_decode = msgspec.json.Decoder().decode


class ParsedColumns:
    """Raises OptionError for a type that JSON cannot become."""

    def __init__(self, fields: Sequence[types.StructField]) -> None:
        self._fields = [(field.name, _converter(field.dataType, field.name)) for field in fields]

    def of(self, texts: pa.Array, schema: pa.Schema) -> list[pa.Array]:
        """A column for each field, of the type that `schema` has for its name."""
        if not self._fields:
            return []
        values = [_decode(text) for text in texts.to_pylist()]
        objects = [value if isinstance(value, dict) else {} for value in values]
        return [
            pa.array([convert(value.get(name)) for value in objects], schema.field(name).type)
            for name, convert in self._fields
        ]


def _converter(kind: types.DataType, name: str) -> Convert:
    if isinstance(kind, types.StringType):
        return _text
    if type(kind) in _INTEGERS:
        return _integer(_INTEGERS[type(kind)])
    if isinstance(kind, types.DoubleType | types.FloatType):
        return _number
    if isinstance(kind, types.BooleanType):
        return lambda value: value if isinstance(value, bool) else None
    if isinstance(kind, types.TimestampType):
        return _timestamp
    if isinstance(kind, types.DateType):
        return _date
    if isinstance(kind, types.DecimalType):
        return _decimal(kind.precision, kind.scale)
    if isinstance(kind, types.ArrayType):
        return _array(_converter(kind.elementType, name))
    if isinstance(kind, types.MapType) and isinstance(kind.keyType, types.StringType):
        return _map(_converter(kind.valueType, name))
    if isinstance(kind, types.StructType):
        return _struct([(field.name, _converter(field.dataType, field.name)) for field in kind.fields])
    raise OptionError(f"option schema: {name} is of type {kind.simpleString()}, which data cannot be parsed into")


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _encode(value).decode()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(bits: int) -> Convert:
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def convert(value: Any) -> int | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return value if fits else None

    return convert


def _decimal(precision: int, scale: int) -> Convert:
    quantum = decimal.Decimal(1).scaleb(-scale)
    context = decimal.Context(prec=precision, rounding=decimal.ROUND_HALF_UP)

    def convert(value: Any) -> decimal.Decimal | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        try:
            return decimal.Decimal(repr(value)).quantize(quantum, context=context)
        except decimal.InvalidOperation:
            return None

    return convert


def _timestamp(value: Any) -> datetime.datetime | None:
    """ISO 8601; without a zone it is UTC."""
    if not isinstance(value, str):
        return None
    try:
        time = datetime.datetime.fromisoformat(value)
    except ValueError:
        return None
    return time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time


def _date(value: Any) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _array(convert: Convert) -> Convert:
    return lambda value: [convert(one) for one in value] if isinstance(value, list) else None


def _map(convert: Convert) -> Convert:
    return lambda value: [(key, convert(one)) for key, one in value.items()] if isinstance(value, dict) else None


def _struct(fields: list[tuple[str, Convert]]) -> Convert:
    def to_struct(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        return {name: convert(value.get(name)) for name, convert in fields}

    return to_struct


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


class ColumnBuilder:
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
        """Makes a batch of columns that are there already; `data` is JSON text."""
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
        """Makes the one row that stands for records that cannot be read."""
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
    """Returns the type as Spark wants it. Before 4.2 the zone is no parameter, and UTC."""
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)
