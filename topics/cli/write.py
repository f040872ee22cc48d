"""`topics write TOPIC`: append the lines of stdin (NDJSON) as records."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, Final

import msgspec

from topics.cli import shared
from topics.cli.shared import BadLineError, LineBatch, UsageError, print_line, say, stdin_batches
from topics.client import ApiError, Client, ClientError, NewRecord, calls
from topics.core.json_text import why_refused
from topics.progress import progress, stdin_bytes
from topicsd import OutputError

BATCH_MAX_BYTES: Final = 1 << 20
BATCH_MAX_RECORDS: Final = 10_000
KEY_MAX_CHARS: Final = 256
PATIENCE_MAX_S: Final = 100
_EXAMPLES: Final = """  echo '{"item": "tea"}' | topics write orders --tag tea
  tail -F app.log.json | topics write logs
  topics write orders --records <<< '{"data": {"item": "milk"}, "tag": "milk", "meta": {"by": "ann"}}'
  topics write payments --key-of id < payments.ndjson   # if it broke, repeat it: nothing is written twice"""


class Line(NewRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of `--records`: a record as the service takes it, or as `topics read` and `topics tail` print it."""

    data: msgspec.Raw
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
    about = (
        "Append records to a topic, which is created if it is not there. Each line of stdin is the `data` of one, any "
        'JSON value, kept byte for byte. The last line of output is {"first_seq", "last_seq", "count"}, also after an '
        "error. A write that is not answered is repeated and committed once."
    )
    shared.fill(parser, "write", _write, about=about, examples=_EXAMPLES)
    parser.add_argument("topic", metavar="TOPIC")
    whole = "lines are whole records: data, tag, node, meta, deliver_at, delay_ms, order_key; output of `read` fits"
    parser.add_argument("--records", action="store_true", help=whole)
    parser.add_argument("--tag", help="tag of records without one")
    parser.add_argument("--node", help="node of records without one")
    if_new = "class of the topic if this creates it; an existing one keeps its own, and a message says so"
    parser.add_argument("--durability", choices=shared.CLASSES, help=if_new)
    if_new = 'whole configuration if this creates it, like \'{"type": "queue", "max_deliveries": 5}\''
    parser.add_argument("--config", metavar="JSON", type=config_object, default={}, help=if_new)
    parser.add_argument("--no-create", action="store_true", help="do not create the topic")
    key_of = (
        "write each record alone, with this field of its data as idempotency key: a repeat of the same input within "
        "the topic's idempotency_window_ms writes only what is missing; slower"
    )
    parser.add_argument("--key-of", metavar="FIELD", help=key_of)
    most = f"most records of one write (%(default)s; the service takes {BATCH_MAX_RECORDS} by default)"
    parser.add_argument("--batch-records", metavar="N", type=shared.positive, default=1000, help=most)
    together = "longest wait of a line for others, to be written together (%(default)g)"
    parser.add_argument("--delay-ms", metavar="MS", type=shared.not_negative, default=50.0, help=together)


def _write(client: Client, options: argparse.Namespace) -> int:
    if getattr(options, "patience_s", 0.0) > PATIENCE_MAX_S:
        raise UsageError(
            f"--patience-s {options.patience_s:g}: at most {PATIENCE_MAX_S} for a write: a repeat after the topic's "
            "idempotency_window_ms, 120 s by default, would be a second write"
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
    except (BadLineError, ClientError, KeyboardInterrupt, SystemExit) as error:
        say("write", writing.state_after(error))
        raise
    finally:
        writing.progress.close()
        # An output that cannot be written must not hide the error before it.
        with contextlib.suppress(OutputError):
            writing.summary()
    return 0


class _Writing:
    """The writes of this command, and how many lines they have written."""

    def __init__(self, client: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._config = options.config | ({} if options.durability is None else {"durability": options.durability})
        self._first_seq: int | None = None
        self._last_seq: int | None = None
        self._count = 0
        self._deduped = 0
        self._lines_done = 0
        self._in_progress: str | None = None
        self._class_checked = False
        self._input_bytes = given = stdin_bytes()
        self.progress = progress(" records", typed=True) if given is None else progress("B", given)

    def write(self, batch: LineBatch) -> None:
        """Write a batch; BadLineError after the lines before the bad one were written."""
        records, bad = parse(batch, whole_records=self._options.records, tag=self._options.tag)
        last = batch.last if bad is None else bad.number - 1
        if records:
            self._in_progress = f"lines {batch.first} to {last}"
            self._append(records, last)
            self._in_progress = None
        self._lines_done = last
        self.progress.update(len(records) if self._input_bytes is None else sum(len(line) + 1 for line in batch.lines))
        if bad is not None:
            raise bad

    def _append(self, records: list[NewRecord], last_line: int) -> None:
        field = self._options.key_of
        written = self._client.append(
            self._options.topic,
            records,
            node=self._options.node,
            create=not self._options.no_create,
            config=self._config or None,
            idempotency_key=None if field is None else key_of(records[0], field, last_line),
        )
        self._first_seq = written.first_seq if self._first_seq is None else min(self._first_seq, written.first_seq)
        self._last_seq = max(self._last_seq or 0, written.last_seq)
        self._count += written.count
        # With a key that the client made itself, `deduped` only means that the answer to its first attempt was lost.
        self._deduped += written.count if written.deduped and field is not None else 0
        wanted = self._config.get("durability", written.durability)
        if not self._class_checked and written.durability != wanted:
            say("write", f"topic {self._options.topic!r} exists and stays {written.durability}, not {wanted}")
        self._class_checked = True

    def state_after(self, error: BaseException) -> str:
        """Return which lines of the input are in the topic."""
        done = f"lines 1 to {self._lines_done} are written" if self._lines_done else "no line was written"
        if self._in_progress is None:
            return done
        unwritten, unknown = f"{self._in_progress} are not", f"it is not known whether {self._in_progress} are"
        return f"{done}, {unwritten}" if is_certain(error) else f"{done}; {unknown}"

    def summary(self) -> None:
        line: dict[str, Any] = {"first_seq": self._first_seq, "last_seq": self._last_seq, "count": self._count}
        print_line(line | ({"deduped": self._deduped} if self._deduped else {}))


def is_certain(error: BaseException) -> bool:
    """Return whether a write that failed with this error certainly wrote nothing. In general an earlier attempt may
    have been committed without an answer. If the service refuses the write itself, none was: it would report that one.
    """
    if isinstance(error, BadLineError) or (isinstance(error, ApiError) and error.status in (400, 409, 413, 422)):
        return True
    return isinstance(error, ClientError) and not error.may_be_done


def parse(
    batch: LineBatch, *, whole_records: bool, tag: str | None = None
) -> tuple[list[NewRecord], BadLineError | None]:
    """Return the records of a batch up to the first bad line, and the error for that line."""
    records = []
    for number, text in batch.numbered():
        try:
            text.decode()  # the JSON decoder does not check the encoding of strings
            records.append(_new_record(_line(text), tag) if whole_records else NewRecord(_raw(text), tag))
        except UnicodeDecodeError as error:
            return records, BadLineError(number, text, f"is not UTF-8 (byte {error.start})")
        except msgspec.ValidationError as error:
            return records, BadLineError(number, text, f'is not a record like {{"data": …, "tag": …}} ({error})')
        except (msgspec.DecodeError, RecursionError) as error:
            return records, BadLineError(number, text, why_refused(text, error))
    return records, None


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


def key_of(record: NewRecord, field: str, line: int) -> str:
    """Return the idempotency key in a record's data: a text, or a number as it is spelled."""
    data = bytes(record.data)
    try:
        raw = _object(data)[field]
        value = _text_or_number(raw)
    except (msgspec.DecodeError, KeyError):
        reason = f"has no text or number in the field {field!r} of its data (--key-of)"
        raise BadLineError(line, data, reason) from None
    key = value if isinstance(value, str) else bytes(raw).decode()
    if not 0 < len(key) <= KEY_MAX_CHARS:
        raise BadLineError(line, data, f"the field {field!r} must have 1 to {KEY_MAX_CHARS} characters")
    return key


def config_object(text: str) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
        calls.encode_config(config)
        return config
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise argparse.ArgumentTypeError(f'{text!r} is no configuration like {{"type": "queue"}}: {error}') from None
