"""python -m bench.compare REF: is this checkout slower than that commit? `make compare REF=<commit>`.

Both services are driven by the load of this checkout. Each round starts fresh services of either, one for each case of
the short set; who begins changes with each round. A figure of the result is the ratio of the two, so that above 1 is
better here, with the interval in which it lies with 95 % confidence. The command fails if any ratio is below FLOOR.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench import figures, machine, wire
from bench.actors import ChainPlan, hand_around
from bench.cases import Bench, make_topic, plural
from bench.fan_out import SOURCE, wait_copied
from bench.load import Plan, closed_loop, pin
from bench.rooms import RoomPlan, talk
from bench.routed import CopyPlan, read_copies
from bench.watchers import WatchPlan, deliver
from bench.workers import WorkPlan, work
from tests.harness import COMMAND, Service, clean_environment
from topics.core.names import owner_shard

ROOT: Final = Path(__file__).parents[1]
OUT: Final = ROOT / "bench" / "out"
FLOOR: Final = 0.93
"""A ratio below it is a step back; the noise of ten rounds is less than that on a quiet machine."""
RESAMPLES: Final = 4000
SHARDS: Final = 2
FRONTENDS: Final = 2
WRITERS: Final = 16
WORKERS: Final = 32
JOBS: Final = 250_000
PAGES: Final = 200
PAGE_RECORDS: Final = 256
DESTS: Final = 10
WATCHERS: Final = {1: 200.0, 100: 50.0}
"""Watchers of a topic, and writes a second to it."""

MEMBERS: Final = 30
PACKETS_PER_S: Final = 50.0

ACTORS: Final = 1000
EVENTS: Final = 32

Measured = dict[str, float]
"""Values of one round by name. A name ends with its unit, which says whether more is better."""


class Candidate(NamedTuple):
    """One of the two: the command that starts its service, and what the environment needs for it."""

    name: str
    command: Path
    env: dict[str, str]


class Ratio(NamedTuple):
    """This checkout beside the commit in one value; above 1 is better. With 95 % confidence it is in `low`…`high`."""

    name: str
    ratio: float
    low: float
    high: float
    there: float
    here: float

    @property
    def is_slower(self) -> bool:
        return self.ratio < FLOOR

    def __str__(self) -> str:
        # The name of a value is `what it measures: value_unit`.
        what, _, value = self.name.rpartition(": ")
        shown = " → ".join(figures.show(value, one) for one in (self.there, self.here))
        verdict = "  SLOWER" if self.is_slower else ""
        return f"{what:<34}{self.ratio:5.2f}  ({self.low:.2f} to {self.high:.2f})  {shown}{verdict}"


def compare(there: Sequence[Measured], here: Sequence[Measured]) -> list[Ratio]:
    """Return the ratio of each value: the geometric mean over the rounds, and its interval by resampling rounds."""
    found = []
    resample = random.Random(0)
    for name in there[0]:
        logs = [math.log(new[name] / old[name]) for old, new in zip(there, here, strict=True)]
        if figures.less_is_better(name):
            logs = [-one for one in logs]
        means = sorted(statistics.fmean(resample.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
        low, high = means[RESAMPLES // 40], means[-1 - RESAMPLES // 40]
        medians = (statistics.median(one[name] for one in side) for side in (there, here))
        found.append(Ratio(name, math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high), *medians))
    return found


def measure_acks(bench: Bench, service: Service) -> Measured:
    found: Measured = {}
    for durability in ("disk", "fsync"):
        for connections in (1, 32):
            topics = [
                make_topic(service, f"ack-{durability}-{connections}-{n}", durability) for n in range(connections)
            ]
            outcome = bench.measure(service.port, [[wire.write(topic, 1)] for topic in topics])
            what = f"ack, {durability}, {plural(connections, 'connection')}"
            found |= {f"{what}: p50_us": outcome.p50_us, f"{what}: requests_per_s": outcome.per_s}
    return found


def measure_watchers(bench: Bench, service: Service) -> Measured:
    found: Measured = {}
    for watchers, writes_per_s in WATCHERS.items():
        topic = make_topic(service, f"watched-{watchers}", "disk")
        watch: dict[str, object] = {"topics": {topic: {}}}
        opened = [service.client.post("/v0/watch", json=watch).raise_for_status().json() for _ in range(watchers)]
        plan = WatchPlan(service.port, topic, [one["stream_url"] for one in opened], writes_per_s, bench.seconds)
        outcome = bench.pool.submit(deliver, plan).result()
        what = f"streams, {plural(watchers, 'watcher')}"
        found |= {f"{what}: p50_us": outcome.p50_us, f"{what}: deliveries_per_s": outcome.deliveries_per_s}
    return found


def measure_rooms(bench: Bench, service: Service) -> Measured:
    plan = RoomPlan(service.port, make_topic(service, "room", "disk"), MEMBERS, PACKETS_PER_S, bench.seconds)
    outcome = bench.pool.submit(talk, plan).result()
    what = f"room of {MEMBERS} WebSockets"
    return {f"{what}: p50_us": outcome.p50_us, f"{what}: p99_us": outcome.p99_us}


def measure_routed(bench: Bench, service: Service) -> Measured:
    """A lone write until its copy is read, and until a stream of the dest has it; what either takes of the service."""
    found: Measured = {}
    pids = tuple(service.family())
    for where, is_same in (("same shard", True), ("other shard", False)):
        names = [f"{what}-{where[:5].strip()}-{n}" for what in ("from", "to") for n in range(40)]
        source = names[0]
        dest = next(
            name for name in names[40:] if (owner_shard(name, SHARDS) == owner_shard(source, SHARDS)) is is_same
        )
        make_topic(service, source, "disk")
        service.client.put(f"/v0/routers/{dest}", json={"source": source, "dest": dest}).raise_for_status()
        read = bench.pool.submit(read_copies, CopyPlan(service.port, source, dest, bench.seconds, pids)).result()
        what = f"copy, {where}"
        found |= {f"{what}, ack: p50_us": read.ack_p50_us, f"{what}, read: p50_us": read.p50_us}
        found[f"{what}, read: cpu_us"] = sum(read.cpu_us[:-1])
        watch: dict[str, object] = {"topics": {dest: {}}}
        stream = service.client.post("/v0/watch", json=watch).raise_for_status().json()["stream_url"]
        plan = WatchPlan(service.port, source, [stream], WATCHERS[1], bench.seconds, pids, unpaused_max=1)
        seen = bench.pool.submit(deliver, plan).result()
        found[f"{what}, stream: p50_us"] = seen.p50_us
        found[f"{what}, stream: cpu_us"] = sum(seen.paced.cpu_ns) / 1000 / seen.paced.deliveries
    return found


def measure_actors(bench: Bench, service: Service) -> Measured:
    found: Measured = {}
    for how, by_tag in (("seq", False), ("tag", True)):
        actors = [make_topic(service, f"actor-{how}-{number:04}", "disk") for number in range(ACTORS)]
        plan = ChainPlan(service.port, actors, EVENTS, by_tag, bench.warm_up_s, bench.seconds, tuple(service.family()))
        outcome = bench.pool.submit(hand_around, plan).result()
        what = f"{ACTORS} actors, delete by {how}"
        found |= {f"{what}: events_per_s": outcome.per_s, f"{what}: cpu_us": sum(outcome.cpu_us[:-1])}
    return found


def measure_reads(bench: Bench, service: Service) -> Measured:
    topic = make_topic(service, "pages", "disk")
    bench.fill(service, [topic], PAGES * 1000)
    found: Measured = {}
    for limit in (1, PAGE_RECORDS):
        outcome = bench.measure(service.port, [[wire.diff(topic, page * limit, limit) for page in range(PAGES)]])
        what = f"diff, limit {limit}"
        found |= {f"{what}: p50_us": outcome.p50_us, f"{what}: records_per_s": outcome.per_s * limit}
    return found


def measure_queue(bench: Bench, service: Service) -> Measured:
    found: Measured = {}
    for batch in (1, 16):
        topic = f"jobs-{batch}"
        config = {"type": "queue", "durability": "disk", "lease_ms": 3_600_000}
        service.client.put(f"/v0/topics/{topic}", json=config).raise_for_status()
        bench.fill(service, [topic], JOBS)
        plan = WorkPlan(service.port, topic, WORKERS, batch, bench.warm_up_s, bench.seconds)
        outcome = bench.pool.submit(work, plan).result()
        what = f"queue, batch {batch}, {WORKERS} workers"
        found |= {f"{what}: p50_us": outcome.p50_us, f"{what}: jobs_per_s": outcome.per_s}
    return found


def measure_batches(bench: Bench, service: Service) -> Measured:
    found: Measured = {}
    for batch in (100, 1000):
        topics = [make_topic(service, f"batch-{batch}-{n}", "disk") for n in range(WRITERS)]
        outcome = bench.measure(service.port, [[wire.write(topic, batch)] for topic in topics])
        found[f"batches of {batch}, {WRITERS} writers: records_per_s"] = outcome.per_s * batch
    return found


def measure_copies(bench: Bench, service: Service) -> Measured:
    make_topic(service, SOURCE, "disk")
    for number in range(DESTS):
        router = {"source": SOURCE, "dest": f"dest-{number}"}
        service.client.put(f"/v0/routers/copy-{number}", json=router).raise_for_status()
    plan = Plan(service.port, [[wire.write(SOURCE, 100)]] * 4, duration_s=bench.seconds)
    outcome = bench.pool.submit(closed_loop, plan).result()
    waited_s = wait_copied(service, outcome.answers * 100 * DESTS)
    what = f"copies, {DESTS} dests"
    copies_per_s = outcome.answers * 100 * DESTS / (outcome.seconds + waited_s)
    return {f"{what}: copies_per_s": copies_per_s, f"{what}: source_p50_us": outcome.p50_us}


SHORT_SET: Final[dict[str, Callable[[Bench, Service], Measured]]] = {
    "ack": measure_acks,
    "streams": measure_watchers,
    "rooms": measure_rooms,
    "routed": measure_routed,
    "diff": measure_reads,
    "queue": measure_queue,
    "actors": measure_actors,
    "batches": measure_batches,
    "copies": measure_copies,
}
"""The cases that write much come last: the compactor is then at work."""


def measure(bench: Bench, candidate: Candidate, cases: Sequence[str]) -> Measured:
    """Return what the cases measured on this candidate, each on a fresh service: no case meets the work that the
    compactor still has from another.
    """
    found: Measured = {}
    for name in cases:
        with Service(
            shards=bench.shards,
            frontends=bench.frontends,
            wal_file_bytes=None,
            cpus=bench.cores.server,
            env=candidate.env,
            command=candidate.command,
        ) as service:
            found |= SHORT_SET[name](bench, service)
            service.kill_group()  # a stop would make a last cut of all that
    return found


def check_out(ref: str, directory: Path) -> Candidate:
    """Put that commit into `directory`; return how its service is started.

    It runs in this environment, or in one of its own if it pins other packages.
    """
    tree = directory / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", ref], cwd=ROOT, check=False, capture_output=True)
    if archive.returncode:
        sys.exit(f"compare: there is no commit {ref!r} here: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
    if pins(tree / "requirements.lock") == pins(ROOT / "requirements.lock"):
        return Candidate(ref, COMMAND, {"PYTHONPATH": str(tree)})
    print(f"compare: {ref} pins other packages: an environment is made for it …", file=sys.stderr, flush=True)
    venv.create(directory / "env", with_pip=True)
    python = directory / "env" / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    environment = clean_environment({})
    subprocess.run([*pip, "--require-hashes", "-r", tree / "requirements.lock"], env=environment, check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", tree], env=environment, check=True)
    return Candidate(ref, directory / "env" / "bin" / "topics-supervisor", {})


def pins(lock: Path) -> list[str]:
    """Lines of a lock file that choose a package: who asked for it is a comment."""
    return [line for line in lock.read_text().splitlines() if not line.lstrip().startswith("#")]


def run(bench: Bench, ref: str, rounds: int, cases: Sequence[str], command: Path) -> list[Ratio]:
    """Measure both in turns; `command` starts the service of this checkout."""
    here = Candidate("this checkout", command, {"PYTHONPATH": str(ROOT)})
    measured: dict[str, list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="topics-compare-") as directory:
        there = check_out(ref, Path(directory))
        for number in range(rounds):
            turn = (there, here) if number % 2 == 0 else (here, there)
            for candidate in turn:
                print(f"compare: round {number + 1} of {rounds}, {candidate.name} …", file=sys.stderr, flush=True)
                measured[candidate.name].append(measure(bench, candidate, cases))
    return compare(measured[there.name], measured[here.name])


def main() -> int:
    arguments = parse()
    busy = os.getloadavg()[0]
    cores = machine.share_cores()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=pin, initargs=(cores.load,)) as pool:
        bench = Bench(
            pool=pool,
            cores=cores,
            seconds=arguments.seconds,
            warm_up_s=arguments.seconds / 4,
            frontends=FRONTENDS,
            shards=SHARDS,
            quick=False,
        )
        ratios = run(bench, arguments.ref, arguments.rounds, arguments.only or list(SHORT_SET), arguments.command)
    described = ", ".join(f"{name} {value}" for name, value in machine.describe(ROOT).items())
    print(f"{arguments.ref} → this checkout, {plural(arguments.rounds, 'round')} in turns; above 1 is better here")
    print(f"{described}, load average before {busy:.1f}")
    print(*ratios, sep="\n")
    OUT.mkdir(parents=True, exist_ok=True)
    kept = msgspec.json.format(msgspec.json.encode(ratios), indent=1)
    (OUT / "compare.json").write_bytes(kept + b"\n")
    slower = [ratio for ratio in ratios if ratio.is_slower]
    if slower:
        print(f"{len(slower)} of {len(ratios)} figures are below {FLOOR} of what {arguments.ref} does")
    return 1 if slower else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.compare", description="Compare this checkout with a commit, in turns.")
    parser.add_argument("ref", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds, each with both; default: 10")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of each measurement; default: 2")
    parser.add_argument(
        "--only",
        action="append",
        choices=SHORT_SET,
        metavar="CASE",
        help=f"this case, may be repeated: {', '.join(SHORT_SET)}",
    )
    parser.add_argument(
        "--command",
        type=Path,
        default=COMMAND,
        metavar="PATH",
        help="topics-supervisor of another environment, whose Python runs this checkout; REF is run by this one",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
