"""`topics bench`: how fast a service writes, delivers and reads, as a client on this machine sees it.

Each phase repeats one kind of request in a closed loop: a connection sends its next request when the last one is
answered. So figures are those of a service that is never asked for more than it does.
"""

from __future__ import annotations

import argparse
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import cycle
from threading import Event
from typing import Any, Final, NamedTuple

import msgspec

from topics.cli import shared
from topics.cli.progress import progress
from topics.cli.shared import print_line, print_table, put, say
from topics.client import Client, NewRecord, calls

PHASES: Final = ("write", "deliver", "read")
QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)
READ_PAGE: Final = 1000
TOPIC_PREFIX: Final = "topics-bench-"
_TICK_S: Final = 0.1
_EXAMPLES: Final = """  topics bench
  topics bench --durability fsync --connections 16 --seconds 30
  topics bench --phases write --batch 100 --bytes 1000 --json"""
Work = Callable[[], int]
"""Does one request and returns how many records it moved."""


class Sample(NamedTuple):
    """One request: when it began and ended, by the same clock, and how many records it moved."""

    began_ns: int
    ended_ns: int
    records: int


class PhaseFigures(msgspec.Struct, frozen=True):
    """What was measured in one phase, without the warm-up. Times are in ms."""

    phase: str
    requests: int
    records: int
    records_per_s: float
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    max_ms: float | None = None


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Measure a service from this machine: how long writes take until they are acknowledged (write), how long until "
        "a follower has a record that is written (deliver), and how fast records are read (read). It makes a topic of "
        "its own, and deletes it. One Python process asks, so a fast service is faster than it shows. It loads the "
        "service as any client would."
    )
    shared.fill(parser, "bench", _bench, about=about, examples=_EXAMPLES)
    parser.add_argument("--seconds", type=seconds, default=5.0, metavar="S", help="length of a phase (%(default)g)")
    parser.add_argument(
        "--warm-up-s", type=shared.not_negative, default=1.0, metavar="S", help="before it, unmeasured (%(default)g)"
    )
    parser.add_argument("--connections", type=shared.positive, default=4, metavar="N", help="at a time (%(default)s)")
    parser.add_argument("--batch", type=shared.positive, default=1, metavar="N", help="records a write (%(default)s)")
    parser.add_argument(
        "--bytes", type=shared.positive, default=100, metavar="N", help="data of a record (%(default)s)"
    )
    parser.add_argument(
        "--durability", choices=("ephemeral", "memory", "disk", "fsync"), default="disk", help="(%(default)s)"
    )
    parser.add_argument(
        "--phases", type=phases, default=PHASES, metavar="NAMES", help="some of write,deliver,read (all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def seconds(text: str) -> float:
    """Parse an argument: a number above 0."""
    value = shared.not_negative(text)
    if not value:
        raise ValueError(text)
    return value


def phases(text: str) -> tuple[str, ...]:
    """Parse an argument: names of phases, separated by commas."""
    names = tuple(text.split(","))
    if not set(names) <= set(PHASES):
        raise argparse.ArgumentTypeError(f"{text!r}: name some of {', '.join(PHASES)}")
    return tuple(name for name in PHASES if name in names)


def _bench(client: Client, options: argparse.Namespace) -> int:
    version = client.call(calls.health()).version
    topic = TOPIC_PREFIX + secrets.token_hex(8)
    client.put_topic(topic, durability=options.durability)
    try:
        figures = [measure_phase(client, topic, phase, options) for phase in options.phases]
    finally:
        try:
            client.delete_topic(topic)
        except Exception:
            say("bench", f"topic {topic!r} could not be deleted: topics delete {topic} --topic")
            raise
    settings = {name: getattr(options, name) for name in ("seconds", "warm_up_s", "connections", "batch", "bytes")}
    if options.json:
        about = {"version": version, "url": shared.url_of(options), "machine": platform.node(), **settings}
        print_line({**about, "durability": options.durability, "phases": figures})
        return 0
    put((explain(version, shared.url_of(options), options) + "\n").encode())
    rows = [[getattr(one, name) for name in PhaseFigures.__struct_fields__] for one in figures]
    shown = [[f"{cell:,.2f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    print_table(
        [["PHASE", "REQUESTS", "RECORDS", "RECORDS/S", "P50 MS", "P90 MS", "P99 MS", "P99.9 MS", "MAX MS"], *shown],
        options,
    )
    return 0


def explain(version: str, url: str, options: argparse.Namespace) -> str:
    """Return what the figures are of."""
    what = {
        "write": f"write: {options.connections} connections, each writes {options.batch} records of {options.bytes}"
        f" bytes to a {options.durability} topic and waits for the acknowledgement.",
        "deliver": "deliver: one record at a time, from the start of its write until a follower has it.",
        "read": f"read: {options.connections} connections, each reads pages of up to {READ_PAGE} records.",
    }
    return "\n".join(
        [
            f"topics {version} at {url}, asked by one Python process; {options.seconds:g} s each after"
            f" {options.warm_up_s:g} s of warm-up, in a closed loop. Lengths are those of the data alone.",
            *(what[phase] for phase in options.phases),
            "",
        ]
    )


def measure_phase(client: Client, topic: str, phase: str, options: argparse.Namespace) -> PhaseFigures:
    """Run one phase against a topic that is there."""
    record = NewRecord(msgspec.Raw(b'"%s"' % (b"x" * max(0, options.bytes - 2))))
    if phase == "deliver":
        with _delivery(client, topic, record) as work:
            samples = measure([work], phase, options)
    elif phase == "write":
        batch = [record] * options.batch
        samples = measure([lambda: client.append(topic, batch).count] * options.connections, phase, options)
    else:
        if not client.get_topic(topic, touch=False).count:
            client.append(topic, [record] * READ_PAGE)
        samples = measure([_reading(client, topic) for _ in range(options.connections)], phase, options)
    return figures_of(phase, samples, options.seconds)


@contextmanager
def _delivery(client: Client, topic: str, record: NewRecord) -> Iterator[Work]:
    """Give the work of a delivery: a write, and the wait for a follower to have it."""
    items = client.follow({topic: client.get_topic(topic, touch=False).head_seq})

    def deliver() -> int:
        client.append(topic, [record])
        next(items)
        return 1

    try:
        yield deliver
    finally:
        items.close()  # type: ignore[attr-defined]


def _reading(client: Client, topic: str) -> Work:
    """Return the work of a reader, which begins again at the end."""

    def pages() -> Iterator[int]:
        for _ in cycle((0,)):
            position, caught_up = 0, False
            while not caught_up:
                page = client.diff(topic, position, limit=READ_PAGE)
                position, caught_up = page.next_from_seq, page.caught_up
                yield len(page.records)

    return pages().__next__


def measure(works: Sequence[Work], phase: str, options: argparse.Namespace) -> list[Sample]:
    """Repeat each work in a thread of its own; return the requests that ended after the warm-up and in time."""
    stop = Event()
    begin_ns = time.perf_counter_ns() + int(options.warm_up_s * 1e9)
    end_ns = begin_ns + int(options.seconds * 1e9)

    def repeat(work: Work) -> list[Sample]:
        samples, ended_ns = [], 0
        while ended_ns < end_ns and not stop.is_set():
            began_ns = time.perf_counter_ns()
            records = work()
            ended_ns = time.perf_counter_ns()
            if begin_ns <= ended_ns < end_ns:
                samples.append(Sample(began_ns, ended_ns, records))
        return samples

    span_s = options.warm_up_s + options.seconds
    form = "{desc} {bar}| {remaining} left"
    with ThreadPoolExecutor(len(works)) as pool, progress("s", span_s, desc=phase, bar_format=form) as bar:
        try:
            threads = [pool.submit(repeat, work) for work in works]
            while wait(threads, _TICK_S).not_done:
                bar.update(min(_TICK_S, max(0.0, span_s - bar.n)))
        finally:
            stop.set()
    return [sample for thread in threads for sample in thread.result()]


def figures_of(phase: str, samples: Sequence[Sample], span_s: float) -> PhaseFigures:
    """Return the figures of the requests that ended within `span_s`."""
    records = sum(sample.records for sample in samples)
    times_ms = sorted((sample.ended_ns - sample.began_ns) / 1e6 for sample in samples)
    quantiles: list[Any] = [quantile(times_ms, share) for share in QUANTILES] if times_ms else []
    return PhaseFigures(phase, len(samples), records, records / span_s, *quantiles, *times_ms[-1:])


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all does not exceed."""
    rank = -(-len(ascending) * round(share * 1000) // 1000)
    return ascending[max(1, rank) - 1]
