"""A cap that holds over several processes, none of which asks another (api §11).

What is capped is the sum of one word over the cells of several processes, each word written by its own process alone.
Who wants more *first* adds it to its own word, *then* adds all words up, and takes it back when the sum is too high.

Of any two who do that at once at least one sees the other's claim, because a full barrier lies between the store and
the loads. So the sum of what was granted never exceeds the cap. Both may be refused where there was room for one: a
refusal at the very border may be wrong, a grant never is.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics.core.errors import TopicsError
from topics.shm.control import Cell
from topics.shm.memory import fence


class Cap:
    """`most` of `field` over `every` cell, as the process that owns `own` keeps to it; `most` 0 is no cap."""

    def __init__(self, limit: str, most: int, field: str, own: Cell, every: Sequence[Cell]) -> None:
        self.most = most
        self._limit = limit
        self._field = field
        self._own = own
        self._every = every

    def claim(self, amount: int = 1) -> bool:
        """Takes `amount` more, or takes nothing and returns False."""
        if not self.most:
            return True
        self._own.add(self._field, amount)
        fence()
        if sum([cell.get(self._field) for cell in self._every]) <= self.most:
            return True
        self._own.add(self._field, -amount)
        return False

    def release(self, amount: int = 1) -> None:
        """Gives back what was claimed and is not used."""
        if self.most:
            self._own.add(self._field, -amount)

    def reached(self) -> TopicsError:
        """What to refuse with after a claim that was not granted."""
        return TopicsError(
            "throttled",
            f"{self.most} {self._limit.replace('_', ' ')} are all that the whole service may have; remove some, or"
            f" raise TOPICS_MAX_{self._limit.upper()}",
            {"limit": self._limit, "max": self.most},
        )
