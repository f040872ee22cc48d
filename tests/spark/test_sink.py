"""`df.write` and `writeStream` into topics: all or nothing for a job, exactly once for a query."""

from __future__ import annotations

import math
import re
import uuid
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from tests.harness import Service
from topics.client import Client, NewRecord, Record
from topics.core.names import check_topic_name
from topics.spark.columns import arrow_schema
from topics.spark.jobs.program import run_to_end
from topics.spark.options import OptionError, TopicsSparkError, plainly, write_options
from topics.spark.sink import BatchWriter, Rows, check_json
from topics.spark.source import TopicsDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def write(frame: DataFrame, service: Service, **options: Any) -> None:
    frame.write.format("topics").option("url", service.url).options(**options).mode("append").save()


def records(topics: Client, topic: str) -> list[Record]:
    return [item for item in topics.read(topic) if isinstance(item, Record)]


def stages_left(service: Service) -> set[str]:
    """Return the stages of all who share the service."""
    directory = service.data_dir / "txn" / "stages"
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def refusal(action: Any) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        action()
    return plainly(caught.value)


def test_structs_become_json_and_columns_attributes(
    spark: SparkSession, service: Service, topics: Client, topic: str
) -> None:
    frame = spark.sql(
        "select named_struct('i', 1, 's', 'x', 'd', cast(1.50 as decimal(4,2)), 'n', cast(null as int), "
        "'a', array(1, 2), 'm', map('k', true), 't', timestamp'2024-02-29 12:00:00') data, "
        "'tag' tag, 'me' node, map('a', 'b') meta"
    )
    write(frame, service, topic=topic)
    (record,) = records(topics, topic)
    assert bytes(record.raw) == (
        b'{"i":1,"s":"x","d":1.50,"n":null,"a":[1,2],"m":{"k":true},"t":"2024-02-29T12:00:00Z"}'
    )
    assert (record.tag, record.node, record.meta) == ("tag", "me", {"a": "b"})


def made(kind: DataType, values: list[Any]) -> list[bytes]:
    """Return the JSON of these values of the column `data`."""
    schema = StructType([StructField("data", kind)])
    batch = pa.RecordBatch.from_pylist([{"data": value} for value in values], arrow_schema(schema))
    return [bytes(record.data) for _topic, record in Rows(schema, write_options({"topic": "t"})).of(batch)]


NUMBERS = StructType([StructField("n", DoubleType()), StructField("m", MapType(StringType(), ArrayType(FloatType())))])


def test_values_of_structs_are_what_they_were() -> None:
    values = [{"n": 0.1, "m": {}}, {"n": -0.0, "m": {"k": [1.5, None]}}, {"n": None, "m": None}]
    assert made(NUMBERS, values) == [b'{"n":0.1,"m":{}}', b'{"n":-0.0,"m":{"k":[1.5,null]}}', b'{"n":null,"m":null}']
    assert made(MapType(StringType(), StringType()), [{}]) == [b"{}"]
    assert made(ArrayType(DecimalType(30, 2)), [[Decimal("12345678901234567890.12"), None]]) == [
        b"[12345678901234567890.12,null]"
    ]


@pytest.mark.parametrize(
    ("value", "place"),
    [({"n": math.nan, "m": {}}, "data.n is nan"), ({"n": None, "m": {"k": [1.0, math.inf]}}, "data.m.k[1] is inf")],
)
def test_a_number_that_is_not_finite_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(TopicsSparkError, match="a row for topic 't': " + re.escape(place)):
        made(NUMBERS, [{"n": 1.0, "m": None}, value])


def test_a_null_in_meta_is_refused_by_its_name() -> None:
    schema = StructType([StructField("data", StringType()), StructField("meta", MapType(StringType(), StringType()))])
    options = write_options({"topic": "t"})
    batch = pa.RecordBatch.from_pylist([{"data": "1", "meta": [("k", "v"), ("n", None)]}], arrow_schema(schema))
    with pytest.raises(TopicsSparkError, match=r"a row for topic 't': meta\.n is null, and only strings are meta"):
        list(BatchWriter(schema, options).groups(Rows(schema, options), iter([batch])))


def test_texts_are_written_byte_for_byte_and_rows_may_name_their_topic(
    spark: SparkSession, service: Service, topics: Client, topic: str
) -> None:
    rows = [('{"a": 1.0,  "b":"\u00e9"}', f"{topic}-a"), ("2", f"{topic}-b"), ("3", None)]
    write(spark.createDataFrame(rows, "data string, topic string"), service, topic=topic)
    assert bytes(records(topics, f"{topic}-a")[0].raw) == '{"a": 1.0,  "b":"\u00e9"}'.encode()
    assert [record.data for record in records(topics, f"{topic}-b")] == [2]
    assert [record.data for record in records(topics, topic)] == [3]


def test_a_large_job_is_there_once_and_leaves_nothing_behind(
    spark: SparkSession, service: Service, topics: Client, topic: str
) -> None:
    frame = spark.range(0, 20_000, 1, 4).selectExpr("to_json(struct(id)) data", "cast(id % 7 as string) tag")
    before = stages_left(service)
    write(frame, service, topic=topic, recordsPerStage="1500")
    found = records(topics, topic)
    assert sorted(record.data["id"] for record in found) == list(range(20_000))
    assert all(record.tag == str(record.data["id"] % 7) for record in found)
    assert stages_left(service) <= before


def test_a_job_that_fails_writes_nothing(spark: SparkSession, service: Service, topics: Client, topic: str) -> None:
    topics.put_topic(topic)
    before = stages_left(service)
    # One task: another that runs beside it would be killed, and what it staged expire.
    frame = spark.range(0, 100, 1, 1).selectExpr("if(id = 99, 'no json', cast(id as string)) data")
    assert "a row's data is not JSON" in refusal(lambda: write(frame, service, topic=topic, recordsPerStage="10"))
    assert topics.get_topic(topic).head_seq == 0
    assert stages_left(service) <= before


def test_long_meta_make_more_stages() -> None:
    """A stage of 5,000 rows with 14 KiB of meta each was refused as too long a body, for ever."""
    schema = StructType([StructField("data", StringType()), StructField("meta", MapType(StringType(), StringType()))])
    options = write_options({"url": "http://127.0.0.1:9", "topic": "t"})
    stager = BatchWriter(schema, options)
    row = {"data": "1", "meta": [("k", "v" * (14 << 10))]}
    batch = pa.RecordBatch.from_pylist([row] * 2000, schema=arrow_schema(schema))
    counts = [len(records) for _topic, records in stager.groups(Rows(schema, options), iter([batch]))]
    assert sum(counts) == 2000
    assert max(counts) == -(-(8 << 20) // (2 + (14 << 10)))


def test_an_abort_drops_what_the_other_tasks_have_staged(service: Service, topics: Client, topic: str) -> None:
    topics.put_topic(topic)
    before = stages_left(service)
    schema = StructType([StructField("data", StringType())])
    writer = TopicsDataSource({"url": service.url, "topic": topic}).writer(schema, False)
    assert isinstance(writer, BatchWriter)
    staged = writer.write(iter([pa.RecordBatch.from_pydict({"data": ["1", "2"]})]))
    assert len(stages_left(service) - before) == 1
    writer.abort([staged, None])
    assert stages_left(service) <= before
    assert topics.get_topic(topic).head_seq == 0


def test_a_job_commits_under_the_name_that_its_user_gave(topic: str) -> None:
    """A key whose prefixes are those of the topic and of the sink was refused when all rows were staged."""
    schema = StructType([StructField("data", StringType())])
    with Service(env={"TOPICS_API_KEYS": f"key:rw:{topic}|mine"}) as guarded:
        writer = BatchWriter(
            schema, write_options({"url": guarded.url, "token": "key", "topic": topic, "sink": "mine"})
        )
        writer.commit([writer.write(iter([pa.RecordBatch.from_pydict({"data": ["1", "2"]})]))])
        with Client(guarded.url, token="key") as client:
            assert client.get_topic(topic).head_seq == 2


@pytest.mark.parametrize("text", ['{"x": 1e400}', f'{{"x": {"1" * 5_000}}}', " [1, null] "])
def test_texts_are_checked_as_the_service_checks_them(service: Service, topics: Client, topic: str, text: str) -> None:
    """A number that Python cannot hold is JSON: a topic with one could be exported, and not be replayed."""
    check_json([NewRecord(msgspec.Raw(text.encode()))])
    topics.append(topic, [NewRecord(msgspec.Raw(text.encode()))])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON: "),
        ("1 2", "is not JSON: "),
        ("NaN", "is not JSON: "),
        ('{"x": 1},{"x": 2}', "is not JSON: "),
        ("[" * 5_000 + "]" * 5_000, "is not accepted: its JSON is nested too deeply"),
        ('"\\ud800"', "is not accepted: an unpaired surrogate escape"),
    ],
)
def test_a_text_that_is_not_json_is_shown(text: str, reason: str) -> None:
    """Half a surrogate pair was called "Input data was truncated"."""
    with pytest.raises(TopicsSparkError, match=f"a row's data {reason}"):
        check_json([NewRecord(msgspec.Raw(text.encode()))])


@pytest.mark.parametrize(
    ("columns", "options", "line"),
    [
        ("1 as x", {"topic": "t"}, "needs the column data"),
        ("'1' as data, 2 as extra", {"topic": "t"}, "column extra is not a part of a record"),
        ("'1' as data", {}, "give the option topic, or a column topic"),
        ("'1' as data, 1 as tag", {"topic": "t"}, "column tag must be a string, not int"),
        ("'1' as data, map('a', 1) as meta", {"topic": "t"}, "must be map<string,string>"),
        ("'1' as data", {"topic": "a/b"}, "not a valid name"),
        ("'1' as data", {"topic": "t", "topics": "x"}, "did you mean topic?"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(
    spark: SparkSession, columns: str, options: dict[str, str], line: str
) -> None:
    with pytest.raises(TopicsSparkError) as caught:
        TopicsDataSource(options).writer(spark.sql(f"select {columns}").schema, False)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "line"),
    [("1 as x", "needs the column data"), ("cast(null as string) as data", "has no data: null is not a record")],
)
def test_driver_and_tasks_say_what_is_wrong_in_one_line(
    spark: SparkSession, service: Service, columns: str, line: str
) -> None:
    assert line in refusal(lambda: write(spark.sql(f"select {columns}"), service, topic="t"))


def test_a_sinks_name_leaves_room_for_that_of_its_query() -> None:
    longest = "s" * 218
    assert check_topic_name(f"{write_options({'sink': longest}).sink}.{uuid.uuid4()}", "sink")
    with pytest.raises(OptionError, match="has 219 characters, at most are 218"):
        write_options({"sink": f"{longest}s"})
    assert write_options({}).sink == "spark"


def stream(spark: SparkSession, service: Service, source: str, sink: str, checkpoint: Path, **options: Any) -> None:
    """A pass over what is in one topic, into another."""
    reader = spark.readStream.format("topics").option("url", service.url).option("subscribe", source)
    frame = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "100").load()
    writer = frame.select("data", "tag").repartition(3).writeStream.format("topics").option("url", service.url)
    run_to_end(writer.option("topic", sink).options(**options).option("checkpointLocation", str(checkpoint)))


@pytest.mark.spark_since("4.2")
def test_a_stream_is_copied_exactly_once_over_restarts(
    spark: SparkSession, service: Service, topics: Client, topic: str, tmp_path: Path
) -> None:
    before = stages_left(service)
    for first in (0, 150):
        topics.append(topic, [{"n": n} for n in range(first, first + 150)])
        stream(spark, service, topic, f"{topic}-out", tmp_path)
    copied = Counter(record.data["n"] for record in records(topics, f"{topic}-out"))
    assert copied == Counter(range(300))
    assert stages_left(service) <= before


@pytest.mark.spark_since("4.2")
def test_a_batch_that_spark_repeats_appends_nothing(
    spark: SparkSession, service: Service, topics: Client, topic: str, tmp_path: Path
) -> None:
    """Spark's note of the commit is taken back, as after a crash between the sink's commit and the note."""
    before = stages_left(service)
    topics.append(topic, [{"n": n} for n in range(150)])
    stream(spark, service, topic, f"{topic}-out", tmp_path)
    assert topics.get_topic(f"{topic}-out").head_seq == 150
    notes = sorted((tmp_path / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last = notes[-1].name
    for name in (last, f".{last}.crc"):
        (tmp_path / "commits" / name).unlink(missing_ok=True)
    stream(spark, service, topic, f"{topic}-out", tmp_path)
    assert Counter(record.data["n"] for record in records(topics, f"{topic}-out")) == Counter(range(150))
    assert stages_left(service) <= before


@pytest.mark.spark_since("4.2")
def test_a_new_checkpoint_is_a_new_query_and_writes_all_again(
    spark: SparkSession, service: Service, topics: Client, topic: str, tmp_path: Path
) -> None:
    topics.append(topic, [{"n": 1}])
    for number in range(2):
        stream(spark, service, topic, f"{topic}-out", tmp_path / str(number))
    assert topics.get_topic(f"{topic}-out").head_seq == 2


@pytest.mark.spark_since("4.2")
def test_a_checkpoint_older_than_what_was_written_is_refused(
    spark: SparkSession, service: Service, topics: Client, topic: str, tmp_path: Path
) -> None:
    topics.append(topic, [{"n": n} for n in range(150)])
    stream(spark, service, topic, f"{topic}-out", tmp_path)
    for directory in ("commits", "offsets"):
        for path in (tmp_path / directory).iterdir():
            if path.name.strip(".").removesuffix(".crc") != "0":
                path.unlink()
    (tmp_path / "commits" / "0").unlink()
    (tmp_path / "commits" / ".0.crc").unlink(missing_ok=True)
    line = refusal(lambda: stream(spark, service, topic, f"{topic}-out", tmp_path))
    assert "the query's checkpoint is older than its last write" in line
    assert topics.get_topic(f"{topic}-out").head_seq == 150
