"""`spark.read.format("topics")` on the real Spark and the real service."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import (
    DataType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.harness import Service
from tests.spark.conftest import Reading
from tests.spark.test_segment_scan import schema_of
from topics.client import Client, NewRecord, Record, calls
from topics.spark import http_read
from topics.spark.batch import BatchReader, RangePartition
from topics.spark.columns import ColumnBuilder, ParsedColumns, arrow_schema
from topics.spark.offsets import Range
from topics.spark.options import OptionError, TopicsSparkError, plainly, read_options
from topics.spark.source import TopicsDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ["topic", "seq", "timestamp", "node", "tag", "data", "meta"]


def fill(topics: Client, topic: str, count: int, batch: int = 1000) -> None:
    for first in range(0, count, batch):
        records = [NewRecord({"n": n}, tag=f"t{n % 3}") for n in range(first, min(count, first + batch))]
        topics.append(topic, records)


def seqs(frame: DataFrame) -> list[int]:
    return sorted(row.seq for row in frame.select("seq").collect())


def refusal(action: Any) -> str:
    with pytest.raises(PySparkException) as caught:
        action()
    return plainly(caught.value)


def test_columns_hold_what_was_written(topics: Client, topic: str, read: Reading) -> None:
    raw = b'{"a": 1.50,  "a": "\\u00e9", "\xc3\xa9": null}'
    topics.append(topic, [NewRecord(msgspec.Raw(raw), tag="x", node="n", meta={"k": "v"}), NewRecord("plain")])
    frame = read(topic)
    assert frame.columns == COLUMNS
    first, second = frame.orderBy("seq").collect()
    record = next(iter(topics.read(topic)))
    assert isinstance(record, Record)
    assert (first.topic, first.seq, first.node, first.tag, first.meta) == (topic, 1, "n", "x", {"k": "v"})
    assert first.data.encode() == raw
    assert first.timestamp.timestamp() * 1000 == pytest.approx(record.ts, abs=0.5)
    assert (second.data, second.node, second.tag, second.meta) == ('"plain"', None, None, None)


def test_every_record_once_over_parallel_partitions(topics: Client, topic: str, read: Reading) -> None:
    fill(topics, topic, 5_000)
    frame = read(topic, minPartitions="4", maxRecordsPerPartition="900")
    assert frame.rdd.getNumPartitions() == 6
    assert seqs(frame) == list(range(1, 5_001))
    assert [json.loads(row.data)["n"] for row in frame.orderBy("seq").collect()] == list(range(5_000))


def test_ranges_are_cursors(topics: Client, topic: str, read: Reading) -> None:
    fill(topics, topic, 20)
    ends = {"startingOffsets": json.dumps({topic: 5}), "endingOffsets": json.dumps({topic: 9})}
    assert seqs(read(topic, **ends)) == [6, 7, 8, 9]
    assert seqs(read(topic, startingOffsets=json.dumps({topic: "latest"}))) == []
    assert seqs(read(topic, startingOffsets=json.dumps({topic: -2}), endingOffsets=json.dumps({topic: 2}))) == [1, 2]
    assert "endingOffsets: topic" in refusal(lambda: read(topic, endingOffsets=json.dumps({topic: 21})).count())


def test_offsets_that_are_not_there_and_topics_that_are_not_read_are_refused(topics: Client, topic: str) -> None:
    topics.append(topic, range(20))
    found = {topic: topics.get_topic(topic)}

    def resolved(position: int | str, name: str = topic) -> int:
        options = read_options({"subscribe": topic, "startingOffsets": json.dumps({name: position})})
        assert options.starting is not None
        return http_read.resolve("startingOffsets", found, options.starting)[topic].seq

    assert [resolved(position) for position in (20, 0, -1, "earliest")] == [20, 0, 20, 0]
    with pytest.raises(OptionError, match=rf"startingOffsets: topic '{topic}' ends at 20, not 21"):
        resolved(21)
    with pytest.raises(OptionError, match="startingOffsets names the topic 'odrers', which is not one of those"):
        resolved(1, "odrers")


def test_a_range_that_ends_before_it_begins_is_refused(service: Service, topics: Client, topic: str) -> None:
    """Two offsets that were mixed up gave no rows."""
    topics.append(topic, range(20))

    def planned(starting: str, ending: str) -> int:
        given = {"url": service.url, "subscribe": topic, "startingOffsets": starting, "endingOffsets": ending}
        options = read_options(given)
        parts = BatchReader(schema_of(options), options).partitions()
        return sum(part.range.to_seq - part.range.from_seq for part in parts if isinstance(part, RangePartition))

    at_4, at_5 = (json.dumps({topic: seq}) for seq in (4, 5))
    assert [planned(at_5, at_5), planned(at_5, "latest"), planned("latest", at_5)] == [0, 15, 0]
    with pytest.raises(OptionError, match=f"endingOffsets: topic '{topic}' ends at 4, before startingOffsets, 5"):
        planned(at_5, at_4)


def test_reading_begins_at_a_time(topics: Client, topic: str, read: Reading) -> None:
    fill(topics, topic, 3)
    at_ms = max(record.ts for record in topics.read(topic) if isinstance(record, Record)) + 1
    while topics.append(topic, [0]).head_seq and _last_ts(topics, topic) < at_ms:
        pass
    expected = [record.seq for record in topics.read(topic) if isinstance(record, Record) and record.ts >= at_ms]
    assert seqs(read(topic, startingTimestamp=str(at_ms))) == expected
    assert seqs(read(topic, startingTimestamp=str(at_ms + 10**9))) == []


def _last_ts(topics: Client, topic: str) -> int:
    ts = topics.get_topic(topic).last_write_ts
    assert ts is not None
    return ts


def test_several_topics_and_patterns(
    spark: SparkSession, service: Service, topics: Client, topic: str, read: Reading
) -> None:
    for name in (f"{topic}-a", f"{topic}-b", f"{topic}x"):
        topics.append(name, [name])
    assert sorted(row.topic for row in read(f"{topic}-a, {topic}x").collect()) == [f"{topic}-a", f"{topic}x"]
    by_pattern = spark.read.format("topics").option("url", service.url).option("subscribePattern", f"{topic}-.*").load()
    assert sorted(row.topic for row in by_pattern.collect()) == [f"{topic}-a", f"{topic}-b"]


def test_nodes_tags_and_meta_can_be_left_out(topics: Client, topic: str, read: Reading) -> None:
    topics.append(topic, [NewRecord(1, node="me", tag="x", meta={"a": "b"}), NewRecord(2, node="you", tag="y")])
    assert seqs(read(topic, node="me")) == [2]
    rows = read(topic, includeTags="false", includeMeta="false").collect()
    assert [(row.tag, row.meta) for row in rows] == [(None, None), (None, None)]


def test_an_empty_topic_is_an_empty_frame(topics: Client, topic: str, read: Reading) -> None:
    topics.put_topic(topic)
    assert read(topic).collect() == []


PARSED = [
    ({"s": "x", "i": 7, "f": 1.5, "b": True, "d": "2024-02-29", "t": "2024-02-29T12:00:00Z", "l": [1, 2], "m": {"k": 1},
      "o": {"z": "q"}, "dec": 12.345},
     ("x", 7, 1.5, True, datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12), [1, 2], {"k": 1}, ("q",),
      "12.35")),
    ({"s": {"a": [1]}, "i": 2**40, "f": "no", "b": 1, "d": "never", "t": 5.5, "l": {}, "m": [], "o": 3, "dec": "x"},
     ('{"a":[1]}', None, None, None, None, None, None, None, None, None)),
    ({"s": msgspec.Raw(b"1e400"), "f": msgspec.Raw(b"1e400"), "i": 1, "dec": msgspec.Raw(b"12345678.905")},
     ("1E+400", 1, None, None, None, None, None, None, None, "12345678.91")),
    ({"f": msgspec.Raw(b"1" + b"0" * 400), "dec": msgspec.Raw(b"9" * 9)}, (None,) * 10),
    ({"d": "2024-02-29T23:30:00-08:00", "t": 1709208000, "dec": "-12.345e1"},
     (None, None, None, None, datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12), None, None, None,
      "-123.45")),
    ({"d": "2024-02-30T00:00:00Z", "t": 10**15, "dec": "1_000"}, (None,) * 10),
    ({"d": "20240229", "t": True, "dec": "NaN"}, (None,) * 10),
    ({"dec": "1" * 500_000 + "x"}, (None,) * 10),  # it took time by the square of its length
    (["no", "object"], (None,) * 10),
    ({}, (None,) * 10),
]  # fmt: skip


def test_parsed_columns_are_permissive_as_from_json(topics: Client, topic: str, read: Reading) -> None:
    topics.append(topic, [data for data, _ in PARSED])
    ddl = (
        "s STRING, i INT, f DOUBLE, b BOOLEAN, d DATE, t TIMESTAMP, l ARRAY<BIGINT>, m MAP<STRING, INT>, "
        "o STRUCT<z: STRING>, dec DECIMAL(10, 2)"
    )
    frame = read(topic, schema=ddl)
    assert frame.columns == [*COLUMNS, "s", "i", "f", "b", "d", "t", "l", "m", "o", "dec"]
    for row, (_, expected) in zip(frame.orderBy("seq").collect(), PARSED, strict=True):
        values = list(row)[7:]
        values[9] = None if values[9] is None else str(values[9])
        values[8] = None if values[8] is None else tuple(values[8])
        values[5] = None if values[5] is None else values[5].astimezone(datetime.UTC).replace(tzinfo=None)
        assert tuple(values) == expected
    assert "topic would be there twice" in refusal(lambda: read(topic, schema="topic STRING").collect())
    assert "cannot be parsed into" in refusal(lambda: read(topic, schema="x BINARY").collect())


@pytest.mark.parametrize("kind", [StringType(), DecimalType(10, 2)])
@pytest.mark.parametrize(
    "text",
    [
        '{"x": 1, "y": 1e99999999999999999999}',
        f'{{"x": 1, "y": {"1" * 5_000}}}',
        f'{{"x": {"[" * 5_000}{"]" * 5_000}}}',
    ],
    ids=["an exponent", "digits", "nesting"],
)
def test_data_that_python_cannot_hold_are_null_and_fail_no_query(text: str, kind: DataType) -> None:
    schema = StructType([StructField("x", kind)])
    parsed = ParsedColumns(schema.fields).of(pa.array([text, '{"x": 7}']), arrow_schema(schema))
    assert [str(value) for value in parsed[0].to_pylist()] == ["None", "7" if kind == StringType() else "7.00"]


def test_long_records_come_in_batches_of_few(service: Service, topics: Client, topic: str) -> None:
    text = "x" * 900_000
    for _ in range(75):
        topics.append(topic, [text])
    kinds = [StringType(), LongType(), TimestampType(), *[StringType()] * 3, MapType(StringType(), StringType())]
    schema = StructType([StructField(name, kind) for name, kind in zip(COLUMNS, kinds, strict=True)])
    options = read_options({"subscribe": topic, "url": service.url})
    plan = http_read.ReadPlan(options, ColumnBuilder(schema, options), None)
    part = Range(topic, topics.get_topic(topic).epoch, 0, 75)
    batches = list(http_read.read_range(topics, part, plan))
    assert [seq for batch in batches for seq in batch.column(1).to_pylist()] == list(range(1, 76))
    assert max(batch.nbytes for batch in batches) <= http_read.PAGES_PER_BATCH * calls.DIFF_MAX_BYTES
    assert len(batches) == 2


def test_a_gap_fails_the_query_by_default(topics: Client, topic: str, read: Reading) -> None:
    topics.put_topic(topic, cap_records=5)
    fill(topics, topic, 12, batch=1)
    assert seqs(read(topic)) == [8, 9, 10, 11, 12], "earliest is where the live records begin"
    from_three = {"startingOffsets": json.dumps({topic: 3})}
    message = refusal(lambda: read(topic, **from_three).collect())
    assert f"topic '{topic}': records 4 to 7 are gone (reason: cap)" in message
    assert seqs(read(topic, **from_three, failOnDataLoss="false")) == [8, 9, 10, 11, 12]
    assert seqs(read(topic, **from_three, tombstones="ignore")) == [8, 9, 10, 11, 12]


def test_a_gap_behind_the_time_at_which_a_query_begins_fails_it(topics: Client, topic: str, read: Reading) -> None:
    topics.put_topic(topic, cap_records=5)
    fill(topics, topic, 12, batch=1)
    from_then = {"startingTimestamp": "0"}
    message = refusal(lambda: read(topic, **from_then).collect())
    assert f"topic '{topic}': records 1 to 7 are gone (reason: cap)" in message
    assert seqs(read(topic, **from_then, tombstones="ignore")) == [8, 9, 10, 11, 12]
    last_ts = _last_ts(topics, topic)
    assert seqs(read(topic, startingTimestamp=str(last_ts + 1))) == []


def test_gaps_as_rows_cover_exactly_what_is_gone(topics: Client, topic: str, read: Reading) -> None:
    topics.put_topic(topic, cap_records=5)
    fill(topics, topic, 12, batch=1)
    rows = read(topic, startingOffsets=json.dumps({topic: 0}), tombstones="rows", maxRecordsPerPartition="3").collect()
    gaps = [(row.gap_from, row.gap_to, row.reason, row.seq) for row in rows if row.kind == "gap"]
    assert sorted(gaps) == [(1, 3, "cap", None), (4, 6, "cap", None), (7, 7, "cap", None)]
    assert sorted(row.seq for row in rows if row.kind == "record") == [8, 9, 10, 11, 12]


def test_deletions_are_silent_and_expiry_is_not(topics: Client, topic: str, read: Reading) -> None:
    fill(topics, topic, 9)
    topics.delete_records(topic, match="t1")
    topics.delete_records(topic, before_seq=3)
    assert seqs(read(topic, startingOffsets=json.dumps({topic: 0}))) == [3, 4, 6, 7, 9]
    topics.put_topic(topic, ttl_ms=1)
    while topics.get_topic(topic).count:
        pass
    from_five = {"startingOffsets": json.dumps({topic: 5}), "endingOffsets": json.dumps({topic: 9})}
    assert "reason: ttl" in refusal(lambda: read(topic, **from_five).collect())


@pytest.mark.spark_since("4.1")
@pytest.mark.parametrize("where", ["seq > 4000 and seq <= 4100", "tag = 't1'", "tag in ('t0', 't2')", "seq = 7"])
def test_pushed_filters_give_the_same_rows(topics: Client, topic: str, read: Reading, where: str) -> None:
    fill(topics, topic, 5_000)
    assert seqs(read(topic, pushFilters="true").where(where)) == seqs(read(topic).where(where))


@pytest.mark.spark_since("4.1")
def test_pushed_filters_spare_requests(topics: Client, topic: str, read: Reading) -> None:
    fill(topics, topic, 3_000)

    def tasks(where: str) -> int:
        return read(topic, maxRecordsPerPartition="100", pushFilters="true").where(where).rdd.getNumPartitions()

    assert tasks("true") == 30
    assert tasks("seq > 2950") == 1
    assert tasks("seq between 1001 and 1300") == 3
    assert tasks(f"topic = '{topic}'") == 30
    assert tasks("topic = 'another'") == 1, "a task that reads nothing"


@pytest.mark.spark_since("4.1")
def test_pushed_filters_on_time(topics: Client, topic: str, read: Reading) -> None:
    from pyspark.sql import functions as f

    for n in range(30):
        topics.append(topic, [n])
    rows = read(topic).orderBy("seq").collect()
    middle = rows[14].timestamp
    expected = [row.seq for row in rows if row.timestamp >= middle]
    assert 0 < len(expected) < 30
    frame = read(topic, pushFilters="true", maxRecordsPerPartition="1")
    later = frame.where(f.col("timestamp") >= f.lit(middle))
    assert seqs(later) == expected
    assert later.rdd.getNumPartitions() == len(expected)
    assert seqs(frame.where(f.col("timestamp") < f.lit(middle))) == list(range(1, expected[0]))
    old = f.lit(datetime.datetime(1969, 7, 20, tzinfo=datetime.UTC))
    again = read(topic, pushFilters="true")
    assert len(seqs(again.where(f.col("timestamp") > old))) == 30
    assert seqs(read(topic, pushFilters="true").where(f.col("timestamp") <= old)) == []


def test_without_pushed_filters_a_frame_can_be_used_again(topics: Client, topic: str, read: Reading) -> None:
    fill(topics, topic, 50)
    frame = read(topic)
    assert seqs(frame.where("seq > 40")) == list(range(41, 51))
    assert seqs(frame) == list(range(1, 51))


@pytest.mark.spark_since("4.1")
def test_why_filters_are_pushed_only_on_request(topics: Client, topic: str, read: Reading) -> None:
    """A fault of Spark 4.3: when this fails, it is mended, and the option can be on by default."""
    fill(topics, topic, 50)
    frame = read(topic, pushFilters="true")
    assert seqs(frame.where("seq > 40")) == list(range(41, 51))
    assert seqs(frame) == list(range(41, 51)), "Spark gives the next query what the filters of the last one left"


@pytest.mark.parametrize(
    ("ddl", "line"),
    [
        ("user STRING, amount DOUBLE", "not with user, amount: leave out .schema(…), and name fields of data in the"),
        (
            "topic STRING, seq BIGINT, timestamp TIMESTAMP, tag STRING, node STRING, data STRING, "
            "meta MAP<STRING, STRING>",
            "timestamp timestamp, node string, tag string, data string, meta map<string,string>, not with topic, seq",
        ),
        (
            "topic STRING, seq INT, timestamp TIMESTAMP, node STRING, tag STRING, data STRING",
            "a read begins with the columns",
        ),
    ],
)
def test_a_schema_of_other_columns_is_refused(
    spark: SparkSession, service: Service, topics: Client, topic: str, ddl: str, line: str
) -> None:
    """Its columns were filled by their places: tags as nodes, without a word."""
    topics.append(topic, [1])
    reader = spark.read.format("topics").options(url=service.url, subscribe=topic)
    assert line in refusal(lambda: reader.schema(ddl).load().collect())


@pytest.mark.parametrize(
    ("ddl", "line"),
    [
        ("item STRNG", 'Unsupported data type "STRNG"'),
        ("item VARCHAR(2)", "option schema: item is of type varchar(2), which data cannot be parsed into"),
    ],
)
def test_a_wrong_parsed_column_is_named(topics: Client, topic: str, read: Reading, ddl: str, line: str) -> None:
    """The error named the first column of the frame, or a type of Arrow and no option."""
    topics.append(topic, [1])
    assert line in refusal(lambda: read(topic, schema=ddl).collect())


def test_a_session_may_have_times_without_a_zone(
    spark: SparkSession, topics: Client, topic: str, read: Reading
) -> None:
    topics.append(topic, [1])
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        frame = read(topic)
        assert frame.schema["timestamp"].dataType.simpleString() == "timestamp_ntz"
        assert seqs(frame) == [1]
    finally:
        spark.conf.unset("spark.sql.timestampType")


@pytest.mark.parametrize("ddl", ["x INT NOT NULL", "x STRUCT<y: INT NOT NULL>", "x ARRAY<STRUCT<y: INT NOT NULL>>"])
def test_a_parsed_column_that_is_not_null_is_refused(topics: Client, topic: str, read: Reading, ddl: str) -> None:
    """Spark left the test for null out, and gave 0 where a record had no such field."""
    topics.append(topic, [{"x": None}, {}])
    assert "is NOT NULL, but a record may lack it" in refusal(lambda: read(topic, schema=ddl).select("x").collect())


def test_the_schema_of_a_frame_can_be_given_again(
    spark: SparkSession, service: Service, topics: Client, topic: str, read: Reading
) -> None:
    topics.append(topic, [{"x": 1}])
    frame = read(topic, schema="x INT")
    reader = spark.read.format("topics").options(url=service.url, subscribe=topic)
    assert reader.schema(frame.schema).load().collect() == frame.collect()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "give one of the options subscribe"),
        ({"subscribe": "a", "subscribePattern": "b"}, "give one of the options subscribe"),
        ({"subscribe": "a/b"}, "'a/b' is not a valid name"),
        ({"subscribe": "a", "startingOffset": "earliest"}, "did you mean startingOffsets?"),
        ({"subscribe": "a", "startingOffsets": "first"}, "startingOffsets='first' must be earliest, latest or JSON"),
        ({"subscribe": "a", "startingOffsets": '{"a": 1.5}'}, "1.5 is not a position"),
        ({"subscribe": "a", "minPartitions": "0"}, "minPartitions='0' must be an integer of at least 1"),
        ({"subscribe": "a", "minPartitions": "9" * 5000}, "' must be an integer of at least 1"),
        ({"subscribe": "a", "failOnDataLoss": "yes"}, "failOnDataLoss='yes' must be true or false"),
        (
            {"subscribe": "a", "failOnDataLoss": "true", "tombstones": "rows"},
            "failOnDataLoss=true contradicts tombstones=rows",
        ),
        ({"subscribe": "a", "url": "localhost:4000"}, "does not name a service: give one like http://127.0.0.1:4000"),
        ({"subscribe": "a", "tombstones": "loud"}, "must be one of fail, rows, ignore"),
        ({"subscribePattern": "("}, "is not a regular expression"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for streams"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(options: dict[str, str], line: str) -> None:
    with pytest.raises(TopicsSparkError) as caught:
        TopicsDataSource(options).reader(StructType())
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("An exception was thrown from the Python worker:\nTypeError: no", "TypeError: no"),
        ("It was thrown from the Python worker:\nTraceback (most recent call last):\n  x\nKeyError: 1", "KeyError: 1"),
        ("Job aborted\nE: Traceback (most recent call last):\n  File x\nKeyError: 1\n\tat java", "KeyError: 1"),
        ("Job aborted\n\tat java", "Job aborted"),
    ],
)
def test_the_error_of_a_worker_is_found_with_and_without_its_traceback(text: str, line: str) -> None:
    """With the settings of the jobs they said `An exception was thrown from the Python worker:` and no more."""
    assert plainly(Exception(text)) == line


def test_what_is_wrong_comes_before_any_stack_trace(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        spark.read.format("topics").options(subscribe="a", startingOffset="earliest").load().count()
    assert plainly(caught.value) == "there is no option startingoffset for reading; did you mean startingOffsets?"
    first = str(caught.value).splitlines()[:6]
    assert not any(text.lstrip().startswith("at ") for text in first), "no Java stack trace before the reason"
    assert any("did you mean startingOffsets?" in text for text in first)


def test_a_wrong_place_key_or_topic_is_one_clear_line(spark: SparkSession, service: Service, topic: str) -> None:
    def message(**options: str) -> str:
        return refusal(lambda: spark.read.format("topics").options(**options).load().count())

    assert message(url="http://127.0.0.1:1", subscribe=topic).startswith("GET http://127.0.0.1:1/v0/topics/")
    assert f"topic '{topic}' does not exist at {service.url}" in message(url=service.url, subscribe=topic)
    assert "no topic at" in message(url=service.url, subscribePattern="nothing-like-it.*")
    for what in ({"subscribe": topic}, {"subscribePattern": ".*"}):  # it said that the topic does not exist there
        said = message(url=f"{service.url}/v0", **what)
        assert said.startswith(f"option url='{service.url}/v0': there is nothing at /v0/v0/topics"), said
        assert said.endswith("(404 not_found); give the address without a path")
    with Service(env={"TOPICS_API_KEYS": "secret:rw"}) as guarded:
        assert "the key is not one that is valid here" in message(url=guarded.url, subscribe=topic, token="wrong")
        assert "needs a key" in message(url=guarded.url, subscribe=topic)
