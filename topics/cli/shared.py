"""The common parts of client commands: address and key of the service, errors, input and output.

Output is one JSON value a line, never more lines for one value. Lines of stdin are batched by count, by bytes, and by a
short delay, so that a pipe that trickles is not held up.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import textwrap
import time
from argparse import SUPPRESS
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, get_args

import msgspec

from topics.api.requests import Durability
from topics.client import ApiError, Client, ClientError, Record, Retry, Tombstone, UnreachableError
from topics.terminal import Cell, paint_for, table
from topicsd import EXIT_USAGE

URL_DEFAULT: Final = "http://127.0.0.1:4000"
PATIENCE_DEFAULT_S: Final = 10.0
HELP_WIDTH: Final = 100
EXIT_REFUSED: Final = 1
EXIT_UNREACHABLE: Final = 3
EXIT_GAP: Final = 5
EXIT_FOUND: Final = 6
SHOWN_MAX_CHARS: Final = 120
_CODES: Final = """exit codes:
  0    done
  1    refused by the service (the message has its code), or by you when asked
  2    usage: an argument, the key file, or a line of the input; or the output cannot be written
  3    no service was reached, or none answered
  5    the output has a gap: records were lost to a cap, a ttl or damage
  6    found what it looks for: `apply --plan` a difference, `lag --over` such a reader, `doctor` something wrong
  130  interrupted (Ctrl-C); 143 by SIGTERM, 129 by SIGHUP; 141 the reader of the output closed it"""
T = TypeVar("T")
CLASSES: Final[tuple[str, ...]] = get_args(Durability)
Work = Callable[[Client, argparse.Namespace], int]


class UsageError(Exception):
    """An argument or a line of input cannot be used; the text says which, and what would be right."""


def fill(parser: argparse.ArgumentParser, name: str, work: Work, *, about: str, examples: str) -> None:
    """Make `parser` that of a command which does `work` with a client of the service; `name` begins its errors."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(about, HELP_WIDTH)
    parser.epilog = f"examples:\n{examples}\n\n{_CODES}"
    add_where(parser)
    parser.set_defaults(command=lambda options: run(name, work, options))


def add_verb(verbs: Any, command: str, name: str, work: Work, *, about: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of a verb of a command. Its examples are those that name it."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=about)
    own = [line for line in examples.splitlines() if f" {name}" in line]
    fill(parser, f"{command} {name}", work, about=about, examples="\n".join(own) or f"  topics {command} mails {name}")
    return parser


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the options for the service's address and the key."""
    # SUPPRESS, not None: `topics queue` has them before and after its verb, and a later default would win.
    to = parser.add_argument_group("service")
    to.add_argument(
        "--url",
        default=SUPPRESS,
        help=f"the service (TOPICS_URL, else {URL_DEFAULT}); several of one service between commas",
    )
    about = "file with the API key (TOPICS_KEY_FILE, else none); as an argument anybody could read it"
    to.add_argument("--key-file", metavar="FILE", default=SUPPRESS, help=about)
    about = f"how long to repeat a request while no service, or a busy one, answers ({PATIENCE_DEFAULT_S:g})"
    to.add_argument("--patience-s", metavar="SECONDS", type=not_negative, default=SUPPRESS, help=about)


def add_data_only(parser: argparse.ArgumentParser) -> None:
    about = "print only the `data` of each record; tombstones go to stderr"
    parser.add_argument("--data-only", action="store_true", help=about)


def run(name: str, work: Work, options: argparse.Namespace) -> int:
    """Run the whole command. Return the exit code; an error is one line on stderr."""
    end_in_order()
    try:
        retry = Retry(total_s=getattr(options, "patience_s", PATIENCE_DEFAULT_S))
        with Client(url_of(options), token=_key(options), retry=retry) as client:
            return work(client, options)
    except UnreachableError as error:
        say(name, f"{error} (--url or TOPICS_URL names the service)")
        return EXIT_UNREACHABLE
    except ApiError as error:
        cause = error.detail.get("cause")  # as ENOSPC, by which docs/operations.md lists what to do
        say(name, f"{error.code}: {error.message}" + (f" ({cause})" if cause else ""))
        return EXIT_REFUSED
    except (UsageError, ClientError) as error:
        say(name, str(error))
        return EXIT_USAGE


def end_in_order() -> None:
    """Have SIGTERM and SIGHUP end this program as Ctrl-C does, so that it says what it did, and leaves nothing behind.
    One that is ignored (`nohup`) stays so, and a second one is.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def url_of(options: argparse.Namespace) -> str:
    """Return the service's address. An empty variable is none; an empty `--url` is an error, as is one of `$UNSET`."""
    given: str | None = getattr(options, "url", None)
    return (options.environment.get("TOPICS_URL") or URL_DEFAULT) if given is None else given


def key_file_of(options: argparse.Namespace) -> str | None:
    given: str | None = getattr(options, "key_file", None)
    return (options.environment.get("TOPICS_KEY_FILE") or None) if given is None else given


def changes(now: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return a line for each field that differs, like `ttl_ms: 0 → 1000`. A field that `now` lacks is at null."""
    return [
        f"{field}: {show(now.get(field))} → {show(value)}" for field, value in wanted.items() if now.get(field) != value
    ]


def show(value: Any) -> str:
    """Return a value as JSON."""
    return _encoder.encode(value).decode()


def agreed(name: str, question: str, options: argparse.Namespace) -> bool:
    """Return whether to go on: yes after `--yes`, on a terminal as the person answers."""
    if options.yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        say(name, "nothing was done; repeat it with --yes if that is right")
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say(name, "nothing was done")
    return False


def say(name: str, text: str) -> None:
    print(f"topics {name}: {text}", file=sys.stderr, flush=True)


def _key(options: argparse.Namespace) -> str | None:
    path = key_file_of(options)
    if path is None:
        return None
    try:
        with open(path, encoding="ascii") as file:
            key = file.read().strip()
    except OSError as error:
        raise UsageError(f"key file {path or repr(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    # No message shows the contents of a wrong file, which may hold another secret.
    if not key.isprintable() or not key or " " in key:
        raise UsageError(f"key file {path}: has to hold one API key, in printable ASCII, and nothing else")
    return key


def not_negative(text: str) -> float:
    """Parse an argument: a finite number from 0."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")


def whole(text: str, least: int = 0) -> int:
    """Parse an argument: an integer from `least`. Python converts no more than 4,300 digits."""
    with suppress(ValueError):
        if text.isdecimal() and (value := int(text)) >= least:
            return value
    wrong = f"is not a whole number from {least}" if len(text) <= SHOWN_MAX_CHARS else f"… has {len(text)} characters"
    raise argparse.ArgumentTypeError(f"{text[:SHOWN_MAX_CHARS]!r} {wrong}")


positive: Final = partial(whole, least=1)
_encoder: Final = msgspec.json.Encoder()


def one_line(json: bytes) -> bytes:
    """Return the same JSON without line breaks. Strings have them escaped, so all of them are white space."""
    return json.replace(b"\n", b" ").replace(b"\r", b" ")


def record_lines(records: Sequence[Record], topic: str | None = None) -> bytes:
    """Return a line for each record; it begins with the topic if that is given."""
    if not records:
        return b""
    lines = _encoder.encode_lines(records).replace(b"\r", b" ")
    if lines.count(b"\n") != len(records):
        # `data` may have several lines, since the service keeps it as it was written.
        lines = b"".join(one_line(_encoder.encode(record)) + b"\n" for record in records)
    if topic is None:
        return lines
    begin = b'{"topic":' + _encoder.encode(topic) + b","
    return begin + lines[1:].replace(b"\n{", b"\n" + begin)


def data_lines(records: Sequence[Record]) -> bytes:
    return b"".join(one_line(bytes(record.raw)) + b"\n" for record in records)


def print_answer(answer: msgspec.Struct) -> None:
    """Print an answer of the service as one line of JSON, without `performance`."""
    fields = msgspec.structs.asdict(answer)
    del fields["performance"]
    print_line(fields)


def printing(ask: Callable[[Client, argparse.Namespace], msgspec.Struct]) -> Work:
    """Return the work of asking the service once and printing its answer."""

    def work(client: Client, options: argparse.Namespace) -> int:
        print_answer(ask(client, options))
        return 0

    return work


def print_line(value: Any) -> None:
    put(one_line(_encoder.encode(value)) + b"\n")


def print_table(rows: Sequence[Sequence[Cell]], options: argparse.Namespace, *, text_columns: int = 1) -> None:
    """Print rows below their headings, with colours on a terminal."""
    put(table(rows, paint_for(sys.stdout, options.environment), text_columns=text_columns).encode())


def print_items(
    items: Iterable[T], options: argparse.Namespace, heads: str, row: Callable[[T], Sequence[Cell]], text_columns: int
) -> None:
    """Print a table with a row for each item, or the items as NDJSON after --json."""
    if options.json:
        put(b"".join(one_line(_encoder.encode(item)) + b"\n" for item in items))
    else:
        print_table([heads.split(), *map(row, items)], options, text_columns=text_columns)


def put(lines: bytes) -> None:
    """Write lines and flush them: a reader at the other end of a pipe waits for them."""
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


class RecordPrinter:
    """Prints records and gaps, each line with its topic if there are `several`. `exit_code` is EXIT_GAP after a gap."""

    def __init__(self, *, data_only: bool = False, several: bool = False) -> None:
        self._data_only = data_only
        self._several = several
        self.exit_code = 0

    def records(self, topic: str, records: Sequence[Record]) -> None:
        if records:
            put(data_lines(records) if self._data_only else record_lines(records, topic if self._several else None))

    def tombstone(self, topic: str, tombstone: Tombstone) -> None:
        self.exit_code = EXIT_GAP
        gap: dict[str, Any] = {"topic": topic} if self._several or self._data_only else {}
        gap["tombstone"] = tombstone
        if self._data_only:
            print(_encoder.encode(gap).decode(), file=sys.stderr, flush=True)
        else:
            print_line(gap)


READ_MAX_BYTES: Final = 1 << 20
LINE_MAX_BYTES: Final = 64 << 20
"""The service's limit for a whole request. Longer input without a line break is refused before it fills the memory."""


class BadLineError(UsageError):
    """A line of the input cannot be used."""

    def __init__(self, number: int, text: bytes, reason: str) -> None:
        shown = text[: 4 * SHOWN_MAX_CHARS].decode(errors="replace").strip()
        shown = shown[:SHOWN_MAX_CHARS] + ("…" if len(shown) > SHOWN_MAX_CHARS else "")
        super().__init__(f"line {number}: {reason}: {shown}")
        self.number = number


class LineBatch(NamedTuple):
    """Consecutive lines, blank ones included; `first` is the number of the first, from 1."""

    first: int
    lines: list[bytes]

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, text) of the lines that are not blank, stripped."""
        for number, line in enumerate(self.lines, self.first):
            if text := line.strip(b" \t\r"):
                yield number, text


class Batcher:
    """Lines on their way into batches. Pure: lines and times come in, full or due batches go out."""

    def __init__(self, *, lines_max: int, bytes_max: int, delay_s: float) -> None:
        self._lines_max = lines_max
        self._bytes_max = bytes_max
        self._delay_s = delay_s
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._first = 1
        self._since_s = 0.0

    def add(self, lines: list[bytes], now_s: float) -> None:
        if not self._waiting:
            self._since_s = now_s
        self._waiting.extend(lines)
        self._waiting_bytes += sum(map(len, lines))

    def wait_s(self, now_s: float) -> float | None:
        """Return how long to wait for more lines; None: until there are some."""
        return max(0.0, self._since_s + self._delay_s - now_s) if self._waiting else None

    def due(self, now_s: float, *, ended: bool) -> LineBatch | None:
        """Return the next batch that is full or due; with `ended` (no more lines come) any that is left."""
        full = len(self._waiting) >= self._lines_max or self._waiting_bytes >= self._bytes_max
        if not self._waiting or not (full or ended or now_s >= self._since_s + self._delay_s):
            return None
        batch, len_bytes = LineBatch(self._first, []), 0
        while self._waiting and len(batch.lines) < self._lines_max:
            if batch.lines and len_bytes + len(self._waiting[0]) > self._bytes_max:
                break
            len_bytes += len(self._waiting[0])
            batch.lines.append(self._waiting.popleft())
        self._first += len(batch.lines)
        self._waiting_bytes -= len_bytes
        self._since_s = now_s
        return batch


class LineSource:
    """The lines of a file descriptor, as they come. `ended` is true at the end; the last line needs no line break."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._whole = 0
        self.ended = False

    def take(self, wait_s: float | None) -> list[bytes]:
        """Wait up to `wait_s` for input, and return the lines that are complete."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return []
        chunk = os.read(self._fd, READ_MAX_BYTES)
        self.ended = not chunk
        if chunk and b"\n" not in chunk:
            return self._begin(chunk)
        lines = b"".join((*self._begun, chunk)).split(b"\n")
        self._begun, self._begun_bytes = [], 0
        rest = lines.pop()
        if self.ended:
            return [rest] if rest else []
        self._whole += len(lines)
        if rest:
            self._begin(rest)
        return lines

    def _begin(self, part: bytes) -> list[bytes]:
        self._begun.append(part)
        self._begun_bytes += len(part)
        if self._begun_bytes > LINE_MAX_BYTES:
            raise BadLineError(self._whole + 1, self._begun[0], f"is longer than {LINE_MAX_BYTES} bytes")
        return []


def stdin_batches(*, lines_max: int, bytes_max: int, delay_s: float) -> Iterator[LineBatch]:
    """Yield the lines of stdin in batches. Nothing is read while a batch is handled, so the pipe's writer waits."""
    if sys.stdin is None:
        raise UsageError("stdin is closed: give the input as NDJSON on stdin")
    source = LineSource(sys.stdin.fileno())
    batcher = Batcher(lines_max=lines_max, bytes_max=bytes_max, delay_s=delay_s)
    while True:
        batch = batcher.due(time.monotonic(), ended=source.ended)
        if batch is not None:
            yield batch
        elif source.ended:
            return
        else:
            lines = source.take(batcher.wait_s(time.monotonic()))
            batcher.add(lines, time.monotonic())
