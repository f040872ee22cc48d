"""The limits of a service, from the CPU time that an operation takes in each of its processes: for docs/scale.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

GROWTH_MAX: Final = 1.3
"""An operation may cost so many times as much at any larger size as at the smallest one."""
SLACK: Final = 1.02
"""A larger layout is taken only for more than this."""


class Cost(NamedTuple):
    """CPU time of one operation in µs: in its frontend, in its shard, and in the compactor by the time that all is in
    segments. `records` are what the operation moves.
    """

    operation: str
    records: int
    frontend_us: float
    shard_us: float
    compactor_us: float

    @property
    def all_us(self) -> float:
        return self.frontend_us + self.shard_us + self.compactor_us


class Layout(NamedTuple):
    """The processes of a service on so many cores, the operations a second that they can do, and what is full then."""

    cores: int
    frontends: int
    shards: int
    per_s: float
    full: str


def layout(cost: Cost, cores: int, frontends: int, shards: int) -> Layout:
    """Return what these processes do when no other work shares the cores: the least of four bounds.

    A process has one core at most, so frontends do `frontends` / their µs, shards likewise, and the compactor is one
    process for all. All together have `cores`.
    """
    bounds = {
        "compactor": 1e6 / cost.compactor_us if cost.compactor_us else float("inf"),
        "cores": cores * 1e6 / cost.all_us,
        "frontends": frontends * 1e6 / cost.frontend_us if cost.frontend_us else float("inf"),
        "shards": shards * 1e6 / cost.shard_us if cost.shard_us else float("inf"),
    }
    full = min(bounds, key=lambda one: bounds[one])
    return Layout(cores, frontends, shards, bounds[full], full)


def best(cost: Cost, cores: int) -> Layout:
    """Return the layout that does most on so many cores, with as few processes as that takes."""
    found = [
        layout(cost, cores, frontends, shards) for frontends in range(1, cores + 1) for shards in range(1, cores + 1)
    ]
    most_per_s = max(one.per_s for one in found)
    good = [one for one in found if one.per_s * SLACK >= most_per_s]
    return min(good, key=lambda one: (one.frontends + one.shards, -one.per_s))


def growth(costs: Sequence[float]) -> float:
    """Return how many times as much as at the smallest size an operation costs at most at a larger one.

    Costs are in the order of their sizes. One that only falls has a growth below 1.
    """
    return max(costs[1:]) / costs[0] if len(costs) > 1 else 1.0
