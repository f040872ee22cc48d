"""Everything that client commands share: where the service is and whose key it uses, errors, input and output.

Output is one JSON value a line, and never two lines for one value. Lines of stdin come in batches: by count, by bytes,
and by a short delay, so that a pipe that trickles is not held up.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from topics.api.answers import Timed
from topics.client import ApiError, Client, ClientError, Record, Retry, Tombstone, UnreachableError

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
    """An argument or an input of the caller cannot be used; the text says which and what would be right."""


def fill(parser: argparse.ArgumentParser, name: str, work: Work, *, about: str, examples: str) -> None:
    """Makes it the parser of a command that does `work` with a client of the service; errors begin with `name`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(about, HELP_WIDTH)
    parser.epilog = f"examples:\n{examples}\n\n{_CODES}"
    add_where(parser)
    parser.set_defaults(command=lambda options: run(name, work, options))


def add_where(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the service's address and for the key."""
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
    """Runs the whole command. Returns the exit code, with one line on stderr for an error."""
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
    # Other contents could be a secret: no message shows them.
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


_encoder: Final = msgspec.json.Encoder()


def one_line(json: bytes) -> bytes:
    """Returns the same JSON without line breaks. Strings have none inside, so all line breaks are white space."""
    return json.replace(b"\n", b" ").replace(b"\r", b" ")


def record_lines(records: Sequence[Record], topic: str | None = None) -> bytes:
    """Returns a line for each record; it begins with the record's topic if that is given."""
    if not records:
        return b""
    lines = _encoder.encode_lines(records).replace(b"\r", b" ")
    if lines.count(b"\n") != len(records):
        # Somebody's `data` was written in several lines, and is kept as it was.
        lines = b"".join(one_line(_encoder.encode(record)) + b"\n" for record in records)
    if topic is None:
        return lines
    begin = b'{"topic":' + _encoder.encode(topic) + b","
    return begin + lines[1:].replace(b"\n{", b"\n" + begin)


def data_lines(records: Sequence[Record]) -> bytes:
    """Returns a line for each record's `data`."""
    return b"".join(one_line(bytes(record.raw)) + b"\n" for record in records)


def print_answer(answer: Timed) -> None:
    """Prints an answer of the service as one line of JSON, without how long it took."""
    fields = msgspec.structs.asdict(answer)
    del fields["performance"]
    print_line(fields)


def print_line(value: Any) -> None:
    """Prints one value as JSON."""
    put(one_line(_encoder.encode(value)) + b"\n")


def put(lines: bytes) -> None:
    """Writes lines at once: a reader at the other end of a pipe waits for them."""
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


class RecordPrinter:
    """Prints records and gaps of one topic, or of several, each line with its topic then. `exit_code` tells of gaps."""

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
"""The service's bound for a whole request: input without line breaks must not fill the memory."""
SHOWN_MAX_CHARS: Final = 120


class BadLineError(UsageError):
    """A line of the input that cannot be used."""

    def __init__(self, number: int, text: bytes, reason: str) -> None:
        shown = text[: 4 * SHOWN_MAX_CHARS].decode(errors="replace").strip()
        shown = shown[:SHOWN_MAX_CHARS] + ("…" if len(shown) > SHOWN_MAX_CHARS else "")
        super().__init__(f"line {number}: {reason}: {shown}")
        self.number = number


class LineBatch(NamedTuple):
    """Lines that go together, blank ones included; `first` is the number of the first, from 1."""

    first: int
    lines: list[bytes]

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1

    def texts(self) -> list[bytes]:
        """The lines that are not blank."""
        return [text for line in self.lines if (text := line.strip(b" \t\r"))]

    def before(self, number: int) -> LineBatch:
        """Returns its lines up to that one."""
        return LineBatch(self.first, self.lines[: number - self.first])


class Batcher:
    """Decides which lines go together, and when. Pure: lines and times come in."""

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
        """Returns how long to wait for more; None: until there is some."""
        return max(0.0, self._since_s + self._delay_s - now_s) if self._waiting else None

    def due(self, now_s: float, *, ended: bool) -> LineBatch | None:
        """Returns the next batch that is due; with `ended`, when no more lines come, everything, batch by batch."""
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
    """The lines of a file descriptor, as they come. `ended` is true once there are no more; the last line needs no line
    end.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._whole = 0
        self.ended = False

    def take(self, wait_s: float | None) -> list[bytes]:
        """Returns the whole lines that have come within this time, waiting for no more than the first bytes."""
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


def stdin_batches(
    *, lines_max: int, bytes_max: int, delay_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[LineBatch]:
    """Yields the lines of stdin in batches. Nothing is read while a batch is handled, so the writer of the pipe
    waits.
    """
    if sys.stdin is None:
        raise UsageError("stdin is closed: the input is NDJSON on stdin")
    source = LineSource(sys.stdin.fileno())
    batcher = Batcher(lines_max=lines_max, bytes_max=bytes_max, delay_s=delay_s)
    while True:
        batch = batcher.due(clock(), ended=source.ended)
        if batch is not None:
            yield batch
        elif source.ended:
            return
        else:
            lines = source.take(batcher.wait_s(clock()))
            batcher.add(lines, clock())
