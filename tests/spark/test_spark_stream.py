"""`spark.readStream.format("topics")` on the real Spark: every record once, over restarts and changes of topics."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.harness import Service, poll
from tests.spark.test_segment_scan import schema_of
from topics.client import Client, Retry
from topics.spark.jobs.program import run_to_end
from topics.spark.options import plainly, read_options
from topics.spark.spark_stream import StreamReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


BATCH_S = 120
"""By then a query that has just been started has had its first batches, also where two cores have ten things to do."""


class Stream:
    """A query that gathers its rows; `run` reads all that is there from its checkpoint on, and ends."""

    def __init__(self, spark: SparkSession, url: str, directory: Path) -> None:
        self.spark = spark
        self.url = url
        self.checkpoint = str(directory / "checkpoint")
        self.rows: list[Row] = []
        self.batches: list[int] = []

    def frame(self, **options: Any) -> DataFrame:
        options = {"startingOffsets": "earliest"} | options
        return self.spark.readStream.format("topics").option("url", self.url).options(**options).load()

    def writer(self, **options: Any) -> DataStreamWriter:
        def take(batch: DataFrame, _batch_id: int) -> None:
            rows = batch.collect()
            self.rows += rows
            self.batches.append(len(rows))

        return self.frame(**options).writeStream.foreachBatch(take).option("checkpointLocation", self.checkpoint)

    def start(self, **options: Any) -> StreamingQuery:
        return self.writer(**options).trigger(processingTime="50 milliseconds").start()

    def run(self, **options: Any) -> list[Any]:
        """The seqs this run has brought, in order."""
        before = len(self.rows)
        run_to_end(self.writer(**options))
        return sorted(row.seq for row in self.rows[before:] if row.seq is not None)

    def fails(self, **options: Any) -> str:
        with pytest.raises(Exception, match=r".") as caught:
            self.run(**options)
        return plainly(caught.value)


@pytest.fixture
def stream(spark: SparkSession, service: Service, tmp_path: Path) -> Iterator[Stream]:
    one = Stream(spark, service.url, tmp_path)
    yield one
    for query in spark.streams.active:
        query.stop()


def test_available_now_reads_all_and_goes_on_from_its_checkpoint(stream: Stream, topics: Client, topic: str) -> None:
    topics.append(topic, range(30))
    assert stream.run(subscribe=topic) == list(range(1, 31))
    assert stream.run(subscribe=topic) == []
    topics.append(topic, range(12))
    assert stream.run(subscribe=topic) == list(range(31, 43))


def test_max_offsets_bounds_every_batch(stream: Stream, topics: Client, topic: str) -> None:
    topics.append(topic, range(25))
    assert stream.run(subscribe=topic, maxOffsetsPerTrigger="10") == list(range(1, 26))
    assert stream.batches == [10, 10, 5]


def test_a_stream_starts_at_the_head_unless_told_otherwise(stream: Stream, topics: Client, topic: str) -> None:
    topics.append(topic, range(5))
    assert stream.run(subscribe=topic, startingOffsets="latest") == []
    topics.append(topic, range(2))
    assert stream.run(subscribe=topic, startingOffsets="latest") == [6, 7]


def test_what_comes_while_a_query_begins_at_the_head_is_no_loss(service: Service, topics: Client, topic: str) -> None:
    """Spark asks where a pass ends before it asks where a query without a checkpoint begins."""
    topics.append(topic, [1])
    options = read_options({"url": service.url, "subscribe": topic})
    reader = StreamReader(schema_of(options), options)
    reader.prepareForTriggerAvailableNow()
    topics.append(topic, [2])
    begin = reader.initialOffset()
    assert begin[topic]["seq"] == 2
    assert reader.latestOffset(begin, ReadAllAvailable()) == begin
    reader.stop()


def test_topics_that_come_to_match_a_pattern_are_read_from_their_start(
    stream: Stream, topics: Client, topic: str
) -> None:
    topics.append(f"{topic}-a", [1])
    assert stream.run(subscribePattern=f"{topic}-.*") == [1]
    topics.append(f"{topic}-b", range(3))
    assert stream.run(subscribePattern=f"{topic}-.*") == [1, 2, 3]
    assert {row.topic for row in stream.rows} == {f"{topic}-a", f"{topic}-b"}


def test_concurrent_writers_and_restarts_lose_and_double_nothing(stream: Stream, service: Service, topic: str) -> None:
    """Two writers all the time, a query that is stopped anywhere and started again, a killed shard and frontend."""
    done = threading.Event()
    written: list[str] = []
    # More than the query is to take meanwhile, so that it never waits for them, and no more: what it has not come to by
    # then is all one batch.
    ahead_max = 4_000

    def write(name: str) -> None:
        with Client(service.url) as client:
            for number in itertools.count():
                while len(written) > len(stream.rows) + ahead_max:
                    if done.wait(0.01):
                        return
                if done.is_set():
                    return
                client.append(topic, [f"{name}{number}.{part}" for part in range(5)])
                written.extend(f"{name}{number}.{part}" for part in range(5))

    with Client(service.url) as client:
        client.put_topic(topic)
    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    disturbances = iter([lambda: service.kill("walshard", 0), lambda: service.kill("frontend", 1)])
    try:
        for _ in range(3):
            had = len(stream.batches)
            query = stream.start(subscribe=topic, maxOffsetsPerTrigger="400", minPartitions="2")
            disturb: Callable[[], Any] = next(disturbances, lambda: None)
            poll("a batch", lambda: len(stream.batches) > had, BATCH_S)
            disturb()
            poll("three batches", lambda: len(stream.batches) > had + 2, BATCH_S)
            query.stop()
    finally:
        done.set()
        for writer in writers:
            writer.join()
    # A batch that was stopped between its rows and the note in the checkpoint comes again: same range, same rows.
    stream.run(subscribe=topic)
    by_seq = {row.seq: row.data for row in stream.rows}
    assert sorted(by_seq) == list(range(1, len(written) + 1))
    assert sorted(json.loads(data) for data in by_seq.values()) == sorted(written)
    assert all(by_seq[row.seq] == row.data for row in stream.rows)


def test_a_gap_under_a_lagging_query_fails_it(stream: Stream, topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=10)
    topics.append(topic, range(5))
    assert stream.run(subscribe=topic) == [1, 2, 3, 4, 5]
    topics.append(topic, range(20))
    assert "records 6 to 15 are gone (reason: cap)" in stream.fails(subscribe=topic)
    assert stream.run(subscribe=topic, tombstones="ignore") == list(range(16, 26))


def test_a_gap_under_a_lagging_query_as_rows(stream: Stream, topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=10)
    topics.append(topic, range(5))
    stream.run(subscribe=topic, tombstones="rows")
    topics.append(topic, range(20))
    topics.delete_records(topic, before_seq=20)
    assert stream.run(subscribe=topic, tombstones="rows") == list(range(20, 26))
    gaps = [(row.gap_from, row.gap_to, row.reason) for row in stream.rows if row.kind == "gap"]
    assert len(gaps) == 1
    assert gaps[0][0] == 6
    assert gaps[0][2] == "cap"


def test_a_topic_made_again_is_noticed(stream: Stream, topics: Client, topic: str) -> None:
    topics.append(topic, range(5))
    stream.run(subscribe=topic, tombstones="rows")
    topics.delete_topic(topic)
    topics.append(topic, range(9))
    assert f"'{topic}' was deleted and made again while the query stood at record 5" in stream.fails(subscribe=topic)
    assert stream.run(subscribe=topic, tombstones="rows") == list(range(1, 10))
    assert [(row.gap_from, row.gap_to, row.reason) for row in stream.rows if row.kind == "gap"] == [
        (6, None, "recreated")
    ]


def test_a_topic_that_is_gone_is_noticed(stream: Stream, topics: Client, topic: str) -> None:
    topics.append(topic, range(5))
    stream.run(subscribe=topic, tombstones="rows")
    topics.delete_topic(topic)
    assert f"'{topic}' was deleted while the query stood at record 5" in stream.fails(subscribe=topic)
    stream.run(subscribe=topic, tombstones="rows")
    assert [row.reason for row in stream.rows if row.kind == "gap"] == ["deleted"]
    topics.append(topic, range(2))
    assert stream.run(subscribe=topic, tombstones="rows") == [1, 2]


def test_a_topic_that_is_no_longer_subscribed_to_is_not_lost_and_may_come_back(
    stream: Stream, topics: Client, topic: str
) -> None:
    one, other = f"{topic}-a", f"{topic}-b"
    for name in (one, other):
        topics.append(name, range(3))
    assert stream.run(subscribe=f"{one},{other}") == [1, 1, 2, 2, 3, 3]
    for name in (one, other):
        topics.append(name, [3])
    assert stream.run(subscribe=one) == [4]
    assert stream.run(subscribePattern=f"{topic}-[bc]") == [4]
    assert stream.run(subscribe=f"{one},{other}") == []


def test_a_missing_topic_and_wrong_options_are_one_clear_line(stream: Stream, topic: str) -> None:
    assert f"topic '{topic}' does not exist" in stream.fails(subscribe=topic)
    assert "endingOffsets is for batches" in stream.fails(subscribe=topic, endingOffsets="latest")


def test_a_service_that_is_away_for_a_while_is_waited_for(spark: SparkSession, tmp_path: Path, topic: str) -> None:
    with Service() as service, Client(service.url, retry=Retry(total_s=30)) as client:
        client.append(topic, range(5))
        stream = Stream(spark, service.url, tmp_path)
        query = stream.start(subscribe=topic)
        poll("the first batch", lambda: len(stream.rows) == 5, BATCH_S)
        service.restart()
        client.append(topic, range(5))
        poll("what came after the restart", lambda: len(stream.rows) == 10, BATCH_S)
        query.stop()
    assert sorted(row.seq for row in stream.rows) == list(range(1, 11))
