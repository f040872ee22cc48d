"""Parsed columns: top-level fields of `data` as Spark types, by the option `schema`.

As Spark's `from_json` in its permissive mode: what is not there or does not fit is null, never an error. A STRING takes
any value: a text as it is, everything else as JSON.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import types

from topics.spark.errors import OptionError

Convert = Callable[[Any], Any]

_INTEGERS: dict[type[types.DataType], int] = {
    types.ByteType: 8,
    types.ShortType: 16,
    types.IntegerType: 32,
    types.LongType: 64,
}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class ParsedColumns:
    """OptionError for a type that JSON cannot become."""

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
