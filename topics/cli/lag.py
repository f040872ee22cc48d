"""`topics lag`: every reader of every topic, and how far it is behind."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from topics.cli import shared
from topics.cli.list_topics import AT_ONCE
from topics.cli.shared import EXIT_FOUND, print_items
from topics.client import Client, CursorState, NotFoundError, TopicEntry, TopicState
from topics.progress import counted, progress
from topics.terminal import Cell, Styled

_EXAMPLES: Final = """  topics lag
  topics lag orders. --json | jq 'select(.kind == "cursor")'
  topics lag --over 10000 || page-somebody"""


class Reader(msgspec.Struct, frozen=True):
    """A reader of a topic: a named cursor, a router, or the workers of a queue.

    `lag` of a cursor counts seqs that are kept, of a queue ready jobs. `leased` are jobs in somebody's hands.
    """

    kind: str
    topic: str
    reader: str
    lag: int
    head_seq: int
    leased: int | None = None


def behind(topic: TopicEntry | TopicState, seq: int) -> int:
    """Return the lag of a reader that has read up to `seq`: no seq counts below the first record that is kept."""
    return max(0, topic.head_seq - max(seq, topic.earliest_seq - 1))


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "List every reader of every topic whose name begins with PREFIX, the furthest behind first: named cursors, "
        "routers, and queues with their ready and leased jobs. A reader that keeps its position to itself is unknown "
        "to the service."
    )
    shared.fill(parser, "lag", _lag, about=about, examples=_EXAMPLES)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="beginning of the names (all topics)")
    parser.add_argument(
        "--over", metavar="N", type=shared.whole, help="only those more than N behind; exit code 6 if any"
    )
    parser.add_argument("--json", action="store_true", help="as NDJSON")


def _lag(client: Client, options: argparse.Namespace) -> int:
    found = sorted(readers(client, options.prefix), key=lambda one: (-one.lag, one.topic, one.reader))
    shown = found if options.over is None else [one for one in found if one.lag > options.over]
    print_items(shown, options, "TOPIC KIND READER LAG LEASED HEAD", _row, 3)
    return EXIT_FOUND if shown and options.over is not None else 0


def _row(one: Reader) -> Sequence[Cell]:
    return (one.topic, one.kind, one.reader, Styled(one.lag, "warn" if one.lag else "good"), one.leased, one.head_seq)


def readers(client: Client, prefix: str) -> Iterator[Reader]:
    """Yield all readers of the topics whose names begin with `prefix`."""
    topics = list(counted(client.list_topics(prefix), " topics"))
    by_name = {topic.topic: topic for topic in topics}
    for router in client.list_routers():
        if (source := by_name.get(router.source)) is not None and router.lag is not None:
            yield Reader("router", source.topic, router.router, router.lag, source.head_seq)

    def cursors(topic: TopicEntry) -> list[CursorState]:
        try:
            return list(client.list_cursors(topic.topic))
        except NotFoundError:
            return []  # deleted meanwhile

    with ThreadPoolExecutor(AT_ONCE) as pool, progress(" topics", len(topics)) as bar:
        for topic, found in zip(topics, pool.map(cursors, topics), strict=True):
            bar.update()
            if topic.queue is not None:
                yield Reader("queue", topic.topic, "workers", topic.queue.ready, topic.head_seq, topic.queue.in_flight)
            for one in found:
                yield Reader("cursor", topic.topic, one.cursor, behind(topic, one.cursor_seq), topic.head_seq)
