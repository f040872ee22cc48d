"""Figures of a run: their types, their units, their tables, and the files that keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

MS = 1000.0
MIB = float(1 << 20)
LATEST_RUN: Final = "<!-- The latest full run; `python -m bench --markdown` writes it. -->\n"
"""Line of docs/benchmarks.md behind which the latest full run is."""


class Figure(msgspec.Struct, frozen=True):
    """One line of the table. Names of values carry their unit: `p50_us`, `records_per_s`, `seconds`, `bytes`."""

    case: str
    what: str
    values: dict[str, float]


class Target(msgspec.Struct, frozen=True):
    """A figure held against what it should be; `limit` is a maximum unless `at_least`."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Report(msgspec.Struct, frozen=True):
    """One run. `bench/out/latest.json` and the files of `bench/history` are this as JSON."""

    date: str
    version: str
    machine: dict[str, str]
    layout: dict[str, str]
    quick: bool
    figures: list[Figure]
    targets: list[Target]


def show(name: str, value: float) -> str:
    """Return a value as people read it. Its name ends with its unit."""
    label = name.rpartition("_")[0]
    if name.endswith("_us"):
        return f"{label} {value / MS:.2f} ms"
    if name.endswith("_per_s"):
        return (
            f"{value / 1000:.1f} k {label.removesuffix('_per')}/s"
            if value >= 1000
            else f"{value:.0f} {label.removesuffix('_per')}/s"
        )
    if name.endswith("bytes"):
        if value < MIB:
            return f"{label or 'size'} {value:.0f} B"
        return f"{label or 'size'} {value / MIB:.1f} MiB"
    if name == "seconds":
        return f"{value:.2f} s"
    if name.endswith("_s"):
        return f"{label} {value:.2f} s"
    return f"{name} {value:g}"


def less_is_better(name: str) -> bool:
    """Return whether a value of this name is better when it is smaller: all but rates are."""
    return not name.endswith("_per_s")


def table(report: Report) -> str:
    """Return the run as plain text."""
    lines = []
    for figure in report.figures:
        shown = ", ".join(show(name, value) for name, value in figure.values.items())
        lines.append(f"{figure.case:<11}{figure.what:<30}{shown}")
    lines += ["", "targets"]
    for target in report.targets:
        sign = "≥" if target.at_least else "≤"
        verdict = "met" if target.met else "MISSED"
        lines.append(f"  {target.what:<45}{target.value:>14,.2f} {sign} {target.limit:<12,.10g} {verdict}")
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """Return the run as a section of docs/benchmarks.md."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    layout = ", ".join(f"{name} {value}" for name, value in report.layout.items())
    lines = [f"## {report.date}, version {report.version}", "", f"Machine: {machine}.", f"Layout: {layout}.", ""]
    lines += ["| case | | figures |", "|---|---|---|"]
    for figure in report.figures:
        shown = ", ".join(show(name, value) for name, value in figure.values.items())
        lines.append(f"| {figure.case} | {figure.what} | {shown} |")
    lines += ["", "| target | measured | wanted | |", "|---|---|---|---|"]
    for target in report.targets:
        sign = "≥" if target.at_least else "≤"
        verdict = "met" if target.met else "**missed**"
        lines.append(f"| {target.what} | {target.value:,.2f} | {sign} {target.limit:,.10g} | {verdict} |")
    return "\n".join(lines) + "\n"


def keep(report: Report, path: Path) -> None:
    """Write the run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def history_name(report: Report, what: str = "") -> str:
    """Return the name of the run's file in `bench/history`, after its time: `2026-11-22T0342.json`."""
    return report.date[: len("2026-11-22T03:42")].replace(":", "") + f"{what}.json"


def with_table(page: str, name: str, text: str) -> str:
    """Return a page of the documentation with this text between the two lines that mark the place of this name."""
    begin, end = (f"<!-- {name}: {edge} of what the measurement writes. -->\n" for edge in ("begin", "end"))
    before, begun, rest = page.partition(begin)
    _former, ended, after = rest.partition(end)
    assert begun, f"the page has no place for {name}: it lacks the line {begin!r}"
    assert ended, f"the page has no end of the place for {name}: it lacks the line {end!r}"
    return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def with_latest(page: str, report: Report) -> str:
    """Return docs/benchmarks.md with this run instead of the one before."""
    method, found, _former_run = page.partition(LATEST_RUN)
    assert found, f"the page has no line {LATEST_RUN!r}"
    return method + LATEST_RUN + markdown(report)
