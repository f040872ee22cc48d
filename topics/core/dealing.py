"""Dealing what there is among those who want it, evenly (api §9). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def deal(items: Sequence[T], wanted: Sequence[int]) -> list[list[T]]:
    """Round-robin: each of them one at a time, in turn, until it has what it wanted or nothing is left."""
    hands: list[list[T]] = [[] for _ in wanted]
    hungry = [at for at, most in enumerate(wanted) if most]
    dealt = 0
    while hungry and dealt < len(items):
        for at in hungry[: len(items) - dealt]:
            hands[at].append(items[dealt])
            dealt += 1
        hungry = [at for at in hungry if len(hands[at]) < wanted[at]]
    return hands
