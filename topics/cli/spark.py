"""`topics spark JOB …`: the pipelines of `topics[spark]`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

JOBS: Final = {
    "export": "topics to partitioned Parquet or Delta, incrementally",
    "rollup": "events per tag and window of event time",
    "replay": "Parquet or a topic back into a topic",
    "audit": "every record of topics checked in their files",
}
EXIT_USAGE: Final = 2


def add_to(commands: Commands) -> None:
    """Adds the command to the parser of `topics`."""
    help = "run a pipeline on Spark: " + "; ".join(f"{name}: {about}" for name, about in JOBS.items())
    parser = commands.add_parser("spark", help=help, description=help)
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
