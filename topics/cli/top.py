"""`topics top`: a service and its busiest topics, drawn again and again. `render` is pure; `_top` is the loop."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from topics.api.answers import TopicList
from topics.cli import shared
from topics.cli.shared import print_line, put
from topics.client import Client, TopicEntry, calls
from topics.terminal import CLEAR, Cell, Paint, Styled, duration, paint_for, plain, plural, table

SORTS: Final = ("rate", "lag", "bytes", "count", "last_write_ts", "topic")
OVERHEAD_LINES: Final = 5
"""Lines that are not topics."""
COUNTERS: Final = {
    "written": "topics_records_written_total",
    "delivered": "topics_records_delivered_total",
    "requests": "topics_requests_total",
    "throttled": "topics_throttled_total",
}
_EXAMPLES: Final = """  topics top
  topics top shop. --sort lag --every-s 5
  topics top --rounds 1 --json | jq '.topics[0]'"""


class Look(NamedTuple):
    """The service at one moment: its metrics, its topics in order, and when that was, in seconds."""

    metrics: Mapping[str, Any]
    topics: TopicList
    at_s: float


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Show the rates of a service and its topics whose names begin with PREFIX, the busiest first, every two "
        "seconds until Ctrl-C. What is not a terminal gets one table after another."
    )
    shared.fill(parser, "top", _top, about=about, examples=_EXAMPLES)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="beginning of the names (all topics)")
    parser.add_argument("--sort", choices=SORTS, default="rate", help="order of the topics (%(default)s)")
    parser.add_argument("-n", dest="count", metavar="N", type=shared.positive, help="most topics (the screen's room)")
    parser.add_argument("--every-s", metavar="S", type=shared.not_negative, default=2.0, help="pause between looks (2)")
    parser.add_argument("--rounds", metavar="N", type=shared.positive, help="end after so many tables")
    parser.add_argument("--json", action="store_true", help="one JSON object for each look")


def _top(client: Client, options: argparse.Namespace) -> int:
    live, before, left = sys.stdout.isatty() and not options.json, None, options.rounds
    paint = paint_for(sys.stdout, options.environment)
    while left is None or left > 0:
        lines = shutil.get_terminal_size().lines
        count = options.count or max(1, lines - OVERHEAD_LINES)
        size = str(min(count, calls.PAGE_SIZE))
        ranked = client.call(calls.list_topics(options.prefix, sort=options.sort, page_size=size))
        look = Look(client.call(calls.metrics()), ranked, time.monotonic())
        if options.json:
            print_line({"rates": rates(before, look), "topics": msgspec.to_builtins(ranked.topics)})
        else:
            put(((CLEAR if live else "") + render(before, look, int(time.time() * 1000), paint)).encode())
        before, left = look, None if left is None else left - 1
        if left != 0:
            time.sleep(options.every_s)
    return 0


def rates(before: Look | None, look: Look) -> dict[str, float | None]:
    """Return the rate of each metric per second between two looks; None without an earlier look."""
    if before is None or look.at_s <= before.at_s:
        return dict.fromkeys(COUNTERS)
    # A service that was restarted in between counts from 0.
    span_s = look.at_s - before.at_s
    return {
        name: max(0, look.metrics.get(metric, 0) - before.metrics.get(metric, 0)) / span_s
        for name, metric in COUNTERS.items()
    }


def render(before: Look | None, look: Look, now_ms: int, paint: Paint = plain) -> str:
    """Return a summary in two lines, then the table of topics."""
    metrics, topics = look.metrics, look.topics.topics
    version = next(iter(metrics.get("topics_build_info", {"?": 1})))
    pressure, lag = metrics.get("topics_pressure", 0.0), metrics.get("topics_compactor_lag_seconds", 0.0)
    facts = [
        f"topics {version}",
        f"up {duration(metrics.get('topics_uptime_ms', 0))}",
        plural(metrics.get("topics", 0), "topic"),
        paint(f"pressure {pressure:.2f}", "bad" if pressure >= 0.8 else "warn" if pressure >= 0.2 else "good"),
        f"compactor {lag:.0f} s behind",
    ]
    if metrics.get("topics_wal_read_only"):
        facts.append(paint("READ-ONLY", "bad"))
    each = [f"{name} {'-' if rate is None else f'{rate:,.0f}/s'}" for name, rate in rates(before, look).items()]
    rows: list[list[Cell]] = [["TOPIC", "TYPE", "WRITES/S", "RECORDS", "BYTES", "LAG", "LEASED", "WRITTEN"]]
    rows += [_row(topic, now_ms) for topic in topics]
    return "  ".join(facts) + "\n" + "  ".join(each) + "\n\n" + table(rows, paint, text_columns=2)


def _row(topic: TopicEntry, now_ms: int) -> list[Cell]:
    written = None if topic.last_write_ts is None else f"{duration(max(0, now_ms - topic.last_write_ts))} ago"
    lag = None if topic.lag is None else Styled(topic.lag, "warn" if topic.lag else "good")
    leased = None if topic.queue is None else topic.queue.in_flight
    rate = None if topic.rate is None else f"{topic.rate:,.1f}"
    return [topic.topic, topic.type, rate, topic.count, f"{topic.bytes:,}", lag, leased, written]
