"""The cost of open consoles: the latency of writes without them and beside them, in turns.

`python -m bench.consoles` starts a service, loads it with writers, and has ten consoles ask what open pages ask, every
second turn. A test of tests/e2e/test_console.py holds `VIEWS` against what real pages ask. Real browsers are left out:
they would take the processors of a small machine, and that is not what a console costs the service.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final, NamedTuple

import psutil
import uvloop

from bench import machine, wire
from bench.compare import RESAMPLES, compare
from bench.crowd import Client, watch
from bench.load import LoadError, Plan, closed_loop, pin
from tests.harness import Service

WRITERS: Final = 16
TOPICS: Final = 500
QUEUES: Final = 20
ROUTERS: Final = 50
CURSORS: Final = 20
IDLE_S: Final = 10.0


class Asked(NamedTuple):
    """A request that a page repeats."""

    every_s: float
    path: str
    body: bytes | None = None


_EVERY_VIEW: Final[dict[str, tuple[Asked, ...]]] = {
    "overview": (Asked(3, "metrics?topic_series=false"), Asked(3, "ready")),
    "topics": (Asked(5, "topics?sort=rate&order=desc&page_size=100"),),
    "topic/log-0": (
        Asked(2, "topics/log-0?touch=false"),
        Asked(10, "topics/log-0/segments?from_seq=1"),
        Asked(10, "topics/log-0/cursors?page_size=20"),
    ),
    "queue/queue-0": (
        Asked(2, "topics/queue-0?touch=false"),
        Asked(5, "topics/queue-0/peek", b'{"state":"leased","from_seq":0,"max":1000}'),
    ),
    "cursors": (Asked(5, "topics?sort=lag&kind=followed&page_size=1000"),),
    "routers": (Asked(5, "routers?page_size=1000"),),
}
_BEHIND: Final = (Asked(10, "metrics?topic_series=false"), Asked(10, "ready"))
"""With these the charts of the overview go on while another view is open."""
VIEWS: Final = {view: asked if view == "overview" else asked + _BEHIND for view, asked in _EVERY_VIEW.items()}
"""The requests that an open page of each view repeats."""
CROWD: Final = (*["overview"] * 4, "topics", "topic/log-0", "topic/log-0", "queue/queue-0", "cursors", "routers")
"""Ten people on call. Those that look at a topic have its live tail open, too."""


class Opened(NamedTuple):
    """Consoles that are open for a while."""

    port: int
    views: tuple[str, ...]
    tails: bool
    seconds: float


def fill(service: Service) -> None:
    """Make topics, jobs, routers and cursors for the views to show."""
    for number in range(TOPICS):
        service.client.put(f"/v0/topics/log-{number}", json={}).raise_for_status()
    for number in range(QUEUES):
        service.client.put(f"/v0/topics/queue-{number}", json={"type": "queue"}).raise_for_status()
        service.client.post(f"/v0/topics/queue-{number}", json={"records": [{"data": 1}] * 50}).raise_for_status()
        service.client.post(f"/v0/topics/queue-{number}/claim", json={"node": "n", "max": 20}).raise_for_status()
    for number in range(ROUTERS):
        ends = {"source": f"log-{100 + number}", "dest": f"log-{200 + number}"}
        service.client.put(f"/v0/routers/r-{number}", json=ends).raise_for_status()
    for number in range(CURSORS):
        service.client.put(f"/v0/topics/log-{number}/cursors/reader", json={}).raise_for_status()


def used_s(service: Service) -> float:
    """Return the processor time that the service has taken."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in service.family())


def open_consoles(opened: Opened) -> int:
    """Ask what the pages ask; return the number of requests."""
    return uvloop.run(_open(opened))


async def _open(opened: Opened) -> int:
    chance, clients, streams = random.Random(0), list[Client](), []

    async def repeat(asked: Asked) -> None:
        client = Client(opened.port)
        clients.append(client)
        await asyncio.sleep(chance.random() * asked.every_s)  # pages are opened at any time
        while True:
            answer = await client.ask("GET" if asked.body is None else "POST", f"/v0/{asked.path}", asked.body)
            if answer.status != 200:
                raise LoadError(f"{asked.path}: {answer.status} {answer.body[:300]!r}")
            await asyncio.sleep(asked.every_s)  # a page counts from the answer, too

    for view in opened.views:
        if opened.tails and view.startswith("topic/"):
            name = view.removeprefix("topic/")
            body: dict[str, Any] = {
                "topics": {name: {"tail": True}},
                "include_tags": True,
                "limit": 1000,
                "pace_ms": 250,
            }
            streams.append(await watch(Client(opened.port), opened.port, name, **body))
    pages = [asyncio.create_task(repeat(asked)) for view in opened.views for asked in VIEWS[view]]
    await asyncio.sleep(opened.seconds)
    for page in pages:
        if page.done():
            page.result()  # it failed
        page.cancel()
    for stream in streams:
        stream.close()
    return sum(client.asked for client in clients)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.consoles", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="pairs of turns (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn (default %(default)s)")
    parser.add_argument("--consoles", type=int, default=len(CROWD), help="open consoles (default %(default)s)")
    parser.add_argument("--writes-per-s", type=float, default=0, help="of all writers (default: as many as they can)")
    parser.add_argument("--no-tails", action="store_true", help="nobody looks at a live tail")
    arguments = parser.parse_args()
    crowd = tuple(CROWD[number % len(CROWD)] for number in range(arguments.consoles))
    cores, found = machine.share_cores(), {False: list[dict[str, float]](), True: list[dict[str, float]]()}
    asked, idle_ms_per_s, spawn = 0, list[float](), multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(2, spawn, initializer=pin, initargs=(cores.load,)) as pool,
        Service(shards=2, frontends=2, wal_file_bytes=None, cpus=cores.server) as service,
    ):
        fill(service)
        writers = [[wire.write(f"log-{number}", 1)] for number in range(WRITERS)]
        for number in range(arguments.rounds):
            for beside in (number % 2 == 0, number % 2 == 1):
                per_s = arguments.writes_per_s / WRITERS
                plan = Plan(service.port, writers, warm_up_s=0.3, duration_s=arguments.seconds, per_s=per_s)
                opened = Opened(service.port, crowd if beside else (), not arguments.no_tails, arguments.seconds + 0.3)
                pages = pool.submit(open_consoles, opened)
                cpu_s = used_s(service)
                outcome = pool.submit(closed_loop, plan).result()
                cpu_s = used_s(service) - cpu_s
                asked += pages.result()
                figures = {"p50_us": outcome.p50_us, "p99_us": outcome.p99_us, "writes_per_s": outcome.per_s}
                figures["cpu_us"] = cpu_s * 1e6 / outcome.answers
                found[beside].append({f"write: {name}": value for name, value in figures.items()})
        for beside in (False, True):
            opened = Opened(service.port, crowd if beside else (), not arguments.no_tails, IDLE_S)
            cpu_s = used_s(service)
            pool.submit(open_consoles, opened).result()
            idle_ms_per_s.append((used_s(service) - cpu_s) * 1000 / IDLE_S)
    print("nobody writes: {:.0f} ms of processor time a second, {:.0f} beside the consoles".format(*idle_ms_per_s))
    print(f"{len(crowd)} consoles, {asked / arguments.rounds / arguments.seconds:.1f} requests/s of theirs")
    print("figure                        ratio, above 1 is better beside the consoles")
    for ratio in compare(found[False], found[True]):
        print(ratio)
    pairs = zip(*[[one["write: p99_us"] for one in found[beside]] for beside in (False, True)], strict=True)
    moves = [later / earlier - 1 for earlier, later in pairs]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(moves, k=len(moves))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]
    print(
        f"write p99 moves by {statistics.median(moves):+.1%} ({low:+.1%} to {high:+.1%}), median of {len(moves)} pairs"
    )


if __name__ == "__main__":
    main()
