"""Writes that are still done when ten times as many writers as keep the service busy send, and repeat a refused request
at once.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import uvloop

from bench import machine, wire
from bench.cases import Bench
from bench.engine import service_with
from bench.figures import Figure
from bench.load import LoadError, always, percentiles

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ACKED: Final = 200
_REFUSED: Final = 429
TIMES: Final = 10
ROUNDS: Final = 3
LOADS: Final[tuple[tuple[str, int, int, dict[str, str]], ...]] = (
    ("100 B, rings as they are", 32, 100, {}),
    # So that there is no room in the rings for them: most are refused.
    ("15 kB, rings of 64 KiB", 8, 15_000, {"TOPICS_RING_BYTES": "65536"}),
)
"""(what, writers that keep the service busy, bytes of a record, settings)"""


class Crowding(NamedTuple):
    """The load: each of `writers` connections has one write in flight, of one record of `record_bytes` to a capped
    topic of its own, so nothing piles up. Writes are counted for `seconds` after `warm_up_s`.
    """

    port: int
    writers: int
    record_bytes: int
    warm_up_s: float
    seconds: float


class CrowdingOutcome(NamedTuple):
    """Acknowledged and refused writes a second; (p50, p99) in µs of either, (0, 0) if there was none."""

    acked_per_s: float
    refused_per_s: float
    acked_us: tuple[float, float]
    refused_us: tuple[float, float]


def run_crowding(plan: Crowding) -> CrowdingOutcome:
    """Run the plan in this process; LoadError for an answer that is neither a success nor a 429."""
    return uvloop.run(_Run(plan).run())


class _Run:
    def __init__(self, plan: Crowding) -> None:
        self.plan = plan
        self.counting = False
        self.stopped = False
        self.counts: Counter[int] = Counter()
        self.took_us: dict[int, array[int]] = {_ACKED: array("Q"), _REFUSED: array("Q")}
        self.failed: asyncio.Future[None]

    async def run(self) -> CrowdingOutcome:
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        writers = [_Writer(self, number) for number in range(self.plan.writers)]
        for writer in writers:
            await loop.create_connection(always(writer), "127.0.0.1", self.plan.port)
        for writer in writers:
            writer.send()
        await self._for(self.plan.warm_up_s)
        self.counting = True
        start_s = loop.time()
        await self._for(self.plan.seconds)
        seconds = loop.time() - start_s
        self.stopped = True
        for writer in writers:
            writer.close()
        return CrowdingOutcome(
            self.counts[_ACKED] / seconds,
            self.counts[_REFUSED] / seconds,
            _p50_p99(self.took_us[_ACKED]),
            _p50_p99(self.took_us[_REFUSED]),
        )

    async def _for(self, seconds: float) -> None:
        await asyncio.wait([self.failed], timeout=seconds)
        if self.failed.done():
            self.failed.result()

    def fail(self, what: str) -> None:
        if not self.failed.done() and not self.stopped:
            self.failed.set_exception(LoadError(what))


class _Writer(asyncio.Protocol):
    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        body = b'{"records":[{"data":"%b"}],"config":{"cap_records":20}}' % (b"x" * run.plan.record_bytes)
        self._request = wire.post(f"/v0/topics/crowd-{run.plan.writers}-{number}?return_seqs=false", body)
        self._answer = bytearray()
        self._sent_ns = 0
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._run.fail(f"the server closed a connection ({error})")

    def send(self) -> None:
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(self._request)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, chunk: bytes) -> None:
        self._answer += chunk
        end = self._answer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._answer, 0, end + 2)
        status = int(self._answer[9:12])
        kind = _ACKED if status // 100 == 2 else status
        if length is None or kind not in (_ACKED, _REFUSED):
            self._run.fail(self._answer[:500].decode(errors="replace"))
            return
        if len(self._answer) < end + 4 + int(length[1]):
            return
        self._answer.clear()
        run = self._run
        if run.counting:
            run.counts[kind] += 1
            run.took_us[kind].append((time.perf_counter_ns() - self._sent_ns) // 1000)
        if not run.stopped:
            self.send()


def _p50_p99(took_us: array[int]) -> tuple[float, float]:
    if not took_us:
        return 0.0, 0.0
    histogram = percentiles(took_us)
    return histogram.get_value_at_percentile(50), histogram.get_value_at_percentile(99)


def goodput(bench: Bench) -> list[Figure]:
    """Measure the acknowledged writes of enough writers and of ten times as many, in turns on one service, and its
    memory.
    """
    figures = []
    for what, writers, record_bytes, env in LOADS:
        done: dict[int, list[CrowdingOutcome]] = {writers: [], TIMES * writers: []}
        held: list[int] = []
        with service_with(bench, env) as service:
            for _ in range(ROUNDS):
                for count, found in done.items():
                    plan = Crowding(service.port, count, record_bytes, bench.warm_up_s, bench.seconds)
                    found.append(bench.pool.submit(run_crowding, plan).result())
                held.append(machine.memory_of(service.family(), service.shared_memory()).held)
        for count, found in done.items():
            values = {
                "acked_per_s": sum(one.acked_per_s for one in found) / ROUNDS,
                "refused_per_s": sum(one.refused_per_s for one in found) / ROUNDS,
                "acked_p99_us": max(one.acked_us[1] for one in found),
                "refused_p99_us": max(one.refused_us[1] for one in found),
            }
            figures.append(Figure("goodput", f"{what}, {'10 ×' if count > writers else 'so many'} writers", values))
        figures.append(Figure("goodput", f"{what}, memory", {"first_bytes": held[0], "last_bytes": held[-1]}))
    return figures


CASES: dict[str, Callable[[Bench], list[Figure]]] = {"goodput": goodput}
