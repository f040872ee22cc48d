"""`df.write.format("topics")` and `writeStream`: tasks stage, the driver commits (api §6, docs/spark.md).

If Spark runs a task again, the task stages again; its former stages are in no commit message, and expire. If Spark runs
a batch again, its commit is answered as a duplicate. The order of rows may differ each time.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from topics.client import Client, ClientError, NewRecord, NotFiniteError, calls
from topics.client.calls import encode_body
from topics.core.json_text import why_refused
from topics.core.names import is_topic_name
from topics.spark.http_read import PLAN_RETRY, TASK_RETRY, connect
from topics.spark.options import OptionError, TopicsSparkError, WriteOptions

_COLUMNS: Final = ("data", "topic", "tag", "node", "meta")
_PLAIN: Final = (
    types.StringType,
    types.NumericType,
    types.BooleanType,
    types.DateType,
    types.NullType,
    types.BinaryType,
)
Convert = Callable[[Any], Any]


class Rows:
    """Makes records of the rows of one schema. OptionError names a column that does not fit."""

    def __init__(self, schema: types.StructType, options: WriteOptions) -> None:
        kinds = {field.name: field.dataType for field in schema.fields}
        unknown = sorted(kinds.keys() - set(_COLUMNS))
        if "data" not in kinds:
            raise OptionError(
                f"a frame that is written needs the column data (JSON text or a struct), not {', '.join(kinds)}; "
                "make one with to_json(struct(*)) or struct(*)"
            )
        if unknown:
            raise OptionError(f"column {unknown[0]} is not a part of a record: columns are {', '.join(_COLUMNS)}")
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
            raise OptionError("no topic to write to: give the option topic, or a column topic")
        self._convert = None if isinstance(kinds["data"], types.StringType) else _converter(kinds["data"], "data")
        self._topic = options.topic

    def of(self, batch: pa.RecordBatch) -> Iterator[tuple[str, NewRecord]]:
        """Yield (topic, record) of each row, in order."""
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        missing = [None] * batch.num_rows
        for data, topic, tag, node, meta in zip(*(columns.get(name, missing) for name in _COLUMNS), strict=True):
            target = topic if topic is not None else self._topic
            if target is None:
                raise TopicsSparkError("a row has no topic: its column topic is null and there is no option topic")
            if topic is not None and not is_topic_name(topic):
                raise TopicsSparkError(f"a row names the topic {topic!r}, which is not a valid name")
            if data is None:
                raise TopicsSparkError(f"a row for topic {target!r} has no data: null is not a record (try 'null')")
            nulls = [] if meta is None else [key for key, value in meta if value is None]
            if nulls:
                raise TopicsSparkError(
                    f"a row for topic {target!r}: meta.{nulls[0]} is null, and only strings are meta"
                )
            try:
                text = data.encode() if self._convert is None else encode_body(self._convert(data), "data")
            except NotFiniteError as error:
                raise TopicsSparkError(f"a row for topic {target!r}: {error}") from None
            yield target, NewRecord(msgspec.Raw(text), tag, node, None if meta is None else dict(meta))


_check = msgspec.json.Decoder(msgspec.Raw).decode  # decodes nothing: a number may be beyond all that Python holds


def check_json(records: list[NewRecord]) -> None:
    """Raise TopicsSparkError for a text that is not JSON: the service would not say which one it is."""
    for record in records:
        try:
            _check(record.data)
        except (msgspec.DecodeError, RecursionError) as error:
            text = bytes(record.data)[:100].decode(errors="replace")
            raise TopicsSparkError(f"a row's data {why_refused(bytes(record.data), error)}: {text!r}") from None


def _converter(kind: types.DataType, name: str) -> Convert:
    """Return the function that makes JSON of a column's values: like `to_json`, but it keeps nulls. OptionError for a
    type that it does not know.
    """
    if isinstance(kind, types.StructType):
        fields = [(field.name, _or_null(_converter(field.dataType, f"{name}.{field.name}"))) for field in kind.fields]
        return lambda row: {name: convert(row[name]) for name, convert in fields}
    if isinstance(kind, types.ArrayType):
        element = _or_null(_converter(kind.elementType, f"{name}[]"))
        return lambda items: [element(one) for one in items]
    if isinstance(kind, types.MapType):
        if not isinstance(kind.keyType, types.StringType):
            raise OptionError(f"column {name} is a map whose keys are not strings, which JSON has not")
        value = _or_null(_converter(kind.valueType, f"{name}{{}}"))
        return lambda items: {key: value(one) for key, one in items}
    if isinstance(kind, types.TimestampType | types.TimestampNTZType):
        return lambda time: time.isoformat().replace("+00:00", "Z")
    if isinstance(kind, types.DecimalType):
        return lambda number: msgspec.Raw(str(number).encode())
    if isinstance(kind, _PLAIN):
        return lambda value: value
    raise OptionError(f"column {name} is of type {kind.simpleString()}, which has no JSON form here; use to_json")


def _or_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


_BYTES_PER_STAGE = 8 << 20  # with meta: escaped in a body it is up to six times as long, and 64 MiB are taken
_QUERY_ID = "sql.streaming.queryId"
"""The local property of a query's tasks that names the query. It stays the same as long as the checkpoint."""


@dataclass
class Staged(WriterCommitMessage):
    """The stages of one task: (topic, stage) in the order of its rows; `query` is None outside of streams."""

    txn: str
    query: str | None
    stages: list[tuple[str, str]]


class Stager:
    """The part of both writers that runs in tasks."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        self._schema = schema
        self.options = options
        self._job = secrets.token_hex(8)
        Rows(schema, options)  # a wrong frame fails here, not in a task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY_ID)
        staged = Staged(f"{self._job}-{secrets.token_hex(8)}", query, [])
        rows = Rows(self._schema, self.options)
        with connect(self.options.service, TASK_RETRY) as client:
            try:
                due_s = time.monotonic()
                for topic, records in self.groups(rows, iterator):
                    if self.options.records_per_second:
                        time.sleep(max(0.0, due_s - time.monotonic()))
                        due_s = max(due_s, time.monotonic()) + len(records) / self.options.records_per_second
                    check_json(records)
                    answer = client.call(calls.stage(topic, staged.txn, records))
                    staged.stages.append((topic, answer.stage))
            except BaseException:
                _drop(client, [staged])
                raise
        return staged

    def groups(self, rows: Rows, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, list[NewRecord]]]:
        """Yield records by topic, as many together as one stage takes."""
        waiting: dict[str, list[NewRecord]] = {}
        sizes: dict[str, int] = {}
        for topic, record in itertools.chain.from_iterable(map(rows.of, batches)):
            waiting.setdefault(topic, []).append(record)
            meta = itertools.chain.from_iterable((record.meta or {}).items())
            sizes[topic] = sizes.get(topic, 0) + len(record.data) + sum(map(len, meta))
            if len(waiting[topic]) >= self.options.records_per_stage or sizes[topic] >= _BYTES_PER_STAGE:
                yield topic, waiting.pop(topic)
                del sizes[topic]
        yield from waiting.items()

    def publish(self, sink: str, batch: int, messages: list[Staged]) -> bool:
        """Commit a batch; return False when the sink has committed it before."""
        stages = [stage for message in messages for _topic, stage in message.stages]
        with connect(self.options.service, TASK_RETRY) as client:
            told = client.call(calls.commit(sink, batch, stages))
            if told.duplicate:
                _drop(client, messages)
            if told.last_batch > batch:
                raise TopicsSparkError(
                    f"sink {sink!r} has committed batch {told.last_batch}, this is batch {batch}: the query's "
                    "checkpoint is older than its last write; with another option sink all of it is written again"
                )
            return not told.duplicate

    def drop(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the stages of these tasks; failed tasks have dropped theirs."""
        with contextlib.suppress(ClientError), connect(self.options.service, PLAN_RETRY) as client:
            _drop(client, [message for message in messages if isinstance(message, Staged)])


class BatchWriter(Stager, DataSourceArrowWriter):
    """Writes one job as the only batch of a sink of its own: all of it or nothing."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        sink = f"{self.options.sink}-job.{self._job}"
        self.publish(sink, 0, all_staged(messages))
        # Forget the sink only now: while the commit may be repeated, it has to remember its batch.
        with contextlib.suppress(ClientError), connect(self.options.service, PLAN_RETRY) as client:
            client.call(calls.forget_sink(sink))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.drop(messages)


def all_staged(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    """Return the stages of all tasks; TopicsSparkError when those of one are missing."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise TopicsSparkError(f"{len(messages) - len(staged)} tasks did not report their stages")
    return staged


def _drop(client: Client, messages: list[Staged]) -> None:
    """Drop stages; a stage that cannot be dropped now expires."""
    for message in messages:
        for topic in {topic for topic, _stage in message.stages}:
            with contextlib.suppress(ClientError):
                client.call(calls.drop_stages(topic, message.txn))
