"""Kept runs of the benchmarks: files of bench/history can be read and are listed, the page has the latest full run."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from bench import figures
from bench.__main__ import HISTORY, PAGE
from bench.figures import Figure, Report, Target

RUN = Report(
    date="2026-11-22T03:42+00:00",
    version="0.2.0",
    machine={"cores": "2"},
    layout={"shards": "1"},
    quick=False,
    figures=[Figure("ack", "disk, 1 connection", {"p50_us": 320.0})],
    targets=[Target("batch 1 disk, p99 ms", 3.66, 2.0)],
)


def test_a_run_takes_the_place_of_the_one_before_and_leaves_the_method() -> None:
    page = PAGE.read_text()
    method = page.partition(figures.LATEST_RUN)[0]
    assert "## Method" in method
    changed = figures.with_latest(page, RUN)
    assert changed == method + figures.LATEST_RUN + figures.markdown(RUN)
    assert figures.with_latest(changed, RUN) == changed


def test_a_run_is_kept_under_its_time(tmp_path: Path) -> None:
    assert figures.history_name(RUN) == "2026-11-22T0342.json"
    figures.keep(RUN, tmp_path / "history" / figures.history_name(RUN))
    assert msgspec.json.decode((tmp_path / "history" / "2026-11-22T0342.json").read_bytes(), type=Report) == RUN


def test_every_kept_run_can_be_read() -> None:
    for path in HISTORY.glob("*.json"):
        assert msgspec.json.decode(path.read_bytes(), type=Report).figures, path.name


def test_every_measurement_in_words_is_listed() -> None:
    listed = set(re.findall(r"\]\(([\w.-]+\.md)\)", (HISTORY / "README.md").read_text()))
    assert listed == {path.name for path in HISTORY.glob("*.md")} - {"README.md"}
