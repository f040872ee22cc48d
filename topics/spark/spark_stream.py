"""`spark.readStream.format("topics")`: offsets, admission control and `Trigger.AvailableNow`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from topics.client import Client
from topics.spark import planning
from topics.spark.batch import RangePartition
from topics.spark.columns import ColumnBuilder
from topics.spark.http_read import TASK_RETRY, connect
from topics.spark.offsets import Mark, Offset, advance, check_history, from_json, ranges, split, to_json
from topics.spark.options import ReadOptions
from topics.spark.segment_scan import Pinned, end_pins, sealed_of

if TYPE_CHECKING:
    import pyarrow as pa


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process of the driver for as long as the query; a copy of it is pickled into every task."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = schema
        self._options = options
        self._target: Offset | None = None
        self._client: Client | None = None
        self._pins: tuple[Pinned, ...] = ()
        ColumnBuilder(schema, options)  # a schema that cannot be is an error now, not in a task

    def __getstate__(self) -> dict[str, Any]:
        # Connections stay where they are.
        return self.__dict__ | {"_client": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 — Spark's names, here and below
        """Only for a query without a checkpoint."""
        found = planning.states(self._service(), self._options)
        planning.require(found, self._options)
        return to_json(planning.starts(self._service(), found, self._options, "latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin, heads = from_json(start), self._heads()
        if self._target is not None:
            heads = _up_to(heads, self._target, begin)
        max_records = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return to_json(advance(begin, heads, max_records))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return to_json(self._heads())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._heads()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        options = self._options
        whole = ranges(from_json(start), from_json(end))
        check_history(whole, options.tombstones)
        parts = split(whole, options.max_records_per_partition, options.min_partitions)
        if options.directories is None:
            return [RangePartition(part, None) for part in parts]
        # The batch before has been read.
        self._end_pins()
        found, self._pins = sealed_of(self._service(), parts)
        return [RangePartition(part, None, sealed) for part, sealed in zip(parts, found, strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return partition.read(self._options, ColumnBuilder(self._schema, self._options))

    def stop(self) -> None:
        self._end_pins()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _end_pins(self) -> None:
        if self._pins:
            end_pins(self._service(), self._pins)
            self._pins = ()

    def _heads(self) -> Offset:
        return planning.heads(planning.states(self._service(), self._options))

    def _service(self) -> Client:
        if self._client is None:
            # A query outlives a restart of the service as a task does.
            self._client = connect(self._options.service, TASK_RETRY)
        return self._client


def _up_to(heads: Offset, target: Offset, begin: Offset) -> Offset:
    """What a query that is to end may see: nothing written since it began, and no topic that was made since."""
    bounded = {}
    for topic, head in heads.items():
        goal = target.get(topic)
        if goal is not None and goal.epoch == head.epoch:
            bounded[topic] = Mark(min(head.seq, goal.seq), head.epoch)
        elif topic in begin:
            # Made anew since: where the query stands is all it will see of it.
            bounded[topic] = begin[topic]
    return bounded
