"""Claim → ack: workers that do nothing else, on bare transports, in a process of their own."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from typing import NamedTuple, cast

import uvloop

from bench import wire
from bench.load import LoadError, always, body_of, percentiles

_SEQ = re.compile(rb'"\$seq":(\d+),')


class WorkPlan(NamedTuple):
    """The load: `workers` connections claim `batch` jobs of `topic` and ack them together, for `duration_s`."""

    port: int
    topic: str
    workers: int
    batch: int
    warm_up_s: float
    duration_s: float


class WorkOutcome(NamedTuple):
    """The result: jobs acknowledged in the measured time; latencies in µs of a claim and its ack together."""

    jobs: int
    seconds: float
    p50_us: float
    p99_us: float

    @property
    def per_s(self) -> float:
        return self.jobs / self.seconds


def work(plan: WorkPlan) -> WorkOutcome:
    """Run the plan in this process; LoadError for an answer that is not 2xx, or when the jobs run out."""
    return uvloop.run(_Run(plan).run())


class _Run:
    def __init__(self, plan: WorkPlan) -> None:
        self.plan = plan
        self.jobs = 0
        self.latencies_us: array[int] = array("Q")
        self.failure = ""
        self.measure_from_ns = time.perf_counter_ns() + int(plan.warm_up_s * 1e9)
        self.stop_at_ns = self.measure_from_ns + int(plan.duration_s * 1e9)
        self.last_ns = 0
        self.open = plan.workers
        self.done = asyncio.Event()

    async def run(self) -> WorkOutcome:
        loop = asyncio.get_running_loop()
        workers = [_Worker(self, f"w{n}") for n in range(self.plan.workers)]
        for worker in workers:
            await loop.create_connection(always(worker), "127.0.0.1", self.plan.port)
        for worker in workers:
            worker.claim()
        await self.done.wait()
        if self.failure:
            raise LoadError(self.failure)
        histogram = percentiles(self.latencies_us)
        seconds = (self.last_ns - self.measure_from_ns) / 1e9
        return WorkOutcome(
            self.jobs, seconds, histogram.get_value_at_percentile(50), histogram.get_value_at_percentile(99)
        )

    def closed(self) -> None:
        self.open -= 1
        if not self.open or self.failure:
            self.done.set()


class _Worker(asyncio.Protocol):
    """One connection that claims, acknowledges, and repeats that."""

    def __init__(self, run: _Run, node: str) -> None:
        plan = run.plan
        self._run = run
        self._ack_path = f"/v0/topics/{plan.topic}/ack"
        self._node = node.encode()
        claim = b'{"node":"%b","max":%d}' % (self._node, plan.batch)
        self._claim = wire.post(f"/v0/topics/{plan.topic}/claim", claim)
        self._acking = 0
        self._started_ns = 0
        self._answer = bytearray()
        self._finished = False
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._finished:
            self._run.failure = f"the server closed a connection ({error})"
        self._run.closed()

    def claim(self) -> None:
        self._acking = 0
        self._started_ns = time.perf_counter_ns()
        self._transport.write(self._claim)

    def data_received(self, chunk: bytes) -> None:
        self._answer += chunk
        try:
            body = body_of(self._answer)
        except LoadError as error:
            self._fail(str(error))
            return
        if body is not None:
            self._acked(body) if self._acking else self._claimed(body)

    def _claimed(self, body: bytes) -> None:
        seqs = _SEQ.findall(body)
        if not seqs:
            self._fail("there were not enough jobs for the whole measurement")
            return
        self._acking = len(seqs)
        ack = b'{"node":"%b","seqs":[%b]}' % (self._node, b",".join(seqs))
        self._transport.write(wire.post(self._ack_path, ack))

    def _acked(self, body: bytes) -> None:
        run = self._run
        if b'"acked":%d,' % self._acking not in body:
            self._fail(f"not everything was acknowledged: {body[:200]!r}")
            return
        now_ns = time.perf_counter_ns()
        if self._started_ns >= run.measure_from_ns:
            run.jobs += self._acking
            run.latencies_us.append((now_ns - self._started_ns) // 1000)
            run.last_ns = now_ns
        if now_ns >= run.stop_at_ns or run.failure:
            self._finished = True
            self._transport.close()
        else:
            self.claim()

    def _fail(self, what: str) -> None:
        self._run.failure = what
        self._finished = True
        self._transport.abort()
