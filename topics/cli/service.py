"""What every client command has: where the service is, whose key it uses, and how a failure is told."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from typing import Final

from topics.client import ApiError, Client, ClientError, Retry, UnreachableError

URL_DEFAULT: Final = "http://127.0.0.1:4000"
PATIENCE_DEFAULT_S: Final = 10.0
HELP_WIDTH: Final = 100
EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_GAP: Final = 5
_CODES: Final = """exit codes:
  0    done
  1    refused: by the service (the message has its code), or by you when you were asked
  2    usage: an argument, the key file, or a line of the input
  3    no service was reached, or none answered
  5    records were lost to a cap, a ttl or damage: a gap is in what was printed
  130  interrupted (Ctrl-C); 141 whoever read the output went away"""
Work = Callable[[Client, argparse.Namespace], int]


class UsageError(Exception):
    """Something that the caller gave cannot be used; the text says what and what would be right."""


def fill(parser: argparse.ArgumentParser, name: str, work: Work, *, about: str, examples: str) -> None:
    """Makes it the parser of a command that does `work` with a client of the service; errors begin with `name`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(about, HELP_WIDTH)
    parser.epilog = f"examples:\n{examples}\n\n{_CODES}"
    add_where(parser)
    parser.set_defaults(command=lambda options: run(name, work, options))


def add_where(parser: argparse.ArgumentParser) -> None:
    """Adds where the service is and whose key is used."""
    # Suppressed, not None: `topics queue` has them before and after its verb, and the later must not undo the earlier.
    to = parser.add_argument_group("service")
    to.add_argument("--url", default=argparse.SUPPRESS, help=f"the service (TOPICS_URL, else {URL_DEFAULT})")
    to.add_argument(
        "--key-file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file with the API key (TOPICS_KEY_FILE, else none); an argument could be read by anybody",
    )
    to.add_argument(
        "--patience-s",
        metavar="SECONDS",
        type=not_negative,
        default=argparse.SUPPRESS,
        help=f"how long a request is repeated when no service, or a busy one, answers ({PATIENCE_DEFAULT_S:g})",
    )


def run(name: str, work: Work, options: argparse.Namespace) -> int:
    """The whole command: the exit code, with one line on stderr for what went wrong."""
    try:
        retry = Retry(total_s=getattr(options, "patience_s", PATIENCE_DEFAULT_S))
        with Client(_url(options), token=_key(options), retry=retry) as client:
            return work(client, options)
    except UsageError as error:
        say(name, str(error))
        return EXIT_USAGE
    except UnreachableError as error:
        say(name, f"{error} (--url or TOPICS_URL names the service)")
        return EXIT_UNREACHABLE
    except ApiError as error:
        say(name, f"{error.code}: {error.message}")
        return EXIT_REFUSED
    except ClientError as error:
        say(name, str(error))
        return EXIT_USAGE


def say(name: str, text: str) -> None:
    print(f"topics {name}: {text}", file=sys.stderr, flush=True)


def _url(options: argparse.Namespace) -> str:
    url: str = getattr(options, "url", None) or options.environment.get("TOPICS_URL") or URL_DEFAULT
    return url


def _key(options: argparse.Namespace) -> str | None:
    path = getattr(options, "key_file", None) or options.environment.get("TOPICS_KEY_FILE")
    if not path:
        return None
    try:
        with open(path, encoding="ascii") as file:
            key = file.read().strip()
    except OSError as error:
        raise UsageError(f"key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    # What else could be in there would be shown by none of these messages.
    if not key.isprintable() or not key or " " in key:
        raise UsageError(f"key file {path}: has to hold one API key, in printable ASCII, and nothing else")
    return key


def not_negative(text: str) -> float:
    """A type of argparse."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def whole(text: str) -> int:
    """A type of argparse: an integer from 0."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def positive(text: str) -> int:
    """A type of argparse: an integer from 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
