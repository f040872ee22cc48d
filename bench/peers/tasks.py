"""The measurements: each takes a server that was just started, and how much to do, and returns its values by name."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import psycopg
import uvloop

from bench import wire
from bench.load import Plan, closed_loop, percentiles
from bench.peers import bare
from bench.peers.links import LINKS, STREAM, Link, lone_writer, payload, postgres_dsn, prepare, read_all
from bench.peers.servers import Address, Contender, Server

Values = dict[str, float]

CONNECTIONS: Final = (1, 16, 64)
BATCHES: Final = (1, 100)
READERS: Final = (1, 100)
PAUSE_S: Final = 0.01
"""Between two writes to blocked readers: they wait when it comes."""
WORKERS: Final = 32
FILL_BATCH: Final = 1_000
FILL_LINKS: Final = 4


class Volume(NamedTuple):
    """The amount of work in each measurement."""

    append_s: float
    lone_writes: int
    read_records: int
    deliveries: int
    jobs: int
    retained: int

    @classmethod
    def of(cls, seconds: float, retained: int) -> Volume:
        """Return what is done with measurements of so many seconds: counts go along with them."""
        fills = max(1, round(50 * seconds)) * FILL_LINKS * FILL_BATCH
        return cls(seconds, round(2000 * seconds), fills, round(200 * seconds), round(8000 * seconds), retained)


def lone(server: Server, volume: Volume) -> Values:
    """Append one record after the other."""
    with lone_writer(server) as write:
        record = payload()
        for _ in range(volume.lone_writes // 10):
            write(record)
        times_us = array("Q")
        for _ in range(volume.lone_writes):
            began_ns = time.perf_counter_ns()
            write(record)
            times_us.append((time.perf_counter_ns() - began_ns) // 1000)
    histogram = percentiles(times_us)
    return {
        "one append: p50_us": histogram.get_value_at_percentile(50),
        "one append: p99_us": histogram.get_value_at_percentile(99),
    }


def appends(server: Server, volume: Volume) -> Values:
    """Append on several connections of one process, each waiting for its ack, through the client that people use."""
    found: Values = {}
    for batch in BATCHES:
        for connections in CONNECTIONS:
            rate = uvloop.run(_append(server, connections, batch, volume.append_s))
            found[f"appends, batch {batch}, {plural(connections)}: records_per_s"] = rate
    return found


def plural(connections: int) -> str:
    return "1 connection" if connections == 1 else f"{connections} connections"


async def _append(server: Server, connections: int, batch: int, duration_s: float) -> float:
    links = [LINKS[server.contender.family](server.port) for _ in range(connections)]
    records = [payload()] * batch
    counts = [0] * connections

    async def write(number: int, until: float) -> None:
        while time.perf_counter() < until:
            await links[number].append(records)
            counts[number] += batch

    await asyncio.gather(*[write(number, time.perf_counter() + duration_s / 10) for number in range(connections)])
    counts[:] = [0] * connections
    began = time.perf_counter()
    await asyncio.gather(*[write(number, began + duration_s) for number in range(connections)])
    took_s = time.perf_counter() - began
    await _close(links)
    return sum(counts) / took_s


def appends_bare(server: Server, volume: Volume) -> Values:
    """Append the same on bare connections, requests made beforehand: the server is the limit, not its client."""
    found: Values = {}
    for batch in BATCHES:
        for connections in CONNECTIONS:
            name = f"bare appends, batch {batch}, {plural(connections)}: records_per_s"
            found[name] = bare_rate(server, batch, connections, duration_s=volume.append_s) * batch
    return found


def bare_rate(server: Server, batch: int, connections: int, duration_s: float = 0.0, rounds: int = 0) -> float:
    """Return batches a second."""
    family = server.contender.family
    if family == "topics":
        request = wire.write(STREAM, batch)
        return closed_loop(Plan(server.port, [[request]] * connections, 0.0, duration_s, rounds)).per_s
    plan = bare.Plan(family, server.port, STREAM, payload(), batch, connections, duration_s, rounds)
    return bare.bare_appends(plan)


def catch_up(server: Server, volume: Volume) -> Values:
    """Read a stream from its beginning."""
    uvloop.run(fill(server, volume.read_records))
    began = time.perf_counter()
    count = read_all(server)
    took_s = time.perf_counter() - began
    assert count == volume.read_records, f"{server.contender.name} has {count} records, not {volume.read_records}"
    return {"catch-up read: records_per_s": count / took_s}


def deliver(server: Server, volume: Volume) -> Values:
    """Append a record, and see when it is in the hands of readers that wait for it, in a process of their own."""
    found: Values = {}
    for readers in READERS:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_readers, args=(theirs, server.address, readers, volume.deliveries))
        process.start()
        assert ours.recv() == "ready"
        uvloop.run(_write_stamped(server, volume.deliveries))
        times_us = ours.recv()
        process.join()
        assert len(times_us) == volume.deliveries * readers
        histogram = percentiles(times_us)
        what = f"delivery to {readers} blocked readers" if readers > 1 else "delivery to a blocked reader"
        found[f"{what}: p50_us"] = histogram.get_value_at_percentile(50)
        found[f"{what}: p99_us"] = histogram.get_value_at_percentile(99)
    return found


async def _write_stamped(server: Server, deliveries: int) -> None:
    link = LINKS[server.contender.family](server.port)
    for _ in range(deliveries):
        await asyncio.sleep(PAUSE_S)
        await link.append([payload(time.monotonic_ns())])
    await link.close()


def _run_readers(pipe: Connection, address: Address, readers: int, deliveries: int) -> None:
    uvloop.run(_read_stamped(pipe, address, readers, deliveries))


async def _read_stamped(pipe: Connection, address: Address, readers: int, deliveries: int) -> None:
    times_us = array("Q")
    waiting = asyncio.Semaphore(0)

    async def read() -> None:
        reader = LINKS[address.family](address.port)
        seen = 0
        async for record in reader.follow():
            now_ns = time.monotonic_ns()
            if not record:
                waiting.release()
                continue
            sent_ns = int(record[len(b'{"sent_ns": ') : record.index(b",")])
            times_us.append((now_ns - sent_ns) // 1000)
            seen += 1
            if seen == deliveries:
                break
        await reader.close()

    async def report_ready() -> None:
        for _ in range(readers):
            await waiting.acquire()
        await asyncio.sleep(0.5)  # each is in its blocking call
        pipe.send("ready")

    await asyncio.gather(report_ready(), *[read() for _ in range(readers)])
    pipe.send(times_us)


def queue(server: Server, volume: Volume) -> Values:
    """Claim a job and acknowledge it, one after the other, with several workers in one process."""
    return uvloop.run(_queue(server, volume.jobs))


async def _queue(server: Server, jobs: int) -> Values:
    filler = LINKS[server.contender.family](server.port)
    for first in range(0, jobs, FILL_BATCH):
        await filler.fill_queue([payload()] * min(FILL_BATCH, jobs - first))
    await filler.close()
    times_us = array("Q")

    async def work() -> None:
        link = LINKS[server.contender.family](server.port)
        while True:
            began_ns = time.perf_counter_ns()
            if len(times_us) + WORKERS > jobs or not await link.work():
                break
            times_us.append((time.perf_counter_ns() - began_ns) // 1000)
        await link.close()

    began = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(WORKERS)])
    took_s = time.perf_counter() - began
    assert len(times_us) > jobs // 2
    histogram = percentiles(times_us)
    what = f"queue, {WORKERS} workers"
    return {f"{what}: jobs_per_s": len(times_us) / took_s, f"{what}: p99_us": histogram.get_value_at_percentile(99)}


def retained(server: Server, volume: Volume) -> Values:
    """Fill a stream, kill the server, start it: the time until the next record is acknowledged, and its memory."""
    records = volume.retained
    before = server.held_bytes()
    fill_bare(server, records)
    held = server.held_bytes()
    server.kill()
    began = time.perf_counter()
    server.start()
    uvloop.run(_append_one(server))
    took_s = time.perf_counter() - began
    after = server.held_bytes()
    million = records / 1e6
    label = f"{million:g} M records"
    return {
        f"start after a kill with {label}: seconds": took_s,
        f"memory of a million records, of {label} written: bytes": max(1.0, (held - before) / million),
        f"memory of a million records, of {label} after a start: bytes": max(1.0, (after - before) / million),
    }


async def _append_one(server: Server) -> None:
    link = LINKS[server.contender.family](server.port)
    await link.append([payload()])
    await link.close()


async def fill(server: Server, records: int) -> None:
    """Append so many records in large batches."""
    links = [LINKS[server.contender.family](server.port) for _ in range(FILL_LINKS)]
    batch = [payload()] * FILL_BATCH

    async def write(link: Link) -> None:
        for _ in range(records // FILL_BATCH // FILL_LINKS):
            await link.append(batch)

    await asyncio.gather(*map(write, links))
    await _close(links)


async def _close(links: list[Link]) -> None:
    for link in links:
        await link.close()


def fill_bare(server: Server, records: int) -> None:
    """Append so many records as fast as the server takes them, by no client: none of this is measured."""
    if server.contender.family == "postgres":
        with psycopg.connect(postgres_dsn(server.port), autocommit=True) as database:
            for first in range(0, records, 100 * FILL_BATCH):
                count = min(100 * FILL_BATCH, records - first)
                database.execute(
                    f"INSERT INTO {STREAM} (data) SELECT %s::bytea FROM generate_series(1, %s)", (payload(), count)
                )
    else:
        bare_rate(server, FILL_BATCH, FILL_LINKS, rounds=records // FILL_BATCH // FILL_LINKS)


RETAINED: Final = "retained"
TASKS: Final[dict[str, Callable[[Server, Volume], Values]]] = {
    "lone": lone,
    "appends": appends,
    "bare": appends_bare,
    "catch-up": catch_up,
    "delivery": deliver,
    "queue": queue,
    RETAINED: retained,
}
BARE_FAMILIES: Final = ("topics", *bare.TALKS)
"""Contenders whose Python client is the limit, not the server, and whose protocol a bare load speaks. PostgreSQL's
client is in C.
"""


def takes_part(server: Contender, task: str) -> bool:
    """Return whether a task is for this contender. What is kept does not depend on when it was synced."""
    if task == RETAINED:
        return not server.synced
    return task != "bare" or server.family in BARE_FAMILIES


def measure(server: Server, task: str, volume: Volume) -> Values:
    """Make the stream and the queue on this fresh server, and run the task."""
    asyncio.run(prepare(server))
    return TASKS[task](server, volume)
