"""`spark.read.format("topics")`. The driver fixes the ranges when it plans the query; tasks read their parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from topics.client import Client
from topics.spark import http_read
from topics.spark.columns import ColumnBuilder, check_schema
from topics.spark.http_read import PLAN_RETRY, TASK_RETRY, ReadPlan, connect, read_range
from topics.spark.offsets import Mark, Range, ranges, split
from topics.spark.options import OptionError, Positions, ReadOptions
from topics.spark.segment_scan import Pinned, Sealed, read_part, sealed_of

if TYPE_CHECKING:
    import pyarrow as pa


class RangePartition(InputPartition):
    """The range that one task reads. `sealed` is the part of it that is in files (`mode=segments`)."""

    def __init__(self, range: Range, tags: frozenset[str] | None, sealed: Sealed | None = None) -> None:
        super().__init__(tuple(range))
        self.range = range
        self.tags = tags
        self.sealed = sealed


class RangeReader:
    """The common part of batch and stream readers. The driver makes it and plans with it; tasks have pickled copies."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = schema
        self._options = options
        check_schema(schema, options)
        ColumnBuilder(schema, options)  # a wrong schema fails here, not in a task

    def plan(
        self, client: Client, whole: Sequence[Range], tags: frozenset[str] | None = None
    ) -> tuple[list[RangePartition], tuple[Pinned, ...]]:
        """Return the partitions of these ranges, and the pins of their files."""
        parts = split(whole, self._options.max_records_per_partition, self._options.min_partitions)
        if self._options.directories is None:
            return [RangePartition(part, tags) for part in parts], ()
        found, pins = sealed_of(client, parts)
        return [RangePartition(part, tags, sealed) for part, sealed in zip(parts, found, strict=True)], pins

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a partition in order; runs in a task."""
        assert isinstance(partition, RangePartition)
        plan = ReadPlan(self._options, ColumnBuilder(self._schema, self._options), partition.tags)
        if partition.sealed is not None:
            yield from read_part(partition.range, partition.sealed, plan)
            return
        with connect(self._options.service, TASK_RETRY) as client:
            yield from read_range(client, partition.range, plan)


FAR: Final = 1 << 64
"""A bound that no seq and no time reaches."""


class Wanted(NamedTuple):
    """The rows that filters leave. None: any topic, any tag. Times are in µs since the epoch, bounds inclusive."""

    topics: frozenset[str] | None = None
    tags: frozenset[str] | None = None
    seq_from: int = 1
    seq_to: int = FAR
    time_from_us: int = -FAR
    time_to_us: int = FAR


class BatchReader(RangeReader, DataSourceReader):
    """Reads up to the heads at the time of planning, or up to `endingOffsets`."""

    wanted = Wanted()

    def partitions(self) -> Sequence[InputPartition]:
        options, wanted = self._options, self.wanted
        with connect(options.service, PLAN_RETRY) as client:
            found = http_read.states(client, options)
            http_read.require(found, options)
            start = http_read.starts(client, found, options, "earliest")
            end = http_read.resolve("endingOffsets", found, options.ending or Positions("latest"))
            _check_order(options)
            end = {name: Mark(max(mark.seq, start[name].seq), mark.epoch) for name, mark in end.items()}
            whole = ranges(start, end)
            whole = [one for one in whole if wanted.topics is None or one.topic in wanted.topics]
            whole = [clipped for one in whole if (clipped := _clip(client, one, wanted)).to_seq > clipped.from_seq]
            made, _pins = self.plan(client, whole, wanted.tags)
        return made or [RangePartition(Range("", "", 0, 0), None)]


def _check_order(options: ReadOptions) -> None:
    """Raise OptionError for a topic whose range would end before it begins, by what the user gave."""
    begin, end = options.starting or Positions("earliest"), options.ending or Positions("latest")
    for topic, last in end.by_topic.items():
        first = begin.of(topic)
        if isinstance(first, int) and isinstance(last, int) and last < first:
            raise OptionError(f"endingOffsets: topic {topic!r} ends at {last}, before startingOffsets, {first}")


def _clip(client: Client, one: Range, wanted: Wanted) -> Range:
    """Return the part that filters on seq and time leave. `$ts` never decreases, so a time bound is a seq bound."""
    from_seq, to_seq = max(one.from_seq, wanted.seq_from - 1), min(one.to_seq, wanted.seq_to)
    if wanted.time_from_us > -FAR:
        from_seq = max(from_seq, http_read.before_ts(client, one.topic, max(0, -(-wanted.time_from_us // 1000))))
    if wanted.time_to_us < FAR:
        to_seq = min(to_seq, http_read.before_ts(client, one.topic, max(0, wanted.time_to_us // 1000 + 1)))
    return one._replace(from_seq=from_seq, to_seq=to_seq)
