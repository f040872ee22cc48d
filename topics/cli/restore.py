"""`topics restore`: make a data directory from an archive."""

from __future__ import annotations

import argparse
import os
import socket
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from topics.archive.ownership import close_archive
from topics.archive.restoring import Restore, Restored, WantedMoment, last_whole_ms, plan, reserved
from topics.cli.archive_shared import PLACE, directory, fill_command, mebibytes, place, require_apart, show
from topics.cli.read import timestamp_ms
from topics.cli.shared import end_in_order, positive
from topics.core.clock import SystemClock, iso
from topics.progress import progress
from topics.storage.archive_objects import Archive, ArchiveDamagedError, base_name, open_archive
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.terminal import plural

_ABOUT: Final = """Make a data directory from an archive, as the service was at the last moment there, or at an earlier
one. The restored service is one of its own: every topic has a new epoch, and behind its last record a gap whose reason
is "restored", for seqs that may have been given out later. Most data stay in the archive, which keeps them: the service
reads them there until it has fetched them, and `topics-supervisor status` says how much is left. `--copy` fetches
everything at once."""
_EXAMPLES: Final = """  topics restore /mnt/backup/topics --data-dir ./restored
  topics restore s3://my-bucket/topics --data-dir ./restored --to-ts 2026-11-22T14:00:00Z
  topics restore /mnt/backup/topics --data-dir ./restored --to-seq orders=1200
  topics restore s3://my-bucket/topics --data-dir ./restored --take-over
  topics restore /mnt/backup/topics --data-dir ./restored --copy"""


def fill(parser: argparse.ArgumentParser) -> None:
    fill_command(parser, "restore", _run, about=_ABOUT, examples=_EXAMPLES)
    parser.add_argument("place", metavar="FROM", type=place, help=PLACE)
    about = "the directory to make; it must not exist, or be empty"
    parser.add_argument("--data-dir", metavar="DIR", type=directory, required=True, help=about)
    parser.add_argument(
        "--copy",
        action="store_true",
        help="fetch everything: the directory needs the archive no more, which need not be writable",
    )
    to = parser.add_mutually_exclusive_group()
    to.add_argument(
        "--take-over",
        action="store_true",
        help="the last moment, for good: the service that ships into this archive may still run, but nothing that it"
        " writes from now on gets there, and it takes no more writes once it notices",
    )
    to.add_argument("--to-ts", metavar="TIME", type=timestamp_ms, help="the last moment at or before this time")
    to.add_argument("--to-seq", metavar="TOPIC=N", type=_topic_seq, help="the first moment with record N of the topic")


def _topic_seq(text: str) -> tuple[str, int]:
    topic, _, seq = text.rpartition("=")
    if not topic or not seq.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no TOPIC=N: write for example orders=1200")
    return topic, positive(seq)


def _run(options: argparse.Namespace) -> int:
    end_in_order()  # it gives its loan back
    require_apart(options.data_dir, options.place)
    fs = OsFileSystem()
    archive = Archive(open_archive(fs, options.place))
    topic, seq = options.to_seq or (None, 0)
    try:
        done = _restore(options, archive, fs, WantedMoment(options.to_ts, topic, seq))
    except ArchiveDamagedError as damage:
        raise ArchiveDamagedError(f"{damage}{_way_out(options, archive)}") from damage
    if options.json:
        print(msgspec.json.encode({**done._asdict(), "data_dir": options.data_dir}).decode())
    else:
        print(
            f"{options.data_dir}: is as it was at {iso(done.taken_ms)}; {plural(done.topics, 'topic')},"
            f" {mebibytes(done.size_bytes)} were fetched"
        )
        if done.borrowed_segments:
            print(
                f"{options.data_dir}: borrows {mebibytes(done.borrowed_bytes)} in {done.borrowed_segments} segments"
                f" from {options.place} until its service has fetched them: keep that until then"
            )
    return 0


def _way_out(options: argparse.Namespace, archive: Archive) -> str:
    """Return words about the last earlier moment that a restore can get to; none if there is none."""
    with suppress(ArchiveDamagedError, OSError):
        earlier_ms = None if options.to_seq else last_whole_ms(archive, options.to_ts)
        if earlier_ms is not None and earlier_ms != options.to_ts:
            plan(Archive(archive.store), WantedMoment(earlier_ms))
            instead = " instead of --take-over, once the former service is stopped" if options.take_over else ""
            return f"; or restore an earlier moment, with --to-ts {iso(earlier_ms)}{instead}"
    return ""


def _restore(options: argparse.Namespace, archive: Archive, fs: FileSystem, wanted: WantedMoment) -> Restored:
    if options.take_over:
        with reserved(options.data_dir):
            plan(archive, WantedMoment())  # raises if nothing can be restored, before the former service is shut out
            close_archive(archive, SystemClock(), f"{socket.gethostname()} ({os.path.abspath(options.data_dir)})")
    lender = None if options.copy else options.place
    with progress("object", 0) as bar:
        while True:
            found = plan(archive, wanted)
            found.warn()
            try:
                return Restore(archive, found, fs, options.data_dir, partial(show, bar), lender).run(SystemClock())
            except ArchiveDamagedError as damage:  # an older base may do
                archive.damaged[base_name(found.generation.number, found.base.number)] = damage
