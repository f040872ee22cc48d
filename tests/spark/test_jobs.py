"""The pipelines, as the programs that people run, one after the other on the real events."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark.errors import StreamingQueryException

from examples import weekly
from examples.replay import DATA, first_folder
from tests.harness import Service, poll
from tests.spark.conftest import COMPACTED_S, ROOT, make_java_home, spark_environment
from topics.client import Client, NewRecord, Record, calls
from topics.spark.jobs import compaction, program, replay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Segments are sealed at once."""
    env = {"TOPICS_SEGMENT_MAX_EVENTS": "5000", "TOPICS_CHECKPOINT_INTERVAL_MS": "100"}
    with Service(env=env, wal_file_bytes=None) as running:
        yield running


class Jobs:
    """The jobs on one service: in this process, whose Spark is there already, or as programs of their own."""

    def __init__(self, service: Service, directory: Path) -> None:
        self._url = service.url
        self._directory = directory

    def run(self, job: str, *arguments: str) -> dict[str, Any]:
        """The report."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module(f"topics.spark.jobs.{job}").main(["--url", self._url, *arguments])
        assert code == 0, err.getvalue()
        report: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
        return report

    def refusal(self, job: str, *arguments: str) -> str:
        """Return the one line that a job prints which ends with exit code 1."""
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            code = importlib.import_module(f"topics.spark.jobs.{job}").main(["--url", self._url, *arguments])
        (line,) = err.getvalue().splitlines()
        assert code == program.EXIT_FAILURE
        return line

    def program(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A process, on a Spark of its own."""
        java_home = self._directory / "java"
        if not java_home.exists():
            make_java_home(java_home)
        environment = os.environ | spark_environment(java_home)
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )

    def topics_spark(self, job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from topics.cli.main import main; sys.exit(main())"
        common = ["--url", self._url, "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
        return self.program(sys.executable, "-c", code, "spark", job, *common, *arguments)

    def spark_submit(self, job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        submit = str(Path(sys.executable).with_name("spark-submit"))
        path = str(ROOT / "topics" / "spark" / "jobs" / f"{job}.py")
        master = ["--master", "local[2]", "--conf", "spark.ui.enabled=false"]
        return self.program(submit, *master, path, "--url", self._url, *arguments)


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture
def jobs(spark: SparkSession, service: Service, tmp_path: Path) -> Jobs:
    return Jobs(service, tmp_path)


def lake_rows(spark: SparkSession, lake: Path) -> list[Any]:
    return spark.read.parquet(str(lake)).collect()


def take_back(checkpoint: Path) -> None:
    """The state after a crash between a batch and Spark's note that it is done."""
    notes = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for name in (notes[-1].name, f".{notes[-1].name}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


def test_the_real_events_from_file_to_chart_and_back(
    spark: SparkSession, service: Service, topics: Client, jobs: Jobs, topic: str, tmp_path: Path
) -> None:
    """Batch = segments = stream = the file itself; the lake grows by what is new; weekly counts are the file's."""
    lines = gzip.decompress(DATA.read_bytes()).splitlines()
    assert len(lines) == 28_069
    ingest = [sys.executable, "-m", "examples.replay", "--url", service.url, "--topic", topic]
    subprocess.run(ingest, cwd=ROOT, check=True, capture_output=True, timeout=300)
    poll("segments", lambda: len(topics.call(calls.segments(topic)).segments) >= 5, COMPACTED_S)

    http = {"url": service.url, "subscribe": topic, "minPartitions": "4"}
    for options in (http, http | {"mode": "segments", "dataDir": str(service.data_dir)}):
        rows = spark.read.format("topics").options(**options).load().select("seq", "data").collect()
        assert [row.data.encode() for row in sorted(rows)] == lines

    lake = tmp_path / "lake"
    export = ["--topics", topic, "--out", str(lake), "--max-records", "10000"]
    assert jobs.run("export", *export)["records"] == 28_069
    by_seq = {row.seq: row.data.encode() for row in lake_rows(spark, lake)}
    assert [by_seq[seq] for seq in sorted(by_seq)] == lines

    counts = tmp_path / "counts"
    rollup = ["--lake", str(lake), "--time-field", "committed_at", "--to-parquet", str(counts)]
    report_of(jobs.spark_submit("rollup", *rollup))
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
    assert jobs.run("export", *export, "--compact", "1")["records"] == 1
    rows = lake_rows(spark, lake)
    assert len(rows) == 28_070
    assert len({row.seq for row in rows}) == 28_070
    assert {row.batch for row in rows if row.seq > 1} >= {"c0000000003"}

    again = ["--lake", str(lake), "--to-topic", f"{topic}-again", "--checkpoint", str(tmp_path / "replay")]
    assert jobs.run("replay", *again)["rows"] == 28_070
    jobs.run("replay", *again)
    topics.append(topic, [NewRecord({"new": 2})])
    assert jobs.run("export", *export, "--compact", "1")["days_compacted"] == 1
    assert "was compacted since this checkpoint was made" in jobs.refusal("replay", *again)
    replayed = Counter(bytes(item.raw) for item in topics.read(f"{topic}-again") if isinstance(item, Record))
    assert replayed == Counter([*lines, b'{"new":true}'])


def test_an_export_that_died_between_files_and_note_is_repeated_to_the_same_files(
    spark: SparkSession, topics: Client, jobs: Jobs, topic: str, tmp_path: Path
) -> None:
    topics.append(topic, range(25))
    export = ["--topics", topic, "--out", str(tmp_path / "lake"), "--max-records", "10"]
    assert jobs.run("export", *export)["records"] == 25
    take_back(tmp_path / "lake" / "_checkpoint")
    topics.append(topic, range(25, 30))
    jobs.run("export", *export)
    assert sorted(row.seq for row in lake_rows(spark, tmp_path / "lake")) == list(range(1, 31))


def test_a_gap_is_on_the_day_of_its_batch_also_when_that_is_repeated_on_another_day(
    spark: SparkSession, topics: Client, jobs: Jobs, topic: str, tmp_path: Path
) -> None:
    topics.put_topic(topic, cap_records=5)
    export = ["--topics", topic, "--out", str(tmp_path / "lake"), "--tombstones", "rows"]
    for records in (3, 20):
        topics.append(topic, range(records))
        jobs.run("export", *export)
    checkpoint = tmp_path / "lake" / "_checkpoint"
    take_back(checkpoint)
    # The first attempt was two days ago, as Spark's note of what is in the batch says.
    note = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    version, metadata, *offsets = note.read_text().split("\n")
    noted = json.loads(metadata)
    noted["batchTimestampMs"] -= 2 * 86_400_000
    (checkpoint / "offsets" / f".{note.name}.crc").unlink()
    note.write_text("\n".join([version, json.dumps(noted), *offsets]))
    jobs.run("export", *export)
    day = datetime.fromtimestamp(noted["batchTimestampMs"] / 1000, UTC).date()
    found = [row for row in lake_rows(spark, tmp_path / "lake") if row.kind == "gap" and row.date == day]
    assert [(row.gap_from, row.gap_to, row.reason) for row in found] == [(4, 18, "cap")]


@pytest.mark.parametrize("step", ["before the plan", "before the move", "before the removal"])
def test_a_compaction_that_died_is_completed_by_the_next(
    spark: SparkSession, topics: Client, jobs: Jobs, topic: str, tmp_path: Path, step: str
) -> None:
    lake = tmp_path / "lake"
    topics.append(topic, range(12))
    jobs.run("export", "--topics", topic, "--out", str(lake), "--max-records", "4")
    with pytest.MonkeyPatch.context() as patch:
        # It dies: what would come next does not.
        patch.setattr(compaction.Lake, "finish", lambda _lake: None)
        if step == "before the plan":
            patch.setattr(compaction.Lake, "write_plan", lambda _lake, _plan: None)
        compaction.compact(spark, str(lake), 1)
    plan_path = lake / "_compaction.json"
    assert plan_path.exists() == (step != "before the plan")
    if step == "before the removal":
        plan = json.loads(plan_path.read_text())
        Path(plan["new"]).rename(plan["place"].removeprefix("file:"))
        assert len(lake_rows(spark, lake)) == 24, "both are there: compact while nobody reads"
    compaction.compact(spark, str(lake), 1)
    assert sorted(row.seq for row in lake_rows(spark, lake)) == list(range(1, 13))
    assert len({row.batch for row in lake_rows(spark, lake)}) == 1
    assert not plan_path.exists()


def test_segments_of_a_topic_are_replayed_once(
    service: Service, topics: Client, jobs: Jobs, topic: str, tmp_path: Path
) -> None:
    """The topic was also filled by a router, whose members of `meta` nobody else may write."""
    route = {"source": topic, "dest": f"{topic}.d", "guarantee": "exactly_once"}
    topics.put_topic(topic)
    assert service.client.put(f"/v0/routers/{topic}", json=route).status_code == 201
    written = [NewRecord({"n": n}, tag=f"t{n % 3}", node="me", meta={"k": str(n)}) for n in range(6_000)]
    topics.append(topic, written)
    # A read waits for the copies, but not for ever (api §6).
    poll("the copies", lambda: topics.get_topic(f"{topic}.d").head_seq == 6_000, 30)
    poll("segments", lambda: topics.call(calls.segments(f"{topic}.d")).segments, COMPACTED_S)
    arguments = ["--from-topic", f"{topic}.d", "--data-dir", str(service.data_dir), "--records-per-batch", "2500"]
    arguments += ["--to-topic", f"{topic}-again", "--checkpoint", str(tmp_path / "replay")]
    assert jobs.run("replay", *arguments)["rows"] == 6_000
    take_back(tmp_path / "replay")
    jobs.run("replay", *arguments)
    found = [item for item in topics.read(f"{topic}-again") if isinstance(item, Record)]
    assert sorted((one.data["n"], one.tag, one.node, one.meta) for one in found) == [
        (n, one.tag, "me", one.meta) for n, one in enumerate(written)
    ]


def test_a_slow_replay_makes_batches_that_end_before_their_stages_expire(
    topics: Client, jobs: Jobs, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10 rows a second a batch of 100,000 took three hours, and what is staged lives for one: it failed for ever."""
    monkeypatch.setattr(replay, "BATCH_MAX_S", 1, raising=False)
    topics.append(topic, range(120))
    arguments = ["--from-topic", topic, "--to-topic", f"{topic}-again", "--checkpoint", str(tmp_path / "replay")]
    assert jobs.run("replay", *arguments, "--rate", "50")["rows"] == 120
    assert len(list((tmp_path / "replay" / "commits").glob("[0-9]*"))) == 3


def test_a_live_rollup_counts_late_events(topics: Client, jobs: Jobs, topic: str, tmp_path: Path) -> None:
    """A window is written once its watermark has passed; what comes for it later is counted, not counted in."""
    week = 7 * 86_400

    def event(time_s: int, tag: str) -> NewRecord:
        return NewRecord({"at": time_s}, tag=tag)

    rollup = [
        "--topics", topic, "--time-field", "at", "--start", "0 days", "--checkpoint", str(tmp_path / "state"),
        "--to-topic", f"{topic}-weekly",
    ]  # fmt: skip
    topics.append(topic, [event(10, "a"), event(20, "a"), event(30, "b"), event(3 * week, "a")])
    jobs.run("rollup", *rollup)
    topics.append(topic, [event(40, "a"), event(3 * week + 1, "a"), event(6 * week, "b")])
    assert jobs.run("rollup", *rollup)["late_events"] == 1
    found = [
        (item.data["start"][:10], item.tag, item.data["events"])
        for item in topics.read(f"{topic}-weekly")
        if isinstance(item, Record)
    ]
    assert Counter(found) == Counter([("1970-01-01", "a", 2), ("1970-01-01", "b", 1), ("1970-01-22", "a", 2)])


def test_what_is_wrong_is_one_line_before_spark_starts(jobs: Jobs, tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path)]
    assert "nowhere to write: give --to-topic" in jobs.refusal("rollup", "--lake", "x")
    assert "a live roll-up needs --checkpoint" in jobs.refusal("rollup", "--topics", "x", "--to-parquet", "y")
    assert "the job would read what it writes" in jobs.refusal(
        "replay", "--from-topic", "x", "--to-topic", "x", *checkpoint
    )
    assert "need --from-topic" in jobs.refusal(
        "replay", "--lake", "x", "--data-dir", "y", "--to-topic", "z", *checkpoint
    )
    assert "--token-file /nowhere: No such file" in jobs.refusal(
        "export", "--topics", "x", "--out", "y", "--token-file", "/nowhere"
    )


@pytest.mark.parametrize("job", ["export", "rollup", "replay", "audit"])
def test_every_job_has_help(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"topics.spark.jobs.{job}").main(["--help"])
    assert ended.value.code == 0
    assert f"topics spark {job}" in capsys.readouterr().out


def test_a_job_that_fails_says_why_in_one_line(jobs: Jobs, topic: str, tmp_path: Path) -> None:
    failed = jobs.topics_spark("export", "--topics", topic, "--out", str(tmp_path / "x"))
    assert failed.returncode == program.EXIT_FAILURE
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("topics spark")]
    assert f"topic '{topic}' does not exist" in line
    assert failed.stderr.splitlines()[-1] == line
    assert not [text for text in failed.stderr.splitlines() if text.lstrip().startswith("at ")], "Java's stack"


def test_spark_submit_is_not_overruled() -> None:
    """The settings of spark-submit stand; only a plain `topics spark` brings settings for a small machine."""
    options = argparse.Namespace(master=None, conf=["spark.a=1"])
    alone = program.settings(options, None)
    assert (alone["spark.master"], alone["spark.driver.memory"], alone["spark.a"]) == ("local[*]", "1g", "1")
    submitted = program.settings(options, {"spark.master": "yarn", "spark.sql.session.timeZone": "CET"})
    assert not {"spark.master", "spark.driver.memory", "spark.sql.session.timeZone"} & submitted.keys()
    assert submitted["spark.a"] == "1"
    named = argparse.Namespace(master="local[1]", conf=[])
    assert program.settings(named, {"spark.master": "yarn"})["spark.master"] == "local[1]"


class SlowStarts:
    """A writer whose first queries fail as those of a machine on which Python takes more than 10 s to start."""

    def __init__(self, failures: int, message: str = program.SLOW_WORKER) -> None:
        self.left = failures
        self.message = message
        self.starts = 0

    def trigger(self, *, availableNow: bool) -> SlowStarts:  # noqa: N803 — Spark's name
        assert availableNow
        return self

    def start(self) -> SlowStarts:
        self.starts += 1
        return self

    def awaitTermination(self) -> None:  # noqa: N802
        if self.left:
            self.left -= 1
            raise StreamingQueryException(f"[STREAM_FAILED] Query terminated with exception: {self.message}.")


def test_a_query_whose_python_is_slow_to_start_is_started_again() -> None:
    slow = SlowStarts(3)
    program.run_to_end(cast(Any, slow))
    assert slow.starts == 4
    for failing in (SlowStarts(100), SlowStarts(1, "records 1 to 2 are gone")):
        with pytest.raises(StreamingQueryException):
            program.run_to_end(cast(Any, failing))
        assert failing.starts == (program.STARTS_MAX if failing.left else 1)
