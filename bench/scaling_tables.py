"""The tables of `python -m bench.scaling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from bench.figures import Figure, Target
from bench.scale_model import GROWTH_MAX, Cost, best, growth

CORES: Final = (2, 4, 8, 16)


class Point(NamedTuple):
    """An operation at one size: how many a second, and the CPU time in µs that one of them took in all processes of
    each role, and in the load. It moves so many records.
    """

    dimension: str
    operation: str
    size: int
    per_s: float
    frontend_us: float
    shard_us: float
    compactor_us: float
    load_us: float
    records: int = 1

    @property
    def cost_us(self) -> float:
        """The part of the processes that answer, or the compactor's of what it does alone."""
        return self.frontend_us + self.shard_us or self.compactor_us

    @property
    def cost(self) -> Cost:
        return Cost(self.operation, self.records, self.frontend_us, self.shard_us, self.compactor_us)

    def figure(self) -> Figure:
        parts = ("frontend_us", "shard_us", "compactor_us", "load_us")
        values = {"per_s": self.per_s} | {part: getattr(self, part) for part in parts}
        return Figure(f"scaling: {self.dimension}", f"{self.operation}: {self.size}", values)


class Line(NamedTuple):
    """An operation at all sizes of one dimension."""

    dimension: str
    operation: str
    points: tuple[Point, ...]

    @property
    def growth(self) -> float:
        return growth([point.cost_us for point in self.points])

    def target(self) -> Target:
        return Target(f"growth of the cost of {self.operation}, by {self.dimension}", self.growth, GROWTH_MAX)


def lines_of(points: Sequence[Point]) -> list[Line]:
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.dimension, point.operation), []).append(point)
    return [
        Line(dimension, operation, tuple(sorted(same, key=lambda one: one.size)))
        for (dimension, operation), same in found.items()
    ]


def growth_table(points: Sequence[Point]) -> str:
    """Return a table for each dimension: cost and rate at each size, and the growth of the cost."""
    rows: list[str] = []
    lines = lines_of(points)
    for dimension in dict.fromkeys(line.dimension for line in lines):
        mine = [line for line in lines if line.dimension == dimension]
        sizes = sorted({point.size for line in mine for point in line.points})
        rows += [f"| {dimension} | {' | '.join(f'{size:,}' for size in sizes)} | growth | ≤ {GROWTH_MAX} |"]
        rows += ["|---|" + "---|" * (len(sizes) + 2)]
        for line in mine:
            at = {point.size: cell(point) for point in line.points}
            verdict = "met" if line.growth <= GROWTH_MAX else "**missed**"
            cells = " | ".join(at.get(size, "") for size in sizes)
            rows.append(f"| {line.operation} | {cells} | {line.growth:.2f} | {verdict} |")
        rows.append("")
    return "\n".join(rows)


def cell(point: Point) -> str:
    rate = f", {in_words(point.per_s)}/s" if point.per_s else ""
    return f"{in_digits(point.cost_us)} µs{rate}"


def in_digits(us: float) -> str:
    """Return a number of three digits, or all of its digits before the point."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def in_words(per_s: float) -> str:
    if per_s >= 1e6:
        return f"{per_s / 1e6:.1f} M"
    return f"{per_s / 1e3:.1f} k" if per_s >= 1000 else f"{per_s:.0f}"


def smallest(points: Sequence[Point]) -> list[Point]:
    """Return the operations of the layout with fewest processes."""
    mine = [point for point in points if point.dimension == "shards and frontends"]
    return [point for point in mine if point.size == min(one.size for one in mine)]


def costs_table(points: Sequence[Point]) -> str:
    """Return the CPU time of each operation by process, and the rate on two cores that follows beside the measured."""
    rows = [
        "| CPU time in µs of | frontend | shard | compactor | load | on two cores with the load, at most | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in smallest(points):
        all_us = point.cost.all_us + point.load_us
        parts = " | ".join(map(in_digits, (point.frontend_us, point.shard_us, point.compactor_us, point.load_us)))
        rows.append(f"| {point.operation} | {parts} | {in_words(2e6 / all_us)}/s | {in_words(point.per_s)}/s |")
    return "\n".join(rows) + "\n"


def layouts_table(points: Sequence[Point]) -> str:
    """Return what follows for more cores: frontends + shards, operations and records a second, and what is full."""
    shown = " | ".join(f"{cores} cores" for cores in CORES)
    rows = [f"| frontends + shards, a second, full | {shown} |", "|---|" + "---|" * len(CORES)]
    for point in smallest(points):
        cells = []
        for cores in CORES:
            found = best(point.cost, cores)
            records = f" = {in_words(found.per_s * point.records)} records" if point.records > 1 else ""
            cells.append(f"{found.frontends} + {found.shards}, {in_words(found.per_s)}{records}, {found.full}")
        rows.append(f"| {point.operation} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"
