"""`topics spark JOB …`: the pipelines of `topics[spark]`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Final

JOBS: Final = {
    "export": "topics to partitioned Parquet or Delta, incrementally",
    "rollup": "events per tag and window of event time",
    "replay": "Parquet or a topic back into a topic",
    "audit": "every record of topics checked in their files",
}
EXIT_USAGE: Final = 2


def fill(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.description = "Run a pipeline on Spark: " + "; ".join(f"{name}: {about}" for name, about in JOBS.items())
    parser.add_argument("job", choices=list(JOBS), metavar="JOB", help="JOB --help tells its options")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        job = importlib.import_module(f"topics.spark.jobs.{options.job}")
        importlib.import_module("pyspark")
    except ImportError as error:
        print(f"topics spark: this needs topics[spark]: {error}", file=sys.stderr)
        return EXIT_USAGE
    return int(job.main(options.arguments))
