"""python -m bench: start a real server, measure it, print the table."""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench import cases, deletes, engine, fan_out, figures, goodput, machine, queue_depth
from bench.cases import Bench
from bench.figures import Figure, Report
from bench.load import pin
from bench.targets import targets
from topics import __version__

HERE = Path(__file__).parent
LATEST = HERE / "out" / "latest.json"
BUSY_LOAD = 0.5
CASES = cases.CASES | engine.CASES | deletes.CASES | queue_depth.CASES | goodput.CASES | fan_out.CASES
HISTORY = HERE / "history"
PAGE = HERE.parent / "docs" / "benchmarks.md"


def main() -> int:
    arguments = parse()
    cores = machine.share_cores()
    busy = os.getloadavg()[0]
    if busy > BUSY_LOAD:
        print(f"bench: the machine is busy (load average {busy:.1f}): figures will be poor", file=sys.stderr)
    found: list[Figure] = []
    # Spawned: a load process carries nothing of this one.
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=pin, initargs=(cores.load,))
    with pool:
        bench = Bench(
            pool=pool,
            cores=cores,
            seconds=0.5 if arguments.quick else arguments.seconds,
            warm_up_s=0.2 if arguments.quick else 0.5,
            frontends=arguments.frontends,
            shards=arguments.shards,
            quick=arguments.quick,
        )
        for name in arguments.only or CASES:
            print(f"bench: {name} …", file=sys.stderr, flush=True)
            found += CASES[name](bench)
    report = Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        version=__version__,
        machine=machine.describe(HERE) | {"load average before": f"{busy:.1f}"},
        layout={
            "frontends": str(arguments.frontends),
            "shards": str(arguments.shards),
            "server on cores": ",".join(map(str, sorted(cores.server))),
            "load on cores": ",".join(map(str, sorted(cores.load))),
            "seconds each": f"{bench.seconds:g}",
        },
        quick=arguments.quick,
        figures=found,
        targets=targets(found),
    )
    print(figures.table(report))
    figures.keep(report, LATEST)
    if arguments.markdown:
        figures.keep(report, HISTORY / figures.history_name(report))
        if not arguments.only:
            PAGE.write_text(figures.with_latest(PAGE.read_text(), report))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Measure a real server on this machine.")
    parser.add_argument(
        "--quick", action="store_true", help="half a second each and a tenth of the records, to see that it runs"
    )
    parser.add_argument(
        "--only", action="append", choices=CASES, metavar="CASE", help=f"this case, may be repeated: {', '.join(CASES)}"
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="length of one measurement (default %(default)s)")
    parser.add_argument("--frontends", type=int, default=1, help="frontend processes (default %(default)s)")
    parser.add_argument("--shards", type=int, default=1, help="WAL shards (default %(default)s)")
    parser.add_argument(
        "--markdown",
        action="store_true",
        help=f"keep the run in {HISTORY.relative_to(HERE.parent)}; a full one also in {PAGE.relative_to(HERE.parent)}",
    )
    arguments = parser.parse_args()
    if arguments.quick and arguments.markdown:
        parser.error("figures of --quick do not compare, so --markdown does not keep them; leave one of the two out")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
