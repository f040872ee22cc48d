"""The table of `python -m bench.peers`: what each contender did, and how many times as good ours is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench import figures
from bench.peers.servers import Contender

Found = dict[str, dict[str, list[float]]]
"""Values of all rounds, by name and contender."""


def table(found: Found, contenders: Sequence[Contender]) -> str:
    """Return a Markdown table for each durability: a line for each value, the median of the rounds in its cells, and
    behind a peer's how many times as good ours is, from the worst pair of rounds to the best.
    """
    lines: list[str] = []
    for synced, title in ((False, "Not synced when acknowledged"), (True, "Synced before it is acknowledged")):
        beside = [one for one in contenders if one.synced is synced]
        ours = next(one for one in beside if one.family == "topics")
        lines += [f"{title}:", ""]
        lines += ["| | " + " | ".join(one.name for one in beside) + " |", "|---|" + "---|" * len(beside)]
        for name, values in found.items():
            if not values.get(ours.name):
                continue  # measured in one durability only
            cells = [cell(name, values[ours.name], values.get(one.name, [])) for one in beside]
            lines.append(f"| {name.rpartition(': ')[0]} | " + " | ".join(cells) + " |")
        lines += ["", *(f"- {one.name}: {one.promise}" for one in beside), ""]
    return "\n".join(lines)


def cell(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    if not theirs:
        return ""
    shown = figures.show(name.rpartition(": ")[2], statistics.median(theirs))
    if theirs is ours:
        return shown
    low, middle, high = ratios(name, ours, theirs)
    return f"{shown} (× {middle:.2g}, {low:.2g} to {high:.2g})"


def ratios(name: str, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return how many times as good ours is: the least, the ratio of the medians, the most."""
    middle = statistics.median(ours) / statistics.median(theirs)
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    return (1 / high, 1 / middle, 1 / low) if figures.less_is_better(name) else (low, middle, high)
