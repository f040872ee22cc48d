"""`python -m bench.beside_cuts`: where a record's time goes while the compactor works beside writers.

16 writers fill a fresh service in each turn, with the compactor at work and with it held by SIGSTOP, in turns: no
writer is slowed then because it is behind. Each process's CPU time, its waiting for a processor, and what the
processors did besides are divided by the records that were answered. The middle one of `--rounds` counts. All that runs
on the machine meanwhile is in `the kernel and others` and `idle`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NamedTuple

from bench import machine, wire
from bench.cases import make_topic
from bench.engine import held
from bench.load import Outcome, Plan, closed_loop
from tests.harness import Service

WRITERS: Final = 16
ROLES: Final = ("frontend", "walshard", "compactor")
HELD_SETTINGS: Final = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": "86400000",
    "TOPICS_CHECKPOINT_WAL_BYTES": str(16 << 30),
    "TOPICS_MAX_REPLAY_BYTES": "0",
}
"""No cut is due, and no writer is slowed because the compactor is behind."""
HELD_S_MAX: Final = 60.0
"""A longer turn would write more than that, and its rate is steady by then."""
_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_IDLE: Final = (3, 4)
"""Columns of /proc/stat: idle, and idle while the disk works."""
_CPU_COLUMNS: Final = 8


class Turn(NamedTuple):
    """One measurement: requests a second, p99 in µs, bytes of log behind the last snapshot, times in ns a record."""

    requests_per_s: float
    p99_us: float
    lag_bytes: int
    times: dict[str, float]


class Reading(NamedTuple):
    """Sums since the start, ns: CPU time of each process, its waiting for a processor, all processors' time, idle."""

    cpu: list[int]
    waiting: list[int]
    all_cores: int
    idle: int


def read(pids: Sequence[int]) -> Reading:
    columns = [int(text) * _TICK_NS for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return Reading(
        [machine.cpu_ns(pid) for pid in pids],
        [_waiting_ns(pid) for pid in pids],
        sum(columns[:_CPU_COLUMNS]),
        sum(columns[column] for column in _IDLE),
    )


def _waiting_ns(pid: int) -> int:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads)


def turn(service: Service, pool: ProcessPoolExecutor, batch: int, seconds: float) -> Turn:
    names = [make_topic(service, f"{batch}-{number}", "disk") for number in range(WRITERS)]
    pids = [service.pid_of(role) for role in ROLES]
    plan = Plan(service.port, [[wire.write(name, batch)] for name in names], duration_s=seconds)
    before = read(pids)
    outcome: Outcome = pool.submit(closed_loop, plan).result()
    after = read(pids)
    lag_bytes = max(shard["lag_bytes"] for shard in service.status()["shards"])
    records = outcome.answers * batch
    times: dict[str, float] = {}
    for role, began, ended in zip(ROLES, before.cpu, after.cpu, strict=True):
        times[f"{role}, CPU"] = (ended - began) / records
    times["load, CPU"] = outcome.load_cpu_ns / records
    idle = (after.idle - before.idle) / records
    times["the kernel and others"] = (after.all_cores - before.all_cores) / records - idle - sum(times.values())
    times["idle"] = idle
    for role, began, ended in zip(ROLES, before.waiting, after.waiting, strict=True):
        times[f"{role}, waiting for a processor"] = (ended - began) / records
    return Turn(outcome.per_s, outcome.p99_us, lag_bytes, times)


def table(batch: int, turns: dict[bool, list[Turn]]) -> str:
    """Return the middle of all turns, held beside at work."""
    rows = [f"| batch {batch}, ns a record | compactor held | at work |", "|---|---|---|"]

    def row(what: str, held_value: float, at_work: float) -> None:
        rows.append(f"| {what} | {held_value:,.0f} | {at_work:,.0f} |")

    def middle(value: Callable[[Turn], float]) -> tuple[float, float]:
        return statistics.median(map(value, turns[True])), statistics.median(map(value, turns[False]))

    def time_of(what: str) -> Callable[[Turn], float]:
        return lambda one: one.times[what]

    for what in turns[True][0].times:
        row(what, *middle(time_of(what)))
    row("requests/s", *middle(lambda one: one.requests_per_s))
    row("p99, µs", *middle(lambda one: one.p99_us))
    row("log behind the last snapshot, bytes", *middle(lambda one: one.lag_bytes))
    ratios = [work.requests_per_s / alone.requests_per_s for alone, work in zip(turns[True], turns[False], strict=True)]
    rows.append(
        f"\nat work / held, requests/s: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, action="append", help="records of a write; default 100 and 1000")
    options = parser.parse_args(arguments)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for batch in options.batch or (100, 1000):
            turns: dict[bool, list[Turn]] = {True: [], False: []}
            for _ in range(options.rounds):
                for is_held, found in turns.items():
                    env = HELD_SETTINGS if is_held else {}
                    seconds = min(options.seconds, HELD_S_MAX) if is_held else options.seconds
                    # Each its own service: the log goes on into files that a former turn has left.
                    with (
                        Service(shards=1, frontends=1, wal_file_bytes=None, env=env) as service,
                        held(service, "compactor") if is_held else nullcontext(),
                    ):
                        found.append(turn(service, pool, batch, seconds))
            print(table(batch, turns), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
