"""The frame of every job: its arguments, a session, one line for an error, a report as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pyspark import SparkConf
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from topics.client import ClientError
from topics.spark import SMALL, register
from topics.spark.options import OptionError, TopicsSparkError, plainly

EXIT_FAILURE: Final = 1
SLOW_WORKER: Final = "Python worker failed to connect back"
"""Error of Spark when the Python process of a stream takes more than 10 s to start. No setting changes these 10 s."""
STARTS_MAX: Final = 10
_ALWAYS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    # Reports add up the progress of all batches; Spark keeps only that of 100.
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}
Work = Callable[[SparkSession, argparse.Namespace], dict[str, Any]]


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every job has."""
    form = argparse.ArgumentDefaultsHelpFormatter
    prog = f"topics spark {name}"
    made = argparse.ArgumentParser(prog=prog, description=about, formatter_class=form, allow_abbrev=False)
    made.add_argument("--url", default="http://127.0.0.1:4000", help="the service")
    made.add_argument("--token-file", default=None, help="file with its API key; as an argument anybody could read it")
    made.add_argument("--master", default=None, help="where Spark runs, unless spark-submit says it (local[*])")
    made.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark")
    return made


def topics_arguments(made: argparse.ArgumentParser) -> None:
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--topics", help="topic names, comma-separated")
    which.add_argument("--pattern", help="a regular expression for topic names")


def source_options(options: argparse.Namespace) -> dict[str, str]:
    which = {"subscribe": options.topics} if options.topics is not None else {"subscribePattern": options.pattern}
    return service_options(options) | which


def service_options(options: argparse.Namespace) -> dict[str, str]:
    return {"url": options.url} | ({} if options.token is None else {"token": options.token})


def _token(options: argparse.Namespace) -> str | None:
    if options.token_file is None:
        return None
    try:
        with open(options.token_file, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise OptionError(f"--token-file {options.token_file}: {error.strerror}") from None


def run(
    name: str,
    made: argparse.ArgumentParser,
    work: Work,
    arguments: Sequence[str] | None,
    *,
    check: Callable[[argparse.Namespace], None] | None = None,
    exit_code: Callable[[dict[str, Any]], int] = lambda _report: 0,
) -> int:
    """Run the whole program and return its exit code: 0 (or `exit_code` of the report) with the report on stdout, 1
    with one line on stderr, 2 for wrong arguments. `check` raises OptionError before Spark is started.
    """
    options = made.parse_args(arguments)
    try:
        options.token = _token(options)
        if check is not None:
            check(options)
    except OptionError as error:
        print(f"topics spark {name}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    builder = SparkSession.builder.appName(f"topics-{name}")
    if SparkSession.getActiveSession() is None:
        # Without a gateway port there is no spark-submit, and asking Spark for its settings would start Java too early.
        submitted = dict(SparkConf().getAll()) if "PYSPARK_GATEWAY_PORT" in os.environ else None
        for setting, value in settings(options, submitted).items():
            builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    # Spark logs a Java stack for every failed task; the error is printed below.
    spark.sparkContext.setLogLevel("OFF")
    logging.getLogger("pyspark").setLevel(logging.CRITICAL)
    register(spark)
    try:
        report = work(spark, options)
    except (PySparkException, TopicsSparkError, ClientError) as error:
        print(
            f"topics spark {name}: {plainly(error) if isinstance(error, PySparkException) else error}", file=sys.stderr
        )
        return EXIT_FAILURE
    print(json.dumps(report))
    return exit_code(report)


def run_to_end(writer: DataStreamWriter) -> StreamingQuery:
    """Run a query over the records that exist. Run it again if Spark gives up its Python process (SLOW_WORKER), which
    has read nothing then.
    """
    starts = 0
    while True:
        query = writer.trigger(availableNow=True).start()
        starts += 1
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if SLOW_WORKER not in str(error) or starts == STARTS_MAX:
                raise
        else:
            return query


def settings(options: argparse.Namespace, submitted: Mapping[str, str] | None) -> dict[str, str]:
    """Return the settings of the session: those of `--master` and `--conf`, then those of spark-submit (`submitted`,
    None without it), then SMALL, unless spark-submit has chosen the machine.
    """
    chosen = dict(one.partition("=")[::2] for one in options.conf)
    if options.master is not None:
        chosen["spark.master"] = options.master
    always = _ALWAYS | {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    if submitted is None:
        return {"spark.master": "local[*]"} | SMALL | always | chosen
    return {name: value for name, value in always.items() if name not in submitted} | chosen
