"""The pipelines, as the programs that people run, one after the other on the real events."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples import weekly
from examples.replay import DATA, first_folder
from tests.harness import Service
from tests.spark.conftest import ROOT, make_java_home, spark_environment
from topics.client import Client, NewRecord, Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def java_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_java_home(tmp_path_factory.mktemp("java-of-jobs"))


class Pipeline:
    """`topics spark JOB` in processes of their own."""

    def __init__(self, service: Service, java_home: Path) -> None:
        self._url = service.url
        self._environment = os.environ | spark_environment(java_home)

    def run(self, job: str, *arguments: str) -> dict[str, Any]:
        done = self.attempt(job, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    def attempt(self, job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from topics.cli.main import main; sys.exit(main())"
        common = ["--url", self._url, "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
        command = [sys.executable, "-c", code, "spark", job, *common, *arguments]
        return subprocess.run(
            command, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture
def pipeline(service: Service, java_home: Path) -> Pipeline:
    return Pipeline(service, java_home)


@pytest.fixture
def topics(service: Service) -> Any:
    with Client(service.url) as client:
        yield client


def lake_rows(spark: SparkSession, lake: Path) -> list[Any]:
    return spark.read.parquet(str(lake)).collect()


def test_the_real_events_from_file_to_chart_and_back(
    spark: SparkSession, service: Service, topics: Client, pipeline: Pipeline, topic: str, tmp_path: Path
) -> None:
    """Batch = stream = the file itself; the lake grows by what is new; weekly counts are those of the file."""
    lines = gzip.decompress(DATA.read_bytes()).splitlines()
    assert len(lines) == 28_069
    replay = [sys.executable, "-m", "examples.replay", "--url", service.url, "--topic", topic]
    subprocess.run(replay, cwd=ROOT, check=True, capture_output=True, timeout=300)

    batch = spark.read.format("topics").options(url=service.url, subscribe=topic, minPartitions="4").load()
    assert [row.data.encode() for row in batch.orderBy("seq").collect()] == lines

    lake = tmp_path / "lake"
    export = ["--topics", topic, "--out", str(lake), "--max-records", "10000"]
    assert pipeline.run("export", *export)["records"] == 28_069
    by_seq = {row.seq: row.data.encode() for row in lake_rows(spark, lake)}
    assert [by_seq[seq] for seq in sorted(by_seq)] == lines

    counts = tmp_path / "counts"
    pipeline.run("rollup", "--lake", str(lake), "--time-field", "committed_at", "--to-parquet", str(counts))
    expected: Counter[tuple[datetime, str | None]] = Counter()
    for line in lines:
        event = json.loads(line)
        day = datetime.fromtimestamp(event["committed_at"], UTC).date()
        monday = day - timedelta(days=day.weekday())
        expected[datetime(monday.year, monday.month, monday.day), first_folder(event["path"])] += 1
    found = {(row.start, row.tag): row.events for row in spark.read.parquet(str(counts)).collect()}
    assert found == dict(expected)

    chart = tmp_path / "weekly.png"
    weekly.draw(weekly.by_folder(counts), chart)
    assert chart.read_bytes().startswith(b"\x89PNG")
    if os.environ.get("TOPICS_KEEP_CHART"):
        Path(os.environ["TOPICS_KEEP_CHART"]).write_bytes(chart.read_bytes())

    topics.append(topic, [NewRecord({"new": True})])
    assert pipeline.run("export", *export, "--compact", "1")["records"] == 1
    rows = lake_rows(spark, lake)
    assert len(rows) == 28_070
    assert len({row.seq for row in rows}) == 28_070
    assert {row.batch for row in rows if row.seq > 1} >= {"c0000000003"}

    again = ["--lake", str(lake), "--to-topic", f"{topic}-again", "--checkpoint", str(tmp_path / "replay")]
    assert pipeline.run("replay", *again)["rows"] == 28_070
    pipeline.run("replay", *again)
    replayed = Counter(bytes(item.raw) for item in topics.read(f"{topic}-again") if isinstance(item, Record))
    assert replayed == Counter([*lines, b'{"new":true}'])


def test_a_live_rollup_counts_late_events(topics: Client, pipeline: Pipeline, topic: str, tmp_path: Path) -> None:
    """A window is written once its watermark has passed; what comes for it later is counted, not counted in."""
    week = 7 * 86_400

    def event(time_s: int, tag: str) -> NewRecord:
        return NewRecord({"at": time_s}, tag=tag)

    rollup = [
        "--topics", topic, "--time-field", "at", "--start", "0 days", "--checkpoint", str(tmp_path / "state"),
        "--to-topic", f"{topic}-weekly",
    ]  # fmt: skip
    topics.append(topic, [event(10, "a"), event(20, "a"), event(30, "b"), event(3 * week, "a")])
    pipeline.run("rollup", *rollup)
    topics.append(topic, [event(40, "a"), event(3 * week + 1, "a"), event(6 * week, "b")])
    assert pipeline.run("rollup", *rollup)["late_events"] == 1
    found = [
        (item.data["start"][:10], item.tag, item.data["events"])
        for item in topics.read(f"{topic}-weekly")
        if isinstance(item, Record)
    ]
    assert Counter(found) == Counter([("1970-01-01", "a", 2), ("1970-01-01", "b", 1), ("1970-01-22", "a", 2)])


def test_every_job_has_help_and_says_what_is_wrong_in_one_line(pipeline: Pipeline, topic: str, tmp_path: Path) -> None:
    for job in ("export", "rollup", "replay"):
        helped = pipeline.attempt(job, "--help")
        assert helped.returncode == 0
        assert f"topics spark {job}" in helped.stdout
    failed = pipeline.attempt("export", "--topics", topic, "--out", str(tmp_path / "x"))
    assert failed.returncode == 1
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("topics spark")]
    assert f"topic '{topic}' does not exist" in line
    assert failed.stderr.splitlines()[-1] == line
