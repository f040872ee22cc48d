"""`python -m bench.scaling`: what an operation costs as everything around it grows, and what follows for more cores.

Sizes that grow: shards and frontends, records of a topic, topics, connections, event streams. Each point has the rate,
which other work on the machine lowers, and the CPU time of the service's processes for one operation, which other work
hardly touches. A cost that is flat stays within 1.3 of the one at the smallest size. `--markdown` puts the tables into
docs/benchmarks.md and docs/scale.md and keeps the run in bench/history.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench import figures, machine, wire
from bench.cases import Bench, make_topic
from bench.client import RawConnection
from bench.engine import service_with, wait_absorbed
from bench.figures import Report
from bench.load import Plan, closed_loop, pin
from bench.scaling_tables import Point, costs_table, growth_table, layouts_table, lines_of
from bench.watchers import WatchPlan, deliver
from tests.harness import Service
from topics import __version__

ROOT: Final = Path(__file__).parents[1]
LATEST: Final = ROOT / "bench" / "out" / "scaling.json"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
MODEL_PAGE: Final = ROOT / "docs" / "scale.md"
ROLES: Final = ("frontend", "walshard", "compactor")
SETTINGS: Final = {
    # What was written is in segments soon, so that the compactor's part can be told, by one cut if it is little.
    "TOPICS_CHECKPOINT_INTERVAL_MS": "5000",
    "TOPICS_SHARD_WAIT_MS": "30000",  # a busy machine makes the figures poor, and does not end the run
    "TOPICS_MAX_TOPICS": "200000",
    "TOPICS_MAX_WATCH_SESSIONS": "20000",
    "TOPICS_MAX_SSE_CONNECTIONS": "20000",
    "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": "20000",
}
PAGES_MAX: Final = 400
WRITERS: Final = 16
WARM_UP_ROUNDS: Final = 20
TURNS: Final = 3
PACES: Final = {1: 200.0, 10: 200.0, 100: 50.0, 1000: 20.0, 10_000: 4.0}
"""Writes a second to a topic of so many streams."""
UNPAUSED_MAX: Final = 3_000_000
"""Deliveries of the part without a pause."""


class Sizes(NamedTuple):
    """The sizes of each dimension."""

    layouts: tuple[int, ...] = (1, 2, 4)
    records: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000)
    topics: tuple[int, ...] = (1, 100, 10_000, 100_000)
    connections: tuple[int, ...] = (1, 10, 100, 1000, 10_000)


QUICK: Final = Sizes((1, 2), (10_000, 50_000), (1, 500), (1, 50))


class Meter:
    """Measures operations on one service at one size."""

    def __init__(self, bench: Bench, service: Service, dimension: str, size: int) -> None:
        self.bench = bench
        self.service = service
        self.dimension = dimension
        self.size = size
        self._role_of = {
            one["pid"]: one["role"] for one in service.status()["processes"] if one["pid"] and one["role"] in ROLES
        }

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._role_of)

    def read_cpu(self) -> list[int]:
        return [machine.cpu_ns(pid) for pid in self.pids]

    def point(self, operation: str, per_s: float, count: int, cpu_ns: Sequence[int], load_cpu_ns: int) -> Point:
        us = dict.fromkeys(ROLES, 0.0)
        for role, took_ns in zip(self._role_of.values(), cpu_ns, strict=True):
            us[role] += took_ns / 1000 / count
        print(f"  {operation}, {self.size:,}: {per_s:,.0f}/s, {us}", file=sys.stderr, flush=True)
        frontend_us, shard_us, compactor_us = us.values()
        load_us = load_cpu_ns / 1000 / count
        return Point(self.dimension, operation, self.size, per_s, frontend_us, shard_us, compactor_us, load_us)

    def ask(self, operation: str, connections: list[list[bytes]], *, rounds: int = 0, turns: int = TURNS) -> Point:
        """Send these requests round and round for the length of a measurement, or so many times. Of a few turns the
        cheapest counts: what else the machine does makes an operation dearer, never cheaper.
        """
        if turns > 1:
            self.bench.run(self.service, [requests[:1] for requests in connections], WARM_UP_ROUNDS)
        plan = Plan(
            self.service.port,
            connections,
            duration_s=0.0 if rounds else self.bench.seconds / turns,
            rounds=rounds // turns,
            pids=self.pids,
        )
        outcomes = [self.bench.pool.submit(closed_loop, plan).result() for _ in range(turns)]
        outcome = min(outcomes, key=lambda one: sum(one.cpu_ns) / one.answers)
        return self.point(operation, outcome.per_s, outcome.answers, outcome.cpu_ns, outcome.load_cpu_ns)

    def write(self, operation: str, topics: Sequence[str], batch: int) -> Point:
        """Write to each of these topics by one connection, and wait until all of it is in segments: the compactor's
        part is what it took by then.
        """
        wait_absorbed(self.service)
        before = self.read_cpu()
        # So that the warm-up does not count, whose records the compactor moves, too.
        point = self.ask(operation, [[wire.write(topic, batch)] for topic in topics], turns=1)
        wait_absorbed(self.service)
        took = [now - then for now, then in zip(self.read_cpu(), before, strict=True)]
        compactor_ns = sum(ns for ns, role in zip(took, self._role_of.values(), strict=True) if role == "compactor")
        records = sum(
            self.service.client.get(f"/v0/topics/{topic}").raise_for_status().json()["head_seq"] for topic in topics
        )
        return point._replace(compactor_us=compactor_ns / 1000 / (records / batch), records=batch)

    def deliver(self, operation: str, streams: int, *, paced: bool) -> Point:
        """Deliver to so many streams of one topic: at a pace, or without a pause."""
        topic = make_topic(self.service, f"watched-{streams}", "disk")
        watch: dict[str, object] = {"topics": {topic: {}}}
        paths = [
            self.service.client.post("/v0/watch", json=watch).raise_for_status().json()["stream_url"]
            for _ in range(streams)
        ]
        writes_max = max(20, UNPAUSED_MAX // streams)
        plan = WatchPlan(
            self.service.port, topic, paths, PACES.get(streams, 50.0), self.bench.seconds, self.pids, writes_max
        )
        outcome = self.bench.pool.submit(deliver, plan).result()
        used = outcome.paced if paced else outcome.unpaused
        per_s = PACES.get(streams, 50.0) * streams if paced else outcome.deliveries_per_s
        return self.point(operation, per_s, used.deliveries, used.cpu_ns, used.load_cpu_ns)


@contextmanager
def metered(bench: Bench, dimension: str, size: int = 0, settings: Mapping[str, str] = SETTINGS) -> Iterator[Meter]:
    """Start a fresh service, and end it without a last cut. The case may change the size of the meter."""
    with service_with(bench, settings) as service:
        yield Meter(bench, service, dimension, size)
        service.kill_group()


def layouts(bench: Bench, sizes: Sequence[int]) -> list[Point]:
    """Measure every operation with so many frontends and as many shards."""
    found = []
    for size in sizes:
        with metered(bench._replace(frontends=size, shards=size), "shards and frontends", size) as meter:
            service = meter.service
            for name, writers, batch in (
                ("a lone write", 1, 1),
                ("a write of 1, 64 writers", 64, 1),
                ("a write of 100, 16 writers", WRITERS, 100),
                ("a write of 1000, 16 writers", WRITERS, 1000),
            ):
                topics = [make_topic(service, f"w-{writers}-{batch}-{n}", "disk") for n in range(writers)]
                found.append(meter.write(name, topics, batch))
            readers = [make_topic(service, f"r-{n}", "disk") for n in range(4)]
            bench.fill(service, readers, 4 * PAGES_MAX * 256)
            wait_absorbed(service)
            for limit in (256, 1000):
                pages = [
                    [wire.diff(topic, start, limit) for start in range(0, PAGES_MAX * 256 - limit, limit)]
                    for topic in readers
                ]
                point = meter.ask(f"a read of {limit}, 4 readers", pages)
                found.append(point._replace(records=limit))
            behind = [[wire.diff(topic, PAGES_MAX * 256, 256)] for topic in readers] * 4
            found.append(meter.ask("a read of nothing new, 16 readers", behind)._replace(records=0))
            found.append(meter.deliver("a delivery, 100 streams", 100, paced=False))
    return found


def records(bench: Bench, sizes: Sequence[int]) -> list[Point]:
    """Measure a topic of so many records, all in segments."""
    found = []
    with metered(bench, "records in a topic") as meter:
        service = meter.service
        for meter.size in sizes:
            topic = make_topic(service, f"t-{meter.size}", "disk")
            before = meter.read_cpu()
            bench.fill(service, [topic], meter.size)
            wait_absorbed(service)
            took = [now - then for now, then in zip(meter.read_cpu(), before, strict=True)]
            moved = meter.point("a record moved into a segment", 0.0, meter.size, took, 0)
            found.append(moved._replace(frontend_us=0.0, shard_us=0.0))
            step = max(256, meter.size // PAGES_MAX)
            pages = [wire.diff(topic, start, 256) for start in range(0, meter.size - 256, step)]
            found.append(meter.ask("a read of 256, anywhere", [pages]))
            singles = [wire.diff(topic, start, 1) for start in range(0, meter.size - 1, step)]
            found.append(meter.ask("a read of 1, anywhere", [singles]))
            found.append(meter.ask("a read of nothing new", [[wire.diff(topic, meter.size, 256)]]))
            found.append(meter.ask("the state of the topic", [[get(f"/v0/topics/{topic}")]]))
            found.append(meter.ask("a write of 1", [[wire.write(topic, 1)]], rounds=3000 if not bench.quick else 300))
            found.append(meter.ask("a write of 100", [[wire.write(topic, 100)]], rounds=300 if not bench.quick else 50))
    return found


def topics(bench: Bench, sizes: Sequence[int]) -> list[Point]:
    """Measure a service of so many topics: operations go round all of them."""
    found = []
    made = 0
    # Cuts come as they do by default: each has a file to make for each topic that was written to.
    settings = {name: value for name, value in SETTINGS.items() if name != "TOPICS_CHECKPOINT_INTERVAL_MS"}
    with metered(bench, "topics", settings=settings) as meter:
        for meter.size in sizes:
            names = [f"t-{number:06}" for number in range(meter.size)]
            new = [wire.write(name, 1) for name in names[made:]]
            shares = [share for share in (new[n::WRITERS] for n in range(WRITERS)) if share]
            created = meter.ask("a topic made by its first write", shares, rounds=1, turns=1)
            if made:  # one topic is no measurement
                found.append(created)
            made = meter.size
            spread = [names[n % meter.size :: WRITERS] for n in range(WRITERS)]
            found.append(
                meter.ask("a write of 1, 16 writers", [[wire.write(name, 1) for name in share] for share in spread])
            )
            found.append(
                meter.ask("a read of 1, 16 readers", [[wire.diff(name, 0, 1) for name in share] for share in spread])
            )
            lists = [get(f"/v0/topics?page_size=1&prefix={name}") for name in names[:: max(1, meter.size // PAGES_MAX)]]
            found.append(meter.ask("a list of one topic", [lists]))
    return found


def connections(bench: Bench, sizes: Sequence[int]) -> list[Point]:
    """Measure so many connections that all write, one request at a time each, and so many event streams."""
    found = []
    with metered(bench, "connections") as meter:
        names = [make_topic(meter.service, f"t-{n}", "disk") for n in range(WRITERS)]
        for meter.size in sizes:
            requests = [[wire.write(names[n % WRITERS], 1)] for n in range(meter.size)]
            found.append(meter.ask("a write of 1, each connection writes", requests, turns=1))
        for meter.size in sizes:
            with idle_connections(meter.service.port, meter.size):
                requests = [[wire.write(name, 1)] for name in names]
                found.append(meter.ask("a write of 1, 16 writers, the others are idle", requests))
        for meter.size in sizes:
            found.append(meter.deliver("a delivery, each connection is a stream of one topic", meter.size, paced=True))
    return found


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """Keep connections open that have asked once and may ask again."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(RawConnection(port)).ask(get("/v0/live"))
        yield


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


CASES: Final[dict[str, Callable[[Bench, Sequence[int]], list[Point]]]] = {
    "layouts": layouts,
    "records": records,
    "topics": topics,
    "connections": connections,
}


def main() -> int:
    arguments = parse()
    cores = machine.share_cores()
    busy = os.getloadavg()[0]
    sizes = QUICK if arguments.quick else Sizes()
    found: list[Point] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=pin, initargs=(cores.load,)) as pool:
        bench = Bench(
            pool=pool,
            cores=cores,
            seconds=0.4 if arguments.quick else 2.0,
            warm_up_s=0.2,
            frontends=1,
            shards=1,
            quick=arguments.quick,
        )
        for name in arguments.only or CASES:
            print(f"scaling: {name} …", file=sys.stderr, flush=True)
            found += CASES[name](bench, getattr(sizes, name))
    report = Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        version=__version__,
        machine=machine.describe(ROOT) | {"load average before": f"{busy:.1f}"},
        layout={"server on cores": str(len(cores.server)), "load on cores": str(len(cores.load))},
        quick=arguments.quick,
        figures=[point.figure() for point in found],
        targets=[line.target() for line in lines_of(found)],
    )
    described = f"{report.date}. " + ", ".join(f"{name} {value}" for name, value in report.machine.items()) + "."
    flat = f"{described}\n\n{growth_table(found)}"
    print(flat)
    model = ""
    if "layouts" in (arguments.only or CASES):
        model = f"{described}\n\n{costs_table(found)}\n{layouts_table(found)}"
        print(model)
    figures.keep(report, LATEST)
    if arguments.markdown:
        figures.keep(report, ROOT / "bench" / "history" / figures.history_name(report, "-scaling"))
        PAGE.write_text(figures.with_table(PAGE.read_text(), "scaling", flat))
        MODEL_PAGE.write_text(figures.with_table(MODEL_PAGE.read_text(), "model", model))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.scaling", description="Measure what grows with what, on this machine.")
    parser.add_argument("--quick", action="store_true", help="small sizes and short measurements, to see that it runs")
    names = ", ".join(CASES)
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE", help=f"may be repeated: {names}")
    parser.add_argument("--markdown", action="store_true", help="put the tables into the documentation, keep the run")
    arguments = parser.parse_args()
    if arguments.markdown and (arguments.quick or arguments.only):
        parser.error("--markdown keeps a full run; leave out --quick and --only")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
