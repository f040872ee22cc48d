"""`python -m bench.loop_holds`: the longest time that a frontend's event loop is held by one piece of work.

Everybody who is connected to a frontend waits meanwhile, so nothing may hold a loop for more than 10 ms. A service of
one frontend runs with `bench.loop_probe` in it while it is asked for what takes long: a first list after a start with
50,000 topics, metrics, pages and bodies of the largest size, a thousand streams. CPU time is what counts: by the clock
a hold is longer when others use the processor. `--markdown` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from bench import figures, machine, wire
from bench.load import Plan, closed_loop, pin
from bench.watchers import WatchPlan, deliver
from tests.harness import Service

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
MOST_US: Final = 10_000
SETTLE_S: Final = 0.2
COMMAND: Final = """#!{python}
import sys
sys.path.insert(0, {root!r})
from bench.loop_probe import install
install({directory!r})
from topicsd import topics_supervisor
sys.exit(topics_supervisor())
"""


class Hold(NamedTuple):
    """One hold: its end on the monotonic clock, its CPU time and its time by the clock, and where the loop was."""

    at_ns: int
    cpu_us: int
    clock_us: int
    where: str

    @classmethod
    def read(cls, line: str) -> Hold:
        at_ns, cpu_us, clock_us, *where = line.split(" ", 3)
        return cls(int(at_ns), int(cpu_us), int(clock_us), where[0] if where else "")


class Row(NamedTuple):
    """The effect of a piece of work on the loop: its longest hold, and how many were over the bound."""

    what: str
    longest: Hold | None
    over: int


class Probed:
    """A service with a probe in its frontend, and the pool from which it is loaded."""

    def __init__(self, service: Service, pool: ProcessPoolExecutor, directory: Path, topics: int) -> None:
        self.service = service
        self.pool = pool
        self.topics = topics
        self._directory = directory

    def holds(self, from_ns: int) -> list[Hold]:
        """Return the holds since then, of all lives of the frontend."""
        lines = [line for path in self._directory.iterdir() for line in path.read_text().splitlines()]
        return [hold for hold in map(Hold.read, lines) if hold.at_ns >= from_ns]

    def row(self, what: str, work: Callable[[Probed], object]) -> Row:
        """Do the work and return what it did to the loop."""
        time.sleep(SETTLE_S)
        from_ns = time.monotonic_ns()
        work(self)
        time.sleep(SETTLE_S)
        held = self.holds(from_ns)
        longest = max(held, key=lambda one: one.cpu_us, default=None)
        row = Row(what, longest, sum(one.cpu_us > MOST_US for one in held))
        print(f"  {what}: {longest}, {row.over} over", file=sys.stderr, flush=True)
        return row

    def load(self, connections: list[list[bytes]], rounds: int = 1) -> None:
        self.pool.submit(closed_loop, Plan(self.service.port, connections, rounds=rounds)).result()

    def ask(self, method: str, path: str, body: object = None, accept: str = "*/*") -> httpx.Response:
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": "application/json"})
        return self.service.client.request(method, path, content=content, headers=headers).raise_for_status()


def make_topics(probed: Probed) -> None:
    requests = [wire.write(f"t-{number:06}", 1) for number in range(probed.topics)]
    probed.load([requests[n::16] for n in range(16)])


def restart(probed: Probed) -> None:
    probed.service.restart()
    probed.ask("GET", "/v0/topics?page_size=100")


def big_record(bytes_: int) -> dict[str, str]:
    return {"data": "x" * bytes_}


def write_many(probed: Probed) -> None:
    for _ in range(5):
        probed.ask("POST", "/v0/topics/many", wire.write_body(10_000))


def write_large(probed: Probed) -> None:
    """Write bodies of 32 MB: the largest body that is allowed has twice as much."""
    body = {"records": [big_record(900_000) for _ in range(35)]}
    for _ in range(3):
        probed.ask("POST", "/v0/topics/large", body)


def write_structures(probed: Probed) -> None:
    """Write records that are not strings: lists of small objects, 8 MB of them."""
    record = {"data": [{"id": n, "name": f"name {n}", "on": True, "at": [n, n + 1]} for n in range(2_000)]}
    for _ in range(3):
        probed.ask("POST", "/v0/topics/structures", {"records": [record] * 80})


def read_pages(probed: Probed) -> None:
    for topic in ("many", "large", "structures"):
        for _ in range(5):
            probed.ask("POST", f"/v0/topics/{topic}/diff", {"from_seq": 0, "limit": 1000})


def use_queue(probed: Probed) -> None:
    probed.ask("PUT", "/v0/topics/jobs", {"type": "queue"})
    for _ in range(10):
        probed.ask("POST", "/v0/topics/jobs", wire.write_body(1000))
    for _ in range(10):
        jobs = probed.ask("POST", "/v0/topics/jobs/claim", {"node": "n", "max": 1000}).json()["claimed"]
        acks = {"seqs": [job["$seq"] for job in jobs], "lease_ids": [job["lease_id"] for job in jobs]}
        probed.ask("POST", "/v0/topics/jobs/ack", {"node": "n"} | acks)


def open_streams(probed: Probed, streams: int = 1000) -> None:
    topic = "watched"
    probed.ask("PUT", f"/v0/topics/{topic}", {})
    watch: dict[str, object] = {"topics": {topic: {}}}
    paths = [probed.ask("POST", "/v0/watch", watch).json()["stream_url"] for _ in range(streams)]
    probed.pool.submit(deliver, WatchPlan(probed.service.port, topic, paths, 20.0, 2.0)).result()


def watch_many(probed: Probed) -> None:
    """Open streams of 256 topics each, the most that one has."""
    names = [f"t-{number:06}" for number in range(256)]
    watch: dict[str, object] = {"topics": {name: {"from_seq": 0} for name in names}}
    for _ in range(20):
        path = probed.ask("POST", "/v0/watch", watch).json()["stream_url"]
        with probed.service.client.stream("GET", path, headers={"Accept": "text/event-stream"}) as stream:
            seen = 0
            for line in stream.iter_lines():
                seen += line.startswith("event: record")
                if seen == min(len(names), probed.topics):
                    break


def connect_many(probed: Probed) -> None:
    probed.load([[wire.write(f"t-{number:06}", 1)] for number in range(min(2000, probed.topics))], rounds=3)


def gets(*paths: str, times: int = 3, accept: str = "*/*") -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        for path in paths * times:
            probed.ask("GET", path, accept=accept)

    return work


WORK: Final[dict[str, Callable[[Probed], object]]] = {
    "topics are made by their first writes, 16 writers": make_topics,
    "a start, and the first list": restart,
    "lists by name": gets("/v0/topics?page_size=1000", "/v0/topics?prefix=t-0"),
    "a restart, and lists by rate and size": lambda probed: (
        probed.service.restart(),
        gets("/v0/topics?sort=rate&order=desc&page_size=100", "/v0/topics?sort=bytes&page_size=1000")(probed),
    ),
    "a list by name that contains something": gets("/v0/topics?sort=topic&contains=99&page_size=1000"),
    "metrics, for people and for programs": lambda probed: (
        gets("/v0/metrics")(probed),
        gets("/v0/metrics", accept="application/json")(probed),
    ),
    "the first write after a start": lambda probed: (
        probed.service.restart(),
        probed.ask("POST", "/v0/topics/t-000000", wire.write_body(1)),
    ),
    "writes of 10,000 records": write_many,
    "writes of 32 MB, strings": write_large,
    "writes of 8 MB, objects": write_structures,
    "pages of these": read_pages,
    "claims and acks of 1,000 jobs": use_queue,
    "streams of 256 topics are opened": watch_many,
    "2,000 connections ask at once (a turn with many requests)": connect_many,
    "1,000 streams, opened 100 at once (a turn with many requests)": open_streams,
}


def table(rows: list[Row]) -> str:
    lines = ["| work | longest hold, CPU ms | by the clock, ms | over 10 ms of CPU | where |", "|---|---|---|---|---|"]
    for what, longest, over in rows:
        if longest is None:
            lines.append(f"| {what} | < 3 | < 6 | 0 | |")
        else:
            cpu_ms, clock_ms = longest.cpu_us / 1000, longest.clock_us / 1000
            where = longest.where if longest.cpu_us > MOST_US else ""
            lines.append(f"| {what} | {cpu_ms:.1f} | {clock_ms:.1f} | {over} | {f'`{where}`' if where else ''} |")
    return "\n".join(lines) + "\n"


def run(topics: int, only: list[str]) -> list[Row]:
    cores = machine.share_cores()
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="topics-holds-") as kept,
        ProcessPoolExecutor(1, spawn, initializer=pin, initargs=(cores.load,)) as pool,
    ):
        directory, command = Path(kept) / "holds", Path(kept) / "topics-supervisor"
        directory.mkdir()
        command.write_text(COMMAND.format(python=sys.executable, root=str(ROOT), directory=str(directory)))
        command.chmod(0o755)
        with Service(shards=2, frontends=1, wal_file_bytes=None, cpus=cores.server, command=command) as service:
            probed = Probed(service, pool, directory, topics)
            names = [name for name in WORK if not only or any(part in name for part in only)]
            return [probed.row(name, WORK[name]) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.loop_holds", description="Measure what holds a frontend's loop.")
    parser.add_argument("--quick", action="store_true", help="2,000 topics instead of 50,000")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="work whose name contains this")
    parser.add_argument("--markdown", action="store_true", help="put the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.markdown and (arguments.quick or arguments.only):
        parser.error("--markdown keeps a full run; leave out --quick and --only")
    busy = os.getloadavg()[0]
    topics = 2_000 if arguments.quick else 50_000
    rows = run(topics, arguments.only)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    described = ", ".join(f"{name} {value}" for name, value in machine.describe(ROOT).items())
    text = f"{date}. {described}, load average before {busy:.1f}; {topics:,} topics.\n\n{table(rows)}"
    print(text)
    if arguments.markdown:
        PAGE.write_text(figures.with_table(PAGE.read_text(), "loop holds", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
