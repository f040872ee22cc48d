"""What the commands print: one JSON value a line, and never two lines for one value."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from topics.api.answers import Timed
from topics.cli.service import EXIT_GAP
from topics.client import Record, Tombstone

_encoder: Final = msgspec.json.Encoder()


def one_line(json: bytes) -> bytes:
    """The same JSON without line breaks. Inside of strings there are none, so those that are there are white space."""
    return json.replace(b"\n", b" ").replace(b"\r", b" ")


def record_lines(records: Sequence[Record], topic: str | None = None) -> bytes:
    """A line for each record, which begins with its topic if that is given."""
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
    """A line for each record's `data`."""
    return b"".join(one_line(bytes(record.raw)) + b"\n" for record in records)


def print_answer(answer: Timed) -> None:
    """An answer of the service as one line of JSON, without how long it took."""
    fields = msgspec.structs.asdict(answer)
    del fields["performance"]
    print_line(fields)


def print_line(value: Any) -> None:
    """One value as JSON."""
    put(one_line(_encoder.encode(value)) + b"\n")


def put(lines: bytes) -> None:
    """At once: whoever is at the other end of a pipe waits for them."""
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


class RecordPrinter:
    """Records and gaps of one topic, or of several, each line with its topic then. `exit_code` tells of gaps."""

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
