"""Spark finds the source where the package is installed; its look-ups of other sources pay nothing for that."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy import distribution
from tests.spark.conftest import ROOT
from topics import spark as topics_spark
from topics.spark.source import TopicsDataSource


def run(code: str, **env: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_spark_imports_is_cheap() -> None:
    loaded = run("import sys, pyspark_topics; print(*sorted(sys.modules))").split()
    assert not {"pyspark", "pyarrow", "httptools", "topics"} & set(loaded)


def test_the_class_that_spark_takes_imports_neither_arrow_nor_http() -> None:
    loaded = run("import sys, pyspark_topics; pyspark_topics.DefaultSource; print(*sorted(sys.modules))").split()
    assert "topics.spark.source" in loaded
    assert not {"httptools", "topics.client", "topics.spark.columns"} & set(loaded)


def test_without_the_libraries_there_is_no_source_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('not here')")
    assert run("import pyspark_topics; print(hasattr(pyspark_topics, 'DefaultSource'))",
               PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") == "False"  # fmt: skip


@pytest.mark.usefixtures("spark")
def test_the_installed_package_has_what_spark_looks_for(tmp_path: Path) -> None:
    wheel, _ = distribution.build(tmp_path / "dist")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    found = (
        "from pyspark.sql.worker.lookup_data_sources import iter_modules; import importlib; "
        "name, = [one.name for one in iter_modules() if one.name.startswith('pyspark_')]; "
        "source = importlib.import_module(name).DefaultSource; print(source.name(), source.__module__, name)"
    )
    assert run(found, PYTHONPATH=str(site)) == "topics topics.spark.source pyspark_topics"


def test_it_can_be_registered_by_hand(spark: object) -> None:
    from pyspark.sql import SparkSession

    assert isinstance(spark, SparkSession)
    topics_spark.register(spark)
    assert TopicsDataSource.name() == "topics"
    schema = spark.read.format("topics").option("subscribe", "any").load().schema
    assert schema.fieldNames()[:2] == ["topic", "seq"]


OLD = """
import sys, pyspark, pyspark.sql.datasource as sources
pyspark.__version__ = "{version}"
for name in {missing}:
    delattr(sources, name)
sys.modules["pyspark.sql.streaming.datasource"] = None
from topics.spark.source import TopicsDataSource
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType, TimestampType
text = StringType()
kinds = dict(topic=text, seq=LongType(), timestamp=TimestampType(), node=text, tag=text, data=text,
             meta=MapType(text, text))
schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
def attempt(method, options, **more):
    try:
        print(type(getattr(TopicsDataSource(options), method)(schema, **more)).__name__)
    except Exception as error:
        print(error)
reading = dict(subscribe="any")
attempt("reader", reading)
attempt("reader", reading | dict(pushFilters="true"))
attempt("streamReader", reading)
schema = StructType([StructField("data", text)])
attempt("writer", dict(topic="any"), overwrite=False)
attempt("streamWriter", dict(topic="any"), overwrite=False)
"""


@pytest.mark.parametrize("version", ["4.0.1", "4.1.2"])
def test_an_older_spark_reads_and_writes_batches_and_is_told_what_it_lacks(version: str) -> None:
    """`make oldspark` runs the tests of batches on the real ones."""
    filters = ["EqualTo", "Filter", "GreaterThan", "GreaterThanOrEqual", "In", "LessThan", "LessThanOrEqual"]
    missing = ["ReadLimit", *([*filters, "DataSourceStreamArrowWriter"] if version.startswith("4.0") else [])]
    reader, pushing, reading, writer, writing = run(OLD.format(version=version, missing=missing)).splitlines()
    assert (reader, writer) == ("BatchReader", "BatchWriter")
    if version.startswith("4.0"):
        assert pushing.startswith("the option pushFilters: topics need PySpark 4.1 for it, this is 4.0.1")
    else:
        assert pushing == "PushdownBatchReader"
    for stream in (reading, writing):
        assert stream.startswith(f"streams: topics need PySpark 4.2 for it, this is {version}")
