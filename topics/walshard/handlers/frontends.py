"""Which frontends have died: what they had here is over at once, however long they wait for a successor.

The supervisor, who has waited for the process, says so in its control cell (`ended`) and wakes the shards. What the
dead one has still written into its ring comes first: a stream that it had opened would stay otherwise. A successor says
hello before anything else; that is noted here, so that it is not taken for the dead one.
"""

from __future__ import annotations

from collections.abc import Callable

from topics.shm.control import Cell, ControlPage, Role
from topics.shm.topic_messages import Hello, Unwatch, Watch
from topics.walshard.commit.draft import CommitFirst, Draft, GroupHandler, nothing
from topics.walshard.handlers.named_cursors import NamedCursors
from topics.walshard.handlers.queues import Queues
from topics.walshard.handlers.watch_sessions import WatchSessions
from topics.walshard.handlers.watchers import Watchers
from topics.walshard.step_clock import StepClock


class Frontends:
    """Takes notice of frontends that died, and has everything they had in one shard end.

    `drain(frontend)` says whether all that a dead frontend has asked for was taken; it takes no replies any more.
    """

    def __init__(
        self,
        control: ControlPage,
        drain: Callable[[int], bool],
        watchers: Watchers,
        sessions: WatchSessions,
        queues: Queues,
        cursors: NamedCursors,
        time: StepClock,
    ) -> None:
        self._cells = [control.cell(Role.FRONTEND, index).supervisor for index in range(control.frontends)]
        self._drain = drain
        self._watchers = watchers
        self._sessions = sessions
        self._queues = queues
        self._cursors = cursors
        self._time = time
        self._known = [_known_over(cell) for cell in self._cells]
        """By frontend: the last incarnation of which it is known that it is over."""

    @property
    def routes(self) -> dict[type, GroupHandler]:
        """The requests that are handled here in a group."""
        return {Watch: self.watch, Unwatch: self.unwatch, Hello: self.hello}

    def watch(self, call: Watch, frontend: int, group: Draft) -> None:
        """A frontend wants to hear of a topic. Nobody waits for a reply."""
        if group:
            raise CommitFirst(nothing())
        self._watchers.watch(call, frontend)

    def unwatch(self, call: Unwatch, frontend: int, _group: Draft) -> None:
        """A frontend wants to hear of a topic no more. Nobody waits for a reply."""
        self._watchers.unwatch(call, frontend)

    def hello(self, call: Hello, frontend: int, group: Draft) -> None:
        """A new incarnation: all before it are over. Nobody waits for a reply."""
        if group:
            raise CommitFirst(nothing())
        self._known[frontend] = max(self._known[frontend], call.incarnation - 1)
        self._end(frontend, group)

    def end_dead(self, group: Draft) -> bool:
        """Ends what those had that have died since, and whose successor has not said hello. False: none has."""
        dead = self._take()
        for frontend in dead:
            self._end(frontend, group)
        return bool(dead)

    def _end(self, frontend: int, group: Draft) -> None:
        self._watchers.frontend_died(frontend)
        self._sessions.frontend_died(frontend, self._time.now.mono_ms)
        self._queues.frontend_died(frontend, group)
        self._cursors.frontend_died(frontend)

    def _take(self) -> list[int]:
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
