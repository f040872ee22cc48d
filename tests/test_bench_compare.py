"""The comparison of two versions: its ratios say which is better, and by how much."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import compare

ROOT = Path(__file__).parents[1]
NAMES = ("ack: p50_us", "batches: records_per_s")


def rounds(p50_us: float, per_s: float, count: int = 10) -> list[compare.Measured]:
    """Rounds that differ by a hundredth in turns."""
    return [
        {NAMES[0]: p50_us * (1 + number % 2 / 100), NAMES[1]: per_s * (1 + number % 2 / 100)} for number in range(count)
    ]


def test_above_one_is_better_for_times_and_for_rates() -> None:
    ack, batches = compare.compare(rounds(400, 1000), rounds(200, 1500))
    assert [ack.ratio, batches.ratio] == pytest.approx([2.0, 1.5])
    assert not ack.is_slower
    assert not batches.is_slower


def test_what_is_below_the_floor_is_called_slower() -> None:
    ack, batches = compare.compare(rounds(400, 1000), rounds(450, 940))
    assert ack.is_slower
    assert str(ack).endswith("SLOWER")
    assert not batches.is_slower


def test_the_interval_holds_the_ratio_and_grows_with_the_noise() -> None:
    there = rounds(400, 1000)
    noisy = [{name: value * (1.5 if number % 2 else 1.0) for name, value in one.items()} for number, one in
             enumerate(there)]  # fmt: skip
    for steady, ratio in zip(compare.compare(there, there), compare.compare(there, noisy), strict=True):
        assert (steady.low, steady.ratio, steady.high) == (1.0, 1.0, 1.0)
        assert ratio.low < ratio.ratio < ratio.high
        assert abs(math.log(ratio.ratio)) == pytest.approx(math.log(1.5) / 2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_commit_is_compared_with_the_checkout_in_turns() -> None:
    command = [sys.executable, "-m", "bench.compare", "HEAD", "--rounds", "2", "--seconds", "0.1", "--only", "ack"]
    command += ["--only", "rooms"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr  # so short a measurement may say anything
    lines = [line for line in done.stdout.splitlines() if line.startswith("ack, ")]
    assert len(lines) == 8
    assert sum(line.startswith("room of 30 WebSockets") for line in done.stdout.splitlines()) == 2
    assert [line.split(", ")[-1] for line in done.stderr.splitlines() if line.startswith("compare: round")] == [
        "HEAD …", "this checkout …", "this checkout …", "HEAD …",
    ]  # fmt: skip


def test_an_unknown_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no commit 'no-such-commit' here"):
        compare.check_out("no-such-commit", tmp_path)
