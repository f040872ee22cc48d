"""The commit of drafts to the logs. A write that is in the log afterwards has happened; any other never did.

A draft is committed as one. Floors that caps moved come first. The journal gets the requests, then the log gets all
writes as one, with one sync if any needs it (`logs.py`). A request whose write is refused gets an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from topics.core.errors import TopicsError, storage_unavailable
from topics.core.fold import LostEnd
from topics.shm import messages
from topics.storage.wal import WalWriteError
from topics.walshard.commit.draft import Draft, LogWrite, deletion_write, floors_write, head_write
from topics.walshard.commit.logs import BackgroundSync, Failed, Logs
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


@dataclass(eq=False)
class Commits:
    """Commits the drafts of one shard. It owns the order of writes in the logs, and two things that the logs do not say
    yet: floors that caps have moved, and what was `lost` with the end of the log.
    """

    _logs: Logs
    _syncs: BackgroundSync
    _rings: ShardRings
    _catalog: Catalog
    _lost: LostEnd
    _time: StepClock

    def __post_init__(self) -> None:
        self._capped = {hosted.topic.id: hosted for hosted in self._catalog if hosted.has_unlogged_floor}
        """Topics whose caps evicted something that the log does not say yet."""

    def commit(self, draft: Draft) -> None:
        """Commit a draft, or undo what the logs refuse. Afterwards `draft.touched` has all topics to be published."""
        touched = draft.touched.keys()
        draft.is_logged, draft.committed = self._commit(draft.durable, draft.ram, draft.floors_of, touched)
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
        self._syncs.committed(durable)

    def close(self) -> None:
        """End the logs: everything is on the disk, and a mark says so."""
        self._logs.close()

    def _commit(
        self, durable: list[LogWrite], ram: list[LogWrite], floors_of: set[int], touched: Set[int]
    ) -> tuple[bool, bool]:
        """Write both parts, floors moved by caps first. Return (anything is in a log, everything is). `floors_of` are
        ids of topics whose floors the writes have; `touched` are the other topics that the writes concern.
        """
        said: dict[int, Hosted] = {}
        if durable and self._capped:
            said, self._capped = self._capped, {}
            durable = self._cap_marks(hosted for id, hosted in said.items() if id not in floors_of) + durable
        failed = self._write(durable, ram, (touched, floors_of, said.keys())) if durable or ram else []
        for write, refusal in reversed(failed):  # newest first: each undo finds the state that its write left
            if write.undo is not None:
                write.undo()
            if write.request is not None:
                write.request.reply = messages.encode_error(write.request.id, refusal)
        if failed:
            self._capped = said | self._capped
        return len(failed) < len(durable) + len(ram) or not failed, not failed

    def _write(self, durable: list[LogWrite], ram: list[LogWrite], touched: Iterable[Set[int]]) -> Failed:
        try:
            if any(self._lost) and not all(map(self.log_lost_end().isdisjoint, touched)):
                # These writes have older revisions than the marks that `log_lost_end` has just logged.
                raise storage_unavailable("the log has taken what it lost only now; send it again")
            self._rings.journal(self._logs.plan(durable, ram))
        except WalWriteError as error:  # the RAM log cannot be made
            refusal = self._logs.refusal(error)
        except TopicsError as error:
            refusal = error
        else:
            return self._logs.commit(durable, ram)
        return [(write, refusal) for write in durable + ram]

    def log_lost_end(self) -> set[int]:
        """Log which heads were lost, and the deletions that only segments have, before the durable log gets anything
        else. Return the ids of topics whose floors were logged. Raise TopicsError when the log cannot be written.

        The floors of a topic, with its right counts, come behind its deletions. A start that finds wrong counts knows
        that deletions are still missing from the log.
        """
        heads, deletions = self._lost
        ts = self._time.now.wall_ms
        marks = [head_write(hosted.topic, hosted.topic.head_seq, ts) for hosted in self._found(heads)]
        durable = [lost for lost in self._found(heads - deletions) if lost.topic.config.durability != "ephemeral"]
        self._log(marks + self._cap_marks(durable))
        for hosted in self._found(deletions):
            for seqs in hosted.index.deleted_from(hosted.topic.earliest_seq):
                self._log([deletion_write(hosted.topic, seqs, ts)])
            self._log(self._cap_marks([hosted]))
        self._lost = LostEnd(set(), set())
        self._logs.lost_tails = 0
        return deletions | {hosted.topic.id for hosted in durable}

    def _found(self, topic_ids: Iterable[int]) -> list[Hosted]:
        return [hosted for hosted in map(self._catalog.find_id, topic_ids) if hosted is not None]

    def _log(self, writes: list[LogWrite]) -> None:
        if writes:
            self._logs.plan(writes, [])
            for _write, refusal in self._logs.commit(writes, []):
                raise refusal

    def _note_capped(self, capped: list[Hosted]) -> None:
        """Note evictions by caps, to be logged with the next commit. Evictions that a reader of the log could not work
        out again are logged now, before any reader sees them; if that fails, the next commit logs them.
        """
        self._capped.update((hosted.topic.id, hosted) for hosted in capped)
        due = [hosted for hosted in capped if hosted.has_evicted_for_ram]
        if due:
            ids = {hosted.topic.id for hosted in due}
            self._commit(self._cap_marks(due), [], ids, ids)

    def _cap_marks(self, capped: Iterable[Hosted]) -> list[LogWrite]:
        return [floors_write(hosted.topic, self._time.now.wall_ms) for hosted in capped]
