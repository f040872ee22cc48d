"""`topics spark JOB …`: the pipelines of `topicsd[spark]`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Final

from topicsd import EXIT_USAGE

JOBS: Final = {
    "export": "write topics to partitioned Parquet or Delta, incrementally",
    "rollup": "count events by tag and window of event time",
    "replay": "write Parquet or a topic back into a topic",
    "audit": "check every record of topics in their files",
}


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a pipeline on Spark: " + "; ".join(f"{name}: {about}" for name, about in JOBS.items())
    parser.add_argument("job", choices=list(JOBS), metavar="JOB", help="JOB --help lists its options")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        job = importlib.import_module(f"topics.spark.jobs.{options.job}")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        print(f"topics spark: this needs Spark ({module} is missing): pip install 'topicsd[spark]'", file=sys.stderr)
        return EXIT_USAGE
    return int(job.main(options.arguments))
