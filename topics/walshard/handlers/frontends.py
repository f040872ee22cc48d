"""Frontends as a shard knows them: the topics that each watches, and what the shard ends when one dies.

When a frontend dies the supervisor notes its incarnation in the frontend's control cell (`ended`) and wakes the shards.
A shard first takes the requests that the dead frontend left in its ring; otherwise a stream that one of them opens
would stay for ever. A successor says hello before anything else, so that the shard tells it from the dead one.
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
    """Knows which frontends watch which topics of one shard. It detects dead frontends and ends all they had here.

    A notice is a frontend's token of a topic, no more. `notify({frontend: token})` queues notices, `forget(frontend)`
    drops queued ones. `drain(frontend)` drops the replies to a dead frontend, and returns whether all of its requests
    were taken.
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
        """The last incarnation of each frontend that is known to have ended."""
        self.watched: list[set[str]] = [set() for _ in self._cells]
        """Names of the topics that each frontend watches; some may be deleted. They save a look at all topics."""

    def watch(self, call: Watch, frontend: int, group: Draft) -> None:
        """Note that a frontend watches a topic. Notify it at once if the topic has changed since the frontend read it.
        Nobody waits for a reply.
        """
        if group:
            raise CommitFirst
        hosted = self._catalog.find(call.name)
        if hosted is not None:
            hosted.watchers[frontend] = call.token
            self.watched[frontend].add(hosted.topic.name)
        if hosted is None or (hosted.topic.id, hosted.topic.head_seq) != (call.seen_topic_id, call.seen_head_seq):
            self._notify({frontend: call.token})

    def unwatch(self, call: Unwatch, frontend: int, _group: Draft) -> None:
        """Note that a frontend stops watching, unless it watches with another token now. Nobody waits for a reply."""
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
        """End everything that dead frontends had, once all of their requests were taken."""
        for frontend, cell in enumerate(self._cells):
            ended = cell.get("ended")
            # Look at the ring only after `ended` says that the frontend is dead: nothing more comes then.
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
    """Return the last incarnation that counts as ended when a shard's life begins. If a successor runs, its hello has
    come or will. If none runs, the shard's former life may have missed the death; ending a frontend twice does no harm.
    """
    # `ended` before `pid`: if the frontend dies between the two reads, it does not look as if a successor ran.
    ended = cell.get("ended")
    return max(0, ended - 1) if not cell.get("pid") else ended
