"""Driver, executors and service are killed at random while a query writes: the rows are the oracle's, each once.

make spark       # 200 batches, some 40 kills
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.harness import Service, poll
from tests.spark.conftest import ROOT, make_java_home, spark_environment
from topics.client import Client, NewRecord, Record

BATCHES = int(os.environ.get("TOPICS_SPARK_BATCHES", "4"))
KILLS = int(os.environ.get("TOPICS_SPARK_KILLS", str(max(2, BATCHES // 5))))
RECORDS_PER_BATCH = 50


class Driver:
    """The query's process, and what Spark starts from it."""

    def __init__(self, service: Service, topic: str, directory: Path, java_home: Path) -> None:
        self._command = [sys.executable, "-m", "tests.spark.copy_query", service.url, topic, f"{topic}-out"]
        self._command.append(str(directory / "checkpoint"))
        self._environment = os.environ | spark_environment(java_home)
        self._log = directory / "driver.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def kill(self) -> None:
        """Everything of it at once; gone on return."""
        assert self._process is not None
        family = self._family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait(30)

    def kill_a_worker(self, chance: random.Random) -> bool:
        """One of the Python processes in which tasks run, if there is any."""
        workers = [one for one in self._family() if _is_worker(one)]
        if workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(workers).kill()
        return bool(workers)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("pyspark.daemon" in part or "pyspark.worker" in part for part in process.cmdline())
    return False


def test_the_rows_are_the_oracles_whatever_is_killed(topic: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("TOPICS_SEED", str(random.randrange(2**32))))
    print(f"TOPICS_SEED={seed}")
    chance = random.Random(seed)
    total = BATCHES * RECORDS_PER_BATCH
    with Service(shards=2, frontends=2) as service, Client(service.url) as client:
        client.append(topic, [NewRecord({"n": n}, tag=str(n % 5)) for n in range(total)])
        driver = Driver(service, topic, tmp_path, make_java_home(tmp_path / "java"))
        driver.start()
        kills: Counter[str] = Counter()
        starts = 0
        try:
            while driver.exit_code != 0:
                if driver.exit_code is not None:
                    starts += 1
                    assert starts <= 3 * KILLS, "the query fails by itself"
                    driver.start()  # as a scheduler does when the query has failed or was killed
                if sum(kills.values()) < KILLS:
                    _wait_for_progress(service, driver, f"{topic}-out", chance.randrange(1, 3))
                    time.sleep(chance.random() * 0.3)
                    kills[_kill_something(service, driver, chance)] += 1
                else:
                    time.sleep(0.1)
        except BaseException as error:
            error.add_note(f"{dict(kills)}\n{driver.log()}")
            raise
        finally:
            driver.kill()
        print(dict(kills))
        found = Counter(item.data["n"] for item in client.read(f"{topic}-out") if isinstance(item, Record))
        assert found == Counter(range(total))


def _wait_for_progress(service: Service, driver: Driver, topic: str, batches: int) -> None:
    def head_seq() -> int:
        answer = service.client.get(f"/v0/topics/{topic}", params={"touch": "false"})
        return int(answer.json()["head_seq"]) if answer.status_code == 200 else 0

    before = head_seq()
    wanted = before + batches * RECORDS_PER_BATCH
    poll("progress of the query", lambda: driver.exit_code is not None or head_seq() >= wanted, 240, 0.05)


def _kill_something(service: Service, driver: Driver, chance: random.Random) -> str:
    what = chance.choice(["driver", "executor", "executor", "walshard", "frontend", "service"])
    if what == "driver":
        driver.kill()
    elif what == "executor":
        return what if driver.kill_a_worker(chance) else "no executor"
    elif what == "service":
        service.kill_group()
        service.start()
    else:
        service.kill(what, chance.randrange(2))
    return what
