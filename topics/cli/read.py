"""`topics read TOPIC`: the records behind a position, up to the head."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from topics.cli import shared
from topics.cli.shared import RecordPrinter
from topics.client import Client, Page
from topics.progress import progress

PAGE_MAX_RECORDS: Final = 1000
_EXAMPLES: Final = """  topics read orders --from 41 --limit 10
  topics read orders --from-ts 2026-03-01T00:00:00Z --data-only | jq .price
  topics read orders | topics write copy --records"""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Print the records of a topic as NDJSON, up to its head. Records lost to a cap, a ttl or damage are a line "
        '{"tombstone": {"gap_from", "gap_to", "reason", …}}, and the exit code is 5.'
    )
    shared.fill(parser, "read", _read, about=about, examples=_EXAMPLES)
    parser.add_argument("topic", metavar="TOPIC")
    start = parser.add_mutually_exclusive_group()
    after = "only records after this seq: the last one you have (0)"
    start.add_argument("--from", dest="from_seq", metavar="SEQ", type=shared.whole, default=0, help=after)
    since = "only records written then or later: ms since the epoch, or like 2026-03-01T12:00:00+01:00 (else UTC)"
    start.add_argument("--from-ts", metavar="MS|ISO", type=timestamp_ms, help=since)
    parser.add_argument("--limit", metavar="N", type=shared.positive, help="at most so many records")
    head = "end at the head as it was at the start, even if more is written meanwhile"
    parser.add_argument("--until-head", action="store_true", help=head)
    shared.add_data_only(parser)


def _read(client: Client, options: argparse.Namespace) -> int:
    printer = RecordPrinter(data_only=options.data_only)
    pages = read_pages(client, options.topic, options.from_seq, from_ts=options.from_ts, limit=options.limit)
    until_seq: int | None = None
    for page in counted_pages(pages, options.limit):
        if page.tombstone is not None:
            printer.tombstone(options.topic, page.tombstone)
        if options.until_head:
            until_seq = page.head_seq if until_seq is None else until_seq
            printer.records(options.topic, [record for record in page.records if record.seq <= until_seq])
            if page.next_from_seq >= until_seq:
                break
        else:
            printer.records(options.topic, page.records)
    return printer.exit_code


def read_pages(
    client: Client, topic: str, from_seq: int, *, from_ts: int | None = None, limit: int | None = None
) -> Iterator[Page]:
    """Yield the pages behind a position, up to the head, with at most `limit` records in all."""
    start: dict[str, Any] = {} if from_ts is None else {"from_ts": from_ts}
    left = limit
    while left is None or left > 0:
        page = client.diff(
            topic, from_seq, limit=PAGE_MAX_RECORDS if left is None else min(left, PAGE_MAX_RECORDS), **start
        )
        yield page
        if page.caught_up:
            return
        start, from_seq = {}, page.next_from_seq
        left = None if left is None else left - len(page.records)


def counted_pages(pages: Iterable[Page], limit: int | None, *, shown: bool = True) -> Iterator[Page]:
    """Yield pages, and count seqs up to the head in a bar, unless the terminal shows the records (`shown`)."""
    start: int | None = None
    with progress(" records", 0, shown=shown) as bar:
        for page in pages:
            yield page
            start = page.next_from_seq - len(page.records) if start is None else start
            bar.total = min(page.head_seq - start, limit or page.head_seq)
            bar.update(page.next_from_seq - start - bar.n)


def timestamp_ms(text: str) -> int:
    """Parse an argument: ms since the epoch, or a time of ISO 8601, in UTC without an offset."""
    if text.isdecimal():
        return shared.whole(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 2026-03-01T12:00:00Z, or ms since 1970") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # `datetime.timestamp` is a float and would round.
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    ms = (since.days * 86_400 + since.seconds) * 1000 + -(-since.microseconds // 1000)
    if ms < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is before 1970")
    return ms
