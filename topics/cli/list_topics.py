"""`topics list [PREFIX]`: the topics whose names begin so."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from topics.cli import shared
from topics.cli.shared import print_answer, print_table, put
from topics.client import Client, NotFoundError, TopicState
from topics.progress import counted

AT_ONCE: Final = 4
HEADINGS: Final = ("TOPIC", "TYPE", "CLASS", "RECORDS", "BYTES", "HEAD", "OLDEST")
_EXAMPLES: Final = """  topics list
  topics list shop. --json | jq -r 'select(.count == 0).topic'
  topics list --names | xargs -n 1 topics tail -n 1"""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "List the topics whose names begin with PREFIX, by name: type, durability class, live records and their bytes, "
        "head_seq, and the seq of the oldest live record."
    )
    shared.fill(parser, "list", _list, about=about, examples=_EXAMPLES)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="beginning of the names (all topics)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as NDJSON, with the whole configuration of each")
    form.add_argument("--names", action="store_true", help="only the names, with one request for a thousand of them")


def _list(client: Client, options: argparse.Namespace) -> int:
    names = (entry.topic for entry in client.list_topics(options.prefix))
    if options.names:
        for name in counted(names, " topics", shown=True):
            put(name.encode() + b"\n")
    elif options.json:
        for state in _states(client, names, shown=True):
            print_answer(state)
    else:
        print_table([HEADINGS, *map(cells, _states(client, names))], options, text_columns=3)
    return 0


def _states(client: Client, names: Iterable[str], *, shown: bool = False) -> Iterator[TopicState]:
    """Yield the state of each topic, without those that are deleted meanwhile."""

    def state(name: str) -> TopicState | None:
        try:
            return client.get_topic(name, touch=False)
        except NotFoundError:
            return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from (found for found in counted(pool.map(state, names), " topics", shown=shown) if found is not None)


def cells(state: TopicState) -> Sequence[str]:
    oldest = str(state.earliest_seq) if state.count else "-"
    numbers = (str(state.count), str(state.bytes), str(state.head_seq), oldest)
    return (state.topic, state.type, state.config["durability"], *numbers)
