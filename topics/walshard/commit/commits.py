"""From drafts to the logs: what is in the log afterwards has happened, what is not never did.

A draft is committed as one: floors moved by caps go first, the journal names the requests, then everything is
one write, and one sync where that is needed (`logs.py`). A request whose write is refused gets an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from topics.core.errors import TopicsError
from topics.shm import messages
from topics.storage.wal import WalWriteError
from topics.walshard.commit.draft import Draft, LogWrite, floors_write, head_write
from topics.walshard.commit.logs import BackgroundSync, Failed, Logs
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


@dataclass(eq=False)
class Commits:
    """Commits the drafts of one shard. It owns the order of the logs, and knows what they do not say yet: floors that
    caps have moved, and `lost_heads`, ids of topics whose heads only a ceiling tells since something was lost.
    """

    _logs: Logs
    _syncs: BackgroundSync
    _rings: ShardRings
    _catalog: Catalog
    _lost_heads: Collection[int]
    _time: StepClock

    def __post_init__(self) -> None:
        self._capped = {hosted.topic.id: hosted for hosted in self._catalog if hosted.has_unlogged_floor}
        """Topics whose caps evicted something that the log does not say yet."""

    def commit(self, draft: Draft) -> None:
        """Commit a draft, or undo it. Afterwards `draft.touched` has all topics that are to be published."""
        draft.is_logged, draft.committed = self._commit(draft.durable, draft.ram, draft.floors_of)
        if not draft.is_logged:
            for hosted in draft.made.values():
                draft.touched.pop(hosted.topic.id, None)
                self._catalog.abandon(hosted)
            draft.made.clear()
            draft.deleted.clear()
            return
        for hosted in draft.deleted:
            self._catalog.retire(hosted)
            self._syncs.forget(hosted)
            self._capped.pop(hosted.topic.id, None)
        capped = [hosted for hosted in draft.touched.values() if hosted.has_unlogged_floor]
        if capped:
            self._note_capped(capped)
        for hosted in draft.made.values():
            self._catalog.host(hosted)
        durable = {id: hosted for id, hosted in draft.touched.items() if hosted.topic.config.durability != "ephemeral"}
        for moved in self._syncs.committed(durable):
            draft.touch(moved)

    def close(self) -> None:
        """End the logs: everything is on the disk, and a mark says so."""
        self._logs.close()

    def _commit(self, durable: list[LogWrite], ram: list[LogWrite], floors_of: set[int]) -> tuple[bool, bool]:
        """Return whether something is in a log, and whether all of it is."""
        said: dict[int, Hosted] = {}
        if durable and self._capped:
            said, self._capped = self._capped, {}
            durable = self._cap_marks(hosted for id, hosted in said.items() if id not in floors_of) + durable
        failed = self._write(durable, ram) if durable or ram else []
        for write, refusal in reversed(failed):  # the last first: each finds what it left behind
            if write.undo is not None:
                write.undo()
            if write.request is not None:
                write.request.reply = messages.encode_error(write.request.id, refusal)
        if failed:
            self._capped = said | self._capped
        return len(failed) < len(durable) + len(ram) or not failed, not failed

    def _write(self, durable: list[LogWrite], ram: list[LogWrite]) -> Failed:
        try:
            if self._lost_heads:
                self.log_lost_heads()
            self._rings.journal(self._logs.plan(durable, ram))
        except WalWriteError as error:  # the RAM log cannot be made
            refusal = self._logs.refusal(error)
        except TopicsError as error:
            refusal = error
        else:
            return self._logs.commit(durable, ram)
        return [(write, refusal) for write in durable + ram]

    def log_lost_heads(self) -> None:
        """Have the durable log say the heads that were lost, and counts, before anything else: afterwards nobody could
        tell what was lost from what never was. Raise TopicsError when the log cannot be written.
        """
        lost = [hosted for hosted in map(self._catalog.find_id, self._lost_heads) if hosted is not None]
        marks = [head_write(hosted.topic, hosted.topic.head_seq, self._time.now.wall_ms) for hosted in lost]
        marks += self._cap_marks(hosted for hosted in lost if hosted.topic.config.durability != "ephemeral")
        if marks:
            self._logs.plan(marks, [])
            for _write, refusal in self._logs.commit(marks, []):
                raise refusal
        self._lost_heads = ()
        self._logs.lost_tails = 0

    def _note_capped(self, capped: list[Hosted]) -> None:
        """Note evictions for the next commit. Those that could not be worked out again are logged now, before any
        reader sees them; if that fails, the next commit does it.
        """
        self._capped.update((hosted.topic.id, hosted) for hosted in capped)
        due = [hosted for hosted in capped if hosted.has_evicted_for_ram]
        if due:
            self._commit(self._cap_marks(due), [], {hosted.topic.id for hosted in due})

    def _cap_marks(self, capped: Iterable[Hosted]) -> list[LogWrite]:
        return [floors_write(hosted.topic, self._time.now.wall_ms) for hosted in capped]
