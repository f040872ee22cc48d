"""Removals that a group needs: of ended jobs, and of what stands in the way of new records."""

from __future__ import annotations

from collections.abc import Callable

from topics.core.control_bodies import encode_body
from topics.core.errors import TopicsError
from topics.core.pending import done_jobs_to_drop
from topics.storage.frame import FrameType
from topics.walshard.commit.draft import CommitFirst, Draft, Steps, control_write
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


class Removals:
    """Drafts removals from topics of one shard. What a group removes is kept in the group."""

    def __init__(self, deletes: Deletes, time: StepClock) -> None:
        self._deletes = deletes
        self._time = time

    def require_settled(self, hosted: Hosted, group: Draft) -> None:
        """Raise CommitFirst while the group so far, or the ttl, may evict records: plans are made of what stays."""
        topic = hosted.topic
        config = topic.config
        if config.ttl_ms and topic.expired_below(self._time.expiry_ms_of(topic.id)) > topic.earliest_seq:
            raise CommitFirst(self._deletes.expire(hosted))
        capped = (config.cap_records or config.cap_bytes) and config.discard == "old"
        if capped and topic.id in group.touched:
            raise CommitFirst

    def remove(
        self,
        group: Draft,
        hosted: Hosted,
        seqs: list[int],
        *,
        dead_letters: int = 0,
        undo: Callable[[], None] | None = None,
    ) -> None:
        """Delete these live records (ascending seqs; `require_settled` was called), of which so many went to the dead
        letters.
        """
        if seqs:
            now = self._time.now
            body, logged = group.pending_of(hosted.topic, now).remove(seqs, dead_letters)
            bodies = [(FrameType.ACK, encode_body(body))]
            group.add(control_write(hosted.topic, now.wall_ms, bodies, logged, undo))
            group.touch(hosted)

    # -- room that the caps of a topic would not give

    def make_room(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Remove what can go for so many more records and bytes: what has expired, if the log takes that, then
        acknowledged jobs. Nothing else may be prepared. Raises TopicsError when the log refuses to remove jobs.
        """
        yield from self.expire(hosted, records, size_bytes)
        if not (yield from self.drop_done_jobs(hosted, records, size_bytes)):
            raise TopicsError(
                "storage_unavailable",
                f"topic {hosted.topic.name!r} is full of acknowledged jobs, and the log cannot take their removal; see"
                " the service's log",
            )

    def expire(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Expire what a cap would find in the way of so many more, if the log takes it."""
        if hosted.topic.must_expire_first(records, size_bytes, self._time.expiry_ms):
            yield from self._deletes.expire(hosted)

    def drop_done_jobs(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[bool]:
        """Remove acknowledged jobs for so many more. Comes to False when the log refuses that."""
        draft = Draft()
        self.remove(draft, hosted, done_jobs_to_drop(hosted.topic, records, size_bytes, frozenset()))
        if draft:
            yield draft
        return draft.committed or not draft
