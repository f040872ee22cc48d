"""`topics cursor TOPIC list|set|delete`: the read positions that a service keeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Final, get_args

from topics.api.requests import Consistency
from topics.cli import shared
from topics.cli.lag import behind
from topics.cli.shared import print_items, printing
from topics.client import Client, CursorState
from topics.terminal import Cell

_EXAMPLES: Final = """  topics cursor orders list
  topics cursor orders set billing                  # make it, at the first record
  topics cursor orders set billing --tail           # skip what is there
  topics cursor orders set billing --to 41          # the next record read is 42, or the first one behind it
  topics cursor orders delete billing"""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"examples:\n{_EXAMPLES}"
    parser.add_argument("topic", metavar="TOPIC")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = partial(shared.add_verb, verbs, "cursor", examples=_EXAMPLES)
    listing = verb("list", _list, about="List the cursors of a topic: position, lag, and position after a crash.")
    listing.add_argument("--json", action="store_true", help="as NDJSON")
    about = "Make a cursor, move it, or change what is given. Without --to and --tail it stays where it is."
    setting = verb("set", printing(_set), about=about)
    setting.add_argument("cursor", metavar="CURSOR")
    where = setting.add_mutually_exclusive_group()
    where.add_argument("--to", dest="from_seq", metavar="SEQ", type=shared.whole, help="all up to this seq is read")
    where.add_argument("--tail", action="store_true", help="all that is there is read")
    setting.add_argument("--consistency", choices=get_args(Consistency), help="promise for a crash (at_least_once)")
    setting.add_argument("--persist-every", metavar="N", type=shared.positive, help="persist every Nth read (1)")
    deleting = printing(lambda client, options: client.cursor(options.topic, options.cursor).delete())
    delete = verb("delete", deleting, about="Delete a cursor. The records stay.")
    delete.add_argument("cursor", metavar="CURSOR")


def _list(client: Client, options: argparse.Namespace) -> int:
    topic = client.get_topic(options.topic, touch=False)

    def row(one: CursorState) -> Sequence[Cell]:
        return (one.cursor, one.consistency, one.cursor_seq, behind(topic, one.cursor_seq), one.persisted_seq)

    print_items(client.list_cursors(options.topic), options, "CURSOR CONSISTENCY POSITION LAG PERSISTED", row, 2)
    return 0


def _set(client: Client, options: argparse.Namespace) -> CursorState:
    given = {"consistency": options.consistency, "persist_every": options.persist_every, "from_seq": options.from_seq}
    return client.cursor(options.topic, options.cursor).put(**given, tail=options.tail)
