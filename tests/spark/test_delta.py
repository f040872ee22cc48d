"""`export --format delta`: each record once in the table, whatever is repeated."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pytest
from deltalake import DeltaTable

from tests.harness import Service
from tests.spark.test_jobs import Jobs, take_back
from topics.client import Client, NewRecord, Record
from topics.spark.jobs import delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def jobs(spark: SparkSession, service: Service, tmp_path: Path) -> Jobs:
    return Jobs(service, tmp_path)


@pytest.fixture
def topic(topic: str) -> str:
    """A name that neither a path nor a URI takes as it is."""
    return f"{topic}:a.b"


def rows(lake: Path) -> list[dict[str, Any]]:
    """Return the rows, read by Delta's own reader."""
    found: list[dict[str, Any]] = DeltaTable(str(lake)).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: row["seq"])


def test_a_table_grows_by_what_is_new_each_record_once(
    spark: SparkSession, topics: Client, jobs: Jobs, topic: str, tmp_path: Path
) -> None:
    lake = tmp_path / "a lake"
    export = ["--topics", topic, "--out", str(lake), "--format", "delta", "--max-records", "10"]
    topics.append(topic, [NewRecord({"n": n}, tag=f"t{n % 3}", meta={"k": str(n)}) for n in range(25)])
    assert jobs.run("export", *export)["records"] == 25
    # Spark's note of the last batch is gone: it runs again, and the table has it already.
    take_back(lake / "_checkpoint")
    before = DeltaTable(str(lake)).version()
    jobs.run("export", *export)
    assert DeltaTable(str(lake)).version() == before
    topics.append(topic, [NewRecord({"n": n}) for n in range(25, 30)])
    assert jobs.run("export", *export)["records"] == 5
    found = rows(lake)
    assert [row["data"] for row in found] == [f'{{"n":{n}}}' for n in range(30)]
    assert {row["topic"] for row in found} == {topic}
    records = list(topics.read(topic))
    assert [int(row["timestamp"].timestamp() * 1000) for row in found] == [
        record.ts for record in records if isinstance(record, Record)
    ]
    assert [row["meta"] for row in found[:25]] == [[("k", str(n))] for n in range(25)]
    by_spark = delta.read(spark, str(lake))
    assert sorted(row.seq for row in by_spark.select("seq").collect()) == list(range(1, 31))
    assert not list((lake / "_delta_staging").rglob("*.parquet"))


def test_a_batch_whose_commit_failed_is_written_again(
    topics: Client, jobs: Jobs, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    export = ["--topics", topic, "--out", str(lake), "--format", "delta", "--max-records", "10"]
    topics.append(topic, range(25))
    commit = DeltaTable.create_write_transaction
    failures = iter([None, OSError("no commit of the second batch")])

    def failing(self: DeltaTable, *arguments: Any, **more: Any) -> None:
        error = next(failures, None)
        if error is not None:
            raise error
        commit(self, *arguments, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", failing)
    assert "no commit of the second batch" in jobs.refusal("export", *export)
    assert [row["seq"] for row in rows(lake)] == list(range(1, 11))
    jobs.run("export", *export)
    assert [row["seq"] for row in rows(lake)] == list(range(1, 26))


def test_many_small_files_become_one_while_readers_read(topics: Client, jobs: Jobs, topic: str, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    export = ["--topics", topic, "--out", str(lake), "--format", "delta", "--max-records", "5"]
    topics.append(topic, [NewRecord({"n": n}, tag=f"t{n % 3}") for n in range(30)])
    jobs.run("export", *export)
    table = DeltaTable(str(lake))
    assert len(table.file_uris()) >= 6
    expected = rows(lake)
    assert jobs.run("export", *export, "--compact", "2")["days_compacted"] == len(table.partitions())
    assert len(DeltaTable(str(lake)).file_uris()) == len(table.partitions())
    assert rows(lake) == expected
    assert sorted(table.to_pyarrow_table()["seq"].to_pylist()) == list(range(1, 31)), "who had it open reads on"


def test_a_table_is_rolled_up(topics: Client, jobs: Jobs, spark: SparkSession, topic: str, tmp_path: Path) -> None:
    topics.append(topic, [NewRecord({"n": n}, tag=f"t{n % 3}") for n in range(30)])
    jobs.run("export", "--topics", topic, "--out", str(tmp_path / "lake"), "--format", "delta")
    jobs.run("rollup", "--lake", str(tmp_path / "lake"), "--to-parquet", str(tmp_path / "counts"))
    counted: Counter[str] = Counter()
    for row in spark.read.parquet(str(tmp_path / "counts")).collect():
        counted[row.tag] += row.events
    assert counted == {"t0": 10, "t1": 10, "t2": 10}
    replay = ["--lake", str(tmp_path / "lake"), "--to-topic", "x", "--checkpoint", str(tmp_path / "replay")]
    assert "is a Delta table" in jobs.refusal("replay", *replay)


def test_other_columns_are_refused(topics: Client, jobs: Jobs, topic: str, tmp_path: Path) -> None:
    topics.append(topic, [{"n": 1}])
    export = ["--topics", topic, "--out", str(tmp_path), "--format", "delta"]
    jobs.run("export", *export)
    topics.append(topic, [{"n": 2}])
    refusal = jobs.refusal("export", *export, "--schema", "n INT")
    assert f"the Delta table {tmp_path} has other columns than this export" in refusal


def test_without_the_package_and_elsewhere_it_is_refused_in_a_line(
    jobs: Jobs, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = ["--topics", topic, "--format", "delta"]
    assert "not to 's3a://bucket/lake'" in jobs.refusal("export", *export, "--out", "s3a://bucket/lake")
    monkeypatch.setitem(sys.modules, deltalake.__name__, None)
    assert "needs the package deltalake: pip install 'topicsd[delta]'" in jobs.refusal("export", *export, "--out", "x")
