"""`topics bench`: how fast a service writes, delivers and reads, as a client on this machine sees it.

Each phase repeats one kind of request in a closed loop: a connection sends its next request when the last one is
answered. So the service is never asked for more than it can do, and the figures do not show overload.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from typing import Any, Final

import msgspec

from topics.cli import shared
from topics.cli.shared import print_line, print_table, put, say
from topics.client import Client, NewRecord, calls
from topics.progress import progress

QUANTILES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
READ_PAGE: Final = 1000
TOPIC_PREFIX: Final = "topics-bench-"
_TICK_S: Final = 0.1
_EXAMPLES: Final = """  topics bench
  topics bench --durability fsync --connections 16 --seconds 30
  topics bench --batch 100 --bytes 1000 --json"""
_EXPLAINED: Final = """topics {version} at {url}, asked by one Python process, {seconds} s each
write    {connections} connections write to a {durability} topic, {batch} records of {bytes} bytes at a time, and wait
deliver  one record at a time, from the start of its write until a follower has it
read     {connections} connections read pages of up to 1000 records
The first {warm_up_s} s of each are not measured.

"""
Work = Callable[[], int]
"""Does one request and returns how many records it moved."""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Measure a service from this machine: how long writes take until they are acknowledged (write), how long until "
        "a follower has a record that is written (deliver), and how fast records are read (read). It makes a topic of "
        "its own, and deletes it. One Python process asks, so a fast service is faster than it shows. It loads the "
        "service as any client would."
    )
    shared.fill(parser, "bench", _bench, about=about, examples=_EXAMPLES)
    for name, default, about in (
        ("seconds", 5, "length of a phase"),
        ("connections", 4, "at a time"),
        ("batch", 1, "records of a write"),
        ("bytes", 100, "length of the data of a record"),
    ):
        parser.add_argument(
            f"--{name}", type=shared.positive, default=default, metavar="N", help=f"{about} ({default})"
        )
    parser.add_argument("--warm-up-s", type=shared.not_negative, default=1.0, metavar="S", help="before it (1)")
    parser.add_argument("--durability", choices=shared.CLASSES, default="disk", help="(disk)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _bench(client: Client, options: argparse.Namespace) -> int:
    settings = ("seconds", "warm_up_s", "connections", "batch", "bytes", "durability")
    about = {"version": client.call(calls.health()).version, "url": shared.url_of(options)}
    about |= {name: getattr(options, name) for name in settings}
    topic = TOPIC_PREFIX + secrets.token_hex(8)
    client.put_topic(topic, durability=options.durability)
    try:
        figures = [measure(name, works, options) for name, works in phases(client, topic, options)]
    finally:
        try:
            client.delete_topic(topic)
        except Exception:
            say("bench", f"topic {topic!r} is left: topics delete {topic} --topic")
            raise
    if options.json:
        print_line({**about, "phases": figures})
    else:
        put(_EXPLAINED.format(**about).encode())
        rows = [[f"{cell:,.2f}" if isinstance(cell, float) else cell for cell in one.values()] for one in figures]
        print_table([[name.replace("_", " ").upper() for name in figures[0]], *rows], options)
    return 0


def phases(client: Client, topic: str, options: argparse.Namespace) -> Iterator[tuple[str, list[Work]]]:
    """Yield the phases one after the other, each with the work of every connection."""
    record = NewRecord(msgspec.Raw(b'"%s"' % (b"x" * max(0, options.bytes - 2))))
    batch = [record] * options.batch
    yield "write", [lambda: client.append(topic, batch).count] * options.connections
    items = client.follow({topic: client.get_topic(topic, touch=False).head_seq})

    def deliver() -> int:
        client.append(topic, [record])
        next(items)
        return 1

    yield "deliver", [deliver]
    yield "read", [_reader(client, topic).__next__ for _ in range(options.connections)]


def _reader(client: Client, topic: str) -> Iterator[int]:
    """Read one page at each step; begin again at the first page after the last."""
    position = 0
    while True:
        page = client.diff(topic, position, limit=READ_PAGE)
        position = 0 if page.caught_up else page.next_from_seq
        yield len(page.records)


def measure(phase: str, works: Sequence[Work], options: argparse.Namespace) -> dict[str, Any]:
    """Repeat each work in a thread of its own; return the figures of the requests after the warm-up."""
    begin, stop = Event(), Event()
    span_s = options.warm_up_s + options.seconds
    end_s = time.perf_counter() + span_s

    def repeat(work: Work) -> list[tuple[float, int]]:
        samples, ended_s = [], 0.0
        begin.wait()
        while not stop.is_set():
            began_s = time.perf_counter()
            records = work()
            ended_s = time.perf_counter()
            if ended_s >= end_s:
                break
            if ended_s >= end_s - options.seconds:
                samples.append(((ended_s - began_s) * 1000, records))
        return samples

    style: dict[str, Any] = {"desc": phase, "bar_format": "{desc} {bar}| {remaining} left"}
    with ThreadPoolExecutor(len(works)) as pool, progress("s", span_s, **style) as bar:
        try:
            # A signal may break off the start of a thread, and nobody waits for that one: so none asks before `begin`.
            threads = [pool.submit(repeat, work) for work in works]
            begin.set()
            while wait(threads, _TICK_S).not_done:
                bar.update(min(_TICK_S, max(0.0, span_s - bar.n)))
        finally:
            stop.set()
            begin.set()
    return figures_of(phase, [sample for thread in threads for sample in thread.result()], options.seconds)


def figures_of(phase: str, samples: Sequence[tuple[float, int]], span_s: float) -> dict[str, Any]:
    """Return the figures of requests, each with its time in ms and its records."""
    records = sum(count for _, count in samples)
    figures = {"phase": phase, "requests": len(samples), "records": records, "records_per_s": records / span_s}
    times_ms = sorted(time_ms for time_ms, _ in samples)
    return figures | {name: quantile(times_ms, share) if times_ms else None for name, share in QUANTILES.items()}


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all does not exceed."""
    rank = -(-len(ascending) * round(share * 1000) // 1000)
    return ascending[rank - 1]
