"""The common parts of the commands for archives: options, times, and errors."""

from __future__ import annotations

import argparse
import errno
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from tqdm import tqdm

from topics.archive.ownership import OtherShipperError
from topics.archive.restoring import NotThereError
from topics.archive.shipping import NoMomentError
from topics.log import configure_log
from topics.setting_values import LIKE_URL, MIB, RefusedValueError, bucket_url, overlap
from topics.storage.archive_objects import ArchiveDamagedError
from topics.storage.filesystem import NO_ROOM, said, way_to_write
from topics.storage.lock import DataDirLocked
from topics.storage.logfile import RefusedLog
from topics.storage.snapshot import UnknownSnapshotVersion
from topicsd import EXIT_USAGE

EXIT_FAILED: Final = 1
EXIT_LATER: Final = 4
CODES: Final = """exit codes:
  0  done
  1  the archive or the directory is damaged, incomplete, not writable, or of another service or release
  2  usage, or there is no archive at that place, or no such moment in it
  4  not now: the service starts, stops or recovers, or the store does not answer; nothing was lost, try again"""
PLACE: Final = "a directory, or the URL of a bucket: s3://bucket/prefix, gs://…, az://…, file:///…"
_FAILURES: Final = (ArchiveDamagedError, OtherShipperError, DataDirLocked, RefusedLog, UnknownSnapshotVersion, EOFError)
_NOT_WRITTEN: Final = NO_ROOM | {errno.EACCES, errno.EPERM, errno.EROFS}
_BUCKET: Final = re.compile(r"(?!file:)\w+://")
_DURATION: Final = re.compile(r"0+|(\d{1,15})(ms|s|m|h|d)")
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Work = Callable[[argparse.Namespace], int]


def fill_command(parser: argparse.ArgumentParser, name: str, work: Work, *, about: str, examples: str) -> None:
    """Make `parser` that of a command which does `work`; `name` begins its errors."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = about
    parser.epilog = f"examples:\n{examples}\n\n{CODES}"
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=lambda options: _run(name, work, options))


def _run(name: str, work: Work, options: argparse.Namespace) -> int:
    configure_log("warning", "console")  # or warnings would be on stdout, before the JSON
    try:
        return work(options)
    except (NotThereError, argparse.ArgumentTypeError) as error:
        code, problem = EXIT_USAGE, str(error)
    except (NoMomentError, TimeoutError) as error:
        code, problem = EXIT_LATER, str(error)
    except _FAILURES as error:
        code, problem = EXIT_FAILED, str(error)
    except OSError as error:
        code, problem = EXIT_FAILED, said(error)
        if error.errno in _NOT_WRITTEN and not _BUCKET.match(str(error.filename)):
            problem += f"; {way_to_write(error)}, or choose another place"
    print(f"topics {name}: {problem}", file=sys.stderr)
    return code


def directory(text: str) -> str:
    """Parse an argument: a directory. An empty one, mostly an unset `$VARIABLE`, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no directory: write . for the working directory")
    return text


def place(text: str) -> str:
    """Parse an argument: a directory, or the URL of a bucket. No message repeats one that has credentials in it."""
    if LIKE_URL.match(text):
        url = bucket_url("")
        try:
            url.parse(text)
        except RefusedValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no place: write a directory, {url.allowed}") from None
    return directory(text)


def require_apart(data_dir: str, place: str) -> None:
    """Raise ArgumentTypeError if an archive in `place` and the data directory are not apart."""
    if problem := overlap(data_dir, place):
        raise argparse.ArgumentTypeError(f"{place}: {problem}")


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


def show(bar: tqdm[Any], done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def duration_ms(text: str) -> int:
    """Read a duration such as 7d, 12h, 30m, 10s or 500ms, or 0. A number alone may be meant as days or as ms."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 7d, 12h, 30m or 10s")
    return int(match[1]) * _UNIT_MS[match[2]] if match[1] else 0
