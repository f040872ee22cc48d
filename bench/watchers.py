"""Write → deliver: one paced writer and many event streams in one process, so that one clock times both ends."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from typing import NamedTuple, cast

import uvloop

from bench import wire
from bench.load import LoadError, percentiles

_SENT = re.compile(rb'"sent_ns":(\d{1,20})\}')
TAIL_BYTES = 64
"""A stamp is shorter than this: the rest of a chunk that may hold the beginning of one."""
SETTLE_WRITES = 20
DRAIN_DEADLINE_S = 10.0


class WatchPlan(NamedTuple):
    """`stream_paths` are sessions made beforehand; one write every `1 / writes_per_s` for `duration_s`."""

    port: int
    topic: str
    stream_paths: list[str]
    writes_per_s: float
    duration_s: float


class WatchOutcome(NamedTuple):
    """Latencies from just before the write was sent until the record was read from a stream, in µs."""

    deliveries: int
    p50_us: float
    p99_us: float
    max_us: float


def deliver(plan: WatchPlan) -> WatchOutcome:
    """Runs the plan in this process; LoadError when a record did not reach a watcher."""
    return uvloop.run(_run(plan))


async def _run(plan: WatchPlan) -> WatchOutcome:
    loop = asyncio.get_running_loop()
    watchers = []
    for path in plan.stream_paths:
        _, watcher = await loop.create_connection(_Watcher, "127.0.0.1", plan.port)
        watcher.open(path)
        watchers.append(watcher)
    await _until(lambda: all(watcher.caught_up for watcher in watchers), "every stream to be caught up")
    reader, writer = await asyncio.open_connection("127.0.0.1", plan.port)
    writes = SETTLE_WRITES + int(plan.writes_per_s * plan.duration_s)
    start = loop.time()
    for number in range(writes):
        await asyncio.sleep(max(0.0, start + number / plan.writes_per_s - loop.time()))
        body = b'{"records":[{"data":{"pad":"%s","sent_ns":%d}}]}' % (b"x" * 60, time.perf_counter_ns())
        writer.write(wire.post(f"/v0/topics/{plan.topic}?return_seqs=false", body))
        head = await reader.readuntil(b"\r\n\r\n")
        if head[9:10] != b"2":
            raise LoadError(head.decode(errors="replace"))
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
    await _until(
        lambda: all(len(watcher.latencies_us) >= writes for watcher in watchers), "every record at every watcher"
    )
    writer.close()
    latencies_us: array[int] = array("Q")
    for watcher in watchers:
        latencies_us.extend(watcher.latencies_us[SETTLE_WRITES:])
        watcher.close()
    histogram = percentiles(latencies_us)
    return WatchOutcome(
        len(latencies_us),
        histogram.get_value_at_percentile(50),
        histogram.get_value_at_percentile(99),
        histogram.get_max_value(),
    )


async def _until(true: object, what: str) -> None:
    assert callable(true)
    deadline = time.monotonic() + DRAIN_DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            raise LoadError(f"not within {DRAIN_DEADLINE_S} s: {what}")
        await asyncio.sleep(0.01)


class _Watcher(asyncio.Protocol):
    """One event stream; looks only for the time stamps in it."""

    def __init__(self) -> None:
        self.latencies_us: array[int] = array("Q")
        self.caught_up = False
        self._tail = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def open(self, path: str) -> None:
        request = f"GET {path} HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n"
        self._transport.write(request.encode())

    def data_received(self, chunk: bytes) -> None:
        now_ns = time.perf_counter_ns()
        chunk = self._tail + chunk
        end = 0
        for stamp in _SENT.finditer(chunk):
            self.latencies_us.append((now_ns - int(stamp[1])) // 1000)
            end = stamp.end()
        if not self.caught_up:
            self.caught_up = b"event: caught-up" in chunk
        self._tail = chunk[max(end, len(chunk) - TAIL_BYTES) :]

    def close(self) -> None:
        self._transport.abort()
