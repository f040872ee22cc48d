"""`python -m bench.spark_memory`: the most memory that Spark takes for the steps of docs/spark.md.

These are the worked example (each step a program of its own), and a topic of `--records` read in both modes and written
to Parquet, as `bench.spark_read` does. Every 0.2 s the proportional set sizes (PSS: a shared page counts once) of Java
and of all Python processes are added up; the service has a column of its own. Page cache is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import psutil

from bench.spark_read import fill, measure, session
from tests.harness import Service
from tests.spark.conftest import make_java_home, spark_environment

EVERY_S: Final = 0.2
BOUND_BYTES: Final = 4 << 30


class Sample(NamedTuple):
    """PSS in bytes."""

    java: int
    python: int
    service: int

    @property
    def spark(self) -> int:
        return self.java + self.python


class Peak:
    """The largest sample, while it is entered, of this process and its descendants."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.largest = Sample(0, 0, 0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        of_service = set(self._service.family())
        while not self._ended.wait(EVERY_S):
            self.largest = max(self.largest, _sample(of_service), key=lambda sample: sample.spark)


def _sample(of_service: set[int]) -> Sample:
    java = python = service = 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            pss, name = process.memory_full_info().pss, process.name()
        except psutil.Error:
            continue
        if process.pid in of_service:
            service += pss
        elif name == "java":
            java += pss
        else:
            python += pss
    return Sample(java, python, service)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.spark_memory", description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="topics-spark-memory-"))
    os.environ |= spark_environment(make_java_home(root / "java", flags=""))
    peaks: dict[str, Sample] = {}
    try:
        with Service(
            env={"TOPICS_CHECKPOINT_INTERVAL_MS": "1000"}, shards=1, frontends=1, wal_file_bytes=None
        ) as service:
            with Peak(service) as peak:
                example = [sys.executable, "-m", "examples.weekly", "--url", service.url, "--out", str(root / "weekly")]
                subprocess.run([*example, "--master", "local[2]"], check=True, stdout=subprocess.DEVNULL)
            peaks["the worked example"] = peak.largest
            fill(service, options.records)
            spark = session()
            try:
                with Peak(service) as peak:
                    measure(spark, service, root, options.records, readings=1)
            finally:
                spark.stop()
            peaks[f"{options.records} records"] = peak.largest
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("| | Spark in all | Java | Python | the service |")
    for name, sample in peaks.items():
        row = (sample.spark, sample.java, sample.python, sample.service)
        print(f"| {name} | {' | '.join(f'{part / 2**20:.0f} MiB' for part in row)} |")
    return 0 if all(sample.spark + sample.service < BOUND_BYTES for sample in peaks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
