"""When the clock has something to bring to a queue of one shard: the earliest moment of each."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush


class Timers:
    """Monotonic ms, by topic id. A moment that an earlier one came before stays until it is past, and means nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._of: dict[int, int] = {}

    def __len__(self) -> int:
        """How many moments are kept."""
        return len(self._heap)

    @property
    def next_ms(self) -> int | None:
        """None: nothing waits for the clock."""
        return self._heap[0][0] if self._heap else None

    def set(self, topic_id: int, name: str, at_ms: int) -> None:
        """It is looked at then at the latest."""
        known_ms = self._of.get(topic_id)
        if known_ms is not None and known_ms <= at_ms:
            return
        self._of[topic_id] = at_ms
        heappush(self._heap, (at_ms, topic_id, name))
        if len(self._heap) > 64 + 4 * len(self._of):
            # A far one is set anew behind each near one that was set before it, and there it stays.
            self._heap = [timer for timer in set(self._heap) if self._of.get(timer[1]) == timer[0]]
            heapify(self._heap)

    def take_due(self, now_ms: int) -> Iterator[tuple[int, str]]:
        """(topic id, name) of each whose moment has come; it has none then."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, topic_id, name = heappop(self._heap)
            if self._of.get(topic_id) == at_ms:
                del self._of[topic_id]
                yield topic_id, name

    def forget(self, topic_id: int) -> None:
        """The queue is gone."""
        self._of.pop(topic_id, None)
