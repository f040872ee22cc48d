"""`topics backup`: copy the present state of a data directory, whose service may run, into an archive."""

from __future__ import annotations

import argparse
import errno
import os
from functools import partial
from typing import Final

import msgspec

from topics.archive.backing_up import backup
from topics.cli.archive_shared import PLACE, directory, fill_command, mebibytes, place, require_apart, show
from topics.core.clock import SystemClock, iso
from topics.progress import progress
from topics.storage.filesystem import OsFileSystem

PATIENCE_MS: Final = 30_000
_ABOUT: Final = """Copy the present state of a data directory into an archive: one moment of all logs, and the segments.
The service may run meanwhile. What the archive has already is not copied again."""
_EXAMPLES: Final = """  topics backup --data-dir ./topics-data --to /mnt/backup/topics
  topics backup --data-dir ./topics-data --to s3://my-bucket/topics"""


def fill(parser: argparse.ArgumentParser) -> None:
    fill_command(parser, "backup", _run, about=_ABOUT, examples=_EXAMPLES)
    about = "the service's TOPICS_DATA_DIR"
    parser.add_argument("--data-dir", metavar="DIR", type=directory, required=True, help=about)
    parser.add_argument("--to", metavar="PLACE", type=place, required=True, help=PLACE)
    cold = parser.add_mutually_exclusive_group()
    cold.add_argument("--cold-dir", metavar="DIR", type=place, help="the service's TOPICS_COLD_DIR, if it has one")
    cold.add_argument("--cold-url", metavar="URL", type=place, help="the same for TOPICS_COLD_URL")


def _run(options: argparse.Namespace) -> int:
    cold_place = options.cold_dir or options.cold_url
    if not os.path.isdir(options.data_dir):
        raise FileNotFoundError(errno.ENOENT, "is no data directory", options.data_dir)
    require_apart(options.data_dir, options.to)
    with progress("B", 0) as bar:
        done = backup(
            OsFileSystem(), options.data_dir, options.to, cold_place, SystemClock(), PATIENCE_MS, partial(show, bar)
        )
    if options.json:
        print(msgspec.json.encode({**done._asdict(), "to": options.to}).decode())
    else:
        copied = f"{mebibytes(done.size_bytes)} in {done.objects} objects were copied"
        print(f"{options.to}: has the state of {iso(done.taken_ms)}; {copied}")
    return 0
