"""Runs the tests in parts, three parts at a time: `make test` and `make test-all`.

    python -m tests.suite short [--again FILE]
    python -m tests.suite long [--again FILE]

Each test is in one of the two: `long` are those marked `@pytest.mark.long`, `short` are all others. With `--again`, as
.ci/run has it, a skipped test is a failure, and a test that fails is run once more, alone, when all others have ended.
If it passes then, its name is added to FILE. Only a failure of the test's own code is forgiven in this way: an error in
a fixture, a run of pytest that breaks off or finds no test, and more than `AGAIN_MAX` failures are final.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests import outcomes
from tests.outcomes import Outcomes

ROOT: Final = Path(__file__).resolve().parents[1]
AT_ONCE: Final = 3
"""Tests wait a lot: two parts left 0.8 of two cores to a process of the lowest priority (November 2026)."""
AGAIN_MAX: Final = 10
"""More failures than these are no lost races."""

PARTS: Final = {
    "short": (
        "archive",
        "frontend",
        "contract",
        "cli client",
        "storage core shm supervisor",
        "walshard",
        "compactor",
        "test_*.py docs deploy",
        "e2e spark",
    ),
    "long": (
        "e2e",
        "contract",
        "spark",
        "archive",
        "walshard compactor",
        "client cli docs",
        "storage frontend core",
        "test_*.py supervisor deploy attack",
    ),
}
"""Folders and files of `tests` that a run of pytest is given. Parts that take longest come first, so that all end at
about the same time.
"""
CHOSEN_BY: Final = {"short": "not long", "long": "long"}


class Run(NamedTuple):
    """A run of pytest that has ended."""

    part: str
    code: int
    outcomes: Outcomes | None
    """None: it broke off."""
    output: str
    duration_s: float


class Started(NamedTuple):
    """A run of pytest that goes on."""

    part: str
    process: subprocess.Popen[bytes]
    written: Path
    output: Path
    began_s: float

    @classmethod
    def start(cls, part: str, arguments: Sequence[str], root: Path, scratch: Path) -> Started:
        own = Path(tempfile.mkdtemp(dir=scratch))
        written, output = own / "outcomes", own / "output"
        command = [sys.executable, "-m", "pytest", "-p", "tests.outcomes", f"--outcomes={written}", *arguments]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=root, env=environ(scratch), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        return cls(part, process, written, output, time.monotonic())

    def ended(self) -> Run:
        code, output = self.process.wait(), self.output.read_text(errors="replace")
        return Run(self.part, code, outcomes.read(self.written), output, time.monotonic() - self.began_s)


def environ(scratch: Path) -> dict[str, str]:
    """Return the environment of a run. The tests start thousands of processes: where compiled files may not be written
    beside the code, they are kept until the suite ends.
    """
    kept = dict(os.environ)
    if kept.pop("PYTHONDONTWRITEBYTECODE", ""):
        kept["PYTHONPYCACHEPREFIX"] = str(scratch / "compiled")
    return kept


def side_by_side(parts: Sequence[tuple[str, Sequence[str]]], root: Path, scratch: Path) -> Generator[Run]:
    """Run pytest for each (part, arguments), `AT_ONCE` at a time; yield each when it has ended."""
    waiting, running = list(reversed(parts)), list[Started]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                part, arguments = waiting.pop()
                running.append(Started.start(part, arguments, root, scratch))
            for started in [one for one in running if one.process.poll() is not None]:
                running.remove(started)
                yield started.ended()
            time.sleep(0.05)
    finally:
        for started in running:
            started.process.terminate()
        for started in running:
            started.process.wait()


def final(run: Run, no_skips: bool) -> list[str]:
    """Return what is wrong with a run apart from tests that failed."""
    seen = run.outcomes
    wrong = [f"{run.part}: pytest ended with {run.code}"] if seen is None or run.code not in (0, 1) else []
    if seen is None:
        return wrong
    wrong += [f"error: {test}" for test in dict.fromkeys(seen.errors)]
    if no_skips:
        wrong += [f"skipped: {test}" for test in dict.fromkeys(seen.skipped)]
    if seen.finished < seen.selected:
        wrong.append(f"{run.part}: only {seen.finished} of {seen.selected} tests have ended")
    if run.code == 1 and not (seen.failed or seen.errors):
        wrong.append(f"{run.part}: pytest ended with 1, though no test failed")
    return wrong


def show(run: Run) -> None:
    lines = run.output.splitlines() or [""]
    if run.code:
        print(run.output)
    print(f"{run.part}: {lines[-1].strip('= ')} ({run.duration_s:.0f} s)", flush=True)


def run_suite(parts: Sequence[tuple[str, Sequence[str]]], root: Path, again: Path | None) -> int:
    """Run all parts; return the exit code."""
    wrong, failed = list[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="topics-suite-") as directory:
        for run in side_by_side(parts, root, Path(directory)):
            show(run)
            wrong += final(run, no_skips=again is not None)
            failed += run.outcomes.failed if run.outcomes else []
        if again is not None and not wrong and len(failed) <= AGAIN_MAX:
            failed = [test for test in failed if not passes_alone(test, root, Path(directory), again)]
    for line in [*wrong, *(f"failed: {test}" for test in failed)]:
        print(line)
    return 1 if wrong or failed else 0


def passes_alone(test: str, root: Path, scratch: Path, again: Path) -> bool:
    """Run one test once more; add it to the file of unsteady ones if it passes."""
    (run,) = side_by_side([(test, [test])], root, scratch)
    show(run)
    if final(run, no_skips=True) or run.code:
        return False
    with again.open("a") as file:
        file.write(f"{test}\n")
    return True


def arguments_of(suite: str) -> list[tuple[str, list[str]]]:
    """Return each part with what pytest is called with."""
    return [
        (part, ["-m", CHOSEN_BY[suite], *(str(path) for name in part.split() for path in paths(name))])
        for part in PARTS[suite]
    ]


def paths(name: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / "tests").glob(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=sorted(PARTS))
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="run what failed once more; FILE has what passed then"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_suite(arguments_of(given.suite), ROOT, given.again)


if __name__ == "__main__":
    sys.exit(main())
