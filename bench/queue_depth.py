"""Cases of queues: the cost of a deep one beside a shallow one, and the time from an ack to the next job.

Both send one request at a time over bare blocking sockets. The deep and the shallow queue get requests in turns, so
other work of the machine is in the figures of both.
"""

from __future__ import annotations

import re
import socket
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple, Self

from bench import machine, wire
from bench.cases import Bench
from bench.engine import NO_CHECKPOINTS, scaled, service_with
from bench.figures import Figure
from bench.load import LoadError, body_of, percentiles
from tests.harness import Service

WAITING: Final = 1_000_000
LEASED: Final = 100_000
SHALLOW: Final = 64
MIXED: Final = 200_000
"""With a moment before which they must not be handed out, and which is over: before a plain one, and as many behind."""
BATCH: Final = 16
CLAIM_MAX: Final = 1000
LEASE_MS: Final = 3_600_000
ASK_MAX: Final = 32
_SEQ = re.compile(rb'"\$seq":(\d+),')


class Connection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: bytes) -> tuple[bytes, float]:
        """Return the body of a good answer, and its latency in µs."""
        start_ns = time.perf_counter_ns()
        self.send(request)
        answer = bytearray()
        while (body := body_of(answer)) is None:
            answer += self.receive()
        return body, (time.perf_counter_ns() - start_ns) / 1000

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def receive(self) -> bytes:
        """Return the next bytes that come."""
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise LoadError("the server closed a connection")
        return chunk


class DepthPlan(NamedTuple):
    """The load: `rounds` of each kind of request at each of these queues."""

    port: int
    queues: tuple[str, ...]
    rounds: int


Latencies = dict[str, dict[str, tuple[float, float]]]
"""By queue, by what was asked: (p50, p99) in µs."""


def ask_in_turns(plan: DepthPlan) -> Latencies:
    """Run the plan in this process. Acknowledged jobs are written again, so the queues keep their depth."""
    found: dict[str, dict[str, array[int]]] = {queue: defaultdict(lambda: array("Q")) for queue in plan.queues}
    with Connection(plan.port) as connection:
        for _ in range(plan.rounds):
            for queue in plan.queues:
                _round(connection, queue, found[queue])
    return {queue: {what: _p50_p99(took) for what, took in kinds.items()} for queue, kinds in found.items()}


def _round(connection: Connection, queue: str, found: dict[str, array[int]]) -> None:
    path = f"/v0/topics/{queue}"

    def ask(what: str, verb: str, body: bytes) -> bytes:
        answer, took_us = connection.ask(wire.post(f"{path}/{verb}", b'{"node":"w",%b}' % body))
        found[what].append(round(took_us))
        return answer

    def seqs(answer: bytes, count: int) -> bytes:
        named = _SEQ.findall(answer)
        if len(named) != count:
            raise LoadError(f"{len(named)} jobs instead of {count} from {queue}")
        return b",".join(named)

    for batch in (1, BATCH):
        jobs = seqs(ask(f"claim {batch}", "claim", b'"max":%d' % batch), batch)
        if b'"nacked":%d,' % batch not in ask(f"nack {batch}", "nack", b'"seqs":[%b]' % jobs):
            raise LoadError("not everything was nacked")
        again = seqs(ask(f"claim {batch} returned", "claim", b'"max":%d' % batch), batch)
        if again != jobs:
            raise LoadError(f"{again!r} came instead of {jobs!r}, which were returned")
        if b'"acked":%d,' % batch not in ask(f"ack {batch}", "ack", b'"seqs":[%b]' % jobs):
            raise LoadError("not everything was acknowledged")
        connection.ask(wire.write(queue, batch))


def _p50_p99(took_us: array[int]) -> tuple[float, float]:
    histogram = percentiles(took_us)
    return histogram.get_value_at_percentile(50), histogram.get_value_at_percentile(99)


class RefillPlan(NamedTuple):
    """The load: `rounds` of an ack on one connection and the next job on the stream of another."""

    port: int
    queue: str
    rounds: int


def refill(plan: RefillPlan) -> dict[str, tuple[float, float]]:
    """Return (p50, p99) in µs from just before an ack is sent until the next job has come, through the stream's own
    frontend and through another one. Runs in this process.
    """
    opened = [Connection(plan.port) for _ in range(ASK_MAX)]
    try:
        by_frontend = [_frontend_of(plan.port, connection) for connection in opened]
        if len(set(by_frontend)) < 2:
            raise LoadError(f"all of {ASK_MAX} connections came to one frontend")
        found = {}
        for what, same in (("its own frontend", True), ("another frontend", False)):
            first, second = next(
                (a, b) for a in range(1, ASK_MAX) for b in range(a) if (by_frontend[a] == by_frontend[b]) == same
            )
            stream, acks = Connection(plan.port), opened[second]
            while _frontend_of(plan.port, stream) != by_frontend[first]:
                stream = Connection(plan.port)
            with stream:
                found[what] = _refills(plan, stream, acks)
        return found
    finally:
        for connection in opened:
            connection.__exit__()


def _frontend_of(port: int, connection: Connection) -> int:
    """Return the frontend of this connection: the one whose count of requests goes up with them."""
    before = _requests(connection)
    for _ in range(ASK_MAX):
        connection.ask(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    grown = [after - count for count, after in zip(before, _requests(connection), strict=True)]
    return grown.index(max(grown))


def _requests(connection: Connection) -> list[int]:
    body, _ = connection.ask(b"GET /v0/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return [int(count) for count in re.findall(rb"\ntopics_frontend_requests_total\{[^}]*\} (\d+)", body)]


def _refills(plan: RefillPlan, stream: Connection, acks: Connection) -> tuple[float, float]:
    stream.send(f"GET /v0/topics/{plan.queue}/work?node=w&max=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    took_us = array("Q")
    seq = _next_job(stream)
    for _ in range(plan.rounds):
        ack = wire.post(f"/v0/topics/{plan.queue}/ack", b'{"node":"w","seqs":[%b]}' % seq)
        start_ns = time.perf_counter_ns()
        acks.send(ack)
        seq = _next_job(stream)
        took_us.append((time.perf_counter_ns() - start_ns) // 1000)
        answer = b""
        while b'"acked":' not in answer:
            answer += acks.receive()
    return _p50_p99(took_us)


def _next_job(stream: Connection) -> bytes:
    came = b""
    while (job := _SEQ.search(came)) is None:
        came += stream.receive()
    return job[1]  # what is left of its event has no seq in it


def queue_depth(bench: Bench) -> list[Figure]:
    """Measure claims, acks and nacks at a queue with a million jobs waiting and a hundred thousand leased, and at one
    where a plain job waits among many with a `deliver_at`.
    """
    waiting, label = scaled(bench, WAITING)
    leased = LEASED * waiting // WAITING
    figures = []
    with service_with(bench, NO_CHECKPOINTS) as service:
        config = {"type": "queue", "lease_ms": LEASE_MS}
        for queue in ("deep", "mixed", "shallow"):
            service.client.put(f"/v0/topics/{queue}", json=config).raise_for_status()
        bench.fill(service, ["deep"], waiting + leased)
        bench.run(service, [[wire.write("shallow", SHALLOW)]], 1)
        asking, many = _write_asking("mixed"), scaled(bench, MIXED)[0] // CLAIM_MAX
        for request, times in ((asking, many), (wire.write("mixed", 1), 1), (asking, many)):
            bench.run(service, [[request]], times)
        before = machine.memory_of(service.family(), service.shared_memory())
        lease_many(service, "deep", leased)
        after = machine.memory_of(service.family(), service.shared_memory())
        state = service.client.get("/v0/topics/deep").raise_for_status().json()["queue"]
        assert (state["ready"], state["in_flight"]) == (waiting, leased), state
        plan = DepthPlan(service.port, ("deep", "mixed", "shallow"), 100 if bench.quick else 1000)
        found = bench.pool.submit(ask_in_turns, plan).result()
        memory = {"per_lease_bytes": (after.held - before.held) / leased}
        figures.append(Figure("depth", f"{label} waiting, {leased // 1000} k leased", memory))
    for queue, kinds in found.items():
        for what, (p50_us, p99_us) in kinds.items():
            figures.append(Figure("depth", f"{queue}, {what}", {"p50_us": p50_us, "p99_us": p99_us}))
    return figures


def _write_asking(queue: str) -> bytes:
    """Return a write of jobs with a `deliver_at`, of the same length as those of `wire.write`."""
    records = b",".join(b'{"data":%b,"deliver_at":1}' % wire.data(n) for n in range(CLAIM_MAX))
    return wire.post(f"/v0/topics/{queue}?return_seqs=false", b'{"records":[%b]}' % records)


def lease_many(service: Service, queue: str, count: int) -> None:
    """Lease so many jobs to a worker that does nothing with them."""
    for _ in range(count // CLAIM_MAX):
        answer = service.client.post(f"/v0/topics/{queue}/claim", json={"node": "holder", "max": CLAIM_MAX})
        assert answer.raise_for_status().json()["count"] == CLAIM_MAX


def queue_refill(bench: Bench) -> list[Figure]:
    """Measure the time from an ack to the next job on a `/work` stream."""
    rounds = 200 if bench.quick else 2000
    with Service(shards=1, frontends=2, wal_file_bytes=None, cpus=bench.cores.server) as service:
        service.client.put("/v0/topics/jobs", json={"type": "queue", "lease_ms": LEASE_MS}).raise_for_status()
        bench.fill(service, ["jobs"], 10_000)
        found = bench.pool.submit(refill, RefillPlan(service.port, "jobs", rounds)).result()
    return [
        Figure("refill", f"ack through {what}", {"p50_us": p50_us, "p99_us": p99_us})
        for what, (p50_us, p99_us) in found.items()
    ]


CASES: dict[str, Callable[[Bench], list[Figure]]] = {"queue_depth": queue_depth, "queue_refill": queue_refill}
