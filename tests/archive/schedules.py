"""Runs any number of schedules of the model of archives: `python -m tests.archive.schedules --schedules 100000`.

Each seed draws `PER_SEED` schedules. A line of JSON for each seed goes into the file `--out` when it has ended, with
counts of what was compared, or with what was found. A seed that is in the file is not run again, so a run that was
ended goes on with the same command; another range of seeds is `--first-seed`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Final

import hypothesis
import structlog
from hypothesis.stateful import run_state_machine_as_test

from tests.archive.archiving import STEPS, TALLY, Archiving, small_world

PER_SEED: Final = 100
SEEDS_PER_PROCESS: Final = 10
"""A process ends then: what it has mapped, it keeps."""
GARBAGE: Final = 5_000
"""Objects that are made between two looks for garbage."""
TOLD_S: Final = 60.0

_SETTINGS: Final = hypothesis.settings(
    max_examples=PER_SEED,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.archive.schedules", description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("build/archive-sim.jsonl"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = range(given.first_seed, given.first_seed + -(-given.schedules // PER_SEED))
    done = {one["seed"]: one for one in read(given.out) if one["seed"] in wanted}
    left = [seed for seed in wanted if seed not in done]
    told_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with given.out.open("a") as out, context.Pool(given.processes, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        for found in pool.imap_unordered(run, left):
            done[found["seed"]] = found
            print(json.dumps(found), file=out, flush=True)
            if "found" in found:
                print(f"seed {found['seed']}: {found['found']}", flush=True)
            if time.monotonic() - told_s >= TOLD_S or len(done) == len(wanted):
                told_s = time.monotonic()
                print(sums(done.values()), flush=True)
    return int(any("found" in one for one in done.values()))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results. The last one may be cut short by a kill."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def sums(results: Any) -> str:
    total: Counter[str] = Counter()
    for one in results:
        total.update(one["counts"])
        total["violations"] += "found" in one
    return ", ".join(f"{count} {what}" for what, count in sorted(total.items()))


def run(seed: int) -> dict[str, Any]:
    """Run the schedules of a seed; return what was counted, and what was found if one is not as it should be."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    TALLY.clear()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    result: dict[str, Any] = {"seed": seed}
    try:
        with small_world():
            run_state_machine_as_test(hypothesis.seed(seed)(Archiving), settings=_SETTINGS)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        result["found"] = "".join(traceback.format_exception(error))
    return result | {"counts": dict(TALLY)}


if __name__ == "__main__":
    sys.exit(main())
