"""Which frontends have died: what they had here is over at once, however long they wait for a successor.

The supervisor, who has waited for the process, says so in its control cell (`ended`) and wakes the shards. What the
dead one has still written into its ring comes first: a stream that it had opened would stay otherwise. A successor says
hello before anything else; that is noted here, so that it is not taken for the dead one.
"""

from __future__ import annotations

from collections.abc import Callable

from topics.shm.control import ControlPage, Role


class FrontendDeaths:
    """As one shard has taken notice of them; those before its own life are its predecessor's, or a hello's."""

    def __init__(self, control: ControlPage, drained: Callable[[int], bool]) -> None:
        """`drained(frontend)`: everything in that ring has been taken."""
        self._cells = [control.cell(Role.FRONTEND, index).supervisor for index in range(control.frontends)]
        self._drained = drained
        self._known = [cell.get("ended") for cell in self._cells]
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
            if ended > self._known[frontend] and self._drained(frontend):
                self._known[frontend] = ended
                dead.append(frontend)
        return dead
