"""The worked example of docs/spark.md: 28,069 events → topic → lake → weekly counts per folder → a chart.

    python -m examples.weekly --out ./weekly

Needs a running service, `topicsd[spark]` and matplotlib. Each step can be repeated: writes have keys, the export
has its checkpoint.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

TOPIC = "commits"
SHOWN = 6
"""Folders with a colour of their own; the rest is one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="weekly", allow_abbrev=False, description="From events to a chart, by way of Spark."
    )
    parser.add_argument("--url", default="http://127.0.0.1:4000", help="the service (default %(default)s)")
    parser.add_argument("--topic", default=TOPIC, help="the topic (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("weekly"), help="directory for lake and chart")
    parser.add_argument("--master", default="local[*]", help="where Spark runs")
    arguments = parser.parse_args()
    lake, counts, chart = (arguments.out / name for name in ("lake", "counts", "weekly.png"))
    common = ["--url", arguments.url, "--master", arguments.master]
    service = ["--url", arguments.url, "--topic", arguments.topic]
    run("examples.replay", *service)
    run("topics.cli.main", "spark", "export", *common, "--topics", arguments.topic, "--out", str(lake))
    weekly = ["--lake", str(lake), "--time-field", "committed_at", "--to-parquet", str(counts)]
    run("topics.cli.main", "spark", "rollup", *common, *weekly)
    draw(by_folder(counts), chart)
    print(chart)
    return 0


def run(module: str, *arguments: str) -> None:
    """Run a step as a program of its own, as in a pipeline; fail if it fails."""
    code = f"import sys, {module} as m; sys.argv[0] = {module!r}; sys.exit(m.main())"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def by_folder(counts: Path) -> dict[str, dict[int, int]]:
    """Return folder → year → events of the weekly counts: the largest folders first, the others as one."""
    import pyarrow.parquet as pq

    years: dict[str, Counter[int]] = defaultdict(Counter)
    for row in pq.read_table(counts).to_pylist():
        years[row["tag"] or "(root)"][row["start"].year] += row["events"]
    ranked = sorted(years, key=lambda folder: -years[folder].total())
    shown: dict[str, dict[int, int]] = {folder: dict(years[folder]) for folder in ranked[:SHOWN]}
    rest: Counter[int] = Counter()
    for folder in ranked[SHOWN:]:
        rest.update(years[folder])
    return shown | {"others": dict(rest)}


def draw(counts: dict[str, dict[int, int]], path: Path) -> None:
    """Draw a stacked bar for each year."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    years = sorted({year for of_folder in counts.values() for year in of_folder})
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    below = [0] * len(years)
    for folder, of_folder in counts.items():
        heights = [of_folder.get(year, 0) for year in years]
        axes.bar([str(year) for year in years], heights, bottom=below, label=folder)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylabel("changed files")
    axes.set_title(f"{sum(below):,} changes by folder")
    axes.tick_params(axis="x", rotation=60)
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
