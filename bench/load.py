"""A load generator that is not the bottleneck: bare transports, requests made beforehand, a process of its own.

`closed_loop` keeps one request in flight on each connection. Latencies are kept as integers and go into an HDR
histogram after the last answer, so that counting costs nothing while the clock runs.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import uvloop
from hdrh.histogram import HdrHistogram

from bench import machine

T = TypeVar("T")
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LATENCY_MAX_US = 60_000_000


class Plan(NamedTuple):
    """Requests to send. Each connection goes round its own requests, for `duration_s` or `rounds` times: each as soon
    as the one before is answered, or `per_s` of them a second. The CPU time of `pids` is taken.
    """

    port: int
    connections: list[list[bytes]]
    warm_up_s: float = 0.0
    duration_s: float = 0.0
    rounds: int = 0
    per_s: float = 0.0
    pids: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """The answers of a plan: counted and timed after the warm-up, and the latencies in µs. The CPU time of the plan's
    processes, and of the load itself, is from the first request to the last answer, the warm-up included.
    """

    answers: int
    seconds: float
    p50_us: float
    p99_us: float
    max_us: float
    cpu_ns: tuple[int, ...] = ()
    load_cpu_ns: int = 0

    @property
    def per_s(self) -> float:
        return self.answers / self.seconds


class LoadError(Exception):
    """An answer that was not a success, or none: a figure made of errors is not a figure."""


def body_of(answer: bytearray) -> bytes | None:
    """Take the body out of an answer once it is whole, else return None. LoadError if it is not 2xx."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = _CONTENT_LENGTH.search(answer, 0, end + 2)
    if answer[9:10] != b"2" or length is None:
        raise LoadError(answer[:500].decode(errors="replace"))
    if len(answer) < end + 4 + int(length[1]):
        return None
    body = bytes(answer[end + 4 :])
    answer.clear()
    return body


def pin(cores: set[int]) -> None:
    """Keep a pool's process on these cores."""
    os.sched_setaffinity(0, cores)


def always(value: T) -> Callable[[], T]:
    """Return a function that returns this value."""
    return lambda: value


def percentiles(latencies_us: array[int]) -> HdrHistogram:
    """Return an HDR histogram of three digits."""
    histogram = HdrHistogram(1, LATENCY_MAX_US, 3)
    for latency_us in latencies_us:
        histogram.record_value(min(max(latency_us, 1), LATENCY_MAX_US))
    return histogram


def read_cpu(pids: Sequence[int]) -> list[int]:
    """Return the CPU time of each of these processes in ns, and behind them that of this one."""
    return [*map(machine.cpu_ns, pids), time.process_time_ns()]


def closed_loop(plan: Plan) -> Outcome:
    """Run the plan in this process; LoadError for the first answer that is not 2xx."""
    return uvloop.run(_Run(plan).run())


class _Run:
    """The connections of one plan, and what they have measured."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.latencies_us: array[int] = array("Q")
        self.measure_from_ns = 0
        self.stop_at_ns = 0
        self.last_answer_ns = 0
        self.failure = ""
        self._open = len(plan.connections)
        self._done = asyncio.Event()

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        clients = [_Client(self, requests) for requests in self.plan.connections]
        for client in clients:
            await loop.create_connection(always(client), "127.0.0.1", self.plan.port)
        self.measure_from_ns = time.perf_counter_ns() + int(self.plan.warm_up_s * 1e9)
        if self.plan.duration_s:
            self.stop_at_ns = self.measure_from_ns + int(self.plan.duration_s * 1e9)
        before = read_cpu(self.plan.pids)
        for client in clients:
            client.send()
        await self._done.wait()
        *cpu_ns, load_cpu_ns = (now - then for now, then in zip(read_cpu(self.plan.pids), before, strict=True))
        if self.failure:
            raise LoadError(self.failure)
        histogram = percentiles(self.latencies_us)
        return Outcome(
            len(self.latencies_us),
            (self.last_answer_ns - self.measure_from_ns) / 1e9,
            histogram.get_value_at_percentile(50),
            histogram.get_value_at_percentile(99),
            histogram.get_max_value(),
            tuple(cpu_ns),
            load_cpu_ns,
        )

    def closed(self) -> None:
        self._open -= 1
        if self._open == 0 or self.failure:
            self._done.set()


class _Client(asyncio.Protocol):
    """One connection with one request in flight."""

    def __init__(self, run: _Run, requests: list[bytes]) -> None:
        self._run = run
        self._requests = requests
        self._next = 0
        self._due_s = 0.0
        self._left = run.plan.rounds * len(requests)
        self._sent_ns = 0
        self._chunks: list[bytes] = []
        self._missing_bytes = 0
        self._finished = False
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._finished:
            self._run.failure = f"the server closed a connection ({error})"
        self._run.closed()

    def send(self) -> None:
        if per_s := self._run.plan.per_s:
            loop = asyncio.get_running_loop()
            self._due_s = max(self._due_s or loop.time() + random.random() / per_s, loop.time() - 1) + 1 / per_s
            loop.call_at(self._due_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(self._requests[self._next])
        self._next += 1
        if self._next == len(self._requests):
            self._next = 0

    def data_received(self, chunk: bytes) -> None:
        if self._missing_bytes == 0:
            if self._chunks:
                chunk = b"".join(self._chunks) + chunk
                self._chunks.clear()
            end = chunk.find(b"\r\n\r\n")
            if end < 0:
                self._chunks.append(chunk)
                return
            length = _CONTENT_LENGTH.search(chunk, 0, end + 2)
            if chunk[9:10] != b"2" or length is None:
                self._fail(chunk[:500].decode(errors="replace"))
                return
            self._missing_bytes = end + 4 + int(length[1]) - len(chunk)
        else:
            self._missing_bytes -= len(chunk)
        if self._missing_bytes == 0:
            self._answered()

    def _answered(self) -> None:
        run = self._run
        now_ns = time.perf_counter_ns()
        if self._sent_ns >= run.measure_from_ns:
            run.latencies_us.append((now_ns - self._sent_ns) // 1000)
            run.last_answer_ns = now_ns
        self._left -= 1
        if self._left == 0 or (run.stop_at_ns and now_ns >= run.stop_at_ns) or run.failure:
            self._finished = True
            self._transport.close()
        else:
            self.send()

    def _fail(self, what: str) -> None:
        self._run.failure = what
        self._finished = True
        self._transport.abort()
