"""From prepared operations to the logs, and from there to everybody who is to know.

A group of operations is committed as one: floors that caps have moved go first, the journal names the requests, then
everything is one write, and one sync where that is needed (`commit.py`). What is not in the log afterwards never
happened, and its requests are answered with an error. Then each topic of it is shown: in the arena, to the frontends
that watch it, to the queues and to the routers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from topics.core.errors import TopicsError
from topics.log import get_logger
from topics.shm import messages
from topics.storage.wal import WalWriteError
from topics.walshard.background_sync import BackgroundSync
from topics.walshard.commit import Failed, Logs
from topics.walshard.floor_marks import cap_operation
from topics.walshard.head_marks import LostHeads
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation
from topics.walshard.outbox import Outbox
from topics.walshard.queues.calls import Queues
from topics.walshard.routers.routing import Routing
from topics.walshard.step_clock import StepClock
from topics.walshard.watchers import Watchers

log = get_logger()


class GroupCommit:
    """One shard's. Everything that a shard commits goes this way."""

    def __init__(
        self,
        logs: Logs,
        lost_heads: LostHeads,
        syncs: BackgroundSync,
        outbox: Outbox,
        watchers: Watchers,
        time: StepClock,
    ) -> None:
        self._logs = logs
        self._lost_heads = lost_heads
        self._syncs = syncs
        self._outbox = outbox
        self._watchers = watchers
        self._time = time
        self._capped: dict[int, Hosted] = {}
        """Topics whose caps evicted something that the log does not say yet."""
        self._queues: Queues
        self._routing: Routing

    def connect(self, queues: Queues, routing: Routing) -> None:
        """They write themselves, so they come later than this; but before the first commit."""
        self._queues = queues
        self._routing = routing

    def before_log(self, hosted: Hosted) -> None:
        """Something is going to be logged for a topic: what its caps evicted is logged first."""
        if hosted.has_unlogged_floor:
            self._capped[hosted.topic.id] = hosted

    def commit_one(self, operation: Operation, floors_of: Collection[int] = ()) -> bool:
        """As `commit`, of one operation for the durable log."""
        return self.commit([operation], [], floors_of)

    def commit(self, durable: list[Operation], ram: list[Operation], floors_of: Collection[int] = ()) -> bool:
        """True when all of it was committed; what was not is answered with an error. `floors_of`: topics of which the
        group says what their floors are.
        """
        told: dict[int, Hosted] = {}
        if durable and self._capped:
            told, self._capped = self._capped, {}
            durable = self._cap_marks(hosted for id, hosted in told.items() if id not in floors_of) + durable
        failed = self._write(durable, ram)
        for operation, refusal in reversed(failed):  # the last first: each finds what it left behind
            if operation.undo is not None:
                operation.undo()
            if operation.answer is not None:
                operation.answer.reply = messages.encode_error(operation.answer.request_id, refusal)
        if failed:
            self._capped = told | self._capped
        return not failed

    def _write(self, durable: list[Operation], ram: list[Operation]) -> Failed:
        try:
            if ram and self._logs.ram is None:
                self._lost_heads.log(self._time.now.wall_ms)
            self._outbox.journal(self._logs.plan(durable, ram))
        except WalWriteError as error:  # the RAM log cannot be made
            return [(operation, self._logs.refusal(error)) for operation in chain(durable, ram)]
        except TopicsError as error:
            return [(operation, error) for operation in chain(durable, ram)]
        return self._logs.commit(durable, ram)

    def show(self, hosted: Hosted) -> None:
        """What a topic is now is known to all."""
        if hosted.has_unlogged_floor:
            self._capped[hosted.topic.id] = hosted
        hosted.publish()
        self._queues.changed(hosted)
        self._watchers.notify(hosted)
        self._routing.changed(hosted)

    def show_appended(self, touched: dict[int, Hosted]) -> None:
        """Records were appended to these topics, by id; others may have become durable with them."""
        durable = {id: hosted for id, hosted in touched.items() if not _in_ram(hosted)}
        self.log_evicted_for_ram(touched.values())
        moved = self._syncs.committed(durable)
        for hosted in chain(touched.values(), [other for other in moved if other.topic.id not in touched]):
            self.show(hosted)

    def show_configured(self, hosted: Hosted) -> None:
        """A topic has another configuration."""
        self._syncs.hold(hosted)
        self.log_evicted_for_ram([hosted])
        self.show(hosted)

    def log_evicted_for_ram(self, changed: Iterable[Hosted]) -> None:
        """Says before any reader sees it what could not be worked out again. If that fails, the next commit says it."""
        due = {hosted.topic.id: hosted for hosted in changed if hosted.has_evicted_for_ram}
        if not due:
            return
        self._capped |= due
        self.commit(self._cap_marks(due.values()), [], due.keys())

    def forget(self, hosted: Hosted) -> None:
        """The topic was deleted."""
        self._syncs.forget(hosted)
        self._capped.pop(hosted.topic.id, None)

    def _cap_marks(self, capped: Iterable[Hosted]) -> list[Operation]:
        """What caps evicted since the last commit: floors are in the log before anything else is done to the topic."""
        return [cap_operation(hosted, self._time.now.wall_ms) for hosted in capped]


def _in_ram(hosted: Hosted) -> bool:
    return hosted.topic.config.durability == "ephemeral"
