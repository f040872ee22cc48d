"""Executors are killed while they read: a query ends with the rows of the topic, each once, in both modes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pyarrow.parquet as pq
import pytest

from tests.harness import Service, poll
from tests.spark.conftest import COMPACTED_S
from tests.spark.processes import Driver, sigkill, talks_to
from topics.client import Client, NewRecord, calls

RECORDS = int(os.environ.get("TOPICS_SPARK_RECORDS", "120000"))
KILLS = int(os.environ.get("TOPICS_SPARK_READ_KILLS", "2"))
"""Tried in each reading; one that is over before it has had half is repeated."""
ATTEMPTS_MAX = 3
"""Attempts at a reading: looking for tasks may be held up for as long as a reading takes."""
MASTERS = os.environ.get("TOPICS_SPARK_MASTERS", "local[2,50]").split()
SEGMENT_EVENTS = 5_000
PARTITIONS = 12


@pytest.mark.parametrize("master", MASTERS)
def test_rows_are_the_topics_whatever_is_killed(topic: str, tmp_path: Path, master: str) -> None:
    """Python workers in the middle of their range, and in `local-cluster` every other time their whole executor."""
    seed = int(os.environ.get("TOPICS_SEED", str(random.randrange(2**32))))
    print(f"TOPICS_SEED={seed}")
    chance = random.Random(seed)
    texts = [f'{{"n": {n}, "text": "{"x" * (n % 97)}"}}' for n in range(RECORDS)]
    env = {"TOPICS_SEGMENT_MAX_EVENTS": str(SEGMENT_EVENTS), "TOPICS_CHECKPOINT_INTERVAL_MS": "100"}
    with Service(env=env, wal_file_bytes=None) as service, Client(service.url) as client:
        for first in range(0, RECORDS, 5_000):
            client.append(topic, [NewRecord(msgspec.Raw(text.encode())) for text in texts[first : first + 5_000]])
        poll(
            "segments",
            lambda: client.call(calls.segments(topic)).http_from_seq > RECORDS - 2 * SEGMENT_EVENTS,
            COMPACTED_S,
        )
        http = {"url": service.url, "subscribe": topic, "maxRecordsPerPartition": str(RECORDS // PARTITIONS)}
        readings = [http, http | {"mode": "segments", "dataDir": str(service.data_dir)}]
        for attempt in range(ATTEMPTS_MAX):
            directory = tmp_path / str(attempt)
            directory.mkdir()
            kills = _read(master, readings, service.port, directory, chance)
            print(kills)
            for number in range(len(readings)):
                rows = pq.read_table(directory / "out" / str(number))
                assert Counter(rows["seq"].to_pylist()) == Counter(range(1, RECORDS + 1))
                assert [text for _, text in sorted(zip(*rows.to_pydict().values(), strict=True))] == texts
            readings = [reading for reading, killed in zip(readings, kills, strict=True) if killed.total() < KILLS / 2]
            if not readings:
                return
    pytest.fail("a reading ended before all its kills: give it more records")


def _read(
    master: str, readings: list[dict[str, str]], port: int, directory: Path, chance: random.Random
) -> list[Counter[str]]:
    """Reads into <directory>/out/<number>; what was killed meanwhile."""
    out = directory / "out"
    arguments = [master, str(out), json.dumps(readings)]
    driver = Driver("tests.spark.read_query", arguments, directory / "driver.log", directory)
    driver.start()
    try:
        kills = [_kill_readers(driver, port, out / str(number), chance) for number in range(len(readings))]
        poll("the end of the query", lambda: driver.exit_code is not None, 240, 0.05)
        assert driver.exit_code == 0
    except BaseException as error:
        error.add_note(driver.log())
        raise
    finally:
        driver.kill()
    return kills


def _kill_readers(driver: Driver, port: int, out: Path, chance: random.Random) -> Counter[str]:
    """KILLS times, something in which a task of the reading into `out` runs; by kind what it was."""
    killed: Counter[str] = Counter()

    def ended() -> bool:
        return driver.exit_code is not None or (out / "_SUCCESS").exists()

    def reading() -> psutil.Process | None:
        """Return a task of this reading: its output is made when its tasks are about to start."""
        return _stopped_in_its_range(driver, port) if out.exists() else None

    while killed.total() < KILLS and not ended():
        time.sleep(chance.random() * 0.05)  # anywhere in its range
        victim = poll("a task that reads", lambda: reading() or ended(), 240, 0.02)
        if not isinstance(victim, psutil.Process):
            break
        kind = "executor" if killed["worker"] > killed["executor"] and driver.executors() else "worker"
        if kind == "executor":
            victim.resume()  # it ends with its executor
        killed[kind] += sigkill(_executor_of(victim, driver) if kind == "executor" else victim)
    return killed


def _stopped_in_its_range(driver: Driver, port: int) -> psutil.Process | None:
    """A worker that has a connection to the service, or a segment open, stopped: a task on files is over before one has
    looked at it.
    """
    for worker in driver.workers():
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.suspend()
            if talks_to(worker, port) or any(file.path.endswith(".data") for file in worker.open_files()):
                return worker
            worker.resume()
    return None


def _executor_of(worker: psutil.Process, driver: Driver) -> psutil.Process:
    above = {parent.pid for parent in worker.parents()}
    return next((one for one in driver.executors() if one.pid in above), worker)
