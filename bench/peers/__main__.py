"""python -m bench.peers: this service beside what people would pick instead. `make peers`.

Each server gets a fresh directory for each task, one after the other in each round, with the same payloads. Contenders
with the same durability are compared: what was synced with what was synced. Ratios are ours to the peer's; above 1 is
better for us.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

from bench import figures, machine
from bench.peers import tasks
from bench.peers.servers import CONTENDERS, Contender, serving, versions, wanted
from bench.peers.tables import Found, table
from topics import __version__

ROOT: Final = Path(__file__).parents[2]
LATEST: Final = ROOT / "bench" / "out" / "peers.json"
HISTORY: Final = ROOT / "bench" / "history"
PAGE: Final = ROOT / "docs" / "comparison.md"
ROUNDS: Final = 3
RECORDS: Final = 10_000_000


def main() -> int:
    arguments = parse()
    contenders = wanted(arguments.peer or ())
    busy = os.getloadavg()[0]
    volume = tasks.Volume.of(arguments.seconds, arguments.records)
    found: Found = defaultdict(lambda: defaultdict(list))
    for task in arguments.only or tasks.TASKS:
        rounds = 1 if task == tasks.RETAINED else arguments.rounds
        taking_part = [one for one in contenders if tasks.takes_part(one, task)]
        for number in range(rounds):
            for contender in taking_part if number % 2 == 0 else taking_part[::-1]:
                print(f"peers: {task}, round {number + 1} of {rounds}, {contender.name} …", file=sys.stderr, flush=True)
                for name, value in measure(contender, task, volume).items():
                    found[name][contender.name].append(value)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    described = machine.describe(ROOT) | {"load average before": f"{busy:.1f}"} | versions(contenders)
    shown = ", ".join(f"{name} {value}" for name, value in described.items())
    method = (
        f"{arguments.rounds} rounds in turns, {arguments.seconds:g} s of appends each; {volume.retained:,} records kept"
    )
    text = f"{date}. {shown}. {method}.\n\n{table(found, contenders)}"
    print(text)
    report = figures.Report(
        date=date,
        version=__version__,
        machine=described,
        layout={"rounds": str(arguments.rounds), "seconds each": f"{arguments.seconds:g}"},
        quick=arguments.quick,
        figures=[
            figures.Figure(f"peers: {contender}", name, {f"round {n}": value for n, value in enumerate(values, 1)})
            for name, by_contender in found.items()
            for contender, values in by_contender.items()
        ],
        targets=[],
    )
    figures.keep(report, LATEST)
    if arguments.markdown:
        figures.keep(report, HISTORY / figures.history_name(report, "-peers"))
        PAGE.write_text(figures.with_table(PAGE.read_text(), "peers", text))
    return 0


def measure(contender: Contender, task: str, volume: tasks.Volume) -> tasks.Values:
    with serving(contender) as server:
        return tasks.measure(server, task, volume)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.peers", description="Measure this service beside its peers, in turns.")
    families = list(dict.fromkeys(one.family for one in CONTENDERS if one.family != "topics"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--peer", action="append", choices=families, metavar="PEER", help=", ".join(families))
    names = ", ".join(tasks.TASKS)
    parser.add_argument("--only", action="append", choices=tasks.TASKS, metavar="TASK", help=names)
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="of each measurement; counts go along; default: 1"
    )
    parser.add_argument(
        "--records", type=int, default=RECORDS, metavar="N", help=f"of {tasks.RETAINED}; default: {RECORDS}"
    )
    parser.add_argument("--quick", action="store_true", help="one short round of everything, to see that it runs")
    parser.add_argument("--markdown", action="store_true", help=f"put the table into {PAGE.name} and keep the run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.records = 1, 0.1, 20_000
        if arguments.markdown:
            parser.error("--markdown keeps figures that compare; those of --quick do not: leave one out")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
