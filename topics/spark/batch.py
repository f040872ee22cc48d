"""`spark.read.format("topics")`: the range is fixed when the query is planned; tasks read their parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from topics.client import Client
from topics.spark import planning
from topics.spark.columns import ColumnBuilder
from topics.spark.http_read import PLAN_RETRY, TASK_RETRY, connect, read_range
from topics.spark.offsets import Mark, Range, ranges, split
from topics.spark.options import Positions, ReadOptions
from topics.spark.segment_scan import Sealed, read_part, sealed_of

if TYPE_CHECKING:
    import pyarrow as pa


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, range: Range, tags: frozenset[str] | None, sealed: Sealed | None = None) -> None:
        """`sealed`: what of it is in files, in `mode=segments`."""
        super().__init__(tuple(range))
        self.range = range
        self.tags = tags
        self.sealed = sealed

    def read(self, options: ReadOptions, columns: ColumnBuilder) -> Iterator[pa.RecordBatch]:
        """In a task: its batches, in order."""
        if self.sealed is not None:
            yield from read_part(self.range, self.sealed, options, columns, self.tags)
            return
        with connect(options.service, TASK_RETRY) as client:
            yield from read_range(client, self.range, options, columns, self.tags)


class Wanted(NamedTuple):
    """What filters leave of the rows; None where they say nothing. Times in µs since the epoch, bounds inclusive."""

    topics: frozenset[str] | None = None
    tags: frozenset[str] | None = None
    seq_from: int = 1
    seq_to: int | None = None
    time_from_us: int | None = None
    time_to_us: int | None = None


class BatchReader(DataSourceReader):
    """Planned in a process of the driver, read in those of the executors; it is pickled in between."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = schema
        self._options = options
        self.wanted = Wanted()
        ColumnBuilder(schema, options)  # a schema that cannot be is an error now, not in a task

    def partitions(self) -> Sequence[InputPartition]:
        options, wanted = self._options, self.wanted
        with connect(options.service, PLAN_RETRY) as client:
            found = planning.states(client, options)
            planning.require(found, options)
            start = planning.starts(client, found, options, "earliest")
            end = planning.resolve("endingOffsets", found, options.ending or Positions("latest"))
            end = {name: Mark(max(mark.seq, start[name].seq), mark.epoch) for name, mark in end.items()}
            whole = ranges(start, end)
            whole = [one for one in whole if wanted.topics is None or one.topic in wanted.topics]
            whole = [clipped for one in whole if (clipped := _clip(client, one, wanted)).to_seq > clipped.from_seq]
            parts = split(whole, options.max_records_per_partition, options.min_partitions)
            made = [RangePartition(part, wanted.tags) for part in parts]
            if options.directories is not None:
                for one, sealed in zip(made, sealed_of(client, parts)[0], strict=True):
                    one.sealed = sealed
        return made or [RangePartition(_NOTHING, None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return partition.read(self._options, ColumnBuilder(self._schema, self._options))


_NOTHING = Range("", "", 0, 0)


def _clip(client: Client, one: Range, wanted: Wanted) -> Range:
    """What the filters on seq and time leave of a range; `$ts` never decreases in a topic, so time is a seq."""
    from_seq, to_seq = max(one.from_seq, wanted.seq_from - 1), one.to_seq
    if wanted.seq_to is not None:
        to_seq = min(to_seq, wanted.seq_to)
    if wanted.time_from_us is not None:
        from_seq = max(from_seq, planning.before_ts(client, one.topic, -(-wanted.time_from_us // 1000)))
    if wanted.time_to_us is not None:
        to_seq = min(to_seq, planning.before_ts(client, one.topic, wanted.time_to_us // 1000 + 1))
    return one._replace(from_seq=from_seq, to_seq=to_seq)
