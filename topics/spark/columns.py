"""Records as columns: the schema that users see, and the Arrow batches that fill it.

The option `schema` adds parsed columns: top-level fields of `data` as Spark types. They follow Spark's `from_json` in
its permissive mode: a field that is missing or does not fit is null, never an error. A STRING takes any value: text as
it is, anything else as JSON. A DECIMAL takes a number in a text, too, a TIMESTAMP seconds since the epoch.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

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
from topics.spark.options import OptionError, ReadOptions

META: Final = pa.map_(pa.string(), pa.string())
_encode = msgspec.json.Encoder(decimal_format="number").encode


def meta_array(count: int, numbers: npt.NDArray[np.int64], metas: Sequence[Mapping[str, Any]]) -> pa.Array:
    """Return a column of `count` rows: `metas` at the ascending `numbers`, null elsewhere; objects as JSON."""
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
_NUMBER: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

_decode = msgspec.json.Decoder().decode
_decode_exact = msgspec.json.Decoder(float_hook=decimal.Decimal).decode


class ParsedColumns:
    """Converters for the columns of the option `schema`. OptionError for a type that JSON cannot be converted to."""

    def __init__(self, fields: Sequence[types.StructField]) -> None:
        self._fields = [(field.name, _converter(field.dataType, field.name)) for field in fields]
        self._decode = _exact if any("decimal" in field.dataType.simpleString() for field in fields) else _value

    def of(self, texts: pa.Array, schema: pa.Schema) -> list[pa.Array]:
        """Return a column for each field, of the type that `schema` has for its name."""
        if not self._fields:
            return []
        values = [self._decode(text) for text in texts.to_pylist()]
        objects = [value if isinstance(value, dict) else {} for value in values]
        return [
            pa.array([convert(value.get(name)) for value in objects], schema.field(name).type)
            for name, convert in self._fields
        ]


def _value(text: str) -> Any:
    """Return a value of JSON. If one of its numbers is beyond DOUBLE, all that are not integers become Decimals."""
    try:
        return _decode(text)
    except (msgspec.ValidationError, RecursionError):
        return _exact(text)


def _exact(text: str) -> Any:
    """Return a value of JSON. Like `from_json`, return None if its nesting or a number is beyond what Python holds."""
    try:
        return _decode_exact(text)
    except (msgspec.ValidationError, decimal.InvalidOperation, RecursionError):
        return None


def _converter(kind: types.DataType, name: str) -> Convert:
    for known, convert in _SCALARS.items():
        if isinstance(kind, known):
            return convert
    if isinstance(kind, types.DecimalType):
        return _decimal(kind.precision, kind.scale)
    if isinstance(kind, types.ArrayType):
        element = _converter(kind.elementType, name)
        return lambda value: [element(one) for one in value] if isinstance(value, list) else None
    if isinstance(kind, types.MapType) and isinstance(kind.keyType, types.StringType):
        item = _converter(kind.valueType, name)
        return lambda value: [(key, item(one)) for key, one in value.items()] if isinstance(value, dict) else None
    if isinstance(kind, types.StructType):
        fields = [(field.name, _converter(field.dataType, field.name)) for field in kind.fields]
        return lambda value: (
            {name: convert(value.get(name)) for name, convert in fields} if isinstance(value, dict) else None
        )
    raise OptionError(f"option schema: {name} is of type {kind.simpleString()}, which data cannot be parsed into")


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float | decimal.Decimal) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


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
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = decimal.Decimal(value)
        if not isinstance(value, int | decimal.Decimal) or isinstance(value, bool):
            return None
        try:
            return decimal.Decimal(value).quantize(quantum, context=context)
        except decimal.InvalidOperation:
            return None

    return convert


def _timestamp(value: Any) -> datetime.datetime | None:
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return _EPOCH + datetime.timedelta(seconds=value)
        time = datetime.datetime.fromisoformat(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None
    return time.replace(tzinfo=datetime.UTC) if time is not None and time.tzinfo is None else time


def _date(value: Any) -> datetime.date | None:
    """Return the day of a date, or of a time as it is written there, whatever its zone."""
    try:
        return datetime.datetime.fromisoformat(value).date() if isinstance(value, str) and value[4:5] == "-" else None
    except ValueError:
        return None


_SCALARS: Final[dict[type[types.DataType], Convert]] = {
    types.StringType: lambda value: value if value is None or isinstance(value, str) else _encode(value).decode(),
    types.ByteType: _integer(8),
    types.ShortType: _integer(16),
    types.IntegerType: _integer(32),
    types.LongType: _integer(64),
    types.DoubleType: _number,
    types.FloatType: _number,
    types.BooleanType: lambda value: value if isinstance(value, bool) else None,
    types.TimestampType: _timestamp,
    types.DateType: _date,
}


RECORD_COLUMNS: Final = (
    "topic string, seq bigint, timestamp timestamp, node string, tag string, data string, meta map<string,string>"
)
GAP_COLUMNS: Final = "kind string, gap_from bigint, gap_to bigint, reason string"


def schema_ddl(options: ReadOptions) -> str:
    """Return the columns of a read: of records, then (with `tombstones=rows`) of gaps, then the parsed ones."""
    columns = _fixed_columns(options) + ([] if options.parsed_schema is None else [options.parsed_schema])
    return f"struct<{', '.join(columns)}>"  # of a list of columns Spark's errors would name a wrong place


def _fixed_columns(options: ReadOptions) -> list[str]:
    return RECORD_COLUMNS.split(", ") + (GAP_COLUMNS.split(", ") if options.tombstones == "rows" else [])


def check_schema(schema: StructType, options: ReadOptions) -> None:
    """Raise OptionError if a schema that a user gave to `.schema(…)` is not the one of `schema_ddl`. Spark would match
    columns by their places, and would trust that a `NOT NULL` column has no nulls.
    """
    fixed = _fixed_columns(options)
    given = [f"{field.name} {field.dataType.simpleString()}" for field in schema.fields[: len(fixed)]]
    # `timestamp` is what spark.sql.timestampType says.
    if [column.replace("timestamp_ntz", "timestamp") for column in given] != fixed:
        raise OptionError(
            f"a read begins with the columns {', '.join(fixed)}, not with {', '.join(schema.fieldNames())}: leave out "
            ".schema(…), and name fields of data in the option schema"
        )
    for field in schema.fields:
        if '"nullable":false' in field.json():
            raise OptionError(f"column {field.name} is NOT NULL, but a record may lack it: leave that out")


class Records(NamedTuple):
    """Columns of records, in the order of their seqs."""

    seq: pa.Array
    ts_ms: pa.Array
    node: pa.Array
    tag: pa.Array
    data: pa.Array
    """JSON text"""
    meta: pa.Array


class ColumnBuilder:
    """Builds batches of one schema (`schema_ddl`)."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        names = schema.fieldNames()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise OptionError(
                f"option schema: {', '.join(twice)} would be there twice; leave it out, or parse the column data "
                "with from_json under another name"
            )
        self._parsed = ParsedColumns(schema.fields[len(_fixed_columns(options)) :])  # first: it names what is wrong
        self._arrow = arrow_schema(schema)
        self._with_tags = options.include_tags
        self._with_gaps = options.tombstones == "rows"

    def batch_of(self, topic: str, records: Sequence[Record]) -> pa.RecordBatch:
        with_meta = [(number, record.meta) for number, record in enumerate(records) if record.meta is not None]
        numbers = np.fromiter((number for number, _ in with_meta), np.int64, len(with_meta))
        columns = Records(
            pa.array([record.seq for record in records], pa.int64()),
            pa.array([record.ts for record in records], pa.int64()),
            pa.array([record.node for record in records], pa.string()),
            pa.array([record.tag for record in records], pa.string()),
            pa.array([str(record.raw, "utf-8") for record in records], pa.string()),
            meta_array(len(records), numbers, [meta for _, meta in with_meta]),
        )
        return self.batch(topic, columns)

    def batch(self, topic: str, records: Records) -> pa.RecordBatch:
        count = len(records.seq)
        times = pc.multiply(records.ts_ms, 1000).cast(self._arrow.field(2).type)
        tag = records.tag if self._with_tags else pa.nulls(count, pa.string())
        topics = pa.repeat(pa.scalar(topic, pa.string()), count)
        meta = records.meta.cast(self._arrow.field(6).type)
        columns: list[pa.Array] = [topics, records.seq, times, records.node, tag, records.data, meta]
        if self._with_gaps:
            columns.append(pa.repeat(pa.scalar("record", pa.string()), count))
            columns += [pa.nulls(count, self._arrow.field(at).type) for at in range(8, 11)]
        columns += self._parsed.of(records.data, self._arrow)
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def gap(self, topic: str, gap: Gap) -> pa.RecordBatch:
        """Return the one row for records that cannot be read."""
        assert self._with_gaps
        row: dict[str, Any] = {"topic": topic, "kind": "gap", "reason": gap.reason}
        row |= {"gap_from": gap.first_seq, "gap_to": gap.last_seq}
        return pa.RecordBatch.from_pylist([row], schema=self._arrow)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema in Arrow as Spark expects it. Before 4.2 the zone is UTC and not a parameter."""
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)
