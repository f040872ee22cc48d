"""Thousands of event streams of an idle topic, and one of a topic that is written to."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench import machine
from bench.crowd import Client, Watcher, Writer, put, until, watch
from bench.load import percentiles

OPENING_AT_ONCE = 32
WINDOWS_MAX = 3
"""Times that heartbeats are measured while they come too late. Any process that is held up for a moment delays them all
once; heartbeats that the server cannot keep up with are late each time.
"""
LATE_MAX = 0.05
"""Part of the interval by which heartbeats may be late, in the mean."""


class IdleStreams(NamedTuple):
    """Streams of one topic that nobody writes to, with a heartbeat each second; after `seconds` of that, as many
    seconds of writes to another topic that one stream follows. `pids` and `shared_objects` are those of the service.
    """

    port: int
    pids: list[int]
    shared_objects: list[Path]
    streams: int = 2000
    heartbeat_ms: int = 1000
    seconds: float = 5.0
    every_s: float = 0.02


class Heartbeats(NamedTuple):
    """The fewest heartbeats that a stream got, the mean time between two in ms, and the longest silence of any stream,
    from the first moment to the last.
    """

    count_min: int
    interval_mean_ms: float
    silence_max_ms: float


class IdleOutcome(NamedTuple):
    """The result: bytes that the service took for each stream, their heartbeats, and delivery (p50, p99) in µs before
    these streams and beside them.
    """

    bytes_each: float
    heartbeats: Heartbeats
    alone_us: tuple[float, float]
    delivery_us: tuple[float, float]
    odd: list[str]
    closed: int


def run_idle_streams(plan: IdleStreams) -> IdleOutcome:
    """Run the plan in this process."""
    return uvloop.run(_run_idle_streams(plan))


async def _run_idle_streams(plan: IdleStreams) -> IdleOutcome:
    loop = asyncio.get_running_loop()

    def held_bytes() -> int:
        return machine.memory_of(plan.pids, plan.shared_objects).held

    client = Client(plan.port)
    await put(client, "quiet")
    await put(client, "busy")
    probe = await watch(client, plan.port, "busy")
    await until(lambda: probe.caught_up, "the stream of the busy topic")
    writer = Writer(plan.port, "busy", every_s=plan.every_s)
    await writer.run(loop.time() + plan.seconds)
    await until(lambda: len(probe.seqs) >= writer.acked, "every record at the stream")
    alone = writer.acked
    held_before = held_bytes()
    streams: list[Watcher] = []

    async def open_some() -> None:
        own = Client(plan.port)
        for _ in range(plan.streams // OPENING_AT_ONCE):
            streams.append(await watch(own, plan.port, "quiet", heartbeat_ms=plan.heartbeat_ms))
        own.close()

    await asyncio.gather(*[open_some() for _ in range(OPENING_AT_ONCE)])
    await until(lambda: all(stream.caught_up for stream in streams), "every stream to be caught up")
    for _ in range(WINDOWS_MAX):
        heartbeats = await _heartbeats(streams, plan.seconds)
        late = abs(heartbeats.interval_mean_ms / plan.heartbeat_ms - 1) > LATE_MAX
        if not late and heartbeats.silence_max_ms < 2 * plan.heartbeat_ms:
            break
    held_after = held_bytes()
    await writer.run(loop.time() + plan.seconds)
    await until(lambda: len(probe.seqs) >= writer.acked, "every record at the stream")
    closed = sum(stream.closed for stream in streams)
    for stream in [*streams, probe]:
        stream.close()
    return IdleOutcome(
        (held_after - held_before) / len(streams),
        heartbeats,
        _latencies(probe.latencies_us[:alone]),
        _latencies(probe.latencies_us[alone:]),
        writer.odd,
        closed,
    )


async def _heartbeats(streams: list[Watcher], seconds: float) -> Heartbeats:
    # Streams that were opened first have had some already; from here on no stream may miss one.
    from_s = time.perf_counter()
    for stream in streams:
        stream.heartbeats_s.clear()
    await asyncio.sleep(seconds)
    to_s = time.perf_counter()
    intervals_s = [later - earlier for stream in streams for earlier, later in itertools.pairwise(stream.heartbeats_s)]
    silences_s = [
        later - earlier
        for stream in streams
        for earlier, later in itertools.pairwise([from_s, *stream.heartbeats_s, to_s])
    ]
    return Heartbeats(
        min(len(stream.heartbeats_s) for stream in streams),
        sum(intervals_s) / max(1, len(intervals_s)) * 1000,
        max(silences_s) * 1000,
    )


def _latencies(latencies_us: array[int]) -> tuple[float, float]:
    histogram = percentiles(latencies_us)
    return histogram.get_value_at_percentile(50), histogram.get_value_at_percentile(99)
