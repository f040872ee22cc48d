"""`df.write.format("topics")` and `writeStream`: tasks stage, the driver commits (api §6, docs/spark.md).

A task that is run again stages again; its former stages are in no commit message and expire. A batch that is run again
stages and commits again, and the service answers that it is there. So nothing depends on rows coming in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from topics.client import Client, ClientError, NewRecord, NotFoundError, calls
from topics.spark.errors import TopicsSparkError
from topics.spark.http_read import PLAN_RETRY, TASK_RETRY, connect
from topics.spark.options import WriteOptions
from topics.spark.rows import Rows, check_json

if TYPE_CHECKING:
    import pyarrow as pa

_BYTES_PER_STAGE = 8 << 20
_QUERY_ID = "sql.streaming.queryId"
"""The local property that Spark gives the tasks of a query; it is as old as the query's checkpoint."""


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged: (topic, stage) in the order of its rows; `query` is None outside of streams."""

    txn: str
    query: str | None
    stages: list[tuple[str, str]]


class Stager:
    """The part of both writers that runs in tasks."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        self._schema = schema
        self.options = options
        self._job = secrets.token_hex(8)
        Rows(schema, options)  # a frame that cannot be written is an error now, not in a task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY_ID)
        staged = Staged(f"{self._job}-{secrets.token_hex(8)}", query, [])
        rows = Rows(self._schema, self.options)
        with connect(self.options.service, TASK_RETRY) as client:
            try:
                due_s = time.monotonic()
                for topic, records in self._groups(rows, iterator):
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

    def _groups(self, rows: Rows, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, list[NewRecord]]]:
        """Records by topic, as many together as one stage takes."""
        waiting: dict[str, list[NewRecord]] = {}
        sizes: dict[str, int] = {}
        for topic, record in itertools.chain.from_iterable(map(rows.of, batches)):
            waiting.setdefault(topic, []).append(record)
            sizes[topic] = sizes.get(topic, 0) + len(record.data)
            if len(waiting[topic]) >= self.options.records_per_stage or sizes[topic] >= _BYTES_PER_STAGE:
                yield topic, waiting.pop(topic)
                del sizes[topic]
        yield from waiting.items()

    def publish(self, sink: str, batch: int, messages: list[Staged]) -> bool:
        """False when the sink has committed this batch before."""
        stages = [stage for message in messages for _topic, stage in message.stages]
        with connect(self.options.service, TASK_RETRY) as client:
            told = client.call(calls.commit(sink, batch, stages))
            if told.duplicate:
                _drop(client, messages)
            if told.last_batch > batch:
                raise TopicsSparkError(
                    f"sink {sink!r} has committed batch {told.last_batch}, this is batch {batch}: the query's "
                    "checkpoint is older than what it has written; another option sink writes all of it again"
                )
            return not told.duplicate

    def drop(self, messages: list[WriterCommitMessage | None]) -> None:
        """What they have staged; those that failed have dropped theirs."""
        with contextlib.suppress(ClientError), connect(self.options.service, PLAN_RETRY) as client:
            _drop(client, [message for message in messages if isinstance(message, Staged)])


class BatchWriter(Stager, DataSourceArrowWriter):
    """A job of its own is a sink of its own: its one batch is all or nothing."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        sink = f"spark-job.{self._job}"
        self.publish(sink, 0, whole(messages))
        # Nobody will ask for this job again; but a commit whose answer was lost must not have been the last word.
        with contextlib.suppress(ClientError), connect(self.options.service, PLAN_RETRY) as client:
            client.call(calls.forget_sink(sink))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.drop(messages)


def whole(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    """What all tasks have staged; TopicsSparkError when one has not said it."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise TopicsSparkError(f"{len(messages) - len(staged)} tasks have not said what they staged")
    return staged


def _drop(client: Client, messages: list[Staged]) -> None:
    """What cannot be dropped now expires."""
    for message in messages:
        for topic in {topic for topic, _stage in message.stages}:
            with contextlib.suppress(ClientError, NotFoundError):
                client.call(calls.drop_stages(topic, message.txn))
