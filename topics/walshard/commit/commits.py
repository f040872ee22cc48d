"""From drafts to the logs: what is in the log afterwards has happened, what is not never did.

A draft is committed as one: floors that caps have moved go first, the journal names the requests, then everything is
one write, and one sync where that is needed (`logs.py`). A request whose operation is refused gets an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from topics.core.errors import TopicsError
from topics.shm import messages
from topics.storage.wal import WalWriteError
from topics.walshard.commit.background_sync import BackgroundSync
from topics.walshard.commit.draft import Draft, LogWrite
from topics.walshard.commit.logs import Failed, Logs
from topics.walshard.commit.marks import LostHeads, cap_operation
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


class Commits:
    """Commits the drafts of one shard. It owns the order of the logs, and knows which floors they do not say yet."""

    def __init__(
        self,
        logs: Logs,
        lost_heads: LostHeads,
        syncs: BackgroundSync,
        outbox: ShardRings,
        time: StepClock,
        recovered: Iterable[Hosted],
    ) -> None:
        self._logs = logs
        self._lost_heads = lost_heads
        self._syncs = syncs
        self._outbox = outbox
        self._time = time
        self._capped: dict[int, Hosted] = {}
        """Topics whose caps evicted something that the log does not say yet."""
        self._capped.update((hosted.topic.id, hosted) for hosted in recovered if hosted.has_unlogged_floor)

    def commit(self, draft: Draft) -> None:
        """Commits a draft, or undoes it. Afterwards `draft.touched` has all topics that are to be shown."""
        draft.committed = self._commit(draft.durable, draft.ram, draft.floors_of)
        for hosted in draft.deleted:
            self._syncs.forget(hosted)
            self._capped.pop(hosted.topic.id, None)
        capped = [hosted for hosted in draft.touched.values() if hosted.has_unlogged_floor]
        if capped:
            self._note_capped(capped)
        durable = {id: hosted for id, hosted in draft.touched.items() if hosted.topic.config.durability != "ephemeral"}
        for moved in self._syncs.committed(durable):
            draft.touch(moved)

    def close(self) -> None:
        """A clean end: everything on the disk, and a mark that says so."""
        self._logs.close()

    def _commit(self, durable: list[LogWrite], ram: list[LogWrite], floors_of: set[int]) -> bool:
        told: dict[int, Hosted] = {}
        if durable and self._capped:
            told, self._capped = self._capped, {}
            durable = self._cap_marks(hosted for id, hosted in told.items() if id not in floors_of) + durable
        failed = self._write(durable, ram) if durable or ram else []
        for operation, refusal in reversed(failed):  # the last first: each finds what it left behind
            if operation.undo is not None:
                operation.undo()
            if operation.request is not None:
                operation.request.reply = messages.encode_error(operation.request.id, refusal)
        if failed:
            self._capped = told | self._capped
        return not failed

    def _write(self, durable: list[LogWrite], ram: list[LogWrite]) -> Failed:
        try:
            if ram and self._logs.ram is None:
                self._lost_heads.log(self._time.now.wall_ms)
            self._outbox.journal(self._logs.plan(durable, ram))
        except WalWriteError as error:  # the RAM log cannot be made
            return [(operation, self._logs.refusal(error)) for operation in chain(durable, ram)]
        except TopicsError as error:
            return [(operation, error) for operation in chain(durable, ram)]
        return self._logs.commit(durable, ram)

    def _note_capped(self, capped: list[Hosted]) -> None:
        """Notes evictions for the next commit. Those that could not be worked out again are logged now, before any
        reader sees them; if that fails, the next commit does it.
        """
        self._capped.update((hosted.topic.id, hosted) for hosted in capped)
        due = [hosted for hosted in capped if hosted.has_evicted_for_ram]
        if due:
            self._commit(self._cap_marks(due), [], {hosted.topic.id for hosted in due})

    def _cap_marks(self, capped: Iterable[Hosted]) -> list[LogWrite]:
        return [cap_operation(hosted, self._time.now.wall_ms) for hosted in capped]
