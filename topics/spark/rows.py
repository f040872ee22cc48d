"""Rows of a DataFrame as records to write. Arrow batches come in; each topic's records come out, as JSON text."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import types

from topics.client import NewRecord
from topics.spark.errors import OptionError, TopicsSparkError
from topics.spark.options import WriteOptions, valid_name

_COLUMNS: Final = ("data", "topic", "tag", "node", "meta")
_PLAIN: Final = (
    types.StringType,
    types.NumericType,
    types.BooleanType,
    types.TimestampType,
    types.TimestampNTZType,
    types.DateType,
    types.NullType,
    types.BinaryType,
)


class Rows:
    """Checks a schema once; OptionError names the column that does not fit."""

    def __init__(self, schema: types.StructType, options: WriteOptions) -> None:
        kinds = {field.name: field.dataType for field in schema.fields}
        unknown = sorted(kinds.keys() - set(_COLUMNS))
        if "data" not in kinds:
            raise OptionError(
                f"a frame that is written needs the column data (JSON text or a struct), not {', '.join(kinds)}; "
                "make one with to_json(struct(*)) or struct(*)"
            )
        if unknown:
            raise OptionError(f"column {unknown[0]} has no meaning in a record: columns are {', '.join(_COLUMNS)}")
        for name in ("topic", "tag", "node"):
            if name in kinds and not isinstance(kinds[name], types.StringType):
                raise OptionError(f"column {name} must be a string, not {kinds[name].simpleString()}")
        meta = kinds.get("meta")
        if meta is not None and not (
            isinstance(meta, types.MapType)
            and isinstance(meta.keyType, types.StringType)
            and isinstance(meta.valueType, types.StringType)
        ):
            raise OptionError(f"column meta must be map<string,string>, not {meta.simpleString()}")
        if "topic" not in kinds and options.topic is None:
            raise OptionError("where to? Give the option topic, or a column topic")
        self._text = isinstance(kinds["data"], types.StringType)
        if not self._text:
            _check(kinds["data"], "data")
        self._topic = options.topic

    def of(self, batch: pa.RecordBatch) -> Iterator[tuple[str, NewRecord]]:
        """(topic, record) of each row, in order."""
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        missing = [None] * batch.num_rows
        for data, topic, tag, node, meta in zip(*(columns.get(name, missing) for name in _COLUMNS), strict=True):
            target = topic if topic is not None else self._topic
            if target is None:
                raise TopicsSparkError("a row has no topic: its column topic is null and there is no option topic")
            if topic is not None and not valid_name(topic):
                raise TopicsSparkError(f"a row names the topic {topic!r}, which is not a valid name")
            if data is None:
                raise TopicsSparkError(f"a row for topic {target!r} has no data: null is not a record (try 'null')")
            text = data.encode() if self._text else msgspec.json.encode(_json(data))
            yield target, NewRecord(msgspec.Raw(text), tag, node, None if meta is None else dict(meta))


def check_json(records: list[NewRecord]) -> None:
    """TopicsSparkError for a text that is not JSON: which one it is says nobody later."""
    for record in records:
        try:
            msgspec.json.decode(record.data)
        except msgspec.DecodeError as error:
            text = bytes(record.data)[:100].decode(errors="replace")
            raise TopicsSparkError(f"a row's data is not JSON: {error}: {text!r}") from None


def _check(kind: types.DataType, name: str) -> None:
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            _check(field.dataType, f"{name}.{field.name}")
    elif isinstance(kind, types.ArrayType):
        _check(kind.elementType, f"{name}[]")
    elif isinstance(kind, types.MapType):
        if not isinstance(kind.keyType, types.StringType):
            raise OptionError(f"column {name} is a map whose keys are no strings: JSON has no such thing")
        _check(kind.valueType, f"{name}{{}}")
    elif not isinstance(kind, _PLAIN):
        raise OptionError(f"column {name} is of type {kind.simpleString()}, which has no JSON form here; use to_json")


def _json(value: Any) -> Any:
    """A value of a struct as JSON has it: as Spark's `to_json`, but for nulls, which stay."""
    if isinstance(value, dict):
        return {name: _json(one) for name, one in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):  # how Arrow gives a map
            return {name: _json(one) for name, one in value}
        return [_json(one) for one in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, decimal.Decimal):
        return msgspec.Raw(str(value).encode())
    return value
