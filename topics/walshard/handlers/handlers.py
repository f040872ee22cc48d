"""The handlers of one shard, as its pipeline sees them: by the type of a request."""

from __future__ import annotations

from collections.abc import Mapping

from topics.shm.append_messages import AppendReply, AppendRequest
from topics.walshard.commit.draft import AloneHandler, Draft, GroupHandler
from topics.walshard.handlers.appends import Appends
from topics.walshard.handlers.frontends import Frontends
from topics.walshard.handlers.named_cursors import NamedCursors
from topics.walshard.handlers.queue_writes import QueueWrites
from topics.walshard.handlers.queues import Queues


class Handlers:
    """`in_group` prepare a request in a group with others, `alone` carry one out by itself."""

    def __init__(
        self,
        in_group: Mapping[type, GroupHandler],
        alone: Mapping[type, AloneHandler],
        appends: Appends,
        writes: QueueWrites,
        queues: Queues,
        cursors: NamedCursors,
        frontends: Frontends,
    ) -> None:
        self.in_group = in_group
        self.alone = alone
        self._appends = appends
        self._writes = writes
        self.queues = queues
        self.cursors = cursors
        self.frontends = frontends

    def append(self, request: AppendRequest, _frontend: int, group: Draft) -> AppendReply:
        """Prepares an append."""
        return self._appends.prepare(request, group)

    def group_over(self) -> None:
        """A group is committed or refused: what it would have done to topics and jobs is over."""
        self._appends.group_over()
        self._writes.group_over()
