"""Two hundred workers at one queue, half of them over `/work`, half polling: each job is done once, by turns.

Run with `-s` it prints how evenly: Jain's index of jobs per worker, 1 when all did the same, 1/n when one did all; of
each kind, of both together, and each kind's share of the jobs. The figures are in
bench/history/2026-11-22T0048-queue-crowd.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from bench.crowd import Client, put
from tests.harness import Service

STREAMS = POLLERS = 100
JOBS = 6_000
WORK_S = 0.02
"""Time that a job takes. It is the same for all, so a worker that does more was dealt more."""
PAUSE_S = 0.02
DEADLINE_S = 120.0
RUNS_MAX = 4
STANDSTILL_S = 1.0
"""Workers of a frontend that is held up for longer get less than the others': that run is repeated, and no other."""
EVENNESS_MIN = 0.9
"""Within each kind, where all do the same."""
EVENNESS_OF_ALL_MIN = 0.85
SHARES_MIN = {"stream": 0.4, "poller": 0.28}
"""A poller asks twice for each job, and a stream once: where asking takes all the time it is two jobs to one."""
_JOB = re.compile(rb'"\$seq":(\d+),.*?"lease_id":"(lease_[0-9a-f]+)"')


class Crowd:
    """Workers, and the jobs that each did."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.done: Counter[str] = Counter()
        self.seqs: list[int] = []
        self.skipped = 0
        self.longest_wait_s = 0.0
        """The longest wait for any answer."""

    @property
    def finished(self) -> bool:
        return len(self.seqs) >= JOBS

    async def ask(self, client: Client, path: str, body: bytes) -> Any:
        asked_s = time.monotonic()
        answer = await client.ask("POST", path, body)
        self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - asked_s)
        assert answer.status == 200, answer
        return answer.json

    async def ack(self, client: Client, node: str, seq: int, lease_id: str) -> None:
        await asyncio.sleep(WORK_S)
        body = json.dumps({"node": node, "seqs": [seq], "lease_ids": [lease_id]}).encode()
        self.skipped += len((await self.ask(client, "/v0/topics/jobs/ack", body))["skipped"])
        self.done[node] += 1
        self.seqs.append(seq)

    async def poll(self, node: str) -> None:
        client = Client(self.port)
        body = json.dumps({"node": node, "max": 1}).encode()
        while not self.finished:
            claimed = (await self.ask(client, "/v0/topics/jobs/claim", body))["claimed"]
            for job in claimed:
                await self.ack(client, node, job["$seq"], job["lease_id"])
            if not claimed:
                await asyncio.sleep(PAUSE_S)
        client.close()

    async def stream(self, node: str) -> None:
        client = Client(self.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET /v0/topics/jobs/work?node={node}&max=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        try:
            while True:
                job = _JOB.search(await reader.readline())
                if job is not None:
                    await self.ack(client, node, int(job[1]), job[2].decode())
        finally:
            client.close()
            writer.close()

    async def run(self) -> None:
        maker = Client(self.port)
        await put(maker, "jobs", type="queue", lease_ms=60_000)
        streams = [asyncio.create_task(self.stream(f"stream-{number}")) for number in range(STREAMS)]
        pollers = [asyncio.create_task(self.poll(f"poller-{number}")) for number in range(POLLERS)]
        for first in range(0, JOBS, 1000):
            records = [{"data": number} for number in range(first, first + 1000)]
            answer = await maker.ask("POST", "/v0/topics/jobs", json.dumps({"records": records}).encode())
            assert answer.status == 200, answer
        await asyncio.wait_for(asyncio.gather(*pollers), DEADLINE_S)
        for stream in streams:
            assert not stream.done(), stream
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        state = (await maker.ask("GET", "/v0/topics/jobs")).json
        maker.close()
        assert (state["count"], state["queue"]["ready"], state["queue"]["in_flight"]) == (0, 0, 0), state


def evenness(counts: Sequence[int]) -> float:
    """Jain's index."""
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


@pytest.mark.timeout(60 + RUNS_MAX * DEADLINE_S)
def test_two_hundred_workers_do_every_job_once_and_by_turns() -> None:
    unfair: list[str] = []
    for _ in range(RUNS_MAX):
        with Service() as service:
            crowd = Crowd(service.port)
            asyncio.run(crowd.run())
        assert sorted(crowd.seqs) == list(range(1, JOBS + 1))
        assert crowd.skipped == 0
        by_kind = {
            kind: [crowd.done[f"{kind}-{number}"] for number in range(count)]
            for kind, count in (("stream", STREAMS), ("poller", POLLERS))
        }
        shares = {kind: sum(counts) / JOBS for kind, counts in by_kind.items()}
        of_all = evenness([count for counts in by_kind.values() for count in counts])
        said = "\n".join(
            [
                f"{kind}s: {min(counts)} to {max(counts)} jobs each, {shares[kind]:.1%} of all, "
                f"evenness {evenness(counts):.3f}"
                for kind, counts in by_kind.items()
            ]
            + [f"both: evenness {of_all:.3f}; the longest wait for an answer {crowd.longest_wait_s:.2f} s"]
        )
        print(said)
        within = all(min(counts) > 0 and evenness(counts) > EVENNESS_MIN for counts in by_kind.values())
        between = of_all > EVENNESS_OF_ALL_MIN and all(shares[kind] > least for kind, least in SHARES_MIN.items())
        if within and between:
            return
        unfair.append(said)
        if crowd.longest_wait_s < STANDSTILL_S:
            break
    pytest.fail("\n".join(unfair))
