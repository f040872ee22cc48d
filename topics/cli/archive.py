"""`topics archive`: lists an archive, verifies it, and removes what is not needed any more."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from topics.archive.inspection import check, figures, prune
from topics.archive.restoring import NotThereError
from topics.cli.archive_shared import EXIT_FAILED, PLACE, Work, duration_ms, fill_command, mebibytes, place, show
from topics.core.clock import SystemClock, iso
from topics.progress import progress
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.terminal import plural

_LIST: Final = """List what can be restored: each generation (one unbroken history of a service) with its bases."""
_VERIFY: Final = """Read every object that a restore may need, and check it. Changes nothing."""
_PRUNE: Final = """Remove what only older moments need; the last moment always stays, and what a restored service has
not fetched yet. Records that were deleted in the service are gone from the archive once it has no moment from before
the deletion."""


def fill(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _verb(verbs, "list", _run_list, _LIST, "  topics archive list /mnt/backup/topics")
    _verb(verbs, "verify", _run_verify, _VERIFY, "  topics archive verify s3://my-bucket/topics")
    pruned = _verb(verbs, "prune", _run_prune, _PRUNE, "  topics archive prune /mnt/backup/topics --keep 7d")
    pruned.add_argument(
        "--keep", metavar="TIME", type=duration_ms, required=True, help="how far back a restore must reach: 7d, 12h, …"
    )


def _verb(verbs: Any, name: str, work: Work, about: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=about.partition(".")[0].partition(":")[0].lower())
    fill_command(parser, f"archive {name}", work, about=about, examples=examples)
    parser.add_argument("place", metavar="PLACE", type=place, help=PLACE)
    return parser


def _opened(options: argparse.Namespace) -> Archive:
    archive = Archive(open_archive(OsFileSystem(), options.place))
    if not archive.generations():
        raise NotThereError(f"{archive.store.place('')}: there is no archive here")
    return archive


def _run_list(options: argparse.Namespace) -> int:
    archive = _opened(options)
    with progress("base", 0) as bar:
        found = figures(archive, partial(show, bar))
    damaged = [damage for generation in found for damage in generation.damaged]
    for damage in damaged:
        print(f"topics archive list: {damage}", file=sys.stderr)
    if options.json:
        print(msgspec.json.encode({"generations": found}).decode())
    for generation in [] if options.json else found:
        reach = f"nothing can be restored: {'damaged' if generation.damaged else 'its first base is not complete'}"
        if generation.first_ms is not None:
            until = "a damaged piece" if generation.last_ms is None else iso(generation.last_ms)
            reach = f"any time from {iso(generation.first_ms)} to {until}"
        print(
            f"generation {generation.number} of service {generation.service_id or '(unknown)'},"
            f" {plural(generation.shards, 'shard')}: {reach} ({plural(generation.pieces, 'piece')})"
        )
        for base in generation.bases:
            size = f"{mebibytes(base.size_bytes)} in {plural(base.files, 'file')}"
            print(f"  base {base.number}  {iso(base.taken_ms)}  {size}")
        for base_no, loan in archive.loans(generation.number).items():
            print(f"  base {base_no}: {_loan(archive, loan)}")
    return EXIT_FAILED if damaged else 0


def _run_verify(options: argparse.Namespace) -> int:
    with progress("object", 0) as bar:
        problems = check(_opened(options), partial(show, bar))
    if options.json:
        print(msgspec.json.encode({"problems": problems}).decode())
    elif problems:
        print("\n".join(problems))
    else:
        print(f"{options.place}: whole")
    if problems:
        print(f"topics archive verify: {problems[0]}", file=sys.stderr)
    return EXIT_FAILED if problems else 0


def _loan(archive: Archive, name: str) -> str:
    """Return who reads files of a base, and until when."""
    where = archive.store.place(name)
    with suppress(FileNotFoundError):
        to = archive.store.read_range(name, 0, archive.store.len(name)).decode(errors="replace")
        return f"{to} was made of it and has not fetched all; if it is gone for good, delete {where}"
    return f"{where} has just ended"


def _run_prune(options: argparse.Namespace) -> int:
    archive = _opened(options)
    with progress("object", 0) as bar:
        removed = prune(archive, SystemClock().now_ms() - options.keep, partial(show, bar))
    if options.json:
        print(msgspec.json.encode(removed).decode())
    else:
        print(
            f"{options.place}: removed {plural(removed.generations, 'generation')}, {plural(removed.bases, 'base')},"
            f" {plural(removed.pieces, 'piece')}, {plural(removed.files, 'file')}"
        )
        for loan in removed.loans:
            print(f"{options.place}: {_loan(archive, loan)}; what it needs stays")
    for damage in removed.damaged:
        print(f"topics archive prune: {damage}. All that can be judged without it was pruned", file=sys.stderr)
    return EXIT_FAILED if removed.damaged else 0
