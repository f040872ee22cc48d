"""`spark.readStream.format("topics")`: offsets, admission control and `Trigger.AvailableNow`; and `df.writeStream`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from topics.client import Client
from topics.spark import http_read
from topics.spark.batch import RangeReader
from topics.spark.http_read import TASK_RETRY, connect
from topics.spark.offsets import Mark, Offset, advance, check_history, from_json, ranges, to_json
from topics.spark.options import TopicsSparkError
from topics.spark.segment_scan import Pinned, end_pins
from topics.spark.sink import Stager, all_staged

log = logging.getLogger("topics.spark")


class StreamReader(RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader of one query. It lives in a process of the driver; each task gets a pickled copy."""

    _target: Offset | None = None  # the heads at the start of a query with `Trigger.AvailableNow`
    _client: Client | None = None
    _waiting: frozenset[str] = frozenset()  # topics of which a follower has less than the query has read
    _pins: tuple[Pinned, ...] = ()  # pins of the last batch that was planned

    def __getstate__(self) -> dict[str, Any]:
        # Connections are not pickled.
        return self.__dict__ | {"_client": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 — Spark's names, here and below
        """Return where a query without a checkpoint begins."""
        found = http_read.states(self._service(), self._options)
        http_read.require(found, self._options)
        return to_json(http_read.starts(self._service(), found, self._options, "latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        found = http_read.states(self._service(), self._options)
        begin, heads = http_read.carried(from_json(start), found), http_read.heads(found)
        # Keep the positions of topics that the query no longer subscribes to, in case it does so again.
        heads |= {topic: mark for topic, mark in begin.items() if not self._options.subscribed(topic)}
        if self._target is not None:
            heads = _up_to(heads, self._target, begin)
        heads |= self._ahead(begin, heads)
        max_records = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return to_json(advance(begin, heads, max_records))

    def _ahead(self, begin: Offset, heads: Offset) -> Offset:
        """Return the positions that are ahead of the service, if it follows another one: it may still get there. A
        leader that is behind a position has lost those records.
        """
        found: Offset = {}
        for topic, mark in begin.items():
            head = heads.get(topic)
            if head is None or head.epoch != mark.epoch or head.seq >= mark.seq:
                continue
            if http_read.follows(self._service(), topic, head.seq):
                found[topic] = mark
                if topic not in self._waiting:
                    where = (topic, self._options.service.url, head.seq, mark.seq)
                    log.warning("topic %s: %s follows another service and has up to %s; the query waits at %s", *where)
        self._waiting = frozenset(found)
        return found

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return to_json(self._heads())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._heads()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, finish = from_json(start), from_json(end)
        if any(topic in begin and begin[topic].epoch != mark.epoch for topic, mark in finish.items()):
            begin = http_read.carried(begin, http_read.states(self._service(), self._options))
        wanted = ranges(begin, finish)
        check_history(wanted, self._options.tombstones)
        # Spark has finished the batch before this one, so its pins are not needed.
        self._end_pins()
        made, self._pins = self.plan(self._service(), wanted)
        return made

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
        return http_read.heads(http_read.states(self._service(), self._options))

    def _service(self) -> Client:
        if self._client is None:
            # A query survives a restart of the service, as a task does.
            self._client = connect(self._options.service, TASK_RETRY)
        return self._client


def _up_to(heads: Offset, target: Offset, begin: Offset) -> Offset:
    """Return the heads, but not beyond `target`. A topic that was made again since stays at the query's position."""
    bounded = {}
    for topic, head in heads.items():
        goal = target.get(topic)
        if goal is not None and goal.epoch == head.epoch:
            mark = begin.get(topic)
            # A query without a checkpoint may begin at a later head than that which Spark had asked for before.
            begun_seq = mark.seq if mark is not None and mark.epoch == head.epoch else 0
            bounded[topic] = Mark(min(head.seq, max(goal.seq, begun_seq)), head.epoch)
        elif topic in begin:
            bounded[topic] = begin[topic]
    return bounded


class StreamWriter(Stager, DataSourceStreamArrowWriter):
    """Writes each batch exactly once: the sink is the query (its checkpoint), and its batches are Spark's."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 — Spark's name
        staged = all_staged(messages)
        queries = {message.query for message in staged}
        if not staged:
            return
        query = queries.pop()
        if queries or query is None:
            raise TopicsSparkError(
                "Spark did not say which query its tasks belong to, so exactly once cannot be guaranteed"
            )
        self.publish(f"{self.options.sink}.{query}", batchId, staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.drop(messages)
