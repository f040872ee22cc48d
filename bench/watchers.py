"""Write → deliver: one writer and many event streams in one process, so that one clock times both ends.

First come paced writes, for the time that a delivery takes; then writes without pauses, for the rate. A thousand
streams cost their reader as much as their server: chunks are stamped and put aside, and parsed after the measurement.
"""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple, cast

import uvloop

from bench import wire
from bench.load import LoadError, percentiles, read_cpu

_SENT = re.compile(rb'"sent_ns":(\d{1,20})\}')
STAMP_BYTES = 64
"""A stamp is shorter than this: the rest of a chunk that may hold the beginning of one."""
END_BYTES = 1024
"""The rest of a frame behind its last stamp is shorter than this."""
SETTLE_WRITES = 20
DRAIN_DEADLINE_S = 20.0
OPENING_AT_ONCE = 100


class WatchPlan(NamedTuple):
    """The load: streams at `stream_paths`, made beforehand; one write every `1 / writes_per_s` for `duration_s`, then
    as long without a pause, but no more than `unpaused_max`. The CPU time of `pids` is taken meanwhile.
    """

    port: int
    topic: str
    stream_paths: list[str]
    writes_per_s: float
    duration_s: float
    pids: tuple[int, ...] = ()
    unpaused_max: int = sys.maxsize


class Used(NamedTuple):
    """The CPU time that so many deliveries took: of the plan's processes, and of the load."""

    deliveries: int
    cpu_ns: tuple[int, ...]
    load_cpu_ns: int


class WatchOutcome(NamedTuple):
    """The result: latencies in µs from just before a write was sent until a stream read the record; deliveries to all
    streams together while there was no pause, until the last stream had the last record; the CPU time of either part.
    """

    deliveries: int
    p50_us: float
    p99_us: float
    max_us: float
    deliveries_per_s: float
    paced: Used
    unpaused: Used


def deliver(plan: WatchPlan) -> WatchOutcome:
    """Run the plan in this process; LoadError when a record did not reach a watcher."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return uvloop.run(_run(plan))


async def _run(plan: WatchPlan) -> WatchOutcome:
    loop = asyncio.get_running_loop()
    watchers: list[Watcher] = []
    for path in plan.stream_paths:
        _, watcher = await loop.create_connection(Watcher, "127.0.0.1", plan.port)
        watcher.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
        watchers.append(watcher)
        if len(watchers) % OPENING_AT_ONCE == 0:
            await until(lambda: all(watcher.caught_up for watcher in watchers), "the first streams to be caught up")
    await until(lambda: all(watcher.caught_up for watcher in watchers), "every stream to be caught up")
    writer = _Writer(plan.topic, *await asyncio.open_connection("127.0.0.1", plan.port))

    before = read_cpu(plan.pids)
    writes = SETTLE_WRITES + int(plan.writes_per_s * plan.duration_s)
    start_s = loop.time()
    for number in range(writes):
        await asyncio.sleep(max(0.0, start_s + number / plan.writes_per_s - loop.time()))
        last = await writer.write()
    await until(lambda: all(watcher.has(last) for watcher in watchers), "every record at every watcher")
    paced = _used(plan, before, writes)
    latencies_us: array[int] = array("Q")
    for watcher in watchers:
        found = watcher.latencies_us()
        if len(found) != writes:
            raise LoadError(f"{len(found)} of {writes} records reached a watcher")
        latencies_us.extend(found[SETTLE_WRITES:])

    for watcher in watchers:
        watcher.keep_none()
    before = read_cpu(plan.pids)
    writes, start_ns = 0, time.perf_counter_ns()
    while time.perf_counter_ns() - start_ns < plan.duration_s * 1e9 and writes < plan.unpaused_max:
        last = await writer.write()
        writes += 1
    await until(lambda: all(watcher.has(last) for watcher in watchers), "the last record at every watcher")
    unpaused = _used(plan, before, writes)
    took_s = (max(watcher.last_ns for watcher in watchers) - start_ns) / 1e9
    writer.close()
    for watcher in watchers:
        watcher.close()
    histogram = percentiles(latencies_us)
    return WatchOutcome(
        len(latencies_us),
        histogram.get_value_at_percentile(50),
        histogram.get_value_at_percentile(99),
        histogram.get_max_value(),
        writes * len(watchers) / took_s,
        paced,
        unpaused,
    )


def _used(plan: WatchPlan, before: list[int], writes: int) -> Used:
    *cpu_ns, load_cpu_ns = (now - then for now, then in zip(read_cpu(plan.pids), before, strict=True))
    return Used(writes * len(plan.stream_paths), tuple(cpu_ns), load_cpu_ns)


async def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DRAIN_DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            raise LoadError(f"not within {DRAIN_DEADLINE_S} s: {what}")
        await asyncio.sleep(0.01)


class _Writer:
    """One connection, one write at a time; each record has the time of its sending."""

    def __init__(self, topic: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._path = f"/v0/topics/{topic}?return_seqs=false"
        self._reader = reader
        self._writer = writer

    async def write(self) -> bytes:
        """Write a record; return its stamp once it is acknowledged."""
        stamp = b'"sent_ns":%d}' % time.perf_counter_ns()
        body = b'{"records":[{"data":{"pad":"%s",%s}]}' % (b"x" * 60, stamp)
        self._writer.write(wire.post(self._path, body))
        head = await self._reader.readuntil(b"\r\n\r\n")
        if head[9:10] != b"2":
            raise LoadError(head.decode(errors="replace"))
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        assert length is not None
        await self._reader.readexactly(int(length[1]))
        return stamp

    def close(self) -> None:
        self._writer.close()


class Watcher(asyncio.Protocol):
    """One event stream, or WebSocket, of which only the time stamps are parsed, after the measurement."""

    def __init__(self, sign: bytes = b"event: caught-up") -> None:
        """`sign` is in what the service sends when all that was there has come."""
        self.caught_up = False
        self._sign = sign
        self.last_ns = 0
        self._arrivals: list[tuple[int, bytes]] | None = []
        self._end = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, chunk: bytes) -> None:
        self.last_ns = time.perf_counter_ns()
        if self._arrivals is not None:
            self._arrivals.append((self.last_ns, chunk))
        self._end = chunk[-END_BYTES:] if len(chunk) >= END_BYTES else (self._end + chunk)[-END_BYTES:]
        if not self.caught_up:
            self.caught_up = self._sign in self._end

    def has(self, stamp: bytes) -> bool:
        """Return whether this is the stamp of the record that came last."""
        return stamp in self._end

    def latencies_us(self) -> array[int]:
        """Return the latencies of all records so far, in their order."""
        assert self._arrivals is not None
        found: array[int] = array("Q")
        rest = b""
        for came_ns, chunk in self._arrivals:
            text = rest + chunk
            end = 0
            for stamp in _SENT.finditer(text):
                found.append((came_ns - int(stamp[1])) // 1000)
                end = stamp.end()
            rest = text[max(end, len(text) - STAMP_BYTES) :]
        return found

    def keep_none(self) -> None:
        """Keep only the time of the last record from now on."""
        self._arrivals = None

    def close(self) -> None:
        self._transport.abort()
