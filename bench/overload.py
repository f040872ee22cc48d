"""More load than a server can do, for `tests/e2e/test_overload.py` and two cases."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench import machine
from bench.crowd import Client, Observer, PressureSample, Watcher, Writer, put, readers, until, watch
from bench.load import percentiles


class Overload(NamedTuple):
    """The load. `topics` are (priority, None for automatic; number of topics), each topic with `watchers` streams whose
    filters all differ, so that nothing is shared between them, and one closed-loop writer. `floods` writers of
    `flood_bytes` each write to topics that nobody watches. Acknowledged records are read back through each of
    `frontends`.
    """

    port: int
    topics: tuple[tuple[int | None, int], ...] = ((1000, 2), (None, 8), (-1000, 14))
    watchers: int = 40
    floods: int = 0
    flood_bytes: int = 15_000
    seconds: float = 5.0
    frontends: int = 1
    pids: tuple[int, ...] = ()
    shared_objects: tuple[Path, ...] = ()
    """Shared memory of the service, to see what it holds meanwhile; the floods have a cap, so nothing is retained."""
    name: str = "load"
    """Prefix of the watched topics; another one for each plan of the same service."""


class OverloadOutcome(NamedTuple):
    """The result. `delivery_us` are (p50, p99) by priority, over all its streams; `missing` are records that a stream
    never got, `odd` answers that the contract does not allow.
    """

    statuses: dict[int, int]
    odd: list[str]
    missing: list[str]
    delivery_us: dict[int | None, tuple[float, float]]
    before: PressureSample
    during: list[PressureSample]
    after: PressureSample
    asked: int
    """Requests of the load from `before` to `after`: what the service counted beyond them was somebody else's."""
    held_bytes: list[int]
    refused_max_ms: float
    """The longest that a refusal took to come; 0 if there was none."""


def run_overload(plan: Overload) -> OverloadOutcome:
    """Run the plan in this process."""
    return uvloop.run(_run_overload(plan))


async def _run_overload(plan: Overload) -> OverloadOutcome:
    loop = asyncio.get_running_loop()
    client, observer = Client(plan.port), Observer(plan.port)
    through = await readers(plan.port, plan.frontends) if plan.frontends > 1 else []
    watchers: dict[int | None, list[Watcher]] = {}
    writers: list[Writer] = []
    for priority, topics in plan.topics:
        watchers[priority] = []
        for n in range(topics):
            topic = f"{plan.name}.{priority}.{n}"
            await put(client, topic, priority=priority)
            watchers[priority] += [
                await watch(client, plan.port, topic, node=f"reader-{k}") for k in range(plan.watchers)
            ]
            writers.append(Writer(plan.port, topic, read_back=20, readers=through))
    for n in range(plan.floods):
        await put(client, f"flood.{n}", cap_records=20)
    floods = [Writer(plan.port, f"flood.{n}", pad=plan.flood_bytes) for n in range(plan.floods)]
    everybody = [watcher for those in watchers.values() for watcher in those]
    await until(lambda: all(watcher.caught_up for watcher in everybody), "every stream to be caught up")
    before = await observer.until(lambda sample: sample.pressure < 0.2, "a quiet server")
    observer.samples.clear()
    looks = observer.asked + sum(reader.asked for reader in through)
    observing = loop.create_task(observer.run())
    held_bytes: list[int] = []
    weighing = loop.create_task(_weigh(plan, held_bytes))
    end_s = loop.time() + plan.seconds
    await asyncio.gather(*[writer.run(end_s) for writer in writers + floods])
    observer.stopped = True
    await observing
    weighing.cancel()
    during = list(observer.samples)
    expected = {writer.topic: writer.acked for writer in writers}
    missing = []
    try:
        await until(
            lambda: all(len(watcher.seqs) >= expected[watcher.topic] for watcher in everybody),
            "every record everywhere",
        )
    finally:
        for watcher in everybody:
            if list(watcher.seqs) != list(range(1, expected[watcher.topic] + 1)):
                missing.append(f"{watcher.topic}: {len(watcher.seqs)} of {expected[watcher.topic]}, {watcher.tail!r}")
    # What it gave way by ends some time after the pressure, each at its own pace.
    after = await observer.until(
        lambda sample: sample.pressure < 0.05 and not (sample.deferring or sample.coalesce_ms or sample.window_ms),
        "no pressure any more",
    )
    statuses: Counter[int] = Counter()
    for writer in writers + floods:
        statuses += writer.statuses
    for watcher in everybody:
        watcher.close()
    for reader in through:
        reader.close()
    return OverloadOutcome(
        dict(statuses),
        [problem for writer in writers + floods for problem in writer.odd],
        missing,
        {priority: latencies(those) for priority, those in watchers.items()},
        before,
        during,
        after,
        observer.asked
        + sum(reader.asked for reader in through)
        + sum(writer.asked for writer in writers + floods)
        - looks,
        held_bytes,
        max([max(writer.refused_ms, default=0.0) for writer in writers + floods], default=0.0),
    )


async def _weigh(plan: Overload, held_bytes: list[int]) -> None:
    while True:
        await asyncio.sleep(0.25)
        held_bytes.append(machine.memory_of(list(plan.pids), list(plan.shared_objects)).held)


def latencies(watchers: list[Watcher]) -> tuple[float, float]:
    """Return (p50, p99) in µs of all deliveries to these watchers."""
    every: array[int] = array("Q")
    for watcher in watchers:
        every.extend(watcher.latencies_us)
    histogram = percentiles(every)
    return histogram.get_value_at_percentile(50), histogram.get_value_at_percentile(99)
