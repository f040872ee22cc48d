"""What is to wait until its time comes. Pure: the monotonic clock is passed in."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Held(Generic[Item]):
    """Items by when they are due; an item may be due more than once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._serials = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: Item, due_ms: float) -> None:
        heapq.heappush(self._heap, (due_ms, next(self._serials), item))

    @property
    def next_ms(self) -> float | None:
        """When `take_due` is worth the next call; None when nothing waits."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: float) -> list[Item]:
        """Those whose time has come, in that order."""
        due = []
        while self._heap and self._heap[0][0] <= now_ms:
            due.append(heapq.heappop(self._heap)[2])
        return due
