"""`topics verify DIR`: check every byte of a data directory."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Final

import msgspec

from topics.cli.archive_shared import directory, place, show
from topics.progress import progress
from topics.storage.lock import DataDirLocked
from topics.storage.segment_check import Report
from topics.storage.verify import NotADataDir, verify
from topics.terminal import plural
from topicsd import EXIT_USAGE

EXIT_DAMAGE: Final = 1
_CODES: Final = """exit codes:
  0  clean; leftovers of a killed service are listed as notes, the next start clears them up
  1  damage: the first finding is the last line on stderr, with file and offset
  2  usage, a service runs on DIR, or DIR is not a data directory"""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _CODES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("data_dir", metavar="DIR", type=directory, help="the service's TOPICS_DATA_DIR")
    cold = parser.add_mutually_exclusive_group()
    cold.add_argument(
        "--cold-dir",
        metavar="DIR",
        type=place,
        help="the service's TOPICS_COLD_DIR: check the cold segments' data as well",
    )
    about = "the same for TOPICS_COLD_URL: every object is read"
    cold.add_argument("--cold-url", metavar="URL", type=place, help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all findings")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        with progress("B", 0) as bar:
            report = verify(options.data_dir, partial(show, bar), options.cold_dir or options.cold_url)
    except (DataDirLocked, NotADataDir) as refusal:
        print(f"topics verify: {refusal}", file=sys.stderr)
        return EXIT_USAGE
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report)
    if report.damage:
        first = report.damage[0]
        print(f"topics verify: {first.kind}: {first.path}: offset {first.offset}: {first.reason}", file=sys.stderr)
        return EXIT_DAMAGE
    return 0


def _print(report: Report) -> None:
    for note in report.notes:
        print(f"note   {note}")
    for finding in report.damage:
        print(f"DAMAGE {finding.kind}: {finding.path}: offset {finding.offset}: {finding.reason}")
    print(
        f"{'damaged' if report.damage else 'clean'}: {plural(report.log_frames, 'log frame')},"
        f" {plural(report.segment_records, 'record')} in {plural(report.segments, 'segment')},"
        f" {report.postings} of them sealed, {plural(report.snapshots, 'snapshot')}"
    )
