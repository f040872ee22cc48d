"""`topics write TOPIC`: NDJSON on stdin becomes records."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any, Final

import msgspec

from topics.cli import shared
from topics.cli.shared import BadLineError, LineBatch, UsageError, print_line, say, stdin_batches
from topics.client import ApiError, Client, ClientError, NewRecord, ServiceBusyError

BATCH_MAX_BYTES: Final = 1 << 20
BATCH_MAX_RECORDS: Final = 10_000
KEY_MAX_CHARS: Final = 256
PATIENCE_MAX_S: Final = 100
_PROGRESS_EVERY_S: Final = 0.2
_EXAMPLES: Final = """  echo '{"item": "tea"}' | topics write orders --tag tea
  tail -F app.log.json | topics write logs
  topics write orders --records <<< '{"data": {"item": "milk"}, "tag": "milk", "meta": {"by": "ann"}}'
  topics write payments --key-of id < payments.ndjson   # again, if it broke: what is there is not written twice"""


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A record of `--records`: what the service takes, or what `topics read` and `topics tail` have printed."""

    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None
    meta: dict[str, str] | None = None
    deliver_at: int | None = None
    delay_ms: int | None = None
    order_key: str | None = None
    topic: str | None = None
    read_seq: int | None = msgspec.field(name="$seq", default=None)
    read_ts: int | None = msgspec.field(name="$ts", default=None)
    read_tag: str | None = msgspec.field(name="$tag", default=None)
    read_node: str | None = msgspec.field(name="$node", default=None)


_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode
_line: Final = msgspec.json.Decoder(Line).decode
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text_or_number: Final = msgspec.json.Decoder(str | int | float).decode


def fill(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    about = (
        "Append records to a topic, which is made if there is none: each line of stdin is the `data` of one, any JSON "
        'value, kept byte for byte. What was written is the last line, {"first_seq", "last_seq", "count"}, also when '
        "it ends early. A write that is not answered is repeated and committed once."
    )
    shared.fill(parser, "write", _write, about=about, examples=_EXAMPLES)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--records",
        action="store_true",
        help="lines are whole records: data, and tag, node, meta, deliver_at, delay_ms, order_key; "
        "those that `topics read` prints are fine as well",
    )
    parser.add_argument("--tag", help="tag of records that have none")
    parser.add_argument("--node", help="who writes, for records that do not say it")
    parser.add_argument(
        "--durability",
        choices=("ephemeral", "memory", "disk", "fsync"),
        help="of the topic, if this makes it; one that is there keeps its own, which is said",
    )
    parser.add_argument(
        "--config",
        metavar="JSON",
        type=config_object,
        default={},
        help='the same for all of its configuration, like \'{"type": "queue", "max_deliveries": 5}\'',
    )
    parser.add_argument("--no-create", action="store_true", help="refuse to make the topic")
    parser.add_argument(
        "--key-of",
        metavar="FIELD",
        help="each record is a write of its own under this field of its data as idempotency key: the same input again, "
        "within the topic's idempotency_window_ms, writes only what is missing; slower",
    )
    parser.add_argument(
        "--batch-records",
        metavar="N",
        type=shared.positive,
        default=1000,
        help=f"the most records of one write (%(default)s; {BATCH_MAX_RECORDS} unless the service is set otherwise)",
    )
    parser.add_argument(
        "--delay-ms",
        metavar="MS",
        type=shared.not_negative,
        default=50.0,
        help="how long a line may wait for others to go with it (%(default)g)",
    )


def _write(client: Client, options: argparse.Namespace) -> int:
    if getattr(options, "patience_s", 0.0) > PATIENCE_MAX_S:
        raise UsageError(
            f"--patience-s {options.patience_s:g}: at most {PATIENCE_MAX_S} for a write: repeated after the topic's "
            "idempotency_window_ms, 120 s unless it is set otherwise, it would be written twice"
        )
    writing = _Writing(client, options)
    batches = stdin_batches(
        lines_max=1 if options.key_of is not None else options.batch_records,
        bytes_max=BATCH_MAX_BYTES,
        delay_s=options.delay_ms / 1000,
    )
    try:
        for batch in batches:
            writing.write(batch)
    except (BadLineError, ClientError, KeyboardInterrupt) as error:
        say("write", writing.how_far(error))
        raise
    finally:
        writing.progress.end()
        # Nobody may be there any more to read it; what went wrong before is the news then.
        with contextlib.suppress(BrokenPipeError):
            writing.summary()
    return 0


class _Writing:
    """Batches on their way into the topic, and what became of them."""

    def __init__(self, client: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._config = options.config | ({} if options.durability is None else {"durability": options.durability})
        self._first_seq: int | None = None
        self._last_seq: int | None = None
        self._count = 0
        self._deduped = 0
        self._lines_done = 0
        self._under_way: LineBatch | None = None
        self._class_checked = False
        self.progress = _Progress()

    def write(self, batch: LineBatch) -> None:
        """BadLineError after the lines before it were written."""
        try:
            records = parse(batch, whole_records=self._options.records, tag=self._options.tag)
        except BadLineError as bad:
            if bad.number > batch.first:
                self.write(batch.before(bad.number))
            raise
        if records:
            self._under_way = batch
            self._append(records, batch)
            self._under_way = None
        self._lines_done = batch.last

    def _append(self, records: list[NewRecord], batch: LineBatch) -> None:
        field = self._options.key_of
        written = self._client.append(
            self._options.topic,
            records,
            node=self._options.node,
            create=not self._options.no_create,
            config=self._config or None,
            idempotency_key=None if field is None else key_of(records[0], field, batch),
        )
        self._first_seq = written.first_seq if self._first_seq is None else min(self._first_seq, written.first_seq)
        self._last_seq = max(self._last_seq or 0, written.last_seq)
        self._count += written.count
        # Under a key that the client made up it is the first attempt, whose answer was lost.
        self._deduped += written.count if written.deduped and field is not None else 0
        wanted = self._config.get("durability", written.durability)
        if not self._class_checked and written.durability != wanted:
            say(
                "write",
                f"topic {self._options.topic!r} exists and stays {written.durability}, not {self._options.durability}",
            )
        self._class_checked = True
        self.progress.show(self._count)

    def how_far(self, error: BaseException) -> str:
        """What of the input is in the topic."""
        done = f"lines 1 to {self._lines_done} are written" if self._lines_done else "no line was written"
        if self._under_way is None:
            return done
        rest = f"lines {self._under_way.first} to {self._under_way.last}"
        return f"{done}, {rest} are not" if is_certain(error) else f"{done}; of {rest} it is not known"

    def summary(self) -> None:
        line: dict[str, Any] = {"first_seq": self._first_seq, "last_seq": self._last_seq, "count": self._count}
        print_line(line | ({"deduped": self._deduped} if self._deduped else {}))


def is_certain(error: BaseException) -> bool:
    """Whether nothing was written by what ended so. The last of several attempts does not speak for those before it,
    unless it was refused for what it is: had one of them been committed, the answer would be that.
    """
    if isinstance(error, ApiError):
        return 400 <= error.status < 500 and not isinstance(error, ServiceBusyError)
    return isinstance(error, BadLineError)


def parse(batch: LineBatch, *, whole_records: bool, tag: str | None = None) -> list[NewRecord]:
    """The records of a batch; BadLineError for the first that is none."""
    texts = batch.texts()
    try:
        # The decoder passes over strings without a look at their encoding.
        b"\n".join(texts).decode()
        if whole_records:
            return [_new_record(_line(text), tag) for text in texts]
        return [NewRecord(_raw(text), tag) for text in texts]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _first_bad(batch, whole_records) from None


def _first_bad(batch: LineBatch, whole_records: bool) -> BadLineError:
    for number, line in enumerate(batch.lines, batch.first):
        text = line.strip(b" \t\r")
        if not text:
            continue
        try:
            text.decode()
            _raw(text)
        except UnicodeDecodeError as error:
            return BadLineError(number, text, f"is not UTF-8 (byte {error.start})")
        except (msgspec.DecodeError, RecursionError) as error:
            return BadLineError(number, text, f"is not JSON ({error})")
        try:
            if whole_records:
                _line(text)
        except msgspec.DecodeError as error:
            return BadLineError(number, text, f'is not a record like {{"data": …, "tag": …}} ({error})')
    raise AssertionError("a batch that cannot be parsed has a line that cannot be")


def _new_record(line: Line, tag: str | None) -> NewRecord:
    return NewRecord(
        line.data,
        tag=line.tag or line.read_tag or tag,
        node=line.node or line.read_node,
        meta=line.meta,
        deliver_at=line.deliver_at,
        delay_ms=line.delay_ms,
        order_key=line.order_key,
    )


def key_of(record: NewRecord, field: str, batch: LineBatch) -> str:
    """The idempotency key that a record brings along: a text, or a number as it is spelled."""
    data = bytes(record.data)
    try:
        raw = _object(data)[field]
        value = _text_or_number(raw)
    except (msgspec.DecodeError, KeyError):
        reason = f"has no text or number as field {field!r} of its data, which --key-of names"
        raise BadLineError(batch.last, data, reason) from None
    key = value if isinstance(value, str) else bytes(raw).decode()
    if not 0 < len(key) <= KEY_MAX_CHARS:
        raise BadLineError(batch.last, data, f"field {field!r} has to have 1 to {KEY_MAX_CHARS} characters")
    return key


def config_object(text: str) -> dict[str, Any]:
    """A type of argparse: a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(
            f'{text!r}: has to be a JSON object like {{"type": "queue"}} ({error})'
        ) from None


class _Progress:
    """One line on a terminal that shows nothing else, nothing anywhere else."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty() and sys.stdin is not None and not sys.stdin.isatty()
        self._began_s = self._shown_s = time.monotonic()
        self._drawn = False

    def show(self, count: int) -> None:
        now_s = time.monotonic()
        if not self._on or now_s - self._shown_s < _PROGRESS_EVERY_S:
            return
        self._shown_s, self._drawn = now_s, True
        print(f"\r{count} records, {count / (now_s - self._began_s):.0f}/s ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._drawn:
            print(file=sys.stderr)
