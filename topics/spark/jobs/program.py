"""What every job does besides its work: its arguments, a session, one line for an error, a report as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from topics.client import ClientError
from topics.spark import SMALL, register
from topics.spark.errors import OptionError, TopicsSparkError, plainly

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_FAILURE: Final = 1
_REPORTED: Final = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
"""Reports add up what batches say of themselves; Spark forgets all but 100 of them."""
Work = Callable[["SparkSession", argparse.Namespace], dict[str, Any]]


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """The arguments that every job has."""
    made = argparse.ArgumentParser(
        prog=f"topics spark {name}", description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--url", default="http://127.0.0.1:4000", help="the service")
    made.add_argument("--token", default=None, help="its API key; better in the environment of spark-submit's --conf")
    made.add_argument("--master", default="local[*]", help="where Spark runs, unless spark-submit says so")
    made.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark")
    return made


def topics_arguments(made: argparse.ArgumentParser) -> None:
    """Which topics are read."""
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--topics", help="topic names, comma-separated")
    which.add_argument("--pattern", help="a regular expression for topic names")


def source_options(options: argparse.Namespace) -> dict[str, str]:
    """Of the format `topics`, from the arguments."""
    found = service_options(options)
    if options.topics is not None:
        return found | {"subscribe": options.topics}
    return found | {"subscribePattern": options.pattern}


def service_options(options: argparse.Namespace) -> dict[str, str]:
    return {"url": options.url} | ({} if options.token is None else {"token": options.token})


def run(
    name: str,
    made: argparse.ArgumentParser,
    work: Work,
    arguments: Sequence[str] | None,
    *,
    check: Callable[[argparse.Namespace], None] | None = None,
    exit_code: Callable[[dict[str, Any]], int] = lambda _report: 0,
) -> int:
    """The whole program: 0 (or what `exit_code` makes of the report) with the report on stdout; 1 with one line on
    stderr; 2 for wrong arguments. `check` raises OptionError for what is wrong before Spark is started.
    """
    options = made.parse_args(arguments)
    try:
        if check is not None:
            check(options)
    except OptionError as error:
        print(f"topics spark {name}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(f"topics-{name}")
    if SparkSession.getActiveSession() is None:
        builder = builder.master(options.master)
        given = dict(one.partition("=")[::2] for one in options.conf)
        for setting, value in (SMALL | _REPORTED | given).items():
            builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    # Spark tells of every failed task with a stack of Java's; what went wrong is said below.
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
