"""Frontends as a shard knows them: the topics that each watches, and all that ends in the shard when one dies.

The supervisor, which has waited for a dead process, says so in its control cell (`ended`) and wakes the shards. What
the dead frontend has still written into its ring is taken first: a stream that it had opened would stay otherwise. A
successor says hello before anything else. That is noted here, so that it is not taken for the dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from topics.shm.control import Cell, ControlPage, Role
from topics.shm.topic_messages import Hello, Unwatch, Watch
from topics.walshard.commit.draft import CommitFirst, Draft
from topics.walshard.handlers.named_cursors import NamedCursors
from topics.walshard.handlers.queues import Queues
from topics.walshard.handlers.watch_sessions import WatchSessions
from topics.walshard.hosted.catalog import Catalog


@dataclass(eq=False)
class Frontends:
    """Knows which frontends watch which topics of one shard; detects dead ones, and ends everything they had here.

    A notice is no more than a frontend's token of a topic. `notify({frontend: token})` queues notices,
    `forget(frontend)` drops queued ones. `drain(frontend)` says whether all that a dead frontend has asked for was
    taken; it takes no replies any more.
    """

    _control: ControlPage
    _catalog: Catalog
    _notify: Callable[[Mapping[int, int]], None]
    _forget: Callable[[int], None]
    _drain: Callable[[int], bool]
    _sessions: WatchSessions
    _queues: Queues
    _cursors: NamedCursors

    def __post_init__(self) -> None:
        control = self._control
        self._cells = [control.cell(Role.FRONTEND, index).supervisor for index in range(control.frontends)]
        self._ended = [_incarnation_ended(cell) for cell in self._cells]
        """By frontend: the last incarnation that is known to be over."""
        self.watched: list[set[str]] = [set() for _ in self._cells]
        """By frontend: the topics that it watches, also deleted ones. To look at all topics may take long."""

    def watch(self, call: Watch, frontend: int, group: Draft) -> None:
        """Note who watches a topic, and notify at once if it is not what was seen. Nobody waits for a reply."""
        if group:
            raise CommitFirst
        hosted = self._catalog.find(call.name)
        if hosted is not None:
            hosted.watchers[frontend] = call.token
            self.watched[frontend].add(hosted.topic.name)
        if hosted is None or (hosted.topic.id, hosted.topic.head_seq) != (call.seen_topic_id, call.seen_head_seq):
            self._notify({frontend: call.token})

    def unwatch(self, call: Unwatch, frontend: int, _group: Draft) -> None:
        """Note that a frontend watches a topic no more, unless it does with another token. Nobody waits for a reply."""
        hosted = self._catalog.find(call.name)
        if hosted is not None and hosted.watchers.get(frontend) == call.token:
            del hosted.watchers[frontend]
        if hosted is None or frontend not in hosted.watchers:
            self.watched[frontend].discard(call.name)

    def hello(self, call: Hello, frontend: int, group: Draft) -> None:
        """End all incarnations of a frontend before the one that says hello. Nobody waits for a reply."""
        if group:
            raise CommitFirst
        self._ended[frontend] = max(self._ended[frontend], call.incarnation - 1)
        self._end(frontend, group)

    @property
    def some_died(self) -> bool:
        """Return whether frontends have died whose successor has not said hello."""
        return any(cell.get("ended") > ended for cell, ended in zip(self._cells, self._ended, strict=True))

    def end_dead(self, group: Draft) -> None:
        """End everything that such frontends had, once all that they had asked for was taken."""
        for frontend, cell in enumerate(self._cells):
            ended = cell.get("ended")
            # In this order: what is in the ring when it is known to be dead is all there will be of it.
            if ended > self._ended[frontend] and self._drain(frontend):
                self._ended[frontend] = ended
                self._end(frontend, group)

    def _end(self, frontend: int, group: Draft) -> None:
        for hosted in filter(None, map(self._catalog.find, self.watched[frontend])):
            hosted.watchers.pop(frontend, None)
        self.watched[frontend].clear()
        self._forget(frontend)
        self._sessions.frontend_died(frontend)
        self._queues.frontend_died(frontend, group)
        self._cursors.frontend_died(frontend)


def _incarnation_ended(cell: Cell) -> int:
    """Return the last incarnation to take for ended when a shard's life begins. Where a successor runs, its hello has
    come or will. Where none does, the former life may not have noticed the death, and to end it twice is no harm.
    """
    # In this order: one that dies meanwhile is not taken for one that had a successor.
    ended = cell.get("ended")
    return max(0, ended - 1) if not cell.get("pid") else ended
