"""Which frontends have died: what they had here is over at once, however long they wait for a successor.

The supervisor, who has waited for the process, says so in its control cell (`ended`) and wakes the shards. What the
dead one has still written into its ring comes first: a stream that it had opened would stay otherwise. A successor says
hello before anything else; that is noted here, so that it is not taken for the dead one.
"""

from __future__ import annotations

from collections.abc import Callable

from topics.shm.control import Cell, ControlPage, Role


class FrontendDeaths:
    """As one shard has taken notice of them."""

    def __init__(self, control: ControlPage, drain: Callable[[int], bool]) -> None:
        """`drain(frontend)`: everything in that ring has been taken; who has written it takes no answers."""
        self._cells = [control.cell(Role.FRONTEND, index).supervisor for index in range(control.frontends)]
        self._drain = drain
        self._known = [_known_over(cell) for cell in self._cells]
        """By frontend: the last incarnation of which it is known that it is over."""

    def said_hello(self, frontend: int, incarnation: int) -> None:
        """All before this one are over, and that is dealt with."""
        self._known[frontend] = max(self._known[frontend], incarnation - 1)

    def take(self) -> list[int]:
        """Frontends that have died since, and whose successor has not said hello."""
        dead = []
        for frontend, cell in enumerate(self._cells):
            ended = cell.get("ended")
            # In this order: what is in the ring when it is known to be dead is all there will be of it.
            if ended > self._known[frontend] and self._drain(frontend):
                self._known[frontend] = ended
                dead.append(frontend)
        return dead


def _known_over(cell: Cell) -> int:
    """At the begin of a shard's life. Where a successor runs, its hello has come or will; where none does, the former
    life may not have taken notice of the death, and to do so twice is no harm.
    """
    # In this order: one that dies meanwhile is not taken for one that had a successor.
    ended = cell.get("ended")
    return max(0, ended - 1) if not cell.get("pid") else ended
