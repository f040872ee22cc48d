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

import msgspec

from bench import machine
from bench.peers import tasks
from bench.peers.servers import CONTENDERS, Contender, serving, wanted
from bench.peers.tables import Found, table

HERE: Final = Path(__file__).parent
LATEST: Final = HERE.parent / "out" / "peers.json"
ROUNDS: Final = 3
RETAINED: Final = "retained"
RECORDS: Final = 10_000_000


def main() -> int:
    arguments = parse()
    contenders = wanted(arguments.peer or ())
    busy = os.getloadavg()[0]
    found: Found = defaultdict(lambda: defaultdict(list))
    for task in arguments.only or [*tasks.TASKS, RETAINED]:
        rounds = 1 if task == RETAINED else arguments.rounds
        for number in range(rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                if task == "bare" and contender.family not in tasks.BARE_FAMILIES:
                    continue
                print(f"peers: {task}, round {number + 1} of {rounds}, {contender.name} …", file=sys.stderr, flush=True)
                for name, value in measure(contender, task, arguments.records).items():
                    found[name][contender.name].append(value)
    report = table(found, contenders)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    described = ", ".join(f"{name} {value}" for name, value in machine.describe(HERE).items())
    print(f"{date}. {described}, load average before {busy:.1f}. {arguments.rounds} rounds in turns.\n")
    print(report)
    LATEST.parent.mkdir(parents=True, exist_ok=True)
    LATEST.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0


def measure(contender: Contender, task: str, records: int) -> tasks.Values:
    with serving(contender) as server:
        if task == RETAINED:
            return tasks.measure_retained(server, records)
        return tasks.measure(server, task)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.peers", description="Measure this service beside its peers, in turns.")
    families = list(dict.fromkeys(one.family for one in CONTENDERS if one.family != "topics"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--peer", action="append", choices=families, metavar="PEER", help=", ".join(families))
    names = [*tasks.TASKS, RETAINED]
    parser.add_argument("--only", action="append", choices=names, metavar="TASK", help=", ".join(names))
    parser.add_argument("--records", type=int, default=RECORDS, metavar="N", help=f"of {RETAINED}; default: {RECORDS}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
