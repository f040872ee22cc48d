"""One stream whose client stops reading, among many that read."""

from __future__ import annotations

import asyncio
from array import array
from typing import NamedTuple

import uvloop

from bench.crowd import Client, Watcher, Writer, put, until, watch
from bench.load import percentiles

RECEIVE_BYTES = 4096
BALLAST = (16, 900_000)
"""Records, and bytes each, in a second topic of the slow stream: more than the kernel keeps for a socket."""


class SlowReader(NamedTuple):
    """The load: `watchers` streams of one topic and a write of `pad` bytes every `every_s`: for `seconds` while all of
    them read, then as long while one of them does not, which then reads again.
    """

    port: int
    watchers: int = 200
    pad: int = 2000
    every_s: float = 0.02
    seconds: float = 3.0
    name: str = "read.by.many"
    """Name of the topic; another one for each plan of the same service."""


class SlowReaderOutcome(NamedTuple):
    """The result: delivery (p50, p99, longest) in µs to the others, before and meanwhile; the longest answer to the
    writer meanwhile, in ms; the records that the slow stream had by then (`held_back`) and at the end, in how many
    frames. `odd` and `missing` are empty.
    """

    before_us: tuple[float, float, int]
    meanwhile_us: tuple[float, float, int]
    write_max_ms: float
    held_back: int
    caught_up: int
    records: int
    record_frames: int
    odd: list[str]
    missing: list[str]


def run_slow_reader(plan: SlowReader) -> SlowReaderOutcome:
    """Run the plan in this process."""
    return uvloop.run(_run_slow_reader(plan))


async def _run_slow_reader(plan: SlowReader) -> SlowReaderOutcome:
    loop = asyncio.get_running_loop()
    client, topic, heavy = Client(plan.port), plan.name, f"{plan.name}.ballast"
    await put(client, topic)
    await put(client, heavy)
    watchers = [await watch(client, plan.port, topic) for _ in range(plan.watchers)]
    slow = await watch(client, plan.port, topic, heavy, receive_bytes=RECEIVE_BYTES)
    everybody = [*watchers, slow]
    await until(lambda: all(watcher.caught_up for watcher in everybody), "every stream to be caught up")
    writer = Writer(plan.port, topic, plan.pad, plan.every_s)
    await writer.run(loop.time() + plan.seconds)
    first = writer.acked
    await until(lambda: all(len(watcher.seqs) >= first for watcher in everybody), "every record at every stream")
    slow.stop_reading()
    count, size = BALLAST
    ballast = b'{"records":[{"data":"%b"}]}' % (b"x" * size)
    for _ in range(count):
        assert (await client.ask("POST", f"/v0/topics/{heavy}", ballast)).status // 100 == 2
    frames = slow.record_frames
    writer.write_max_ms = 0.0
    # So many, however late: there has to be something to miss.
    await writer.run(loop.time() + plan.seconds, first + int(plan.seconds / plan.every_s))
    write_max_ms = writer.write_max_ms
    records = writer.acked
    await until(lambda: all(len(watcher.seqs) >= records for watcher in watchers), "every record at those who read")
    held_back = len(slow.seqs)
    slow.read_on()
    await until(lambda: len(slow.seqs) >= records, "every record at the one that reads again")
    missing = [f"{len(w.seqs)} of {records}" for w in everybody if list(w.seqs) != list(range(1, records + 1))]
    for watcher in everybody:
        watcher.close()
    return SlowReaderOutcome(
        _latencies(watchers, 0, first),
        _latencies(watchers, first, records),
        write_max_ms,
        held_back,
        len(slow.seqs),
        records,
        slow.record_frames - frames,
        writer.odd,
        missing,
    )


def _latencies(watchers: list[Watcher], start: int, end: int) -> tuple[float, float, int]:
    every: array[int] = array("Q")
    for watcher in watchers:
        every.extend(watcher.latencies_us[start:end])
    histogram = percentiles(every)
    return histogram.get_value_at_percentile(50), histogram.get_value_at_percentile(99), max(every)
