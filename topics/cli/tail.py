"""`topics tail TOPIC…`: the last records, and with `-f` those that follow."""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
from collections import deque
from typing import Final

from topics.cli import shared
from topics.cli.read import counted_pages, read_pages
from topics.cli.shared import RecordPrinter, say
from topics.client import Client, Record, Tombstone, TopicGone
from topicsd import EXIT_BROKEN_PIPE, OutputError

LOOK_BACK_FACTOR: Final = 4
_EXAMPLES: Final = """  topics tail -n 3 orders
  topics tail -f orders payments
  topics tail -f -n 0 --data-only logs | grep --line-buffered error"""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Print the last records of topics as NDJSON and, with -f, those written from then on, each once and in order, "
        "across disconnects. With several topics each line begins with its topic. A gap is a line "
        '{"tombstone": …}, and the exit code is 5.'
    )
    shared.fill(parser, "tail", _tail, about=about, examples=_EXAMPLES)
    parser.add_argument("topics", metavar="TOPIC", nargs="+")
    parser.add_argument(
        "-n", dest="count", metavar="N", type=shared.whole, default=10, help="how many records (%(default)s)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new records, until Ctrl-C")
    shared.add_data_only(parser)


def _tail(client: Client, options: argparse.Namespace) -> int:
    if options.follow and sys.__stdout__ is None:  # others end by themselves
        raise OutputError("cannot write to stdout: it is closed")
    topics = list(dict.fromkeys(options.topics))
    printer = RecordPrinter(data_only=options.data_only, several=len(topics) > 1)
    positions = {topic: _print_last(client, topic, options.count, printer) for topic in topics}
    if not options.follow:
        return printer.exit_code
    _exit_with_the_reader()
    for topic, item in client.follow(positions, tombstones="yield"):
        if isinstance(item, Record):
            printer.records(topic, (item,))
        elif isinstance(item, Tombstone):
            printer.tombstone(topic, item)
        elif isinstance(item, TopicGone):
            say("tail", f"topic {topic!r} was deleted")
    return printer.exit_code


def _print_last(client: Client, topic: str, count: int, printer: RecordPrinter) -> int:
    """Print the last `count` records; return the seq behind which all others come. Deleted and expired records leave
    holes, so the last `count` may lie further back than `count` seqs.
    """
    state = client.get_topic(topic, touch=False)
    if (count := min(count, state.head_seq)) == 0:
        return state.head_seq
    back = count
    while True:
        from_seq = max(state.earliest_seq - 1, state.head_seq - back, 0)
        last: deque[Record] = deque(maxlen=count)
        gaps, position = [], from_seq
        for page in counted_pages(read_pages(client, topic, from_seq), None, shown=False):
            gaps += [page.tombstone] if page.tombstone is not None else []
            last.extend(page.records)
            position = page.next_from_seq
            if position >= state.head_seq:
                break
        if len(last) == count or gaps or from_seq <= state.earliest_seq - 1 or back >= state.head_seq:
            break
        back *= LOOK_BACK_FACTOR
    for gap in gaps:
        printer.tombstone(topic, gap)
    printer.records(topic, list(last))
    return position


def _exit_with_the_reader() -> None:
    """Exit when the reader of the output is gone: `tail -f … | head -1` must not wait for one more record to notice."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # poll reports errors and hang-ups in any case

    def wait() -> None:
        output.poll()
        os._exit(EXIT_BROKEN_PIPE)

    threading.Thread(target=wait, name="topics-reader", daemon=True).start()
