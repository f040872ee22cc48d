"""The measurements: each takes a server that was just started and returns its values by name."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import uvloop

from bench import wire
from bench.load import Plan, closed_loop, percentiles
from bench.peers.bare_redis import bare_appends
from bench.peers.links import LINKS, STREAM, Link, lone_writer, payload, prepare, read_all
from bench.peers.servers import Address, Server

Values = dict[str, float]

LONE_WRITES: Final = 2_000
WARM_UP_WRITES: Final = 200
CONNECTIONS: Final = (1, 16, 64)
BATCHES: Final = (1, 100)
APPEND_S: Final = 2.0
READ_RECORDS: Final = 300_000
READERS: Final = (1, 100)
DELIVERIES: Final = 200
PAUSE_S: Final = 0.01
"""Between two writes to blocked readers: they wait when it comes."""
JOBS: Final = 8_000
WORKERS: Final = 32
FILL_BATCH: Final = 1_000
FILL_LINKS: Final = 4


def lone(server: Server) -> Values:
    """Append one record after the other."""
    with lone_writer(server) as write:
        record = payload()
        for _ in range(WARM_UP_WRITES):
            write(record)
        times_us = array("Q")
        for _ in range(LONE_WRITES):
            began_ns = time.perf_counter_ns()
            write(record)
            times_us.append((time.perf_counter_ns() - began_ns) // 1000)
    histogram = percentiles(times_us)
    return {
        "one append: p50_us": histogram.get_value_at_percentile(50),
        "one append: p99_us": histogram.get_value_at_percentile(99),
    }


def appends(server: Server) -> Values:
    """Append on several connections of one process, each waiting for its ack, through the client that people use."""
    found: Values = {}
    for batch in BATCHES:
        for connections in CONNECTIONS:
            rate = uvloop.run(_append(server, connections, batch))
            found[f"appends, batch {batch}, {connections} connections: records_per_s"] = rate
    return found


async def _append(server: Server, connections: int, batch: int) -> float:
    links = [LINKS[server.contender.family](server.port) for _ in range(connections)]
    records = [payload()] * batch
    counts = [0] * connections

    async def write(number: int, until: float) -> None:
        while time.perf_counter() < until:
            await links[number].append(records)
            counts[number] += batch

    await asyncio.gather(*[write(number, time.perf_counter() + APPEND_S / 10) for number in range(connections)])
    counts[:] = [0] * connections
    began = time.perf_counter()
    await asyncio.gather(*[write(number, began + APPEND_S) for number in range(connections)])
    took_s = time.perf_counter() - began
    await _close(links)
    return sum(counts) / took_s


def appends_bare(server: Server) -> Values:
    """Append the same on bare connections, requests made beforehand: the server is the limit, not its client."""
    found: Values = {}
    for batch in BATCHES:
        for connections in CONNECTIONS:
            if server.contender.family == "topics":
                plan = Plan(server.port, [[wire.write(STREAM, batch)]] * connections, 0.2, APPEND_S)
                rate = closed_loop(plan).per_s
            else:
                rate = bare_appends(server.port, STREAM, payload(), batch, connections, APPEND_S)
            found[f"bare appends, batch {batch}, {connections} connections: records_per_s"] = rate * batch
    return found


def catch_up(server: Server) -> Values:
    """Read a stream from its beginning."""
    uvloop.run(fill(server, READ_RECORDS))
    began = time.perf_counter()
    count = read_all(server)
    took_s = time.perf_counter() - began
    assert count == READ_RECORDS, f"{server.contender.name} has {count} records instead of {READ_RECORDS}"
    return {"catch-up read: records_per_s": count / took_s}


def deliver(server: Server) -> Values:
    """Append a record, and see when it is in the hands of readers that wait for it, in a process of their own."""
    found: Values = {}
    for readers in READERS:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_readers, args=(theirs, server.address, readers))
        process.start()
        assert ours.recv() == "ready"
        uvloop.run(_write_stamped(server))
        times_us = ours.recv()
        process.join()
        assert len(times_us) == DELIVERIES * readers
        histogram = percentiles(times_us)
        what = f"delivery to {readers} blocked readers" if readers > 1 else "delivery to a blocked reader"
        found[f"{what}: p50_us"] = histogram.get_value_at_percentile(50)
        found[f"{what}: p99_us"] = histogram.get_value_at_percentile(99)
    return found


async def _write_stamped(server: Server) -> None:
    link = LINKS[server.contender.family](server.port)
    for _ in range(DELIVERIES):
        await asyncio.sleep(PAUSE_S)
        await link.append([payload(time.monotonic_ns())])
    await link.close()


def _run_readers(pipe: Connection, address: Address, readers: int) -> None:
    uvloop.run(_read_stamped(pipe, address, readers))


async def _read_stamped(pipe: Connection, address: Address, readers: int) -> None:
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
            if seen == DELIVERIES:
                break
        await reader.close()

    async def report_ready() -> None:
        for _ in range(readers):
            await waiting.acquire()
        await asyncio.sleep(0.5)  # each is in its blocking call
        pipe.send("ready")

    await asyncio.gather(report_ready(), *[read() for _ in range(readers)])
    pipe.send(times_us)


def queue(server: Server) -> Values:
    """Claim a job and acknowledge it, one after the other, with several workers in one process."""
    return uvloop.run(_queue(server))


async def _queue(server: Server) -> Values:
    filler = LINKS[server.contender.family](server.port)
    for _ in range(0, JOBS, FILL_BATCH):
        await filler.fill_queue([payload()] * FILL_BATCH)
    await filler.close()
    times_us = array("Q")

    async def work() -> None:
        link = LINKS[server.contender.family](server.port)
        while True:
            began_ns = time.perf_counter_ns()
            if len(times_us) + WORKERS > JOBS or not await link.work():
                break
            times_us.append((time.perf_counter_ns() - began_ns) // 1000)
        await link.close()

    began = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(WORKERS)])
    took_s = time.perf_counter() - began
    assert len(times_us) > JOBS // 2
    histogram = percentiles(times_us)
    what = f"queue, {WORKERS} workers"
    return {f"{what}: jobs_per_s": len(times_us) / took_s, f"{what}: p99_us": histogram.get_value_at_percentile(99)}


def retained(server: Server, records: int) -> Values:
    """Fill a stream, kill the server, start it: the time until the first record can be read, and its memory."""
    before = server.held_bytes()
    uvloop.run(fill(server, records))
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
        f"memory of a million records, of {label} written: bytes": (held - before) / million,
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


TASKS: Final[dict[str, Callable[[Server], Values]]] = {
    "lone": lone,
    "appends": appends,
    "bare": appends_bare,
    "catch-up": catch_up,
    "delivery": deliver,
    "queue": queue,
}
BARE_FAMILIES: Final = ("topics", "redis")
"""Contenders whose Python client is the limit, not the server, and whose protocol a bare load speaks."""


def measure(server: Server, task: str) -> Values:
    """Make the stream and the queue on this fresh server, and run the task."""
    asyncio.run(prepare(server))
    return TASKS[task](server)


def measure_retained(server: Server, records: int) -> Values:
    asyncio.run(prepare(server))
    return retained(server, records)
