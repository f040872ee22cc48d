"""The targets of the figures: ratios taken in one run, and bounds for machines like the one they were set on."""

from __future__ import annotations

from typing import NamedTuple

from bench.figures import MIB, MS, Figure, Target

Ref = tuple[str, str, str]
"""A case, one of its lines, and the name of a value there."""


class Bound(NamedTuple):
    """A bound: `(value - less) / divided_by / scale` is at most `limit`, or with `at_least` no less."""

    what: str
    limit: float
    value: Ref
    less: Ref | None = None
    divided_by: Ref | None = None
    scale: float = 1.0
    at_least: bool = False


def _throughput(durability: str, batch: int) -> Ref:
    return ("throughput", f"{durability}, batch {batch}, 16 writers", "records_per_s")


BOUNDS = [
    Bound(
        "batch 1 write / bare echo, 32 connections",
        0.4,
        ("ack", "disk, 32 connections", "requests_per_s"),
        divided_by=("echo", "httptools, 32 connections", "requests_per_s"),
        at_least=True,
    ),
    Bound("batch 1 disk, 32 connections, p99 ms", 2.0, ("ack", "disk, 32 connections", "p99_us"), scale=MS),
    Bound(
        "lone fsync ack less fdatasync, p50 ms",
        0.5,
        ("ack", "fsync, 1 connection", "p50_us"),
        less=("fdatasync", "4 KiB", "p50_us"),
        scale=MS,
    ),
    Bound("batch 100, disk, records/s", 1.0e6, _throughput("disk", 100), at_least=True),
    Bound("batch 1000, disk, records/s", 2.0e6, _throughput("disk", 1000), at_least=True),
    *(
        Bound(
            f"batch {batch}, 16 writers, fsync / disk",
            0.9,
            _throughput("fsync", batch),
            divided_by=_throughput("disk", batch),
            at_least=True,
        )
        for batch in (1, 100, 1000)
    ),
    Bound("diff limit 1000, records/s", 1.5e6, ("diff", "limit 1000, 4 readers", "records_per_s"), at_least=True),
    Bound("diff limit 256, p50 ms", 0.5, ("diff", "limit 256, 1 reader", "p50_us"), scale=MS),
    Bound("SSE 1 watcher, p50 ms", 1.0, ("sse", "1 watcher", "p50_us"), scale=MS),
    Bound("SSE 1 watcher, p99 ms", 2.0, ("sse", "1 watcher", "p99_us"), scale=MS),
    Bound("SSE 100 watchers, p50 ms", 1.5, ("sse", "100 watchers", "p50_us"), scale=MS),
    Bound("SSE 100 watchers, p99 ms", 4.0, ("sse", "100 watchers", "p99_us"), scale=MS),
    Bound("SSE 1000 watchers, p50 ms", 5.0, ("sse", "1000 watchers", "p50_us"), scale=MS),
    Bound("SSE 1000 watchers, p99 ms", 20.0, ("sse", "1000 watchers", "p99_us"), scale=MS),
    Bound(
        "overload, p99 of priority -1000 / +1000",
        5.0,
        ("overload", "priority -1000", "p99_us"),
        divided_by=("overload", "priority +1000", "p99_us"),
        at_least=True,
    ),
    Bound(
        "200 streams, p99 with / without a slow one",
        1.2,
        ("slow", "one does not", "p99_us"),
        divided_by=("slow", "all 200 read", "p99_us"),
    ),
    *(
        Bound(
            f"goodput of 10 × the writers, {what}",
            0.8,
            ("goodput", f"{what}, 10 × writers", "acked_per_s"),
            divided_by=("goodput", f"{what}, so many writers", "acked_per_s"),
            at_least=True,
        )
        for what in ("100 B, rings as they are", "15 kB, rings of 64 KiB")
    ),
    Bound("idle event stream, bytes", 30_000.0, ("idle", "2048 streams", "each_bytes")),
    Bound(
        "heartbeats of 1 s, longest gap, ms", 1100.0, ("idle", "longest between heartbeats", "interval_us"), scale=MS
    ),
    Bound("delivery beside 2048 idle streams, p50 ms", 5.0, ("idle", "delivery beside them", "p50_us"), scale=MS),
    *(
        Bound(
            f"{what} of a {queue} queue / a shallow one, p50",
            1.25,
            ("depth", f"{queue}, {what}", "p50_us"),
            divided_by=("depth", f"shallow, {what}", "p50_us"),
        )
        for queue in ("deep", "mixed")
        for what in ("claim 1", "claim 16", "ack 1", "ack 16", "nack 1", "nack 16")
    ),
    *(
        Bound(
            f"ack through another frontend to next job, {name} ms",
            5.0,
            ("refill", "ack through another frontend", f"{name}_us"),
            scale=MS,
        )
        for name in ("p50", "p99")
    ),
    Bound("recovery of 1 M records, s", 1.5, ("recovery", "1 M records, one shard", "seconds")),
    *[
        Bound(
            f"write p99 of {batch}, compactor at work / held",
            2.0,
            ("checkpoint", f"16 writers of {batch}, compactor at work", "p99_us"),
            divided_by=("checkpoint", f"16 writers of {batch}, compactor held", "p99_us"),
        )
        for batch in (10, 100)
    ],
    Bound("start with 10 M checkpointed, s", 1.0, ("retained", "10 M records", "restart_s")),
    *(
        Bound(f"memory per retained record of {label}, {when}, B", 50.0, ("retained", f"{label} records", name))
        for label in ("1 M", "5 M", "10 M")
        for when, name in (("restarted", "per_record_bytes"), ("live", "live_per_record_bytes"))
    ),
    Bound("idle service, MiB", 200.0, ("memory", "idle", "held_bytes"), scale=MIB),
]


def targets(figures: list[Figure]) -> list[Target]:
    """Return the targets whose figures were all measured."""
    known = {(figure.case, figure.what, name): value for figure in figures for name, value in figure.values.items()}
    found = []
    for bound in BOUNDS:
        refs = [ref for ref in (bound.value, bound.less, bound.divided_by) if ref is not None]
        if all(ref in known for ref in refs):
            value = known[bound.value] - (known[bound.less] if bound.less else 0.0)
            value /= (known[bound.divided_by] if bound.divided_by else 1.0) * bound.scale
            found.append(Target(bound.what, value, bound.limit, bound.at_least))
    return found
