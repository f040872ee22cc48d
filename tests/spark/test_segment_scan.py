"""`mode=segments`: the same rows as over HTTP, from the files (docs/spark.md)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DataType, LongType, MapType, StringType, StructField, StructType, TimestampType

from tests.harness import Service, poll, tiered_service
from tests.spark.conftest import COMPACTED_S, Reading
from topics.api.segment_answers import Manifest
from topics.client import Client, InvalidRequestError, NewRecord, Retry, ServiceBusyError, calls
from topics.core.clock import SystemClock
from topics.shm import shm_names
from topics.spark import segment_scan
from topics.spark.columns import ColumnBuilder
from topics.spark.http_read import PLAN_RETRY, ReadPlan, connect, read_range
from topics.spark.jobs.program import run_to_end
from topics.spark.offsets import Range
from topics.spark.options import DataLossError, OptionError, ReadOptions, plainly, read_options
from topics.spark.segment_scan import end_pins, read_part, sealed_of
from topics.storage.filesystem import OsFileSystem
from topics.storage.pins import pins_dir, read_pinned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = 40


@pytest.fixture(scope="module")
def stored() -> Iterator[Service]:
    """Small segments at once, a cold directory for all but the newest two."""
    with tiered_service(EVENTS) as running:
        yield running


@pytest.fixture
def service(stored: Service) -> Service:
    return stored


def given(service: Service, topic: str, **more: str) -> dict[str, str]:
    return {"url": service.url, "subscribe": topic} | more


def segments_mode(service: Service) -> dict[str, str]:
    return {"mode": "segments", "dataDir": str(service.data_dir), "coldDir": str(service.root / "cold")}


def schema_of(options: ReadOptions) -> StructType:
    """Return the schema that Spark would give, without a session."""
    text = StringType()
    fields: list[tuple[str, DataType]] = [
        ("topic", text),
        ("seq", LongType()),
        ("timestamp", TimestampType()),
        ("node", text),
        ("tag", text),
    ]
    fields += [("data", text), ("meta", MapType(text, text))]
    if options.tombstones == "rows":
        fields += [("kind", text), ("gap_from", LongType()), ("gap_to", LongType()), ("reason", text)]
    return StructType([StructField(name, kind) for name, kind in fields])


def plan_of(options: ReadOptions, tags: frozenset[str] | None = None) -> ReadPlan:
    return ReadPlan(options, ColumnBuilder(schema_of(options), options), tags)


def rows_of(batches: Iterator[pa.RecordBatch]) -> tuple[list[tuple[Any, ...]], dict[int, str]]:
    """(records as rows, seq → reason of every seq in a gap)"""
    records: list[tuple[Any, ...]] = []
    gone: dict[int, str] = {}
    for batch in batches:
        for row in batch.to_pylist():
            if row.get("kind", "record") == "gap":
                gone |= dict.fromkeys(range(row["gap_from"], row["gap_to"] + 1), row["reason"])
            else:
                meta = row["meta"]
                records.append((row["seq"], row["timestamp"], row["node"], row["tag"], row["data"], meta))
    return records, gone


class Reader:
    """Reads one range in both modes, in this process."""

    def __init__(self, service: Service, topic: str, **more: str) -> None:
        more = {"tombstones": "rows"} | more
        self.http = read_options(given(service, topic, **more))
        self.files = read_options(given(service, topic, **segments_mode(service), **more))
        self.topic = topic
        self.client = connect(self.http.service, PLAN_RETRY)

    def whole(self, from_seq: int = 0) -> Range:
        state = self.client.get_topic(self.topic)
        return Range(self.topic, state.epoch, from_seq, state.head_seq)

    def over_http(self, one: Range, tags: frozenset[str] | None = None) -> Any:
        return rows_of(read_range(self.client, one, plan_of(self.http, tags)))

    def from_files(self, one: Range, tags: frozenset[str] | None = None) -> Any:
        (sealed,), _ = sealed_of(self.client, [one])
        return rows_of(read_part(one, sealed, plan_of(self.files, tags)))


def manifest(client: Client, topic: str) -> Manifest:
    return client.call(calls.segments(topic))


def settle(client: Client, topic: str, count: int) -> Manifest:
    """Wait until `count` segments are sealed."""

    def settled() -> Manifest | None:
        found = manifest(client, topic)
        return found if len(found.segments) >= count else None

    return poll("segments", settled, COMPACTED_S)


def random_record(random_: random.Random, n: int) -> NewRecord:
    text = random_.choice(["", "x", "é", "\N{SNOWMAN}", ',"meta":{', "y" * random_.randrange(200)])
    return NewRecord(
        {"n": n, "text": text},
        tag=random_.choice([None, "a", "b", "c:1", "c:2", "é"]),
        node=random_.choice([None, "me", "you"]),
        meta=random_.choice([None, None, {"k": "v", "é": ',"meta":{'}, {"one": text}]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_same_rows_as_over_http_in_many_states(service: Service, topic: str, seed: int) -> None:
    random_ = random.Random(seed)
    with Client(service.url) as client:
        reader = Reader(service, topic, **({"node": "me"} if seed % 2 else {}))
        written = from_segments = 0
        for step in range(4):
            for _ in range(random_.randrange(3, 9)):
                batch = [random_record(random_, written + n) for n in range(random_.randrange(1, 30))]
                client.append(topic, batch)
                written += len(batch)
            # Files have all but the last records at every step, also where a floor has passed what was sealed before.
            poll(
                "segments",
                lambda: manifest(client, topic).http_from_seq > client.get_topic(topic).head_seq - EVENTS,
                COMPACTED_S,
            )
            change = random_.randrange(4)
            if change == 0:
                client.delete_records(topic, match=random_.choice(["a", "c:*", "b"]))
            elif change == 1:
                client.delete_records(topic, before_seq=random_.randrange(1, written // 2))
            elif change == 2:
                client.put_topic(topic, cap_records=max(EVENTS, written // 2))
                client.append(topic, [written])
                written += 1
            state = client.get_topic(topic)
            starts = {0, state.earliest_seq - 1, state.earliest_seq, random_.randrange(state.head_seq)}
            for from_seq in sorted(starts):
                whole = reader.whole(from_seq)
                to_seq = random_.choice([whole.to_seq, random_.randrange(from_seq, whole.to_seq + 1)])
                one = whole._replace(to_seq=to_seq)
                tags = random_.choice([None, frozenset({"a", "c:1"})])
                assert reader.from_files(one, tags) == reader.over_http(one, tags), (seed, step, one, tags)
                from_segments += len(manifest(client, topic).segments)
        assert from_segments


def test_what_an_exactly_once_router_adds_to_meta_is_text(service: Service, topic: str) -> None:
    """It is an object there (api §6); the column is MAP<STRING, STRING> in both modes."""
    route = {"source": topic, "dest": f"{topic}.d", "guarantee": "exactly_once"}
    with Client(service.url) as client:
        client.put_topic(topic)
        assert service.client.put(f"/v0/routers/{topic}", json=route).status_code == 201
        metas = [{"k": str(n)} if n % 2 else None for n in range(2 * EVENTS)]
        client.append(topic, [NewRecord({"n": n}, meta=meta) for n, meta in enumerate(metas)])
        settle(client, f"{topic}.d", 2)
    reader = Reader(service, f"{topic}.d")
    records, gone = reader.from_files(reader.whole())
    assert (records, gone) == reader.over_http(reader.whole())
    for (seq, *_, meta), written in zip(records, metas, strict=True):
        found = dict(meta)
        assert json.loads(found.pop("_topics_router"))["source_seq"] == seq
        assert found == (written or {})


def read_both(spark: SparkSession, service: Service, topic: str, **more: str) -> tuple[DataFrame, DataFrame]:
    frames = [
        spark.read.format("topics").options(**given(service, topic, **more), **mode).load()
        for mode in ({}, segments_mode(service))
    ]
    return frames[0], frames[1]


def test_spark_reads_the_same_from_files(spark: SparkSession, service: Service, topic: str) -> None:
    random_ = random.Random(5)
    with Client(service.url) as client:
        for first in range(0, 1200, 100):
            client.append(topic, [random_record(random_, first + n) for n in range(100)])
        settle(client, topic, 30)
        poll("cold segments", lambda: any(one.tier == "cold" for one in manifest(client, topic).segments), COMPACTED_S)
        client.delete_records(topic, match="b")
    for more in ({}, {"schema": "n INT, text STRING", "node": "me", "includeMeta": "false", "includeTags": "false"}):
        http, files = read_both(spark, service, topic, maxRecordsPerPartition="333", **more)
        assert http.schema == files.schema
        expected = http.orderBy("seq").collect()
        assert len(expected) > 500
        assert files.orderBy("seq").collect() == expected
    assert files.rdd.getNumPartitions() == http.rdd.getNumPartitions() == 4


@pytest.mark.spark_since("4.1")
def test_filters_are_pushed_down_to_files(spark: SparkSession, service: Service, topic: str) -> None:
    random_ = random.Random(6)
    with Client(service.url) as client:
        client.append(topic, [random_record(random_, n) for n in range(6 * EVENTS)])
        settle(client, topic, 5)
    http, files = read_both(spark, service, topic, pushFilters="true")
    where = f"tag in ('a', 'c:1') and seq > 20 and seq <= 190 and topic = '{topic}'"
    expected = http.where(where).orderBy("seq").collect()
    assert len(expected) > 20
    assert files.where(where).orderBy("seq").collect() == expected


@pytest.mark.spark_since("4.2")
def test_a_stream_takes_its_backlog_from_files(
    spark: SparkSession, service: Service, topic: str, tmp_path: Path
) -> None:
    with Client(service.url) as client:
        client.append(topic, [{"n": n} for n in range(500)])
        settle(client, topic, 12)
        options = given(
            service, topic, **segments_mode(service), startingOffsets="earliest", maxOffsetsPerTrigger="150"
        )
        for expected in (500, 530):
            run_to_end(
                spark.readStream.format("topics")
                .options(**options)
                .load()
                .select("seq", "data")
                .writeStream.format("parquet")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .option("path", str(tmp_path / "out"))
            )
            rows = spark.read.parquet(str(tmp_path / "out")).orderBy("seq").collect()
            assert [(row.seq, json.loads(row.data)["n"]) for row in rows] == [(n + 1, n) for n in range(expected)]
            client.append(topic, [{"n": n} for n in range(500, 530)])


# --- what happens between planning and reading


class Planned:
    """A topic with four sealed segments, planned to be read from its files."""

    def __init__(self, service: Service, topic: str, **more: str) -> None:
        self.client = Client(service.url)
        self.topic = topic
        self.client.append(topic, [NewRecord({"n": n}, tag=f"t{n % 10}") for n in range(4 * EVENTS + 7)])
        settle(self.client, topic, 4)
        # Nothing of it moves any more.
        poll(
            "tiers",
            lambda: [one.tier for one in manifest(self.client, topic).segments] == ["cold", "cold", "hot", "hot"],
            COMPACTED_S,
        )
        self.reader = Reader(service, topic, **more)
        self.range = self.reader.whole()
        self.expected = self.reader.over_http(self.range)
        (self.sealed,), self.pins = sealed_of(self.client, [self.range])
        self.service = service

    def read(self) -> Any:
        return rows_of(read_part(self.range, self.sealed, plan_of(self.reader.files)))

    def path(self, number: int, kind: str = "data") -> Path:
        segment = self.sealed.segments[number]
        if kind == "idx":
            return self.service.data_dir / segment.idx_path
        root = self.service.data_dir if segment.tier == "hot" else self.service.root / "cold"
        return root / segment.data_path


def test_pinned_records_are_read_after_they_were_evicted(service: Service, topic: str) -> None:
    planned = Planned(service, topic)
    planned.client.put_topic(topic, cap_records=5)
    planned.client.append(topic, [1])
    records, gone = planned.read()
    # What was in no sealed segment has gone from the service, and the reader is told.
    assert records[: 4 * EVENTS] == planned.expected[0][: 4 * EVENTS]
    assert set(gone) <= set(range(4 * EVENTS + 1, 4 * EVENTS + 8))
    assert len(records) + len(gone) == len(planned.expected[0])


def test_what_is_deleted_after_planning_is_left_out(service: Service, topic: str) -> None:
    planned = Planned(service, topic)
    planned.client.delete_records(topic, match="t3")
    whole = planned.reader.whole()
    poll("marks", lambda: planned.reader.from_files(whole) == planned.reader.over_http(whole))
    records, gone = planned.read()
    assert not gone
    assert [row for row in planned.expected[0] if row[3] != "t3"] == records


def test_a_file_that_is_not_there_is_asked_of_the_service(service: Service, topic: str) -> None:
    planned = Planned(service, topic)
    without_cold = read_options(
        given(service, topic, mode="segments", dataDir=str(service.data_dir), tombstones="rows")
    )
    planned.reader.files = without_cold
    assert planned.read() == planned.expected


def test_a_file_that_nobody_has_is_a_gap(service: Service, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(service, topic)
    monkeypatch.setattr(segment_scan, "MISSING_RETRY", Retry(total_s=1.0))
    planned.path(3).unlink()

    def refused() -> bool:
        with Client(service.url, retry=Retry(total_s=0.0)) as client:
            try:
                client.diff(topic, 3 * EVENTS)
            except ServiceBusyError as error:
                return error.code == "storage_unavailable"
            return False

    # Each frontend closes its map in its own time; which one answers is chance.
    poll("every frontend to have let go of it", lambda: all(refused() for _ in range(20)), 20)
    records, gone = planned.read()
    assert gone == dict.fromkeys(range(3 * EVENTS + 1, 4 * EVENTS + 1), "missing")
    assert records == [row for row in planned.expected[0] if row[0] not in gone]


@pytest.mark.parametrize("tombstones", ["fail", "rows", "ignore"])
def test_damage_is_a_gap_never_fewer_rows(service: Service, topic: str, tombstones: str) -> None:
    planned = Planned(service, topic, tombstones=tombstones)
    path = planned.path(2)
    content = bytearray(path.read_bytes())
    content[content.index(b'{"n":100}') + 5] ^= 1
    path.write_bytes(content)
    if tombstones == "fail":
        with pytest.raises(DataLossError, match=rf"records 101 to 101 are gone \(reason: damaged: {path}: corrupt at"):
            planned.read()
        return
    records, gone = planned.read()
    assert gone == ({101: "damaged"} if tombstones == "rows" else {})
    assert records == [row for row in planned.expected[0] if row[0] != 101]


@pytest.mark.parametrize("kind", ["truncated data", "truncated index", "another index"])
def test_a_file_that_is_not_whole_is_a_gap(service: Service, topic: str, kind: str) -> None:
    planned = Planned(service, topic)
    path = planned.path(3, "data" if kind == "truncated data" else "idx")
    content = bytearray(path.read_bytes())
    if kind == "another index":
        content[0:20], content[20:40] = content[20:40], content[0:20]
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2])
    records, gone = planned.read()
    assert gone
    assert set(gone.values()) == {"damaged"}
    assert {row[0] for row in records} | gone.keys() == {row[0] for row in planned.expected[0]}
    assert not {row[0] for row in records} & gone.keys()
    assert [row for row in planned.expected[0] if row[0] not in gone] == records


def test_sealed_records_need_no_service(topic: str) -> None:
    with Service(env={"TOPICS_SEGMENT_MAX_EVENTS": "40", "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}) as own:
        with Client(own.url) as client:
            client.append(topic, [{"n": n} for n in range(80)])
            settle(client, topic, 2)
            options = read_options(given(own, topic, mode="segments", dataDir=str(own.data_dir)))
            one = Range(topic, client.get_topic(topic).epoch, 0, 80)
            (sealed,), _ = sealed_of(client, [one])
        own.stop()
        records, gone = rows_of(read_part(one, sealed, plan_of(options)))
        assert [row[0] for row in records] == list(range(1, 81))
        assert not gone


def test_a_plan_that_fails_leaves_no_pins(service: Service, topic: str) -> None:
    directory = pins_dir(shm_names.ram_dir(shm_names.identity(str(service.data_dir))))
    with Client(service.url) as client:
        client.append(topic, list(range(2 * EVENTS)))
        settle(client, topic, 2)
        topic_id = int(client.get_topic(topic).epoch, 16)

        def pinned() -> bool:
            held = read_pinned(OsFileSystem(), directory, SystemClock().monotonic_ms())
            return any(key.topic_id == topic_id for key in held)

        one = Range(topic, client.get_topic(topic).epoch, 0, 2 * EVENTS)
        with pytest.raises(InvalidRequestError):
            sealed_of(client, [one, one._replace(topic="no such name")])
        assert not pinned()
        _, pins = sealed_of(client, [one])
        assert pinned()
        end_pins(client, pins)
        assert not pinned()


def test_a_topic_that_cannot_be_pinned_is_read_over_http(topic: str) -> None:
    """256 pins of others, or of topics of this very query, failed it."""
    settings = {"TOPICS_SEGMENT_MAX_EVENTS": "40", "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}
    with Service(env=settings) as own, Client(own.url) as client:
        client.append(topic, [{"n": n} for n in range(80)])
        settle(client, topic, 2)
        options = read_options(given(own, topic, mode="segments", dataDir=str(own.data_dir)))
        one = Range(topic, client.get_topic(topic).epoch, 0, 80)
        for _ in range(256):
            client.call(calls.segments(topic, pin_ttl_ms=600_000))
        with pytest.raises(ServiceBusyError, match="keeps 256 pins"):
            client.call(calls.segments(topic, pin_ttl_ms=600_000))
        (sealed,), pins = sealed_of(client, [one])
        assert not pins
        records, gone = rows_of(read_part(one, sealed, plan_of(options)))
    assert [row[0] for row in records] == list(range(1, 81))
    assert not gone


def test_the_tasks_of_a_process_renew_pins_together(
    service: Service, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task asked for all pins of its query: those of 200 topics were 40,000 requests."""
    planned = Planned(service, topic)
    renewed: list[str] = []

    def renew(name: str, pin: str, ttl_ms: int) -> Any:
        renewed.append(pin)
        return calls.renew_pin(name, pin, ttl_ms)

    monkeypatch.setattr(segment_scan, "calls", SimpleNamespace(renew_pin=renew))
    for _ in range(3):
        assert planned.read() == planned.expected
    assert renewed == [pin.id for pin in planned.pins]


def test_directories_are_checked_where_they_are_used(service: Service, topic: str, read: Reading) -> None:
    with Client(service.url) as client:
        client.append(topic, [{"n": n} for n in range(2 * EVENTS)])
        settle(client, topic, 2)
    with pytest.raises(OptionError, match="mode=segments needs the option dataDir"):
        read_options(given(service, topic, mode="segments"))
    with pytest.raises(OptionError, match="are for mode=segments"):
        read_options(given(service, topic, dataDir="/x"))
    with pytest.raises(Exception, match="no directory topics") as caught:
        read(topic, mode="segments", dataDir="/nowhere").count()
    assert "option dataDir='/nowhere'" in plainly(caught.value)
