"""`topics delete TOPIC`: records by seq and tag, or the topic itself."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Final

from topics.api.answers import DeleteRecordsAnswer
from topics.cli import shared
from topics.cli.shared import EXIT_REFUSED, UsageError, agreed, print_answer
from topics.client import Client, ClientError, NotAllowedError
from topics.progress import progress
from topics.terminal import plural

LOOK_EVERY_S: Final = 0.5
_EXAMPLES: Final = """  topics delete orders --before 1000
  topics delete chats --match 'chat-42:*' --yes
  topics delete orders --topic"""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Delete records of a topic, or all of it: at once and for good, without a tombstone. On a terminal it asks "
        "first, unless --yes. The answer is printed as JSON. With --before and --match records have to fit both."
    )
    shared.fill(parser, "delete", _delete, about=about, examples=_EXAMPLES)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--before", dest="before_seq", metavar="SEQ", type=shared.whole, help="records below this seq")
    tags = "records with this tag; a star at its end stands for any text (quote it)"
    parser.add_argument("--match", metavar="GLOB", help=tags)
    whole = "the topic: records, configuration, and the routers from and to it"
    parser.add_argument("--topic", dest="whole", action="store_true", help=whole)
    parser.add_argument("--if-empty", action="store_true", help="with --topic: refuse if it has records")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _delete(client: Client, options: argparse.Namespace) -> int:
    records = options.before_seq is not None or options.match is not None
    if records == options.whole:
        raise UsageError("give --before SEQ and/or --match GLOB to delete records, or --topic to delete the topic")
    if options.if_empty and not options.whole:
        raise UsageError("--if-empty needs --topic: it keeps a topic that has records")
    asks = not options.yes and sys.stdin is not None and sys.stdin.isatty()
    if asks and not agreed("delete", _question(client, options), options):
        return EXIT_REFUSED
    if options.whole:
        print_answer(client.delete_topic(options.topic, if_empty=options.if_empty))
    else:
        print_answer(_delete_records(client, options))
    return 0


def _delete_records(client: Client, options: argparse.Namespace) -> DeleteRecordsAnswer:
    """Delete records, and show on a terminal how many are gone. Nobody knows before how many will be."""
    ended = Event()

    def watch() -> None:
        with suppress(ClientError), progress(" records") as bar:
            before = client.get_topic(options.topic, touch=False).count
            while not ended.wait(LOOK_EVERY_S):
                bar.update(max(0, before - client.get_topic(options.topic, touch=False).count - bar.n))

    with ThreadPoolExecutor(1) as pool:
        if sys.stderr.isatty():
            pool.submit(watch)
        try:
            return client.delete_records(options.topic, before_seq=options.before_seq, match=options.match)
        finally:
            ended.set()


def _question(client: Client, options: argparse.Namespace) -> str:
    try:
        state = client.get_topic(options.topic, touch=False)
        seqs = f"seq {state.earliest_seq} to {state.head_seq}"
        has = f" of topic {options.topic!r}, which has {plural(state.count, 'record')} ({seqs})"
    except NotAllowedError:
        # A key may be allowed to delete, and not to read.
        has = f" of topic {options.topic!r}"
    if options.whole:
        return "Delete all" + has + "?"
    what = [] if options.before_seq is None else [f"below seq {options.before_seq}"]
    what += [] if options.match is None else [f"with tag {options.match!r}"]
    return f"Delete the records {' and '.join(what)}{has}?"
