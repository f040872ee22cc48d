"""`python -m bench.loop_holds`: the longest time that a frontend's event loop, or a shard, is held by one thing.

Everybody who is connected to a frontend waits meanwhile, and everybody who asks the shard. So nothing may hold either
for more than 10 ms. A service of one frontend and two shards runs with `bench.loop_probe` in it while it is asked for
what takes long: a first list after a start with 50,000 topics, metrics, pages and bodies of the largest size, many
streams, many routers. CPU time is what counts: by the clock a hold is longer when others use the processor.
`--markdown` puts the table into docs/benchmarks.md.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from bench import figures, machine, wire
from bench.load import Plan, closed_loop, pin
from bench.mass_close import TOPIC, CrowdPlan, Kind, close_crowd, open_crowd
from bench.watchers import WatchPlan, deliver
from tests.contract.socket_client import Socket
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


class Held(NamedTuple):
    """The effect of a piece of work on the processes of one role: the longest hold, and how many are over the bound."""

    longest: Hold | None
    over: int

    @classmethod
    def of(cls, holds: list[Hold]) -> Held:
        longest = max(holds, key=lambda one: one.cpu_us, default=None)
        return cls(longest, sum(one.cpu_us > MOST_US for one in holds))

    def cells(self) -> str:
        """Return its cells of a line of the table."""
        if self.longest is None:
            return "< 3 | < 6 | 0"
        return f"{self.longest.cpu_us / 1000:.1f} | {self.longest.clock_us / 1000:.1f} | {self.over}"


class Row(NamedTuple):
    """The effect of a piece of work."""

    what: str
    frontend: Held
    shards: Held


class Probed:
    """A service with a probe in its frontend, and the pool from which it is loaded."""

    def __init__(self, service: Service, pool: ProcessPoolExecutor, directory: Path, topics: int) -> None:
        self.service = service
        self.pool = pool
        self.topics = topics
        self._directory = directory

    def held(self, role: str, from_ns: int) -> Held:
        """Return what held the processes of this role since then, over all of their lives."""
        lines = [line for path in self._directory.glob(f"{role}-*") for line in path.read_text().splitlines()]
        return Held.of([hold for hold in map(Hold.read, lines) if hold.at_ns >= from_ns])

    def row(self, what: str, work: Callable[[Probed], object]) -> Row:
        """Do the work and return what it did to the loops, but for what comes before it."""
        if what in CROWDS:
            self.gather(*CROWDS[what])
        time.sleep(SETTLE_S)
        from_ns = time.monotonic_ns()
        work(self)
        time.sleep(SETTLE_S)
        row = Row(what, self.held("frontend", from_ns), self.held("shard", from_ns))
        print(f"  {what}:\n    frontend {row.frontend}\n    shards {row.shards}", file=sys.stderr, flush=True)
        return row

    def gather(self, kind: Kind, clients: int, resets: bool) -> None:
        """Have a crowd connect."""
        self.ask("PUT", f"/v0/topics/{TOPIC}", {})
        self.pool.submit(open_crowd, CrowdPlan(self.service.port, kind, clients, resets)).result()

    def load(self, connections: list[list[bytes]], rounds: int = 1) -> None:
        self.pool.submit(closed_loop, Plan(self.service.port, connections, rounds=rounds)).result()

    def ask(self, method: str, path: str, body: object = None, accept: str = "*/*") -> httpx.Response:
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": "application/json"})
        return self.service.client.request(method, path, content=content, headers=headers).raise_for_status()


def spread(requests: list[bytes]) -> list[list[bytes]]:
    """Spread requests over 16 connections."""
    return [requests[n::16] for n in range(16)]


def make_topics(probed: Probed) -> None:
    probed.load(spread([wire.write(f"t-{number:06}", 1) for number in range(probed.topics)]))


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


def write_attributes(probed: Probed) -> None:
    """Write 10,000 records with a tag and meta, in less than 1 MiB."""
    record = {"data": 1, "tag": "a:b", "meta": {"k": "v"}}
    for _ in range(5):
        probed.ask("POST", "/v0/topics/attributed", {"records": [record] * 10_000})


def leave_out(probed: Probed) -> None:
    """Ask for the records of others where there are none: a page is looked through for each answer."""
    record = {"data": 1, "node": "me"}
    for _ in range(2):
        probed.ask("POST", "/v0/topics/own", {"records": [record] * 10_000})
    for _ in range(5):
        probed.ask("POST", "/v0/topics/own/diff", {"from_seq": 0, "limit": 1000, "node": "me"})


def delete_many(probed: Probed) -> None:
    """Delete by tag and by seq out of 300,000 records."""
    probed.ask("PUT", "/v0/topics/tagged", {})
    body = json.dumps({"records": [{"data": n, "tag": f"t:{n % 3}"} for n in range(10_000)]}).encode()
    for _ in range(30):
        probed.ask("POST", "/v0/topics/tagged", body)
    probed.ask("POST", "/v0/topics/tagged/delete", {"match": "t:1"})
    probed.ask("POST", "/v0/topics/tagged/delete", {"before_seq": 200_000})


def bury_and_redrive(probed: Probed) -> None:
    probed.ask("PUT", "/v0/topics/mortal", {"type": "queue", "max_deliveries": 1, "dead_letter": "dead"})
    probed.ask("POST", "/v0/topics/mortal", wire.write_body(1000))
    jobs = probed.ask("POST", "/v0/topics/mortal/claim", {"node": "n", "max": 1000}).json()["claimed"]
    acks = {"seqs": [job["$seq"] for job in jobs], "lease_ids": [job["lease_id"] for job in jobs]}
    probed.ask("POST", "/v0/topics/mortal/nack", {"node": "n"} | acks)
    for _ in range(10):
        probed.ask("POST", "/v0/topics/mortal/claim", {"node": "n", "max": 1000})
    time.sleep(1.5)
    probed.ask("POST", "/v0/topics/mortal/redrive", {"from": "dead", "max": 1000})


def expire_many(probed: Probed) -> None:
    """Let the records of many topics expire in the same second."""
    names = [f"ttl-{number:05}" for number in range(min(5000, probed.topics))]
    probed.load(spread([wire.put(f"/v0/topics/{name}", b'{"ttl_ms": 1000}') for name in names]))
    probed.load(spread([wire.write(name, 1) for name in names]))
    time.sleep(3.5)
    probed.ask("GET", "/v0/topics?prefix=ttl-&page_size=1000")


def list_expired(probed: Probed) -> None:
    """List 1,000 topics whose records have expired, before their shards look."""
    names = [f"ttl-{number:05}" for number in range(min(1000, probed.topics))]
    probed.load(spread([wire.write(name, 1) for name in names]))
    time.sleep(1.05)
    probed.ask("GET", "/v0/topics?prefix=ttl-&page_size=1000")


def route_many(probed: Probed) -> None:
    """Make routers, then list them, and the topics that they copy into; then delete a topic that many copy from."""
    routers = min(2000, probed.topics)
    bodies = [b'{"source": "t-000000", "dest": "copy-%05d"}' % number for number in range(routers)]
    probed.load(spread([wire.put(f"/v0/routers/r-{number:05}", body) for number, body in enumerate(bodies)]))


def list_routers(probed: Probed) -> None:
    for _ in range(3):
        probed.ask("GET", "/v0/routers?page_size=1000&prefix=r-0")
        probed.ask("GET", "/v0/topics?prefix=copy-&page_size=1000")


def unroute_many(probed: Probed) -> None:
    probed.ask("DELETE", "/v0/topics/t-000000")


def subscribe_many(probed: Probed) -> None:
    """Subscribe to 256 topics over a WebSocket, again and again."""
    names = [f"t-{number:06}" for number in range(1, 257)]
    with Socket(probed.service) as socket:
        for request_id in range(10):
            socket.send("subscribe", request_id=request_id, topics=names, tail=True)
            while socket.next()["op"] != "subscribed":
                pass


def lose_a_shard(probed: Probed) -> None:
    """Kill a shard while 40 streams follow 10,000 topics."""
    names = [f"t-{number:06}" for number in range(1, min(10_241, probed.topics))]
    client = probed.service.client
    with ExitStack() as streams:
        for begin in range(0, len(names), 256):
            watch: dict[str, object] = {"topics": {name: {"tail": True} for name in names[begin : begin + 256]}}
            path = probed.ask("POST", "/v0/watch", watch).json()["stream_url"]
            streams.enter_context(client.stream("GET", path, headers={"Accept": "text/event-stream"}))
        time.sleep(0.5)
        probed.service.wait_healed(probed.service.kill("walshard", 0))
        time.sleep(1.0)
    time.sleep(12.0)  # the watches without a listener end


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


def scatter(probed: Probed) -> None:
    """Have the crowd go, all at once."""
    probed.pool.submit(close_crowd).result()
    time.sleep(2.0)


def gets(*paths: str, times: int = 3, accept: str = "*/*") -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        for path in paths * times:
            probed.ask("GET", path, accept=accept)

    return work


CROWDS: Final[dict[str, tuple[Kind, int, bool]]] = {
    f"{clients:,} {kind.value} are {'reset' if resets else 'closed'} at once": (kind, clients, resets)
    for kind, clients in ((Kind.IDLE, 5_000), (Kind.STREAMS, 5_000), (Kind.WEBSOCKETS, 2_000))
    for resets in (False, True)
}
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
    "writes of 10,000 records with tag and meta": write_attributes,
    "pages without one writer, who wrote everything": leave_out,
    "deletes by tag and by seq out of 300,000": delete_many,
    "1,000 jobs become dead letters, and come back": bury_and_redrive,
    "5,000 topics expire in the same second": expire_many,
    "1,000 topics that have expired are listed": list_expired,
    "a WebSocket subscribes to 256 topics": subscribe_many,
    "2,000 routers are made, 16 writers": route_many,
    "1,000 routers, and what they copy into, are listed": list_routers,
    "the source of 2,000 routers is deleted": unroute_many,
    "a shard dies while 40 streams follow 10,000 topics": lose_a_shard,
    "the OpenAPI document and its page": gets("/v0/openapi.json", "/v0/docs"),
    **dict.fromkeys(CROWDS, scatter),
}


def table(rows: list[Row]) -> str:
    lines = [
        "| work | frontend: longest hold, CPU ms | by the clock, ms | over 10 ms of CPU"
        " | shard: longest hold, CPU ms | by the clock, ms | over 10 ms of CPU | where it was longer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for what, frontend, shards in rows:
        where = [one.longest.where for one in (frontend, shards) if one.longest is not None and one.over]
        shown = " ".join(f"`{one}`" for one in where if one)
        lines.append(f"| {what} | {frontend.cells()} | {shards.cells()} | {shown} |")
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
        env = {"TOPICS_MAX_WATCH_SESSIONS": "0"}  # the crowds leave more of them than a service has by default
        with Service(
            shards=2, frontends=1, wal_file_bytes=None, cpus=cores.server, env=env, command=command
        ) as service:
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
